"""Linear algebra on tensors. Nothing here depends on federated learning."""
