"""Adapters: the trained tensors inside a frozen model."""
