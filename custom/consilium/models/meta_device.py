"""Models that are only laid out: names and shapes, next to nothing in memory (torch's meta device)."""

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
"""Modules of a model, at most, and as many parameters: 20 seconds of processor time. One of 1024 blocks has a quarter."""
_MAKE = nn.Module.__init__
_LOCK = threading.Lock()
_counting: list["itertools.count[int]"] = []
"""The counts of modules of the layouts that are made at this moment."""


class _NoNumbers(TorchFunctionMode):
    """Draw no normal numbers: on the meta device torch loads its compiler for them, two seconds in every server process.

    Tensors that the model computes with while it is built are zeros in memory; SAM does so with a few hundred numbers.
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
    """Multiplies by the first expert's weights where each row has an expert of its own: sizes, FLOPs and memory are the same.

    On the meta device the rows of an expert are unknown, and PyTorch has products of experts in bfloat16 only.
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
def numberless() -> Iterator[None]:
    """Let a model on the meta device compute inside the block. Raises ConfigError where its code reads values."""
    try:
        with _OneExpert():
            yield
    except ConfigError:
        raise
    except Exception as error:  # each architecture fails in its own way
        why = " ".join(str(error).split())[:120]
        raise ConfigError(f"model: its FLOPs cannot be counted without weights ({why}); measure one instead") from None


@contextmanager
def layout() -> Iterator[None]:
    """Build models inside the block without weights, on the meta device."""
    with torch.device("meta"), _NoNumbers(), _counted():
        yield


@contextmanager
def _counted() -> Iterator[None]:
    """Stop a model of so many modules that to lay it out takes minutes and gigabytes. Raises ConfigError.

    Modules and parameters count when they are made. To walk the tree is too late: a ModuleList joins it only when it is full.
    """
    modules, parameters = itertools.count(), itertools.count()

    def parameter(parent: nn.Module, name: str, own: nn.Parameter | None) -> None:
        _require_few(next(parameters))

    hook = register_module_parameter_registration_hook(parameter)
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
