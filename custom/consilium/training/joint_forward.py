"""One forward pass for several sites that share a frozen base: their batches are joined, and each adapter gets its own rows.

The sites' models are copies that share the base's tensors (`copy_sharing_base`). The first model runs on all batches. In it
every module with adapter tensors passes each site's rows to that site's own module. So the base's matrix products, most of a
step, become few large ones. The results equal those of single passes up to the rounding of another batch size.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from consilium.adapters import adapter_state

Key = tuple[Any, ...]
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
"""The largest difference between a joint and a single pass, relative to the largest number; 2e-2 for shorter types."""
CHANGE = 0.1
"""The size of the noise that `check_joint_outputs` adds to adapter tensors, relative to their mean size.

For zero tensors it is absolute.
"""


def copy_sharing_base(model: nn.Module) -> nn.Module:
    """Return a copy of `model` with its own adapter tensors, which shares all other tensors with `model`."""
    own = {id(tensor) for tensor in adapter_state.tensors(model).values()}
    shared = [*model.parameters(), *model.buffers(), *adapter_state.original_base_values(model)]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared if id(tensor) not in own})


def part_run_for_all_sites(model: nn.Module) -> nn.Module:
    """Return the part of a model that runs for all sites at once.

    Of a language model it is the decoder without the output layer, which reads only learned tokens.
    """
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

    def run_alone(self) -> Any:
        """Return the output of the site's own model."""
        return self.run(*self.arguments, **self.options)

    @property
    def has_hooks(self) -> bool:
        """Whether the site's model has hooks, which a joint pass would not call."""
        return any(one._forward_hooks or one._forward_pre_hooks for one in self.part.modules())

    @property
    def rows(self) -> int:
        """The size of the batch, from the first tensor."""
        return len(self._first)

    @property
    def length(self) -> int:
        """The number of tokens per text of a batch, 0 for pictures."""
        return self._first.shape[1] if _is_tokens(self._first) else 0

    @property
    def _first(self) -> Tensor:
        return next(one for one in tree_leaves((self.arguments, self.options)) if isinstance(one, Tensor))

    @property
    def key(self) -> Key:
        """The properties that joined calls must share: shapes of a row, other arguments, and the model's settings."""
        leaves, structure = tree_flatten((self.arguments, self.options))
        kinds = list[Any]()
        for one in leaves:
            if isinstance(one, Tensor):  # tokens may differ in length, because they are padded
                size = "tokens" if _is_tokens(one) else tuple(one.shape[1:])
                kinds.append((str(one.dtype), str(one.device), size))
            else:
                kinds.append(one if isinstance(one, (bool, int, float, str, type(None))) else id(one))
        return self.part.training, adapter_state.forward_settings(self.model), str(structure), tuple(kinds)


def forward_together(calls: Sequence[Call]) -> list[Any]:
    """Return each call's output, from one pass over all their batches.

    The base must treat rows independently (no batch norm in training, no dropout). Raises ValueError if the outputs cannot be
    split by row.
    """
    sizes, lengths = [call.rows for call in calls], [call.length for call in calls]
    first = calls[0]
    arguments, options = _join([(call.arguments, call.options) for call in calls], max(lengths))
    # The first call's modules with adapter tensors pass each site's rows to the site's own module. A module whose instance has
    # its own `forward` is skipped by the model, or is the whole part.
    groups = zip(*(adapter_state.adapter_modules(call.model) for call in calls), strict=True)
    inside = set(first.part.modules())
    replaced = [group for group in groups if group[0] in inside and "forward" not in vars(group[0])]
    try:
        for group in replaced:
            vars(group[0])["forward"] = partial(_run_each_on_its_rows, group, [type(one).forward for one in group], sizes)
        output = first.run(*arguments, **options)
    finally:
        for group in replaced:
            vars(group[0]).pop("forward", None)
    return [_cut(output, sum(sizes[:n]), size, sum(sizes), lengths[n]) for n, size in enumerate(sizes)]


def check_joint_outputs(calls: Sequence[Call]) -> None:
    """Raise ValueError unless a joint pass gives each call the output of its own model, for any adapter tensors.

    For the check each site's tensors are changed differently, because at a run's start all sites have equal ones. A model that
    reads a tensor outside its module's forward, as SAM's mask decoder does, would use the first site's tensor for all sites.
    """
    own = [tensor for call in calls for tensor in adapter_state.tensors(call.model).values()]
    kept, noise = [tensor.detach().clone() for tensor in own], torch.Generator().manual_seed(0)
    # A float32 model runs without autocast, so that rounding is small. Autocast's cache would hold casts from before a change.
    model = calls[0].model
    device = next(model.parameters()).device.type
    wanted = torch.is_autocast_enabled(device) and any(one.dtype != torch.float32 for one in model.parameters())
    exact = torch.autocast(device, torch.get_autocast_dtype(device), enabled=wanted, cache_enabled=False)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(own)), exact:
        try:
            for tensor in own:
                size = float(tensor.abs().mean()) if tensor.numel() else 0.0
                tensor.add_(torch.randn(tensor.shape, generator=noise).to(tensor), alpha=CHANGE * (size or 1.0))
            before = random_state()
            outputs = forward_together(calls)
            check_random_state_unchanged(before)
            for n in {0, len(calls) - 1}:
                _check_equal(outputs[n], calls[n].run_alone())
        finally:
            for tensor, value in zip(own, kept, strict=True):
                tensor.copy_(value)


def random_state() -> list[Tensor]:
    """Return the states of PyTorch's random generators, that of the CPU first."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def set_random_state(state: Sequence[Tensor]) -> None:
    """Set the states that `random_state` returned."""
    torch.set_rng_state(state[0])
    if state[1:]:
        torch.cuda.set_rng_state_all(list(state[1:]))


def check_random_state_unchanged(before: Sequence[Tensor]) -> None:
    """Raise ValueError if random numbers were drawn, on the CPU or a GPU, since the state `before`."""
    if not all(map(torch.equal, before, random_state())):
        raise ValueError("the model draws random numbers, as dropout does")


def _check_equal(joined: Any, alone: Any) -> None:
    """Raise ValueError if an output of a joint pass differs from that of the site's own model."""
    pairs = zip(tree_leaves(joined), tree_leaves(alone), strict=True)
    for one, other in ((one, other) for one, other in pairs if isinstance(other, Tensor)):
        largest = float(other.abs().max()) if other.numel() else 0.0
        lower = torch.is_autocast_enabled(other.device.type)
        allowed = largest * (2e-2 if lower else TOLERANCE.get(other.dtype, 2e-2))
        if one.shape != other.shape or not float((one - other).abs().max() if one.numel() else 0.0) <= allowed:
            raise ValueError("the model mixes the rows of a batch, or reads an adapter's tensors past its layers")


def _is_tokens(value: Tensor) -> bool:
    return value.ndim == 2 and not value.is_floating_point()


def _join(values: Sequence[Any], length: int) -> Any:
    """Return one value of the same structure, with the batches of all values concatenated and tokens padded to `length`."""

    def join_leaves(*ones: Any) -> Any:
        if not isinstance(ones[0], Tensor):
            return ones[0]
        # padding follows a text: a causal model's other tokens do not see it
        return torch.cat([F.pad(one, (0, length - one.shape[1])) if _is_tokens(one) else one for one in ones])

    return tree_map(join_leaves, *values)


def _cut(value: Any, start: int, size: int, of: int, length: int) -> Any:
    """Return the rows `start` to `start` + `size` of every tensor in an output of `of` rows; of texts `length` tokens."""

    def cut(one: Any) -> Any:
        if one is None:
            return None
        if not isinstance(one, Tensor) or not one.ndim or len(one) != of:
            what = f"shape {tuple(one.shape)} for {of} rows" if isinstance(one, Tensor) else f"type {type(one).__name__}"
            raise ValueError(f"an output of {what}")
        own = one[start : start + size]
        return own[:, :length] if length else own

    return tree_map(cut, value)


def _run_each_on_its_rows(
    modules: Sequence[nn.Module],
    forwards: Sequence[Callable[..., Any]],
    sizes: Sequence[int],
    hidden: Tensor,
    *more: Any,
    **options: Any,
) -> Tensor:
    """Run each site's module on its rows of `hidden` (sum of `sizes` times any factor, ...), and join the outputs.

    Other arguments must be numbers, booleans or None. Raises ValueError otherwise.
    """
    factor, rest = divmod(len(hidden), sum(sizes))
    if rest or not all(isinstance(one, bool | int | float | None) for one in (*more, *options.values())):
        raise ValueError(f"{type(modules[0]).__name__} gets {tuple(hidden.shape)} for {sum(sizes)} rows")
    weights = [cast(Tensor, one.weight) for one in modules if type(one) is nn.Linear and one.bias is None]
    if len(weights) == len(modules) and len(set(sizes)) == 1 and len({one.shape for one in weights}) == 1:
        stacked = torch.stack(weights)
        rows = hidden.reshape(len(modules), -1, hidden.shape[-1])
        return torch.bmm(rows, stacked.transpose(1, 2)).reshape(*hidden.shape[:-1], -1)
    chunks = hidden.split([size * factor for size in sizes])
    parts = zip(forwards, modules, chunks, strict=True)
    return torch.cat([forward(one, chunk, *more, **options) for forward, one, chunk in parts])
