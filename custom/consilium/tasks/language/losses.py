"""Losses at chosen tokens: a model's output layer is applied only at positions whose token is learned.

With a large vocabulary the output layer and the cross-entropy are a large part of a step. A prompt's tokens need neither.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilium.tasks.language.tokens import IGNORED


def learned_positions(targets: Tensor) -> Tensor:
    """Return the positions (M,) of learned tokens in the flattened targets; `targets` (N, T) is on the CPU."""
    return (targets.flatten() != IGNORED).nonzero().squeeze(1)


def losses_at(model: nn.Module, inputs: Mapping[str, Any], targets: Tensor, places: Tensor) -> Tensor:
    """Return the cross-entropy (M,), float32, at the positions `places` (M,) of the flattened targets (N, T)."""
    logits = logits_at(model, inputs, places)
    wanted = targets.to(logits.device, non_blocking=True).flatten()[places.to(logits.device, non_blocking=True)]
    return F.cross_entropy(logits, wanted, reduction="none")


def logits_at(model: nn.Module, inputs: Mapping[str, Any], places: Tensor) -> Tensor:
    """Return the logits (M, V), float32, at the positions `places` (M,) of the flattened inputs (N, T).

    A model that does not apply its output layer exactly once to all of (N, T) computes all logits, from which these are taken.
    """
    rows, device = inputs["input_ids"].shape, next(model.parameters()).device
    places, chosen = places.to(device, non_blocking=True), False

    def keep_learned_positions(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        nonlocal chosen
        if chosen or not given or given[0].shape[:-1] != rows:
            return None
        chosen = True
        return given[0].flatten(0, 1)[places][None], *given[1:]

    head = getattr(model, "get_output_embeddings", lambda: None)()
    handle = head.register_forward_pre_hook(keep_learned_positions) if isinstance(head, nn.Module) else None
    try:
        logits = cast(Any, model)(**inputs, use_cache=False).logits
    finally:
        if handle is not None:
            handle.remove()
    return cast(Tensor, (logits if chosen else logits.flatten(0, 1)[places][None])[0].float())


def spread(values: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """Return a tensor of `shape` with `values` (M,) at the flattened positions `places` (M,) and 0 elsewhere."""
    return values.new_zeros(shape.numel()).index_put((places.to(values.device, non_blocking=True),), values).view(shape)
