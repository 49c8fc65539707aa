"""What a release may hold: declared names, shared tensors in the shapes they came in, finite values; and its geometry."""

from collections.abc import Set
from typing import Literal

import torch

from consilium.adapters.names import factor
from consilium.config.job import JobConfig
from consilium.errors import ConfigError, RefusedError
from consilium.messages import Payload, Tensors
from consilium.privacy import mechanism
from consilium.privacy.plan import Plan
from consilium.strategies.strategy import Role, Strategy


def check_upload(payload: Payload, strategy: Strategy, metrics: Set[str]) -> None:
    """Raise RefusedError unless every tensor is SHARED in this phase, finite, and every scalar and metric is declared."""
    for name, tensor in payload.tensors.items():
        if (role := _role(strategy, name, payload)) is not Role.SHARED:
            whose = role or "none of the adapter's"
            raise RefusedError(f"release: tensor {name!r} is {whose}, only shared tensors may leave; nothing was sent")
        if not torch.isfinite(tensor).all():
            raise RefusedError(f"release: tensor {name!r} has NaN or Inf; nothing was sent; lower training.lr")
    for kind, given, known, where in (
        ("scalar", payload.scalars, strategy.upload_scalars, "the strategy's upload_scalars"),
        ("metric", payload.metrics, metrics, "the task's metric_names"),
    ):
        if extra := sorted(given.keys() - known):
            what = f"{kind} {extra[0]!r} is not declared, so it may not leave"
            raise RefusedError(f"release: {what}; nothing was sent; declare it in {where}")
        if wrong := sorted(name for name, value in given.items() if type(value) is not float):
            raise RefusedError(f"release: {kind} {wrong[0]!r} is no plain number; nothing was sent; write float(...)")


def _role(strategy: Strategy, name: str, payload: Payload) -> Role | None:
    """Return a tensor's role; None for a name that the strategy cannot place."""
    try:
        return strategy.role(name, payload.round, payload.phase)
    except ConfigError:
        return None


def upload_shapes(strategy: Strategy, sent: Payload) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that a site uploads in answer to `sent`: the shared ones, as they came."""
    names = strategy.names(sent.tensors, Role.SHARED, sent.round, sent.phase)
    return {name: tuple(sent.tensors[name].shape) for name in names}


def privatized(
    plan: Plan, update: Tensors, maps: dict[str, mechanism.Geometry], normal: mechanism.Normal
) -> tuple[Tensors, mechanism.Outcome]:
    """Return an update clipped and noised as the plan says. Raises RefusedError for one that the plan did not count."""
    plan.check_count(update)
    return mechanism.privatize(update, maps, plan.config.clip, plan.site_noise, normal, plan.by_tensor)


def geometries(
    strategy: Strategy, config: JobConfig, update: Tensors, public: Tensors, round: int, phase: int
) -> dict[str, mechanism.Geometry]:
    """Return the whitening of every tensor that has a peer, from the `public` values. Raises RefusedError without them."""
    maps: dict[str, mechanism.Geometry] = {}
    for name in update:
        if (peer := strategy.peer(name, round, phase)) is None:
            continue
        if peer not in public or not torch.isfinite(public[peer]).all() or strategy.role(peer, round, phase) is Role.LOCAL:
            raise RefusedError(f"release: {peer!r}, the public peer of {name!r}, is missing or unusable; nothing was sent")
        side: Literal["left", "right"] = "right" if factor(name) == "B" else "left"
        maps[name] = mechanism.geometry(public[peer], side, config.adapter.product_scaling)
    return maps
