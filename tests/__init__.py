"""Tests. The package comes first: its import keeps the threads of torch from spinning beside the other workers."""

import consilium  # noqa: F401
