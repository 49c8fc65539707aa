"""Federated algorithms: one file each, both halves."""
