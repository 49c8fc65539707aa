"""Linear algebra on tensors, with no federated word."""
