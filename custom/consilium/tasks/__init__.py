"""Tasks: batches, loss and metrics of one kind of problem."""
