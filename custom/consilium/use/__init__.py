"""Using what a run has trained: opening its models, handing them on."""
