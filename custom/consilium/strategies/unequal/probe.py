"""What a site can carry, measured: a few training steps at the smallest and the largest rank give the cost of a rank.

Time is the clock's; memory is counted, not sampled, so that it is the same on every device: the model's numbers, what the
forward pass keeps for the backward pass, gradients and Adam's moments.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from consilium.adapters import layers
from consilium.adapters.dual_rank import DualRankConfig
from consilium.adapters.names import factor, is_head
from consilium.errors import ConfigError
from consilium.strategies.unequal.layers import shapes

if TYPE_CHECKING:
    from consilium.config.capacity import CapacityConfig

STEPS = 3
BYTES = 4


@dataclass(frozen=True)
class StepCost:
    """One training step at some rank: seconds, and bytes held at its end of the forward pass."""

    seconds: float
    memory: float


def measured_ranks(
    limits: "CapacityConfig", model: nn.Module, wanted: DualRankConfig, loss: Callable[[], Tensor]
) -> dict[str, float]:
    """Return ranks per layer on average that fit `limits`, in `download`, `time` and `memory`; what is not limited is left out.

    `loss` computes the training loss of one full batch. Changes the adapter's numbers. Raises ConfigError where not even one
    rank fits.
    """
    found = {"download": limits.download, "time": limits.train, "memory": limits.train}
    dims = shapes(layers.tensors(model))
    if limits.download_bytes is not None:
        found["download"] = _fits("download_bytes", limits.download_bytes, 0.0, BYTES * sum(map(sum, dims.values())), 0)
    if limits.step_seconds is not None or limits.memory_bytes is not None:
        small, large = _step(model, 1, loss), _step(model, wanted.rank, loss)
        for key, limit, at in (("time", "step_seconds", "seconds"), ("memory", "memory_bytes", "memory")):
            if (most := getattr(limits, limit)) is not None:
                least = getattr(small, at)
                slope = max((getattr(large, at) - least) / max(wanted.rank - 1, 1), 1e-9 * least)
                found[key] = _fits(limit, most, least, slope, 1)
    return {key: min(value, float(wanted.rank)) for key, value in found.items() if value is not None}


def _fits(name: str, most: float, least: float, slope: float, rank: int) -> float:
    """Return the rank whose cost, `least` at `rank` and `slope` for each more, is `most`."""
    ranks = rank + (most - least) / slope
    if ranks < 1:
        raise ConfigError(f"site.yaml: capacity.{name}: {most:g}: one rank takes {least + slope * (1 - rank):g}; raise it")
    return ranks


def _step(model: nn.Module, rank: int, loss: Callable[[], Tensor]) -> StepCost:
    values = {name: torch.zeros(_cut(name, tensor, rank)) for name, tensor in layers.tensors(model).items()}
    layers.load(model, {n: t for n, t in values.items() if factor(n) or is_head(n)})
    trained = [p for p in layers.tensors(model).values() if isinstance(p, nn.Parameter)]
    for parameter in trained:
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam(trained, lr=0.0)
    seconds, memory = [], 0.0
    for _ in range(1 + STEPS):  # the first warms up
        began = time.perf_counter()
        kept = _Kept(model)
        with kept:
            value = loss()
        memory = kept.total + BYTES * (sum(p.numel() for p in model.parameters()) + 3 * sum(p.numel() for p in trained))
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if value.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return StepCost(statistics.median(seconds[1:]), memory)


def _cut(name: str, tensor: Tensor, rank: int) -> tuple[int, ...]:
    """Return the tensor's shape at another rank."""
    side = {"A": 0, "B": 1}.get(factor(name) or "")
    return tuple(rank if axis == side else size for axis, size in enumerate(tensor.shape))


class _Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that a forward pass keeps for the backward pass, every storage once, the model's own left out."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        self._seen: dict[int, int] = {}
        super().__init__(self._note, lambda tensor: tensor)

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self._seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.total = float(sum(self._seen.values()))
