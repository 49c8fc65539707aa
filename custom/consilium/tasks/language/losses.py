"""Losses and log-likelihoods of tokens: of records, of a record's options, of preferences (DPO), of packed rows.

A model's output layer is applied only at positions whose token is learned. With a large vocabulary the output layer and the
cross-entropy are a large part of a step. A prompt's tokens need neither.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilium.adapters.adapter_state import disable_adapter
from consilium.tasks.base import Batch, evaluating
from consilium.tasks.language.tokens import IGNORED

CAUSAL = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures (`model_type`) whose tokens attend neither to later tokens nor to padding."""


def mean_loss(model: nn.Module, batch: Batch, packed: bool = False) -> Tensor:
    """Return the mean over samples of the mean cross-entropy per learned token, float32."""
    losses, learned = token_losses(model, batch, packed)
    return (losses.sum(1) / learned.sum(1)).mean()


def token_losses(model: nn.Module, batch: Batch, packed: bool = False) -> tuple[Tensor, Tensor]:
    """Return each token's cross-entropy, 0 if it is not learned, and a mask of learned tokens, both (N, T - 1)."""
    if packed:
        return packed_losses(model, batch)
    inputs: dict[str, Any] = dict(inputs_of(model, batch))
    device = inputs["input_ids"].device
    # On a CPU scores are equal to the bit without a mask, which saves a tenth of the time: no token attends to the padding on
    # its right. Gradients would not be equal to the bit.
    if architecture_of(model) in CAUSAL and device.type == "cpu" and not torch.is_grad_enabled():
        inputs["attention_mask"] = None
    following = F.pad(batch["labels"].cpu()[:, 1:], (0, 1), value=IGNORED)
    places = learned_positions(following)
    losses = scatter_losses(losses_at(model, inputs, following, places), places, following.shape)[:, :-1]
    return losses, (following[:, :-1] != IGNORED).to(device, non_blocking=True)


def inputs_of(model: nn.Module, batch: Batch) -> Batch:
    """Return a language model's inputs for a batch, on its device. Pictures need the model's `picture_inputs`."""
    device = next(model.parameters()).device
    moved = {key: tensor.to(device, non_blocking=True) for key, tensor in batch.items()}
    text = {key: moved[key] for key in ("input_ids", "attention_mask")}
    if "image" not in moved:
        return text
    answers = moved["labels"] != IGNORED if "labels" in moved else torch.zeros_like(moved["input_ids"]).bool()
    return cast(Any, model).picture_inputs(**text, images=moved["image"], answers=answers)


def architecture_of(model: nn.Module) -> str | None:
    """Return the `model_type` of a model of `transformers`, None for any other."""
    return getattr(getattr(model, "config", None), "model_type", None)


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


def reward_margins(model: nn.Module, batch: Batch, beta: float) -> Tensor:
    """Return the implicit reward of the better answer minus that of the worse one (N,), float32, for pairs (N, 2, T).

    An answer's reward is `beta` times the log of its probability under the model over that under the base. The base is the
    model without its adapter, so no second copy of the weights is needed.

    Source: R. Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model", NeurIPS 2023,
    equation 7.
    """
    rows = {name: values.flatten(0, 1) for name, values in batch.items()}
    with torch.no_grad(), evaluating(model), disable_adapter(model):
        reference = token_losses(model, rows)[0].sum(1)
    better, worse = (reference - token_losses(model, rows)[0].sum(1)).view(-1, 2).unbind(1)
    return beta * (better - worse)


# packing -----------------------------------------------------------------------------------------------------------------
# Several records in one row, without padding between them: equal losses from fewer tokens.
#
# A record attends only to its own tokens (block-diagonal mask), and its positions count from 0. So it is computed as if it were
# alone (Krell et al., "Efficient Sequence Packing without Cross-contamination", arXiv 2107.02027). Rows are as long as the
# batch's longest record and are filled first-fit, longest first. There are never more rows than records, so attention costs no
# more either.


class Packed(NamedTuple):
    """Packed rows (R, T): token `ids`, `positions`, and `labels`, the next tokens.

    `segments` (R, T): the number of the record within its row, from 1; 0 for padding. `places` (N, T): the position of each
    record's tokens in the flattened rows, -1 for padding.
    """

    ids: Tensor
    positions: Tensor
    labels: Tensor
    segments: Tensor
    places: Tensor


def pack(batch: Batch) -> Packed:
    """Return a batch of records (N, T), padded on the right, as packed rows on the CPU."""
    mask, width = batch["attention_mask"].cpu().bool(), batch["input_ids"].shape[1]
    places, segments, count = _places(mask.sum(1).tolist(), width)
    following = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    at, here = torch.arange(width).expand_as(mask), places[mask]

    def rows(values: Tensor, fill: int) -> Tensor:
        made = torch.full((count * width,), fill)
        made[here] = values.cpu()[mask]
        return made.view(count, width)

    own = segments[:, None].expand_as(mask)
    return Packed(rows(batch["input_ids"], 0), rows(at, 0), rows(following, IGNORED), rows(own, 0), places)


def _places(lengths: list[int], width: int) -> tuple[Tensor, Tensor, int]:
    """Return the places (N, T) of records with these lengths, the segment of each record (N,), and the number of rows."""
    free: list[int] = []
    counts: list[int] = []
    places, segments = torch.full((len(lengths), width), -1), torch.zeros(len(lengths), dtype=torch.long)
    for record in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        row = next((r for r, room in enumerate(free) if room >= lengths[record]), len(free))
        if row == len(free):
            free.append(width)
            counts.append(0)
        start = row * width + width - free[row]
        places[record, : lengths[record]] = torch.arange(start, start + lengths[record])
        free[row] -= lengths[record]
        counts[row] += 1
        segments[record] = counts[row]
    return places, segments, len(free)


def packed_losses(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the result of `token_losses`, computed on packed rows."""
    device, rows = next(model.parameters()).device, pack(batch)
    ids, positions, segments = (part.to(device, non_blocking=True) for part in (rows.ids, rows.positions, rows.segments))
    # padding attends to padding, so that no row of the mask is empty
    mask = (segments[:, None, :, None] == segments[:, None, None, :]).tril()
    inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
    there = learned_positions(rows.labels)
    losses = scatter_losses(losses_at(model, inputs, rows.labels, there), there, rows.labels.shape).flatten()
    places, learned = rows.places[:, :-1].to(device, non_blocking=True), batch["labels"][:, 1:] != IGNORED
    return losses[places.clamp(min=0)] * (places >= 0), learned.to(device, non_blocking=True)


def group_by_length(order: list[int], lengths: list[int], size: int) -> list[int]:
    """Return an epoch's `order`, rearranged so that batches have records of similar length.

    Records are sorted within parts of 32 batches, and the order of batches stays random. The last batch of a part, which may be
    smaller, stays last.
    """
    part, found, first = 32 * size, list[int](), {index: at for at, index in enumerate(order)}
    for start in range(0, len(order), part):
        own = sorted(order[start : start + part], key=lambda one: lengths[one])
        batches = [own[at : at + size] for at in range(0, len(own), size)]
        whole = [batch for batch in batches if len(batch) == size]
        whole.sort(key=lambda batch: min(first[index] for index in batch))
        found += [index for batch in (*whole, *(batch for batch in batches if len(batch) < size)) for index in batch]
    return found
