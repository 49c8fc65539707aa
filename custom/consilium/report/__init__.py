"""Write, read and show a run's files: records, tables, pictures, pages and comparisons of runs."""
