"""Functions by name, imported when they are first called: kinds of models and tasks name code whose torch no job.yaml needs."""

import importlib
from collections.abc import Callable
from typing import Any


def lazy(place: str, *bound: Any) -> Callable[..., Any]:
    """Return a function that imports `place` ("module:function") and calls it, with `bound` before its own arguments."""
    module, _, name = place.partition(":")

    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*bound, *arguments, **options)

    return call
