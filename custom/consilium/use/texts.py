"""Answers of a language model to records of instructions, as its closing evaluation writes them; small files go together."""

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from consilium.core.errors import DataError
from consilium.data.datalist import DataList
from consilium.data.text import Text, read_records
from consilium.federation.job import build_task
from consilium.training.device import autocast
from consilium.use.inputs import Input
from consilium.use.model import TrainedModel

Answer = dict[str, Any] | DataError
"""A record with its "answer", or why it cannot be used."""
Read = tuple[Input, list[Text], list[DataError]]
"""A file with its records, and why lines of it, or all of it, cannot be used."""


def answers(opened: TrainedModel, inputs: Sequence[Input], batch_size: int) -> Iterator[tuple[Input, Iterator[Answer]]]:
    """Yield every file in order with its answers, those that cannot be had last; a file that cannot be read has but an error.

    Files wait for others while all their records go into one call of `batch_size`.
    """
    waiting = list[Read]()
    for one in inputs:
        found = _read(opened, one)
        if waiting and sum(len(texts) for _, texts, _ in [*waiting, found]) > batch_size:
            yield from _answered(opened, waiting, batch_size)
            waiting = []
        waiting.append(found)
    yield from _answered(opened, waiting, batch_size)


def _read(opened: TrainedModel, one: Input) -> Read:
    bad = list[DataError]()
    try:
        return one, list(read_records(one.path, bad, pictures=opened.config.model.image_side > 0)), bad
    except DataError as error:
        return one, [], [error]


def _answered(opened: TrainedModel, waiting: list[Read], batch_size: int) -> Iterator[tuple[Input, Iterator[Answer]]]:
    if not waiting:
        return
    where = Path(os.path.commonpath([one.path for one, _, _ in waiting]))
    said = iter(_said(opened, where, [text for _, texts, _ in waiting for text in texts], batch_size))
    for one, texts, bad in waiting:
        yield one, iter([*islice(said, len(texts)), *bad])


def _said(opened: TrainedModel, where: Path, texts: list[Text], batch_size: int) -> list[Answer]:
    """Return the answer to each record; where one cannot be used, halves are asked until it is found, and the rest goes on."""
    if not texts:
        return []
    try:
        return [_record(text, said) for text, said in zip(texts, _written(opened, where, texts, batch_size), strict=True)]
    except DataError as error:
        if len(texts) == 1:
            return [error]
    half = len(texts) // 2
    return [answer for part in (texts[:half], texts[half:]) for answer in _said(opened, where, part, batch_size)]


def _written(opened: TrainedModel, where: Path, texts: list[Text], batch_size: int) -> list[str]:
    import torch

    config = opened.config
    task: Any = build_task(config, DataList(where, {"training": tuple(texts), "validation": (), "test": ()}), opened.own)
    device = next(opened.model.parameters()).device
    with torch.no_grad(), autocast(device, config.training.precision):
        written: list[str] = task.write(opened.model, "training", batch_size)
    return written


def _record(text: Text, said: str) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "system": text.system,
        "history": text.history,
        "instruction": text.instruction,
        "input": text.input,
    }
    return {"record": text.name} | {key: value for key, value in asked.items() if value} | {"answer": said}
