"""Local training: PyTorch only."""
