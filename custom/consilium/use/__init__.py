"""Models after their run: opened again, asked for predictions, scored on other data."""
