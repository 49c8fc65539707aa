"""Models that are only laid out: names and shapes, next to nothing in memory (torch's meta device)."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from consilium.errors import ConfigError

FILLS = (torch.Tensor.normal_, nn.init.normal_)
MOST = 200_000
"""Modules of a model, at most, and as many parameters."""


class _NoNumbers(TorchFunctionMode):
    """Draw no normal numbers: without memory torch loads its compiler for them, two seconds in every process of a server.

    What is drawn anew is zeros with memory instead, because a model may reckon with it; SAM does with a few hundred numbers.
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


@contextmanager
def layout() -> Iterator[None]:
    """Let models that are built inside the block be laid out only; move what is kept of them to the meta device."""
    with torch.device("meta"), _NoNumbers(), _counted():
        yield


@contextmanager
def _counted() -> Iterator[None]:
    """Stop a model of so many modules that to lay it out takes minutes and gigabytes. Raises ConfigError.

    Parameters are counted too: a list's layers are modules of their parent only when all of them are made.
    """
    modules, parameters = itertools.count(), itertools.count()

    def module(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        _require_few(next(modules))

    def parameter(parent: nn.Module, name: str, own: nn.Parameter | None) -> None:
        _require_few(next(parameters))

    hooks = register_module_module_registration_hook(module), register_module_parameter_registration_hook(parameter)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _require_few(made: int) -> None:
    if made >= MOST:
        raise ConfigError(f"model.config: over {MOST:,} modules or parameters; use a smaller model")
