"""Imports on first use: functions by name, PyTorch and matplotlib. Most commands only read a job and need none of them.

Model and task kinds use `lazy` for code that needs torch, and the command line uses it for its commands. A module that is
imported to read a job.yaml imports `Tensor`, `nn` and `torch` from here. It may use `nn` and `torch` only inside functions. The
same holds for `matplotlib`, `figure` and `ticker` in a module that draws only sometimes.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any


def resolve(place: str) -> Any:
    """Import the module in `place`, "module:name", and return the object with that name."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def call(place: str, /, *arguments: Any, **options: Any) -> Any:
    """Call the function that `place` names. `call` can be pickled for another process."""
    return resolve(place)(*arguments, **options)


def lazy(place: str, *bound: Any) -> Callable[..., Any]:
    """Return a function that, when called, resolves `place` and calls it with `bound` before its own arguments."""
    return partial(call, place, *bound)


if TYPE_CHECKING:
    import matplotlib
    import torch
    from matplotlib import figure, ticker
    from torch import Tensor, nn
else:
    Tensor = Any

    class _Lazy:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            return resolve(f"{self._name}:{name}")

    torch, nn = _Lazy("torch"), _Lazy("torch.nn")
    matplotlib, figure, ticker = _Lazy("matplotlib"), _Lazy("matplotlib.figure"), _Lazy("matplotlib.ticker")
