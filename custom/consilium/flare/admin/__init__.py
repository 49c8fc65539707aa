"""What administrators do with a federation: log in, submit jobs, export metrics, and pack or verify evidence of a run."""
