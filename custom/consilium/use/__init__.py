"""Using models after their run: open, predict, score on other data, attack, export and import."""
