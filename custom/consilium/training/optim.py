"""The optimizer of local training and its learning rate."""

import math
from typing import Any

import torch
from torch import nn

from consilium.config.job import TrainingConfig


def make_optimizer(parameters: list[nn.Parameter], config: TrainingConfig) -> torch.optim.Optimizer:
    """Return the configured optimizer over `parameters` only."""
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=config.momentum, **common)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer](parameters, **common)


def learning_rate(config: TrainingConfig, done: int, total: int) -> float:
    """Return the learning rate after `done` of a round's `total` steps; `cosine` and `linear` fall to 0 in every round anew."""
    part = {"constant": 1.0, "cosine": 0.5 * (1 + math.cos(math.pi * done / total)), "linear": 1 - done / total}
    return config.lr * part[config.schedule]
