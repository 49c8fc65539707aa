"""What the server accepts: names, shapes, values and norms of a site's result. A refusal costs the result, never the round."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from consilium.assemble import Job
from consilium.errors import RefusedError
from consilium.privacy.plan import Plan
from consilium.privacy.release import upload_shapes
from consilium.strategy import Payload, Role, Strategy, Tensors


def check_result(job: Job, result: Payload) -> None:
    """Raise RefusedError unless tensors and scalars are exactly what the strategy uploads, by name, and all finite."""
    expected = job.strategy.names(job.initial, Role.SHARED, result.round, result.phase)
    if wrong := sorted(set(expected) ^ result.tensors.keys()):
        raise RefusedError(f"tensor {wrong[0]!r} is {'missing' if wrong[0] in expected else 'not expected'}")
    for name, tensor in result.tensors.items():
        if not torch.isfinite(tensor).all():
            raise RefusedError(f"tensor {name!r} has NaN or Inf")
    _check_numbers(result.scalars, job.strategy.upload_scalars)


def check_shapes(strategy: Strategy, result: Payload, sent: Payload) -> None:
    """Raise RefusedError unless every tensor has the shape in which the site was sent it."""
    expected = upload_shapes(strategy, sent)
    for name, tensor in result.tensors.items():
        if tuple(tensor.shape) != expected.get(name):
            raise RefusedError(f"tensor {name!r} has shape {tuple(tensor.shape)}, not {expected.get(name)}")


def check_norm(job: Job, plan: Plan | None, result: Payload, sent: Payload) -> None:
    """Raise RefusedError for an update far larger than what it updates, which one site's fault would ruin for all.

    The measure is the whole adapter as the site was sent it (what is not sent counts as it started), so that neither other
    sites nor the order of arrival matter. Site-level noise is large by design: what it is expected to add is allowed for.
    """
    adapter, update = _norm(job.initial | sent.tensors), _norm(result.tensors)
    numbers = sum(tensor.numel() for tensor in result.tensors.values())
    noise = plan.config.clip + plan.site_noise * math.sqrt(numbers) if plan else 0.0
    limit = job.config.federation.max_norm_ratio
    if update > limit * (adapter + noise):
        against = f"{limit:g} times the adapter's {adapter:.3g}" + (f" and noise of {noise:.3g}" if noise else "")
        raise RefusedError(f"update has norm {update:.3g}, over {against}; see that site, or raise federation.max_norm_ratio")


def _norm(tensors: Tensors) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))


def _check_numbers(scalars: Mapping[str, Any], declared: frozenset[str]) -> None:
    if wrong := sorted(scalars.keys() ^ declared):
        raise RefusedError(f"scalar {wrong[0]!r} is {'missing' if wrong[0] in declared else 'not declared'}")
    for name, value in scalars.items():
        if not math.isfinite(value):
            raise RefusedError(f"scalar {name!r} is {value}")
