"""`consilium predict`: write a model's predictions for new inputs: masks, a table of classes, or answers to records."""

import csv
import errno
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consilium.core.errors import ConfigError, DataError
from consilium.core.sanitize import csv_cell
from consilium.core.storage import PRIVATE, make_private_folder, write_atomic
from consilium.data import volumes
from consilium.data.datalist import DataList
from consilium.data.safe_open import volume_format
from consilium.data.text import Text, read_records
from consilium.federation.job import build_task, reads_texts
from consilium.report.predictions import overlay
from consilium.training.device import autocast
from consilium.use.inputs import Input
from consilium.use.model import TrainedModel
from consilium.use.outputs import (
    CLASSES,
    LABELS,
    OutputOptions,
    check_files,
    label_legend,
    label_map,
    mask_name,
    overlay_name,
    probability_name,
    split_clashing,
    write_dicom,
    write_nifti,
    write_pages,
    write_picture,
)
from consilium.use.predictor import Prediction, Predictor, answer_inputs, stitch_tiles

# texts -----------------------------------------------------------------------------------------------------------------
# Answers of a language model to records of instructions, generated as in a run's final evaluation. Small files share a call.

Answer = dict[str, Any] | DataError
"""A record with its "answer", or the error why the record cannot be used."""
Read = tuple[Input, list[Text], list[DataError]]
"""(A file, its records, the errors of its unusable lines or of the whole file)."""


def answers(opened: TrainedModel, inputs: Sequence[Input], batch_size: int) -> Iterator[tuple[Input, Iterator[Answer]]]:
    """Yield (file, iterator of its answers), in order. A file's errors come after its answers.

    Files are collected until their records fill one call of `batch_size`.
    """
    waiting = list[Read]()
    for one in inputs:
        bad = list[DataError]()
        try:
            found: Read = one, list(read_records(one.path, bad, require_pictures=opened.config.model.image_side > 0)), bad
        except DataError as error:
            found = one, [], [error]
        if waiting and sum(len(texts) for _, texts, _ in [*waiting, found]) > batch_size:
            yield from _answer_files(opened, waiting, batch_size)
            waiting = []
        waiting.append(found)
    yield from _answer_files(opened, waiting, batch_size)


def _answer_files(opened: TrainedModel, waiting: list[Read], batch_size: int) -> Iterator[tuple[Input, Iterator[Answer]]]:
    if not waiting:
        return
    where = Path(os.path.commonpath([one.path for one, _, _ in waiting]))
    said = iter(_answer_records(opened, where, [text for _, texts, _ in waiting for text in texts], batch_size))
    for one, texts, bad in waiting:
        yield one, iter([*islice(said, len(texts)), *bad])


def _answer_records(opened: TrainedModel, where: Path, texts: list[Text], batch_size: int) -> list[Answer]:
    """Return the answer or the error of each record.

    If a record cannot be used, each half of the records is tried separately, until only unusable records have errors.
    """
    if not texts:
        return []
    try:
        config = opened.config
        data = DataList(where, {"training": tuple(texts), "validation": (), "test": ()})
        if config.task.name == "classification":  # records without a class
            data = replace(data, loading=replace(data.loading, ignore_unfit=True))
        task: Any = build_task(config, data, opened.own)
        device = next(opened.model.parameters()).device
        with torch.no_grad(), autocast(device, config.training.precision):
            written: list[Any] = task.predict(opened.model, "training", batch_size)
        fields = ("system", "history", "instruction", "input")
        return [
            {"record": text.name}
            | {key: value for key in fields if (value := getattr(text, key))}
            | (said if isinstance(said, dict) else {"answer": said})
            for text, said in zip(texts, written, strict=True)
        ]
    except DataError as error:
        if len(texts) == 1:
            return [error]
    half = len(texts) // 2
    return [answer for part in (texts[:half], texts[half:]) for answer in _answer_records(opened, where, part, batch_size)]


# predict ---------------------------------------------------------------------------------------------------------------

ENDS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of the disk that end the command, because every later input would meet them too."""
SIDE = 1024
"""Largest length of an overlay's longer side in pixels."""


@dataclass
class Outcome:
    """The result of `predict`. `bad`: (input's name, reason) for inputs that could not be used.

    `written`: the names of the predicted inputs; for segmentation, the names of their masks.
    """

    written: list[str] = field(default_factory=list)
    bad: list[tuple[str, str]] = field(default_factory=list)


def predict(predictor: Predictor, inputs: list[Input], wanted: OutputOptions, done: Callable[[Input], None]) -> Outcome:
    """Predict every input, and return what was written and what failed. `done` is called with each input.

    An input that cannot be used is added to `Outcome.bad`, and the others are still predicted. The same holds for an input
    whose files would have the names of an earlier input's files. Raises ConfigError, before anything is written, if existing
    files would be replaced.
    """
    name = predictor.opened.config.task.name
    if name not in ("segmentation", "classification", "language", "report"):
        raise ConfigError(f"task.name: {name!r}: predict knows segmentation, classification, language and report")
    texts = name in ("language", "report") or reads_texts(predictor.opened.config)
    apart, clashing = split_clashing(name, inputs, wanted)
    check_files(name, inputs, apart, wanted)
    make_private_folder(wanted.out)
    outcome = Outcome(bad=[(one.name, why) for one, why in clashing])
    for one, _ in clashing:
        done(one)
    if name == "segmentation":
        legend = {str(value): list(meant) for value, meant in label_legend(predictor.task.classes).items()}
        write_atomic(wanted.out / LABELS, json.dumps(legend, indent=1).encode())
    asked: Iterator[tuple[Input, Iterator[Any]]] = (
        answers(predictor.opened, apart, predictor.batch_size) if texts else answer_inputs(predictor, apart)
    )
    rows = list[list[Any]]()
    for one, found in asked:
        with _collect_errors(outcome, one):
            if texts:
                _write_answers(one, found, wanted, outcome)
            elif name == "segmentation":
                _write_mask(predictor, one, found, wanted, outcome)
            else:
                rows += [_class_row(one, part, predictor.task.classes) for part in predictor.class_probabilities(one, found)]
                outcome.written.append(one.name)
        volumes.forget()
        done(one)
    if name == "classification" and not texts:
        _write_table(wanted.out / CLASSES, rows, predictor.task.classes)
    return outcome


@contextmanager
def _collect_errors(outcome: Outcome, one: Input) -> Iterator[None]:
    """Within the context, add a DataError, or an OSError when writing, to `outcome`. Raises an OSError that is in ENDS."""
    try:
        yield
    except DataError as error:
        outcome.bad.append((one.name, str(error)))
    except OSError as error:
        if error.errno in ENDS:
            raise
        why = f"{one.path}: its prediction cannot be written ({error.strerror}); look at the folder's names and rights"
        outcome.bad.append((one.name, why))


# segmentation ---------------------------------------------------------------------------------------------------------


def _write_mask(predictor: Predictor, one: Input, asked: Iterator[Prediction], wanted: OutputOptions, outcome: Outcome) -> None:
    name, names = mask_name(one.name), list(predictor.task.classes)
    parts = stitch_tiles(predictor.resize_to_image(one, asked), str(one.path))
    found = _Volume(one, predictor, wanted) if volumes.is_volume(one.path) else None
    best: Prediction | None = None
    for part in parts:
        if found is None:
            write_picture(wanted.out / name, label_map(part.answer, names, label_legend(predictor.task.classes)))
            if wanted.probabilities:
                write_pages(wanted.out / probability_name(name), part.answer.sigmoid().numpy())
        else:
            found.put(part)
        best = part if best is None or _mask_area(part) > _mask_area(best) else best
    if found is not None:
        found.write(wanted.out / name, wanted.out / probability_name(name))
    outcome.written.append(name)
    if wanted.overlays and best is not None:
        _write_overlay(wanted.out / overlay_name(name), best, one)


def _mask_area(part: Prediction) -> int:
    return int((part.answer > 0).any(0).sum())


class _Volume:
    """Collects the predicted planes of a volume in the volume's grid, and writes them."""

    def __init__(self, one: Input, predictor: Predictor, wanted: OutputOptions) -> None:
        self.one, self.names, self.dicom = one, list(predictor.task.classes), volume_format(one.path) == "dicom"
        self.grid, self.card = volumes.header(one.path).grid, predictor.opened.card
        self.values = label_legend(predictor.task.classes)
        shape, count = self.grid.shape, len(self.names)
        kind = np.uint8 if max(self.values) < 256 else np.uint16
        self.labels = np.zeros(shape, kind)
        self.masks = np.zeros((count, *shape), bool) if self.dicom else None
        self.shares = np.zeros((count, *shape), np.float32) if wanted.probabilities else None

    def put(self, part: Prediction) -> None:
        """Add the prediction of one plane."""
        axis, number = part.item.axis, part.item.slice or 0
        if self.masks is None:
            self.grid.put(self.labels, axis, number, label_map(part.answer, self.names, self.values))
        for index, logits in enumerate(part.answer):
            if self.masks is not None:
                self.grid.put(self.masks[index], axis, number, (logits > 0).numpy())
            if self.shares is not None:
                self.grid.put(self.shares[index], axis, number, logits.sigmoid().numpy())

    def write(self, path: Path, beside: Path) -> None:
        """Write the mask to `path` and, if wanted, the probabilities to `beside`."""
        if self.masks is None:
            write_nifti(path, self.labels, self.one.path)
            if self.shares is not None:
                write_nifti(beside, self.shares.transpose(1, 2, 3, 0), self.one.path)
            return
        model = f"{self.card.job} {self.card.name}"
        write_dicom(path, self.masks.transpose(3, 2, 1, 0), self.names, self.one.path, model)
        if self.shares is not None:
            write_dicom(beside, self.shares.transpose(3, 2, 1, 0), self.names, self.one.path, model)


def _write_overlay(path: Path, part: Prediction, one: Input) -> None:
    """Draw an overlay of the mask on the picture, and write it.

    Raises DataError for any failure other than OSError, because the mask is written already and other inputs follow.
    """
    try:
        # For a volume, `part` is the plane with the largest mask.
        rows, columns = part.image.shape[:2]
        side = max(rows, columns)
        image = np.zeros((side, side, 3), np.uint8)
        image[:rows, :columns] = part.image
        masks = torch.zeros(len(part.answer), side, side, dtype=torch.bool)
        masks[:, :rows, :columns] = part.answer > 0
        shown = min(max(side, 256), SIDE)
        drawn = overlay(torch.from_numpy(image.transpose(2, 0, 1).copy()), masks, shown)
        file = io.BytesIO()
        scale = shown / side
        drawn.crop((0, 0, max(1, round(columns * scale)), max(1, round(rows * scale)))).save(file, "PNG")
        write_atomic(path, file.getvalue())
    except OSError:
        raise
    except Exception as error:
        raise DataError(
            f"{one.path}: its mask is written, its overlay cannot be drawn ({type(error).__name__}); look at the picture"
        ) from None


# classification and language ------------------------------------------------------------------------------------------


def _write_table(path: Path, rows: list[list[Any]], classes: list[str]) -> None:
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(["image", "part", "class", "probability", *(f"p({name})" for name in classes)])
    table.writerows(rows)
    write_atomic(path, file.getvalue().encode("utf-8", "surrogateescape"), PRIVATE)


def _class_row(one: Input, part: Prediction, classes: list[str]) -> list[Any]:
    chances: Tensor = part.answer
    best = int(chances.argmax())
    numbers = [f"{float(p):.6f}" for p in (chances[best], *chances)]
    return [csv_cell(one.name), part.item.name_suffix, csv_cell(classes[best]), *numbers]


def _write_answers(one: Input, found: Iterator[Answer], wanted: OutputOptions, outcome: Outcome) -> None:
    said = list(found)
    bad = [(one.name, str(answer)) for answer in said if isinstance(answer, DataError)]
    lines = [json.dumps(answer, ensure_ascii=False) for answer in said if not isinstance(answer, DataError)]
    outcome.bad.extend(bad)
    if lines or not bad:
        write_atomic(wanted.out / one.name, "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace"))
        outcome.written.append(one.name)
