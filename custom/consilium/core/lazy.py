"""What is imported when it is first used: functions by name, and PyTorch. Most commands read a job and need none of it.

Kinds of models and tasks name code so whose torch no job.yaml needs, and the command line names its commands so.
A module that a job.yaml names takes `Tensor`, `nn` and `torch` from here, and uses the latter two in bodies of functions alone.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any


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


if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
else:
    Tensor = Any

    class _Lazy:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            return resolve(f"{self._name}:{name}")

    torch, nn = _Lazy("torch"), _Lazy("torch.nn")
