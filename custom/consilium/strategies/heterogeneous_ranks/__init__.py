"""What FedHera and its peers share: ranks that differ by site and layer."""
