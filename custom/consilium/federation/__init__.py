"""One run of a federation: the server's side, the sites' side, and the engine that runs both in one process."""
