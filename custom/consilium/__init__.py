"""Consilium: federated fine-tuning of medical foundation models on NVIDIA FLARE."""

__version__ = "0.2.0"
