"""What people write: job.yaml, site.yaml, sites.yml. Free of torch."""
