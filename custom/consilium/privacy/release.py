"""What a release may hold: declared names, shared tensors in the shapes they came in, finite values; and its geometry."""

import os
from collections.abc import Set
from typing import Literal, NamedTuple

import numpy as np
import torch

from consilium.adapters.names import factor
from consilium.config.job import JobConfig
from consilium.config.privacy import HospitalPrivacyPolicy
from consilium.errors import ConfigError, RefusedError
from consilium.linalg.together import unusable
from consilium.messages import Payload, Tensors
from consilium.privacy import mechanism
from consilium.privacy.discrete import Bits
from consilium.privacy.plan import Plan
from consilium.privacy.secagg.arithmetic import UNIT
from consilium.privacy.shares import add_share, on_grid
from consilium.seeding import seed_for
from consilium.strategies.strategy import Role, Strategy


def check_upload(payload: Payload, strategy: Strategy, metrics: Set[str]) -> None:
    """Raise RefusedError unless every tensor is SHARED in this phase, finite, and every scalar and metric is declared."""
    for name in payload.tensors:
        if (role := _role(strategy, name, payload)) is not Role.SHARED:
            whose = role or "none of the adapter's"
            raise RefusedError(f"release: tensor {name!r} is {whose}, only shared tensors may leave; nothing was sent")
    if wrong := unusable(payload.tensors):
        raise RefusedError(f"release: tensor {wrong[0]!r} has NaN or Inf; nothing was sent; lower training.lr")
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


def check_complete(who: str, strategy: Strategy, result: Payload, sent: Payload) -> None:
    """Raise RefusedError unless tensors are exactly those of the phase, in shape: clipping is joint over all of them."""
    if result.scalars:
        raise RefusedError(f"{who}: scalar {min(result.scalars)!r} would leave without noise; nothing was sent")
    expected = upload_shapes(strategy, sent)
    found = {name: tuple(tensor.shape) for name, tensor in result.tensors.items()}
    if wrong := sorted(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n)):
        shapes = f"{found.get(wrong[0])}, expected {expected.get(wrong[0])}"
        raise RefusedError(f"{who}: tensor {wrong[0]!r} has shape {shapes}; nothing was sent")


class Sources(NamedTuple):
    """Where noise comes from: normals for what is added in floating point, bits for exact shares."""

    normal: mechanism.Normal = mechanism.system_normal
    bits: Bits = os.urandom


def sources(policy: HospitalPrivacyPolicy, site: str, result: Payload) -> Sources:
    """Return the system's generator, or what a seed of the policy repeats."""
    if policy.noise_seed is None:
        return Sources()
    seed = seed_for(policy.noise_seed, site, result.round, result.phase)
    return Sources(mechanism.seeded_normal(seed), np.random.default_rng(seed).bytes)


def privatized(
    plan: Plan,
    update: Tensors,
    maps: dict[str, mechanism.Geometry],
    source: Sources = Sources(),  # noqa: B008
) -> tuple[Tensors, mechanism.Outcome]:
    """Return an update clipped and noised as the plan says. Raises RefusedError for one that the plan did not count.

    With trust distributed these are whole units of the grid (int64), of whitened coordinates where a tensor has a peer:
    `restored` is what the server makes of their mean.
    """
    plan.check_count(update)
    if plan.config.trust == "distributed":
        return _with_share(plan, {n: maps[n].whiten(t) if n in maps else t for n, t in update.items()}, source.bits)
    return mechanism.privatize(update, maps, plan.config.clip, plan.site_noise, source.normal, plan.by_tensor)


def _with_share(plan: Plan, clean: Tensors, bits: Bits) -> tuple[Tensors, mechanism.Outcome]:
    """Return clipped integers with a share of noise. A step's sum comes as integers: training has clipped every unit's part."""
    if plan.by_step and any(tensor.dtype is not torch.int64 for tensor in clean.values()):
        raise RefusedError("release: a step's sum is not in whole units of the grid; nothing was sent")
    integers = clean if plan.by_step else on_grid(clean, plan.clip)
    numbers = sum(tensor.numel() for tensor in clean.values())
    released = add_share(integers, plan.share(numbers), bits)
    told, sent, kept = ({n: t.double() * UNIT for n, t in one.items()} for one in (clean, released, integers))
    told = told if plan.by_step else {n: t.double() for n, t in clean.items()}
    return released, mechanism.outcome_of(told, kept, sent, plan.site_noise)


def restored(maps: dict[str, mechanism.Geometry], mean: Tensors) -> Tensors:
    """Return the factor updates whose whitened coordinates are a sum or mean of the sites', float64."""
    return {name: maps[name].restore(t) if name in maps else t for name, t in mean.items()}


def geometries(
    strategy: Strategy, config: JobConfig, update: Tensors, public: Tensors, round: int, phase: int
) -> dict[str, mechanism.Geometry]:
    """Return the whitening of every tensor that has a peer, from the `public` values. Raises RefusedError without them.

    Where only a sum of sites' coordinates is seen, they are those of the symmetric root, which all sites share. Gradients of
    DP-SGD are clipped as they are, so they have none.
    """
    maps: dict[str, mechanism.Geometry] = {}
    if config.dpsgd is not None:
        return maps
    summed = config.privacy is not None and config.privacy.trust == "distributed"
    for name in update:
        if (peer := strategy.peer(name, round, phase)) is None:
            continue
        if peer not in public or not torch.isfinite(public[peer]).all() or strategy.role(peer, round, phase) is Role.LOCAL:
            raise RefusedError(f"release: {peer!r}, the public peer of {name!r}, is missing or unusable; nothing was sent")
        side: Literal["left", "right"] = "right" if factor(name) == "B" else "left"
        maps[name] = mechanism.geometry(public[peer], side, config.adapter.product_scaling, summed)
    return maps
