"""The optimizer of local training and its learning rate."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from consilium.config.job import TrainingConfig
from consilium.core.messages import Tensors

FUSED = frozenset({"cpu", "cuda"})
"""Devices with a kernel for all of Adam's step: on a CPU 3 to 7 times faster for adapters, equal to a few roundings.

SGD has one too, which on a CPU was slower than what PyTorch does by itself.
"""


def make_optimizer(parameters: list[nn.Parameter], config: TrainingConfig) -> torch.optim.Optimizer:
    """Return the configured optimizer over `parameters` only."""
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=config.momentum, **common)
    fused = all(parameter.device.type in FUSED for parameter in parameters)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer](parameters, fused=fused, **common)


def learning_rate(config: TrainingConfig, done: int, total: int) -> float:
    """Return the learning rate after `done` of a round's `total` steps; `cosine` and `linear` fall to 0 in every round anew."""
    part = {"constant": 1.0, "cosine": 0.5 * (1 + math.cos(math.pi * done / total)), "linear": 1 - done / total}
    return config.lr * part[config.schedule]


def restore_optimizer(optimizer: torch.optim.Optimizer, names: list[str], kept: Tensors) -> None:
    """Let an optimizer over parameters `names`, in its order, go on with what `memory` returned; one without starts empty."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in kept.items():
        name, _, field = key.rpartition("/")
        if name in names:
            state.setdefault(names.index(name), {})[field] = tensor
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def state_of(optimizer: torch.optim.Optimizer, names: list[str]) -> Tensors:
    """Return an optimizer's state as "parameter/field" (Adam's step, exp_avg, exp_avg_sq; momentum's momentum_buffer)."""
    state = optimizer.state_dict()["state"]
    fields = ((names[i], field, value) for i, one in state.items() for field, value in one.items())
    return {f"{name}/{field}": value.detach().cpu().clone() for name, field, value in fields if isinstance(value, Tensor)}
