"""Runs beside each other: what compares, means and how sure they are, paired tests, tables, pictures."""
