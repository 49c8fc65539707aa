"""A FLARE job: its recipe, its components (controller, aggregator, executor, filters), its messages, and FLARE's simulator."""
