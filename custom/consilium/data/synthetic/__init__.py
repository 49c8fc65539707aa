"""Generated data with set shifts."""
