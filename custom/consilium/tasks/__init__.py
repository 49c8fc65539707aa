"""Tasks: batches, loss and metrics for each kind of problem."""
