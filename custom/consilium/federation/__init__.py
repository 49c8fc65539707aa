"""Code that client and server share: the assembled job, run folders, saved models and model cards, version checks."""
