"""The guard at a site's door: what may leave, what is replayed, what is refused."""
