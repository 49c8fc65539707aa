"""Messages, schemas, registries, storage and numerics that all other packages use."""
