"""`consilium predict`: write a model's predictions for new inputs: masks, a table of classes, or answers to records."""

import csv
import errno
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from consilium.core.errors import ConfigError, DataError
from consilium.core.sanitize import csv_cell, first_names_text, shown
from consilium.core.storage import PRIVATE, make_private_folder, write_atomic
from consilium.data import volumes
from consilium.data.datalist import DataList
from consilium.data.safe_open import volume_format
from consilium.data.text import Text, read_records
from consilium.federation.job_assembly import build_task, reads_texts
from consilium.report.predictions import overlay
from consilium.training.device import autocast
from consilium.use.mask_files import mask_files, write_dicom, write_nifti, write_pages, write_picture
from consilium.use.model import TrainedModel
from consilium.use.predictor import Input, Prediction, Predictor, answer_inputs, stitch_tiles

# outputs ---------------------------------------------------------------------------------------------------------------

CLASSES, LABELS = "classes.csv", "labels.json"
COMMON = {"segmentation": [LABELS], "classification": [CLASSES], "texts": []}
"""The files that are written once for all inputs, by the kind of the outputs."""


@dataclass(frozen=True)
class OutputOptions:
    """The output folder `out`, and which files are wanted besides masks. `force`: existing files there may be replaced."""

    out: Path
    overlays: bool = False
    probabilities: bool = False
    force: bool = False


def split_clashing(kind: str, inputs: list[Input], wanted: OutputOptions) -> tuple[list[Input], list[tuple[Input, str]]]:
    """Return (the inputs with files of their own, [(input, reason)] for inputs that would share a file with an earlier input).

    `kind`: of the outputs, "segmentation", "classification" (one table) or "texts". Names that differ only in upper and lower
    case count as equal, because on some file systems they are.
    """
    taken: dict[str, str] = dict.fromkeys(map(str.casefold, COMMON[kind]), "the tables")
    apart, clashing = list[Input](), list[tuple[Input, str]]()
    for one in inputs:
        names = _output_names(kind, one, wanted)
        if (clash := next((name for name in names if name.casefold() in taken), None)) is None:
            apart.append(one)
            taken |= dict.fromkeys(map(str.casefold, names), one.name)
        else:
            what = f"{shown(clash)!r} is written for {shown(taken[clash.casefold()])!r}"
            clashing.append((one, f"{one.path}: {what}; rename one of the two, or predict them apart"))
    return apart, clashing


def check_files(kind: str, inputs: list[Input], apart: list[Input], wanted: OutputOptions) -> None:
    """Raise ConfigError if a file written for the inputs `apart` would replace an input or, without `force`, any file."""
    names = [*COMMON[kind], *(name for one in apart for name in _output_names(kind, one, wanted))]
    originals = {_file_identity(path) for one in inputs for path in (one.path.iterdir() if one.path.is_dir() else [one.path])}
    if wanted.out.exists() and not wanted.out.is_dir():
        raise ConfigError(f"{wanted.out}: is a file; give a folder")
    there = [path for name in names if (path := wanted.out / name).exists()]
    if own := [path for path in there if _file_identity(path) in originals]:  # not even with `force`
        raise ConfigError(f"--out: {shown(own[0])}: is an input, which is never replaced; give another folder")
    inside = {wanted.out / folder for name in names for folder in Path(name).parents if folder != Path()}
    if away := sorted(folder for folder in inside if folder.is_symlink()):
        raise ConfigError(f"--out: {shown(away[0])}: is a link to another folder; remove it, or give another --out")
    if there and not wanted.force:
        raise ConfigError(
            f"{first_names_text(list(map(str, there)), 1)}: is there already; give another folder, or --force to replace it"
        )


def _output_names(kind: str, one: Input, wanted: OutputOptions) -> list[str]:
    if kind != "segmentation":
        return [one.name] if kind == "texts" else []
    wants = (True, wanted.overlays, wanted.probabilities)
    return [name for name, wants_it in zip(mask_files(one.name), wants, strict=True) if wants_it]


def _file_identity(path: Path) -> tuple[int, int]:
    """Return (device, inode) of a file, which is the same for all its names and links."""
    try:
        told = path.stat()
    except OSError:  # a broken link
        return (-1, -1)
    return (told.st_dev, told.st_ino)


# labels ----------------------------------------------------------------------------------------------------------------
# From the model's logits per class to one map of label values, as in the masks used for training.

MOST = 2**16 - 1
"""The largest label value that a picture can hold."""
Legend = dict[int, tuple[str, ...]]
"""The classes that each label value stands for. 0 is background."""


def label_legend(classes: Mapping[str, Sequence[int | str]]) -> Legend:
    """Return the meaning of each label value. `classes`: for each class the label values of the job.

    If a class has no value that a picture can hold, the classes are numbered from 1 instead.
    """
    own = {name: [v for v in values if isinstance(v, int) and 0 < v <= MOST] for name, values in classes.items()}
    if not all(own.values()):
        return {0: ()} | {number: (name,) for number, name in enumerate(classes, start=1)}
    found: Legend = {0: ()}
    for value in sorted({value for values in own.values() for value in values}):
        meant = tuple(name for name, values in own.items() if value in values)
        if meant not in found.values():  # of several values with the same meaning, use the lowest
            found[value] = meant
    return found


def label_map(logits: Tensor, names: Sequence[str], values: Legend) -> np.ndarray:
    """Return label values (H, W) for logits (C, H, W): at each pixel the value with the highest likelihood.

    The log likelihood of a value is the sum of log p(c) over the classes it stands for, and of log p(not c) over all others. If
    a value stands for exactly the classes with a logit over 0, this is that value. Otherwise, such as for a cup outside its
    disc, it is the best of the existing values.
    """
    table = torch.tensor([[float(name in meant) for name in names] for meant in values.values()])
    best = torch.einsum("vc,chw->vhw", table, logits.float().cpu()).argmax(0).numpy()
    return np.array(list(values), dtype=np.uint8 if max(values) < 256 else np.uint16)[best]


# texts -----------------------------------------------------------------------------------------------------------------
# Answers of a language model to records of instructions, generated as in a run's final evaluation.

Answer = dict[str, Any] | DataError
"""A record with its "answer", or the error why the record cannot be used."""


def answers(opened: TrainedModel, one: Input, batch_size: int) -> Iterator[Answer]:
    """Yield the answers to a file's records in order, then the errors of its unusable lines. Raises DataError for the file."""
    bad = list[DataError]()
    texts = list(read_records(one.path, bad, opened.config.model.image_side > 0, needs_answer=False))
    yield from _answer_records(opened, one.path, texts, batch_size)
    yield from bad


def _answer_records(opened: TrainedModel, where: Path, texts: list[Text], batch_size: int) -> list[Answer]:
    """Return the answer or the error of each record.

    If a record cannot be used, each half of the records is tried separately, until only unusable records have errors.
    """
    if not texts:
        return []
    try:
        # nothing that is written depends on a text's class, or on the worse of two answers
        config, section = opened.config, cast(Any, opened.config.task)
        given: dict[str, Any] = {"rejected": ""}
        if section.name == "classification":
            given["outputs"] = (section.classes[0],)
        elif section.learn == "preference":
            config = config.model_copy(update={"task": section.model_copy(update={"learn": "answer"})})
        asked = tuple(replace(text, **given) for text in texts)
        task: Any = build_task(config, DataList(where, {"training": asked, "validation": (), "test": ()}), opened.own)
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
    return _answer_records(opened, where, texts[:half], batch_size) + _answer_records(opened, where, texts[half:], batch_size)


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
    # a classifier of texts writes a file of records per input, and no table
    texts = name in ("language", "report") or reads_texts(predictor.opened.config)
    kind = "texts" if texts else name
    apart, clashing = split_clashing(kind, inputs, wanted)
    check_files(kind, inputs, apart, wanted)
    make_private_folder(wanted.out)
    outcome = Outcome(bad=[(one.name, why) for one, why in clashing])
    for one, _ in clashing:
        done(one)
    if name == "segmentation":
        legend = {str(value): list(meant) for value, meant in label_legend(predictor.task.classes).items()}
        write_atomic(wanted.out / LABELS, json.dumps(legend, indent=1).encode())
    asked: Iterator[tuple[Input, Iterator[Any]]] = (
        ((one, answers(predictor.opened, one, predictor.batch_size)) for one in apart)
        if texts
        else ((one, predictor.finish(one, raw)) for one, raw in answer_inputs(predictor, apart))
    )
    classes = [] if texts else list(predictor.task.classes)
    rows: list[list[object]] = [["image", "part", "class", "probability", *(f"p({one})" for one in classes)]]
    for one, found in asked:
        with _collect_errors(outcome, one):
            if texts:
                _write_answers(one, found, wanted, outcome)
            elif name == "segmentation":
                _write_mask(predictor, one, found, wanted, outcome)
            else:
                # Keeps no pictures. A part that fails raises here, before any row is added.
                for suffix, shares in [(part.item.name_suffix, part.answer) for part in found]:
                    best = int(shares.argmax())
                    numbers = [f"{float(p):.6f}" for p in (shares[best], *shares)]
                    rows.append([csv_cell(one.name), suffix, csv_cell(classes[best]), *numbers])
                outcome.written.append(one.name)
        volumes.drop_caches()
        done(one)
    if kind == "classification":
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows(rows)
        write_atomic(wanted.out / CLASSES, file.getvalue().encode("utf-8", "surrogateescape"), PRIVATE)
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


def _write_mask(predictor: Predictor, one: Input, found: Iterator[Prediction], wanted: OutputOptions, outcome: Outcome) -> None:
    classes = predictor.task.classes
    name, overlay_name, shares_name = mask_files(one.name)
    volume = _Volume(one, predictor, wanted) if volumes.is_volume(one.path) else None
    best, largest = None, -1
    for part in stitch_tiles(found, one.path, predictor.task):
        if volume is None:
            write_picture(wanted.out / name, label_map(part.answer, list(classes), label_legend(classes)))
            if wanted.probabilities:
                write_pages(wanted.out / shares_name, part.answer.sigmoid().numpy())
        else:
            volume.put(part)
        if (area := int((part.answer > 0).any(0).sum())) > largest:
            best, largest = part, area
    if volume is not None:
        volume.write(wanted.out / name, wanted.out / shares_name)
    outcome.written.append(name)
    if wanted.overlays and best is not None:
        _write_overlay(wanted.out / overlay_name, best, one)


class _Volume:
    """Collects the predicted planes of a volume in the volume's grid, and writes them."""

    def __init__(self, one: Input, predictor: Predictor, wanted: OutputOptions) -> None:
        self.one, self.names, self.dicom = one, list(predictor.task.classes), volume_format(one.path) == "dicom"
        self.grid, self.card = volumes.header(one.path).grid, predictor.opened.card
        self.values = label_legend(predictor.task.classes)
        shape, count = self.grid.shape, len(self.names)
        self.labels = np.zeros(shape, np.uint8 if max(self.values) < 256 else np.uint16)
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


# texts ---------------------------------------------------------------------------------------------------------------


def _write_answers(one: Input, found: Iterator[Answer], wanted: OutputOptions, outcome: Outcome) -> None:
    said = list(found)
    bad = [(one.name, str(answer)) for answer in said if isinstance(answer, DataError)]
    lines = [json.dumps(answer, ensure_ascii=False) for answer in said if not isinstance(answer, DataError)]
    outcome.bad.extend(bad)
    if lines or not bad:
        write_atomic(wanted.out / one.name, "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace"))
        outcome.written.append(one.name)
