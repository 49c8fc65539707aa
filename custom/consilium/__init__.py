"""Consilium: federated fine-tuning of medical foundation models on NVIDIA FLARE."""

__version__ = "0.1.0"
