"""The schemas of job.yaml, site.yaml and sites.yml. Nothing here imports torch."""
