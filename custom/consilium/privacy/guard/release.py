"""Checks of a release (names, roles, shapes, finite values), and its clipping and noise. Used by the guard."""

import math
from collections.abc import Collection, Set
from pathlib import Path
from typing import Literal

import torch

from consilium.adapters.names import factor, is_frozen_part, other_factor
from consilium.config.job import JobConfig
from consilium.core.errors import ConfigError, Reason, RefusedError
from consilium.core.messages import Payload, Tensors
from consilium.core.norms import non_finite_names
from consilium.core.storage import digest, lock_folder, note, read_notes, refuse_if_unwritable
from consilium.privacy import mechanism
from consilium.privacy.discrete_gaussian import Bits, add_share
from consilium.privacy.plan import Plan
from consilium.privacy.randomness import secret_bytes
from consilium.strategies.strategy import Role, Strategy


def check_upload(payload: Payload, strategy: Strategy, metrics: Set[str]) -> None:
    """Raise RefusedError unless a result has only finite tensors that are SHARED in this phase, and declared metrics."""
    for name in payload.tensors:
        try:
            role: str = strategy.role(name, payload.round, payload.phase)
        except ConfigError:
            role = "none of the adapter's"
        if role != Role.SHARED:
            raise RefusedError(f"release: tensor {name!r} is {role}, only shared tensors may leave; nothing was sent")
    if wrong := non_finite_names(payload.tensors):
        raise RefusedError(f"release: tensor {wrong[0]!r} has NaN or Inf; nothing was sent; lower training.lr")
    if payload.scalars:
        raise RefusedError(f"release: scalar {min(payload.scalars)!r} may not leave; nothing was sent; send a shared tensor")
    if extra := sorted(payload.metrics.keys() - metrics):
        raise RefusedError(
            f"release: metric {extra[0]!r} is not declared, so it may not leave; nothing was sent; "
            "declare it in the task's metric_names"
        )
    if wrong := sorted(name for name, value in payload.metrics.items() if type(value) is not float):
        raise RefusedError(f"release: metric {wrong[0]!r} is not a plain number; nothing was sent; write float(...)")


def upload_shapes(strategy: Strategy, sent: Payload) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that a site uploads in answer to `sent`: its shared tensors."""
    names = strategy.names(sent.tensors, Role.SHARED, sent.round, sent.phase)
    return {name: tuple(sent.tensors[name].shape) for name in names}


def check_complete(who: str, strategy: Strategy, result: Payload, sent: Payload) -> None:
    """Raise RefusedError unless `result` has exactly the tensors that the phase releases, because one norm covers them all."""
    expected = upload_shapes(strategy, sent)
    found = {name: tuple(tensor.shape) for name, tensor in result.tensors.items()}
    if wrong := sorted(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n)):
        raise RefusedError(
            f"{who}: tensor {wrong[0]!r} has shape {found.get(wrong[0])}, expected {expected.get(wrong[0])}; nothing was sent"
        )


def server_sees_only_sums(config: JobConfig) -> bool:
    """Return whether the server sees only sums over sites. Then sites send integers, in coordinates that all sites share."""
    privacy, masked = config.privacy, config.secure_aggregation is not None
    return privacy is not None and (privacy.trust == "distributed" or (privacy.trust == "central" and masked))


def privatize_update(
    plan: Plan,
    update: Tensors,
    maps: dict[str, mechanism.Geometry],
    bits: Bits = secret_bytes,
    as_sums: bool = False,
) -> tuple[Tensors, mechanism.Outcome]:
    """Return an update with this site's part of the plan's protection, and its Outcome.

    It is clipped, except for a sum of gradients that training has clipped already. The noise is the whole one, with trust
    distributed this site's share, and with trust central none, which the server adds.

    `maps`: the whitening of tensors with a peer. `as_sums`: return whitened coordinates in whole units of the grid (int64); the
    server maps their mean back with `mechanism.restore_update`. Otherwise return an update in the types of `update`. Raises
    RefusedError if the update has more tensors than the plan counts.
    """
    plan.check_tensor_count(update)
    if plan.is_distributed_dpsgd:  # the update is a DP-SGD step's sum; training clipped and rounded each gradient
        if any(tensor.dtype is not torch.int64 for tensor in update.values()):
            raise RefusedError("release: a step's sum is not in whole units of the grid; nothing was sent")
        noisy = add_share(update, plan.share_deviation(_count_numbers(update)), bits)
        told, sent = mechanism.to_real_numbers(update), mechanism.to_real_numbers(noisy)
        return noisy, mechanism.outcome_of(told, told, sent, plan.site_noise)
    deviation = 0 if plan.config.trust == "central" else plan.share_deviation(_count_numbers(update))
    released, outcome = mechanism.privatized_coordinates(update, maps, plan.config.clip, deviation, bits, plan.by_tensor)
    if as_sums:
        return released, outcome
    return {
        n: t.to(update[n].dtype) for n, t in mechanism.restore_update(maps, mechanism.to_real_numbers(released)).items()
    }, outcome


def _count_numbers(tensors: Tensors) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def noised_sum(plan: Plan, sums: Tensors, bits: Bits = secret_bytes) -> Tensors:
    """Return the sum of the sites' clipped coordinates (int64, units) with the whole noise, for a server with trust central."""
    return add_share(sums, plan.share_deviation(_count_numbers(sums)), bits)


def geometries(
    strategy: Strategy, config: JobConfig, update: Tensors, public: Tensors, round: int, phase: int
) -> dict[str, mechanism.Geometry]:
    """Return the whitening maps of every tensor in `update` that has a peer, computed from the `public` values.

    If the server sees only sums, the maps use the symmetric root, which is the same at all sites. DP-SGD clips gradients
    without whitening, so it has no maps. Raises RefusedError if a peer is missing, not finite or not public.
    """
    maps: dict[str, mechanism.Geometry] = {}
    if config.dpsgd is not None:
        return maps
    summed = server_sees_only_sums(config)
    for name in update:
        if (peer := other_factor(name) if strategy.traits.paired_factors else None) is None:
            continue
        if peer not in public or not torch.isfinite(public[peer]).all() or strategy.role(peer, round, phase) is Role.LOCAL:
            raise RefusedError(f"release: {peer!r}, the public peer of {name!r}, is missing or unusable; nothing was sent")
        side: Literal["left", "right"] = "right" if factor(name) == "B" else "left"
        maps[name] = mechanism.geometry(public[peer], side, config.adapter.product_scaling, summed)
    return maps


# model sharing ---------------------------------------------------------------------------------------------------------
# Cross-site jobs: a site scores each model once, and shares its own model if its site.yaml allows that.

MODELS = 256
"""The largest number of models that one job scores at a site."""
NUMBERS = frozenset({"scaling", "share"})
"""Scalars that a model's forward pass needs in addition to its tensors."""
FILE = "scored.json"


def check_shares_model(name: str, config: JobConfig, shares: bool, protects: bool) -> None:
    """Raise RefusedError unless the job asks for this site's own model and the site shares it.

    `shares`: share_personalized in its site.yaml; `protects`: its site.yaml has a privacy policy, so no model may leave.
    """
    if config.cross_site is None or not config.cross_site.personalized:
        raise RefusedError(f"{name}: the job asks for no personalized model; nothing was sent", Reason.TASK)
    if config.privacy is not None or config.secure_aggregation is not None or protects:
        raise RefusedError(f"{name}: under privacy or masks no personalized model leaves; nothing was sent", Reason.MODEL)
    if not shares:
        raise RefusedError(
            f"{name}: its site.yaml does not say share_personalized: true, so its model stays here; nothing was sent",
            Reason.MODEL,
        )


def record_scored_model(folder: Path, place: tuple[int, int], sent: Payload) -> None:
    """Record which model is scored in a round and phase. Raises RefusedError if a different model was scored there before.

    Otherwise a server could learn about the data from the scores of many models made for that purpose. `folder`: of this
    submission.
    """
    key, found = "{}-{}".format(*place), f"{digest(sent.tensors)} {sorted(sent.scalars.items())}"
    path = folder / FILE
    with refuse_if_unwritable(path), lock_folder(folder):  # FLARE may leave two processes of one site
        known = read_notes(path, "restore it, or submit the job again")
        if known.get(key, {"model": found}) != {"model": found}:
            raise RefusedError(f"round {place[0]} phase {place[1]} had another model before; nothing was sent", Reason.TASK)
        if key not in known:
            note(path, key, {"model": found})


def is_adapter_tensor(name: str, names: Collection[str]) -> bool:
    """Tell whether `name` belongs to the adapter: it is one of `names`, or a frozen part of a layer in `names`."""
    layer = name.rpartition(".")[0]
    return name in names or (is_frozen_part(name) and any(one.rpartition(".")[0] == layer for one in names))


def check_model(name: str, result: Payload, names: Collection[str]) -> None:
    """Raise RefusedError unless `result` is only an adapter: known tensor names, finite floats, the scalars in NUMBERS."""
    if extra := sorted(name for name in result.tensors if not is_adapter_tensor(name, names)):
        raise RefusedError(f"{name}: tensor {extra[0]!r} is none of the adapter's; nothing was sent")
    if bad := sorted(n for n, t in result.tensors.items() if not t.is_floating_point() or not torch.isfinite(t).all()):
        raise RefusedError(f"{name}: tensor {bad[0]!r} is not a finite float; nothing was sent")
    if result.metrics or result.scalars.keys() != NUMBERS or not all(map(math.isfinite, result.scalars.values())):
        raise RefusedError(f"{name}: a model with other numbers than {', '.join(sorted(NUMBERS))}; nothing was sent")
