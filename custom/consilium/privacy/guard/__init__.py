"""The guard of a site: decides which messages may leave, which are replayed and which are refused."""
