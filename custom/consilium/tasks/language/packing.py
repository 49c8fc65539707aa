"""Several records in one row, without padding between them: equal losses from fewer tokens.

A record attends only to its own tokens (block-diagonal mask), and its positions count from 0. So it is computed as if it were
alone (Krell et al., "Efficient Sequence Packing without Cross-contamination", arXiv 2107.02027). Rows are as long as the
batch's longest record and are filled first-fit, longest first. There are never more rows than records, so attention costs no
more either.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilium.tasks.base import Batch
from consilium.tasks.language.losses import learned_positions, losses_at, scatter_losses
from consilium.tasks.language.tokens import IGNORED


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
