"""Functions by name, imported when they are first called.

Kinds of models and tasks name code so whose torch no job.yaml needs, and the command line names its commands so.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any


def resolve(place: str) -> Any:
    """Return what `place`, "module:name", names; its module is imported now."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def call(place: str, /, *arguments: Any, **options: Any) -> Any:
    """Call the function that `place` names; another process can be asked for it."""
    return resolve(place)(*arguments, **options)


def lazy(place: str, *bound: Any) -> Callable[..., Any]:
    """Return a function that resolves `place` when it is called, with `bound` before its own arguments."""
    return partial(call, place, *bound)
