"""Adapters: what is trained inside a frozen model."""
