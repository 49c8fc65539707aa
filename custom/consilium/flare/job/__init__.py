"""Components of a running FLARE job: controller, executor, filters, messages."""
