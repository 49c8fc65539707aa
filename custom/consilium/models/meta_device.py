"""Builds models on torch's meta device: with names and shapes, but without numbers and nearly without memory."""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from consilium.core.errors import ConfigError

FILLS = (torch.Tensor.normal_, nn.init.normal_)
MOST = 100_000
"""Largest number of modules, and of parameters, of a model; creating them takes 20 seconds of CPU time. A model of 1024 blocks
has a quarter of them."""
_MAKE = nn.Module.__init__
_LOCK = threading.Lock()
_counting: list["itertools.count[int]"] = []
"""The module counters of the models that are being built at this moment."""


class _NoNumbers(TorchFunctionMode):
    """Skips drawing normal numbers. On the meta device torch would load its compiler for them, 2 seconds per server process.

    Some models compute while they are built, SAM with a few hundred numbers. For them torch.randn returns zeros on the CPU.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.randn:
            given.pop("generator", None)
            return torch.zeros(*args, **{"device": "cpu"} | given)
        if func in FILLS and (filled := args[0] if args else given["tensor"]).is_meta:
            return filled
        return func(*args, **given)


class _OneExpert(TorchDispatchMode):
    """Replaces products with each row's expert by products with the first expert. Sizes, FLOPs and memory are the same.

    On the meta device the rows of each expert are unknown, and PyTorch has grouped products in bfloat16 only.
    """

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **kwargs or {})
        rows, weights, ends = args[:3]
        if weights.ndim == 3:
            return rows @ weights[0]
        return (rows @ weights).repeat(len(ends), 1, 1)  # the gradient of the experts' weights


@contextmanager
def allow_meta_compute() -> Iterator[None]:
    """Within the context, a model on the meta device can compute. Raises ConfigError if its code reads values."""
    try:
        with _OneExpert():
            yield
    except ConfigError:
        raise
    except Exception as error:  # each architecture fails in its own way
        why = " ".join(str(error).split())[:120]
        raise ConfigError(f"model: its FLOPs cannot be counted without weights ({why}); measure one instead") from None


@contextmanager
def build_on_meta_device() -> Iterator[None]:
    """Within the context, models are built on the meta device, without weights.

    A model with more than MOST modules or parameters raises ConfigError. They are counted when they are created: walking the
    finished model would be too late, after minutes and gigabytes.
    """
    modules, parameters = itertools.count(), itertools.count()

    def count_parameter(parent: nn.Module, name: str, own: nn.Parameter | None) -> None:
        _require_few(next(parameters))

    with torch.device("meta"), _NoNumbers():
        hook = register_module_parameter_registration_hook(count_parameter)
        with _LOCK:
            _counting.append(modules)
            nn.Module.__init__ = _count_and_make  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            hook.remove()
            with _LOCK:
                _counting.remove(modules)
                if not _counting:
                    nn.Module.__init__ = _MAKE  # type: ignore[method-assign]


def _count_and_make(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    for modules in tuple(_counting):
        _require_few(next(modules))
    _MAKE(module, *args, **kwargs)


def _require_few(made: int) -> None:
    if made >= MOST:
        raise ConfigError(f"model.config: over {MOST:,} modules or parameters; use a smaller model")
