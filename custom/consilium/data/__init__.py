"""Data lists, readers, generated phantoms and checks."""
