"""Losses and log-likelihoods of tokens: at chosen positions, of a record's options, and of preferences (DPO).

A model's output layer is applied only at positions whose token is learned. With a large vocabulary the output layer and the
cross-entropy are a large part of a step. A prompt's tokens need neither.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilium.adapters.adapter_state import disable_adapter
from consilium.tasks.base import Batch, evaluating
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


def scatter_losses(values: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """Return a tensor of `shape` with `values` (M,) at the flattened positions `places` (M,) and 0 elsewhere."""
    return values.new_zeros(shape.numel()).index_put((places.to(values.device, non_blocking=True),), values).view(shape)


Row = tuple[list[int], list[int]]


def log_likelihoods(
    model: nn.Module,
    inputs_of: Callable[[Sequence[int], Sequence[Row]], Batch],
    prompts: Sequence[Sequence[int]],
    options: Sequence[Sequence[Sequence[int]]],
    batch_size: int,
) -> list[list[float]]:
    """Return for each record the summed log-probability of each option's tokens after the prompt, as lm-evaluation-harness.

    `inputs_of(records, rows)` returns the model's inputs for rows of (token ids, labels) that belong to these records. An
    option's last token is never an input, so all options with one token are read from the same row.
    """
    rows: dict[tuple[int, tuple[int, ...]], list[tuple[int, Sequence[int]]]] = {}
    for record, (prompt, own) in enumerate(zip(prompts, options, strict=True)):
        for number, tokens in enumerate(own):
            rows.setdefault((record, (*prompt, *tokens[:-1])), []).append((number, tokens))
    found, keys = [[0.0] * len(own) for own in options], list(rows)
    for start in range(0, len(keys), batch_size):
        part = keys[start : start + batch_size]
        begins = [len(prompts[record]) for record, _ in part]
        pairs = [(list(ids), [IGNORED] * b + list(ids[b:])) for (_, ids), b in zip(part, begins, strict=True)]
        inputs: dict[str, Any] = dict(inputs_of([record for record, _ in part], pairs))
        width = inputs["input_ids"].shape[1]
        asked = [
            (record, number, row * width + begin - 1 + at, token)
            for row, (record, ids) in enumerate(part)
            for begin in [begins[row]]
            for number, tokens in rows[record, ids]
            for at, token in enumerate(tokens)
        ]
        places, targets = torch.tensor([one[2:] for one in asked]).T
        logits: Tensor = logits_at(model, inputs, places)
        chosen = logits.log_softmax(1).gather(1, targets.to(logits.device)[:, None])[:, 0].tolist()
        for (record, number, _, _), value in zip(asked, chosen, strict=True):
            found[record][number] += value
    return found


Losses = Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]
"""A function like task.token_losses: it returns each token's cross-entropy, 0 if not learned, and a mask of learned tokens."""


def reward_margins(model: nn.Module, batch: Batch, beta: float, losses_of: Losses) -> Tensor:
    """Return the implicit reward of the better answer minus that of the worse one (N,), float32, for pairs (N, 2, T).

    An answer's reward is `beta` times the log of its probability under the model over that under the base. The base is the
    model without its adapter, so no second copy of the weights is needed.

    Source: R. Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model", NeurIPS 2023,
    equation 7.
    """
    rows = {name: values.flatten(0, 1) for name, values in batch.items()}
    with torch.no_grad(), evaluating(model), disable_adapter(model):
        reference = losses_of(model, rows)[0].sum(1)
    better, worse = (reference - losses_of(model, rows)[0].sum(1)).view(-1, 2).unbind(1)
    return beta * (better - worse)
