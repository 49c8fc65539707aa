"""What may leave a site. Pure: the in-process engine and the FLARE filter use the same check, and it fails closed."""

from collections.abc import Set

import torch

from consilium.errors import RefusedError
from consilium.strategy import Payload, Role, Strategy

STAGES = ("received", "personal", "base")
TRAIN_METRICS = frozenset({"train/loss", "train/steps", "train/seconds"})


def allowed_metrics(task_metrics: Set[str]) -> frozenset[str]:
    """Return the metric names a site may report: "<split>/<stage>/<metric>" and the training loop's own."""
    splits = ("validation", "test")
    return TRAIN_METRICS | {f"{split}/{stage}/{m}" for split in splits for stage in STAGES for m in task_metrics}


def check_release(payload: Payload, strategy: Strategy, metrics: Set[str]) -> None:
    """Raise RefusedError unless every tensor is SHARED in this phase, finite, and every scalar and metric is declared."""
    for name, tensor in payload.tensors.items():
        role = strategy.role(name, payload.round, payload.phase)
        if role is not Role.SHARED:
            raise RefusedError(f"release: tensor {name!r} is {role}, only shared tensors may leave; nothing was sent")
        if not torch.isfinite(tensor).all():
            raise RefusedError(f"release: tensor {name!r} has NaN or Inf; nothing was sent; lower training.lr")
    for kind, given, known in (
        ("scalar", payload.scalars, strategy.upload_scalars),
        ("metric", payload.metrics, metrics),
    ):
        if extra := sorted(given.keys() - known):
            raise RefusedError(f"release: {kind} {extra[0]!r} is not declared, so it may not leave; nothing was sent")
