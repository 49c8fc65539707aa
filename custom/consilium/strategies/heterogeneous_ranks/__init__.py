"""Code shared by FedHera and other algorithms with ranks that differ by site and layer."""
