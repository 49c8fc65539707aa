"""Studies: a grid of runs over methods, ranks, splits and seeds, from one file."""
