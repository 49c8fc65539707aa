"""Data: lists of samples, readers of pictures, volumes and texts, importers, generated phantoms, checks, the sample cache."""
