"""Inputs of `consilium predict`, and a model's predictions for pictures, planes and tiles, which are read as in training."""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from consilium.core.errors import ConfigError, DataError, raise_first
from consilium.core.sanitize import shown
from consilium.data import slides, volumes
from consilium.data.datalist import DataList, Item
from consilium.data.images import read_image, resize, unpadded_size
from consilium.data.planes_and_tiles import expand
from consilium.data.safe_open import PICTURES, read_text
from consilium.tasks.segmentation import PROMPTS
from consilium.training.device import autocast
from consilium.use.model import TrainedModel

TEXTS = (".jsonl",)
TABLE = "DICOMDIR"
"""The table of contents on a DICOM disc, which is a DICOM file but no image."""
MOST_PROMPTS = 2**26
"""Largest size of a file of prompts in bytes, which is enough for over a million prompts."""
PIXELS = "write pixels from the left and the top"
Place = tuple[str, int | None, str]
Prompts = Mapping[Place, tuple[float, ...]]
"""Boxes (left, top, right, bottom) or points (x, y) in pixels, by (input's name, plane, class). Plane None: all planes."""


@dataclass(frozen=True)
class Input:
    """A picture, a volume, a folder with a DICOM series, or a file of texts. `name`: its path relative to the user's folder."""

    path: Path
    name: str


def find_inputs(given: Path, texts: bool, out: Path, companions: list[Path] | None = None) -> list[Input]:
    """Return the inputs in the file or folder `given`, sorted by name. Raises ConfigError if there are none.

    `texts`: look for records instead of images. Files in `out` are ignored. DICOM objects that are not images, such as earlier
    segmentations and reports, are appended to `companions`.
    """
    problems = {
        f"{shown(given)}: no such file or folder; give pictures, volumes or a folder of them": not given.exists(),
        f"{shown(given)}: is a device or a pipe; give a file or a folder": not given.is_dir() and not given.is_file(),
    }
    raise_first(problems)
    if not given.is_dir():
        return [Input(given, given.name)]
    ends, companions = TEXTS if texts else PICTURES, [] if companions is None else companions
    paths = _find_under(given, ends, {out.resolve(), given.resolve()}, companions)
    found = [Input(path, given.resolve().name if path == given else path.relative_to(given).as_posix()) for path in paths]
    if not found:
        wanted = "records (.jsonl)" if texts else "pictures, NIfTI or DICOM images"
        raise ConfigError(f"{shown(given)}: holds no {wanted}; give another folder")
    return sorted(found, key=lambda one: one.name)


def _find_under(folder: Path, ends: tuple[str, ...], seen: set[Path], companions: list[Path]) -> Iterator[Path]:
    """Yield the inputs under a folder and its subfolders. Folders in `seen` are skipped, so that links cannot form a loop.

    Broken links are yielded too, so that they are reported as unusable inputs.
    """
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    files = [path for path in entries if path.is_file()]
    if ends is not TEXTS:
        other = [path for path in files if path.name.upper() != TABLE and not path.name.lower().endswith(PICTURES)]
        yield from _dicom_images(folder, [path for path in other if volumes.is_volume(path)], companions)
    lost = [path for path in entries if path.is_symlink() and not path.exists()]
    yield from (path for path in [*files, *lost] if path.name.lower().endswith(ends))
    for path in sorted((path for path in entries if path.is_dir()), key=Path.is_symlink):
        if (resolved := path.resolve()) not in seen:
            seen.add(resolved)
            yield from _find_under(path, ends, seen, companions)


def _dicom_images(folder: Path, files: list[Path], companions: list[Path]) -> list[Path]:
    """Return the inputs among a folder's DICOM files.

    If each image has a series of its own, such as radiographs, these are the files. Otherwise this is [folder], as one series.
    """
    if not files:
        return []
    try:
        from consilium.data.dicom.files import is_companion_object, open_file, wrap_dicom_errors
    except ImportError:  # without pydicom, reading the input fails later with a clear error
        return files if len(files) == 1 else [folder]
    images = {}
    for path in files:
        try:
            with wrap_dicom_errors(path):
                found = open_file(path)
                other, series = is_companion_object(found), str(found.get("SeriesInstanceUID"))
        except DataError:  # a damaged file counts as an image in a series of its own
            other, series = False, str(path)
        if other:
            companions.append(path)
        else:
            images[path] = series
    return list(images) if len(set(images.values())) == len(images) else [folder]


def read_prompts(path: Path, kind: str, classes: list[str]) -> Prompts:
    """Return the prompts of a `kind` (box or point) from a CSV file.

    The columns are image, class, the numbers of the kind, and optionally slice for one plane of a volume. Raises DataError with
    the number of the row.
    """
    text = read_text(path, f"give a CSV file of {kind} prompts", MOST_PROMPTS)
    columns = ("image", "class", *PROMPTS[kind].numbers)
    found: dict[Place, tuple[float, ...]] = {}
    try:
        for number, row in enumerate(csv.DictReader(io.StringIO(text)), start=1):
            where = f"{path}: {kind} {number}"
            if missing := [key for key in columns if not row.get(key)]:
                raise DataError(f"{where}: lacks {missing[0]}; write {','.join(columns)}")
            if row["class"] not in classes:
                raise DataError(f"{where}: class {shown(row['class'], 80)!r} is none of the model's: {', '.join(classes)}")
            try:
                prompt = tuple(float(row[key]) for key in columns[2:])
                plane = int(row["slice"]) if row.get("slice") else None
            except ValueError:
                raise DataError(f"{where}: has a value that is not a number; {PIXELS}") from None
            if not all(map(math.isfinite, prompt)) or (len(prompt) == 2 and min(prompt) < 0):
                raise DataError(f"{where}: has a value that is not 0 or more; {PIXELS}")
            if len(prompt) == 4 and not (prompt[0] < prompt[2] and prompt[1] < prompt[3]):
                raise DataError(f"{where}: its sides are not left < right and top < bottom; {PIXELS}")
            place = row["image"], plane, row["class"]
            if place in found:
                raise DataError(f"{where}: {shown(place[0])} has two for {place[2]!r}; keep one")
            found[place] = prompt
    except csv.Error as error:
        raise DataError(f"{path}: not valid CSV ({error}); write {','.join(columns)}") from None
    if not found:
        raise DataError(f"{path}: holds no {kind}; write {','.join(columns)}")
    return found


MOST_NUMBERS = 2**29
"""Largest number of logits of one input that are held in memory at once: 2 GiB."""


@dataclass(frozen=True)
class ModelInput:
    """A plane, a tile or a picture. `image`: (H, W, 3), 8 bits. `prompts`: (C, 4 or 2) in the model's pixels, or None."""

    item: Item
    image: np.ndarray
    prompts: Tensor | None


@dataclass(frozen=True)
class Prediction:
    """A plane, a tile or a picture with the model's answer. `image`: (H, W, 3), 8 bits.

    `answer`: the raw output, logits on the image's pixels, or class probabilities, depending on the function that returns it.
    """

    item: Item
    image: np.ndarray
    answer: Tensor


@dataclass(frozen=True)
class Predictor:
    """A model with the settings for prediction. `prompts`: boxes or points by input, plane and class; None without prompts."""

    opened: TrainedModel
    batch_size: int
    prompts: Prompts | None = None

    @property
    def task(self) -> Any:
        """The job's task section."""
        return self.opened.config.task

    def parts(self, one: Input) -> list[Item]:
        """Return the planes or tiles of an input, or the picture itself as the only part.

        Raises DataError if the input cannot be used, or if its prompts name no part of it.
        """
        nothing: dict[str, tuple[Item, ...]] = {"training": (), "validation": ()}
        parts = list(expand(DataList(one.path, nothing | {"test": (Item(one.path, None),)}), self.task).splits["test"])
        # Raise DataError for an input without prompts: its empty mask would look like a prediction.
        if self.prompts is not None and not any(name == one.name for name, _, _ in self.prompts):
            many = PROMPTS[self.task.prompt].many
            raise DataError(f"{one.path}: the {many} name no image {shown(one.name, 200)!r}; add one, or leave the picture out")
        # Raise DataError for a prompt that lies in no part, such as on a missing plane: it would be ignored silently.
        for name, plane, label in self.prompts or {}:
            met = (plane in (None, part.slice) and self._prompt(one, part, label) is not None for part in parts)
            if name == one.name and not any(met):
                where = "lies outside of it" if plane is None else f"is on slice {plane}, which does not exist"
                raise DataError(
                    f"{one.path}: the {self.task.prompt} of {label!r} {where}; count slices from 0, leave slice out for a "
                    "single picture, and pixels from the left and the top"
                )
        return parts

    def load_parts(self, one: Input, items: Sequence[Item]) -> Iterator[ModelInput]:
        """Yield the parts of an input with their pixels. Raises DataError."""
        for item in items:
            image = read_image(item, self.task)
            # Raise DataError for a picture that training would have cropped: the model was trained at another scale.
            crop, (rows, columns) = getattr(self.task, "crop", None), image.shape[:2]
            if crop is not None and max(rows, columns) > crop:
                raise DataError(
                    f"{one.path}: has {columns}x{rows} pixels, and the model was trained on parts of {crop} pixels "
                    "(task.crop); cut it into such parts first"
                )
            yield ModelInput(item, image, self._prompts_for(one, item, image.shape))

    @torch.no_grad()
    def run_model(self, parts: Sequence[ModelInput]) -> list[Prediction]:
        """Return the model's raw outputs as float32 on the CPU, from a single call. The parts may belong to several inputs.

        Raises ConfigError if they do not fit into the device's memory.
        """
        config, model = self.opened.config, self.opened.model
        device, side = next(model.parameters()).device, config.model.image_side
        small = [resize(part.image, side, self.task, config.model.padding) for part in parts]
        batch = torch.from_numpy(np.stack(small).transpose(0, 3, 1, 2).copy()).float().to(device)
        prompts = [part.prompts.to(device) for part in parts if part.prompts is not None]
        try:
            with autocast(device, config.training.precision):
                found = model(batch, torch.stack(prompts)) if prompts else model(batch)
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"--batch: {len(parts)}: do not fit into the memory of {device}; give a smaller number, or --device cpu"
            ) from None
        return [Prediction(part.item, part.image, raw) for part, raw in zip(parts, found.float().cpu(), strict=True)]

    def finish(self, one: Input, raw: Iterable[Prediction]) -> Iterator[Prediction]:
        """Yield each part's raw output as class probabilities (C,), or as logits (C, H, W) on the pixels of its image.

        Raises DataError for NaN or Inf.
        """
        for part in raw:
            if not torch.isfinite(part.answer).all():
                raise DataError(f"{one.path}: the model answers with NaN or Inf; look at the picture's values")
            if part.answer.ndim == 1:
                yield replace(part, answer=part.answer.softmax(0))
                continue
            shape = part.image.shape
            rows, columns = unpadded_size(shape, self.opened.config.model.image_side, self.task)
            found = F.interpolate(part.answer[None, :, :rows, :columns], shape[:2], mode="bilinear", align_corners=False)[0]
            if self.prompts is not None:  # classes without a prompt are not predicted
                missing = torch.tensor([self._prompt(one, part.item, name) is None for name in self.task.classes])
                found = found.masked_fill(missing[:, None, None], -1e4)
            yield replace(part, answer=found)

    def _prompts_for(self, one: Input, item: Item, shape: tuple[int, ...]) -> Tensor | None:
        """Return prompts (C, 4 or 2) in pixels of the model's input, NaN for classes without one. None without prompts."""
        if self.prompts is None:
            return None
        numbers = len(PROMPTS[self.task.prompt].numbers)
        found = torch.full((len(self.task.classes), numbers), float("nan"))
        rows, columns = unpadded_size(shape, self.opened.config.model.image_side, self.task)
        ratio = torch.tensor([columns / shape[1], rows / shape[0]]).repeat(numbers // 2)
        for index, name in enumerate(self.task.classes):
            if (prompt := self._prompt(one, item, name)) is not None:
                # Raise DataError for a point or box outside the picture: the model itself would accept any numbers.
                if prompt[0] >= shape[1] or prompt[1] >= shape[0] or min(prompt[-2:]) < 0:
                    told = ", ".join(f"{number:g}" for number in prompt)
                    raise DataError(
                        f"{one.path}: {told} lies outside its {shape[1]}x{shape[0]} pixels; write pixels from the left and the "
                        "top"
                    )
                found[index] = torch.tensor(prompt) * ratio
        return found

    def _prompt(self, one: Input, item: Item, name: str) -> tuple[float, ...] | None:
        """Return the box or point of class `name` in a part's pixels, clipped to a tile. None if this part has none."""
        known = self.prompts or {}
        prompt = known.get((one.name, item.slice, name), known.get((one.name, None, name)))
        if prompt is None or item.tile is None:
            return prompt
        x, y, width, height = item.tile
        if len(prompt) == 2:
            point = prompt[0] - x, prompt[1] - y
            return point if 0 <= point[0] < width and 0 <= point[1] < height else None
        left, top, right, bottom = prompt
        cut = (max(left - x, 0.0), max(top - y, 0.0), min(right - x, width), min(bottom - y, height))
        return cut if cut[0] < cut[2] and cut[1] < cut[3] else None


def stitch_tiles(parts: Iterator[Prediction], path: Path, task: Any) -> Iterator[Prediction]:
    """Yield planes unchanged. Join the tiles of the picture `path` into one prediction, with mean logits where they overlap.

    `task`: the job's task section. Raises DataError for too large a picture, before its first tile is predicted.
    """
    if volumes.is_volume(path) or not slides.is_cut_into_tiles(path, task):
        yield from parts
        return
    (rows, columns), classes = slides.shape(path, task.tiles.level), len(task.classes)
    if classes * rows * columns > MOST_NUMBERS:
        raise DataError(f"{path}: {columns}x{rows} pixels are too many to hold; cut the picture into smaller ones")
    total, count = torch.zeros(classes, rows, columns), torch.zeros(rows, columns)
    image = np.zeros((rows, columns, 3), np.uint8)
    for one in parts:
        left, top, width, height = one.item.tile or (0, 0, columns, rows)
        total[:, top : top + height, left : left + width] += one.answer
        count[top : top + height, left : left + width] += 1
        image[top : top + height, left : left + width] = one.image
    yield Prediction(Item(path, None), image, total.div_(count))


# batching --------------------------------------------------------------------------------------------------------------
# Predictions for many inputs in their order: one call of the model takes several pictures, or the parts of one volume.

MOST_PIXELS = 2**26
"""Largest number of pixels of the pictures that wait for one call: 200 MB. A single larger picture is allowed."""


def answer_inputs(predictor: Predictor, inputs: Iterable[Input]) -> Iterator[tuple[Input, Iterator[Prediction]]]:
    """Yield (input, iterator of the raw outputs of its parts), in order. Successive pictures share a call of the model.

    An input's DataError or OSError is raised when its own iterator is used, so the other inputs are not affected.
    """
    waiting, pixels = list[tuple[Input, ModelInput]](), 0

    def answer_waiting() -> Iterator[tuple[Input, Iterator[Prediction]]]:
        raw = predictor.run_model([picture for _, picture in waiting]) if waiting else []
        for (one, _), answer in zip(waiting, raw, strict=True):
            yield one, iter([answer])
        waiting.clear()

    for one in inputs:
        found = _open_input(predictor, one)
        size = found.image.shape[0] * found.image.shape[1] if isinstance(found, ModelInput) else 0
        pixels += size
        if not size or len(waiting) == predictor.batch_size or pixels > MOST_PIXELS:
            yield from answer_waiting()
            pixels = size
        if isinstance(found, ModelInput):
            waiting.append((one, found))
        else:
            yield one, found
    yield from answer_waiting()


def _open_input(predictor: Predictor, one: Input) -> ModelInput | Iterator[Prediction]:
    """Return an input's only picture. For several parts, or an error, return an iterator that predicts them, or raises it."""
    try:
        items = predictor.parts(one)
        if len(items) != 1 or items[0].tile is not None:
            size = predictor.batch_size
            batches = (items[start : start + size] for start in range(0, len(items), size))
            return (found for batch in batches for found in predictor.run_model(list(predictor.load_parts(one, batch))))
        (picture,) = predictor.load_parts(one, items)
    except (DataError, OSError) as error:
        return _raise_when_iterated(error)
    volumes.drop_caches()  # free the file's values: a waiting picture needs its 8-bit image only
    return picture


def _raise_when_iterated(error: Exception) -> Iterator[Prediction]:
    yield from ()
    raise error
