"""One forward pass for several sites that share a frozen base: it sees their batches as one, and each adapter sees its own.

The sites' models are copies that share the base's tensors (`copy_sharing_base`). The first one's code runs on all batches, and
in it every module that holds adapter tensors hands each site's rows to that site's own module. So the products of the base,
most of a step, become few large ones. The numbers are those of single passes, but for the rounding of another batch size.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilium.adapters import layers

Key = tuple[Any, ...]


def copy_sharing_base(model: nn.Module) -> nn.Module:
    """Return a copy of `model` with adapter tensors of its own, which shares every other tensor with it."""
    own = {id(tensor) for tensor in layers.tensors(model).values()}
    shared = [*model.parameters(), *model.buffers(), *layers.unchanged_base(model)]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared if id(tensor) not in own})


def joined_part(model: nn.Module) -> nn.Module:
    """Return what runs for all sites at once: of a language model all but its output layer, which only reads learned tokens."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model  # type: ignore[operator]
    return decoder if isinstance(decoder, nn.Module) else model


@dataclass(frozen=True)
class Call:
    """A call of one site's part: `run` is its forward, `arguments` by position and `options` by name."""

    model: nn.Module
    part: nn.Module
    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def alone(self) -> Any:
        """Return what the site's own model makes of it."""
        return self.run(*self.arguments, **self.options)

    @property
    def watched(self) -> bool:
        """Whether something looks into the site's own model, and would see nothing of a joined pass."""
        return any(one._forward_hooks or one._forward_pre_hooks for one in self.part.modules())

    @property
    def rows(self) -> int:
        """The size of the batch: that of the first tensor."""
        return next(len(one) for one in _leaves((self.arguments, self.options)) if isinstance(one, Tensor))

    @property
    def length(self) -> int:
        """The tokens of a batch of texts, 0 of pictures."""
        found = next(one for one in _leaves((self.arguments, self.options)) if isinstance(one, Tensor))
        return found.shape[1] if _is_tokens(found) else 0

    @property
    def key(self) -> Key:
        """What calls must have in common to be joined: the shapes of a row, other arguments, and the model's switches."""
        return self.part.training, layers.switches(self.model), _shape((self.arguments, self.options))


def forward_together(calls: Sequence[Call]) -> list[Any]:
    """Return each call's output, of one pass over all their batches.

    The base must treat rows apart: no batch norm in training, no dropout. Raises ValueError where rows cannot be told apart.
    """
    sizes, lengths = [call.rows for call in calls], [call.length for call in calls]
    first = calls[0]
    arguments, options = _join([(call.arguments, call.options) for call in calls], max(lengths))
    with _each_its_own(calls, sizes):
        output = first.run(*arguments, **options)
    return [_cut(output, sum(sizes[:n]), size, sum(sizes), lengths[n]) for n, size in enumerate(sizes)]


def _is_tokens(value: Tensor) -> bool:
    return value.ndim == 2 and not value.is_floating_point()


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def _shape(value: Any) -> Any:
    """Return what values that can be joined have in common; tokens may differ in length, as they are padded."""
    if isinstance(value, Tensor):
        return str(value.dtype), str(value.device), "tokens" if _is_tokens(value) else tuple(value.shape[1:])
    if isinstance(value, Mapping):
        return tuple((name, _shape(one)) for name, one in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_shape(one) for one in value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else id(value)


def _join(values: Sequence[Any], length: int) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        # padding follows a text: a causal model's other tokens do not see it
        return torch.cat([F.pad(one, (0, length - one.shape[1])) if _is_tokens(one) else one for one in values])
    if isinstance(first, Mapping):
        return {name: _join([one[name] for one in values], length) for name in first}
    if isinstance(first, (list, tuple)):
        return type(first)(_join(list(ones), length) for ones in zip(*values, strict=True))
    return first


def _cut(value: Any, start: int, size: int, of: int, length: int) -> Any:
    if isinstance(value, Tensor):
        if not value.ndim or len(value) != of:
            raise ValueError(f"an output of shape {tuple(value.shape)} for {of} rows")
        own = value[start : start + size]
        return own[:, :length] if length else own
    cut = partial(_cut, start=start, size=size, of=of, length=length)
    if is_dataclass(value) and not isinstance(value, type):  # of transformers
        found = {one.name: getattr(value, one.name) for one in fields(value)}
        return type(value)(**{name: None if one is None else cut(one) for name, one in found.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(cut(one) for one in value)
    raise ValueError(f"an output of type {type(value).__name__}")


@contextmanager
def _each_its_own(calls: Sequence[Call], sizes: Sequence[int]) -> Iterator[None]:
    """Have the first call's modules that hold adapter tensors hand each site's rows to its own module."""
    owners = [layers.owners(call.model) for call in calls]
    inside = set(calls[0].part.modules())
    replaced = [group for group in zip(*owners, strict=True) if group[0] in inside]
    try:
        for group in replaced:
            vars(group[0])["forward"] = partial(_apart, group, [type(one).forward for one in group], sizes)
        yield
    finally:
        for group in replaced:
            vars(group[0]).pop("forward", None)


def _apart(
    modules: Sequence[nn.Module], forwards: Sequence[Callable[..., Any]], sizes: Sequence[int], hidden: Tensor, *more: Any
) -> Tensor:
    """Run each site's module on its rows of `hidden` (rows times any factor, ...)."""
    factor, rest = divmod(len(hidden), sum(sizes))
    if rest or more:
        raise ValueError(f"{type(modules[0]).__name__} gets {tuple(hidden.shape)} for {sum(sizes)} rows")
    weights = [cast(Tensor, one.weight) for one in modules if type(one) is nn.Linear and one.bias is None]
    if len(weights) == len(modules) and len(set(sizes)) == 1 and len({one.shape for one in weights}) == 1:
        stacked = torch.stack(weights)
        rows = hidden.reshape(len(modules), -1, hidden.shape[-1])
        return torch.bmm(rows, stacked.transpose(1, 2)).reshape(*hidden.shape[:-1], -1)
    chunks = hidden.split([size * factor for size in sizes])
    return torch.cat([forward(one, chunk) for forward, one, chunk in zip(forwards, modules, chunks, strict=True)])
