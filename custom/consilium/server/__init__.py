"""The server's side of a run: the coordinator, aggregation, and checks of messages from sites."""
