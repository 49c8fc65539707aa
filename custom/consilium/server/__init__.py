"""The server's side of a run: coordinator, aggregation, checks of results."""
