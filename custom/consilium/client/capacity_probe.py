"""Measures a site's capacity: a few training steps at the smallest and at the largest rank give the cost per rank.

Time is wall-clock time. Memory is counted, not sampled: the model's parameters as stored, the peak of the forward and backward
pass including gradients, and Adam's moments.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from consilium.adapters import adapter_state
from consilium.adapters.names import factor, is_head
from consilium.config.job import JobConfig
from consilium.config.site import CapacityConfig
from consilium.core.errors import ConfigError
from consilium.estimates.compute import MemoryTracker
from consilium.strategies.unequal_ranks import shapes
from consilium.tasks.base import Task
from consilium.tasks.registry import TASKS
from consilium.training.device import autocast, cuda_devices

STEPS = 3
BYTES = 4


def make_step_loss(config: JobConfig, task: Task, model: nn.Module) -> Callable[[], Tensor]:
    """Return a function that computes the training loss of one full batch.

    The batch has the site's own samples. In a job with privacy it has zeros of full size, because the time of real records
    would reveal, without noise, how long they are and whether there are any.
    """
    size, device = config.training.batch_size, next(model.parameters()).device
    batch = {} if config.privacy else task.batch([i % task.num_samples for i in range(size)], 0)

    def loss() -> Tensor:
        with autocast(device, "fp32" if config.dpsgd else config.training.precision):
            if not config.privacy:
                return task.loss(model, batch)
            if (rehearse := TASKS[config.task.name].rehearse) is None:
                raise ConfigError(
                    f"site.yaml: capacity: task {config.task.name!r} cannot be measured without records, which privacy hides; "
                    "give `train` instead of step_seconds and memory_bytes"
                )
            with device:
                return rehearse(config.task, config.model, model, size)

    return loss


def measure_affordable_ranks(
    limits: CapacityConfig, model: nn.Module, largest: int, loss: Callable[[], Tensor]
) -> dict[str, float]:
    """Return the average ranks per layer that fit `limits`, under "download", "time" and "memory"; unlimited ones are left out.

    `largest`: the largest rank of a layer; `loss`: computes the training loss of one full batch. Overwrites the adapter's
    values. Raises ConfigError if not even one rank fits.
    """
    found = {"download": limits.download, "time": limits.train, "memory": limits.train}
    dims = shapes(adapter_state.tensors(model))
    if limits.download_bytes is not None:
        found["download"] = _affordable_ranks(
            "download_bytes", limits.download_bytes, 0.0, BYTES * sum(map(sum, dims.values())), 0
        )
    if limits.step_seconds is not None or limits.memory_bytes is not None:
        with torch.random.fork_rng(devices=cuda_devices(adapter_state.tensors(model))):
            model.train()
            try:
                small, large = _measure_step(model, 1, loss), _measure_step(model, largest, loss)
            finally:
                model.eval()
        for key, limit in (("time", "step_seconds"), ("memory", "memory_bytes")):
            if (most := getattr(limits, limit)) is not None:
                slope = max((large[key] - small[key]) / max(largest - 1, 1), 1e-9 * small[key])
                found[key] = _affordable_ranks(limit, most, small[key], slope, 1)
    return {key: min(value, float(largest)) for key, value in found.items() if value is not None}


def _affordable_ranks(name: str, most: float, least: float, slope: float, rank: int) -> float:
    """Return the rank that costs `most`, if `rank` costs `least` and each further rank costs `slope`."""
    ranks = rank + (most - least) / slope
    if ranks < 1:
        raise ConfigError(f"site.yaml: capacity.{name}: {most:g}: one rank takes {least + slope * (1 - rank):g}; raise it")
    return ranks


def _measure_step(model: nn.Module, rank: int, loss: Callable[[], Tensor]) -> dict[str, float]:
    """Return the cost of one training step at a rank: its "time" in seconds, and its peak "memory" in bytes."""
    values = {}
    for name, tensor in adapter_state.tensors(model).items():
        side = {"A": 0, "B": 1}.get(factor(name) or "")  # the axis of the rank
        values[name] = torch.zeros([rank if axis == side else length for axis, length in enumerate(tensor.shape)])
    adapter_state.load(model, {n: t for n, t in values.items() if factor(n) or is_head(n)})
    trained = [p for p in adapter_state.tensors(model).values() if isinstance(p, nn.Parameter)]
    for parameter in trained:
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam(trained, lr=0.0)
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    with MemoryTracker(own) as live:
        loss().backward()
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    moments = BYTES * 2 * sum(p.numel() for p in trained)
    _time_step(optimizer, loss)  # warms up
    seconds = statistics.median(_time_step(optimizer, loss) for _ in range(STEPS))
    return {"time": seconds, "memory": float(held + moments + live.most)}


def _time_step(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> float:
    """Take one training step; return its seconds."""
    began = time.perf_counter()
    value = loss()
    value.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if value.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began
