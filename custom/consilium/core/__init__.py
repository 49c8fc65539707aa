"""Messages, schemas, registries, storage and numerics that every other room uses."""
