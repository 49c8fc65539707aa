"""Log-likelihoods of a record's options after its prompt, as in lm-evaluation-harness; no answer is generated."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from consilium.tasks.base import Batch
from consilium.tasks.language.losses import logits_at
from consilium.tasks.language.tokens import IGNORED

Row = tuple[list[int], list[int]]


def log_likelihoods(
    model: nn.Module,
    inputs_of: Callable[[Sequence[int], Sequence[Row]], Batch],
    prompts: Sequence[Sequence[int]],
    options: Sequence[Sequence[Sequence[int]]],
    batch_size: int,
) -> list[list[float]]:
    """Return for each record the summed log-probability of each option's tokens after the prompt.

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
