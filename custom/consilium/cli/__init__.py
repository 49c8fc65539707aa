"""The command `consilium`."""
