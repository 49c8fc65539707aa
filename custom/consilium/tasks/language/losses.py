"""Losses of chosen tokens: a model's output layer is applied where a token is learned, and nowhere else.

With a large vocabulary the output layer and its cross-entropy are a large part of a step, and a prompt's tokens need neither.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilium.tasks.language.tokens import IGNORED


def learned_positions(targets: Tensor) -> Tensor:
    """Return the positions (M,), in the flattened targets (N, T) on the CPU, of tokens that are learned."""
    return (targets.flatten() != IGNORED).nonzero().squeeze(1)


def losses_at(model: nn.Module, inputs: Mapping[str, Any], targets: Tensor, places: Tensor) -> Tensor:
    """Return the cross-entropy (M,), in float32, of the targets (N, T) at these of their flattened places (M,)."""
    logits = logits_at(model, inputs, places)
    wanted = targets.to(logits.device, non_blocking=True).flatten()[places.to(logits.device, non_blocking=True)]
    return F.cross_entropy(logits, wanted, reduction="none")


def logits_at(model: nn.Module, inputs: Mapping[str, Any], places: Tensor) -> Tensor:
    """Return the logits (M, V), in float32, at these flattened places (M,) of the inputs (N, T).

    A model that applies its output layer in another way than once to all of (N, T) computes all logits.
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
    """Return values (M,) at their flattened places of a tensor of this shape, 0 elsewhere."""
    return values.new_zeros(shape.numel()).index_put((places.to(values.device, non_blocking=True),), values).view(shape)
