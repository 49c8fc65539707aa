"""What peers.py puts side by side: the same work by five ways to do it. Only `ours` imports consilium."""
