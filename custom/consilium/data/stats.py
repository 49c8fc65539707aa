"""Statistics of one site's data.

`site_stats` shows how sites differ: counts, sizes, spacing, intensities, classes. Its numbers are exact and stay at the site.
`tally` gives a site's samples by class, size, spacing and grey level, from which its guard makes the statistics that leave the
site, see privacy/disclosure_control.py. A cell is one class or one bin of a table. Cells hold samples instead of counts,
because the guard counts the people in a cell. The cells themselves never leave the site.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from consilium.core.errors import DataError, UnfitError
from consilium.data import slides, volumes
from consilium.data.check_samples import Classes, map_by_file
from consilium.data.class_checks import class_name, text_label
from consilium.data.datalist import SPLITS, DataList, Item
from consilium.data.images import (
    check_mask_shape,
    check_values,
    label_values_by_class,
    level_of,
    read_image,
    read_labels,
    read_values,
    whole_labels,
)
from consilium.data.patients import pseudonym
from consilium.data.pixel_values import Spread, windowed
from consilium.data.settings import DEFAULTS, PictureSettings
from consilium.data.text import Text

PERCENTILES = (1, 25, 50, 75, 99)
BINS = 32
MOST_VALUES = 2**20
"""About this many values of an image are sampled, evenly spread."""


@dataclass
class Measure:
    """The measurements of one entry of a list.

    `size`: columns and rows, and planes of a volume, as stored. `voxel`: mm between voxels. `percentiles`: PERCENTILES of the
    file's values. `histogram`: of the 8-bit values. `classes`: pixels per class. `pixels`:
    all pixels of the mask.
    """

    size: tuple[int, ...] = ()
    voxel: tuple[float, float, float] | None = None
    percentiles: tuple[float, ...] = ()
    histogram: np.ndarray = field(default_factory=lambda: np.zeros(BINS, np.int64))
    classes: Counter[str] = field(default_factory=Counter)
    pixels: int = 0
    patient: str = ""
    study: str = ""


def site_stats(data: DataList, classes: Classes = None, settings: PictureSettings = DEFAULTS) -> dict[str, Any]:
    """Return the statistics of one site as plain JSON values. Entries that cannot be read are counted and left out.

    "size" and "spacing": lowest, median and highest. "intensity": the median over images of each percentile, in the file's
    unit. "histogram": shares of the 8-bit values in 32 bins. "classes": for each class, the samples that show it and its share
    of all pixels.
    """
    items = [item for split in SPLITS for item in data.splits[split]]
    found = map_by_file(items, lambda item: _measure(item, classes, settings))
    seen = [one for one in found if one is not None]
    medians = np.median(np.array([m.percentiles for m in seen]), 0) if seen else ()
    total = sum((m.histogram for m in seen), np.zeros(BINS, np.int64))
    pixels = max(1, sum(m.pixels for m in seen))
    names = sorted({name for m in seen for name in m.classes})
    shown = {name: [m.classes[name] for m in seen if m.classes[name]] for name in names}
    return {
        "samples": {split: len(data.splits[split]) for split in SPLITS},
        "unreadable": len(found) - len(seen),
        "images": len({item.image for item in items}),
        "patients": len({m.patient for m in seen} - {""}),
        "studies": len({m.study for m in seen} - {""}),
        "size": _lowest_median_highest([m.size for m in seen], ("columns", "rows", "planes")),
        "spacing": _lowest_median_highest([m.voxel for m in seen if m.voxel], ("i", "j", "k")),
        "intensity": {f"p{p}": round(float(v), 4) for p, v in zip(PERCENTILES, medians, strict=False)},
        "histogram": [round(float(n), 5) for n in total / max(1, total.sum())],
        "classes": {name: {"samples": len(own), "share": round(sum(own) / pixels, 6)} for name, own in shown.items()},
    }


def _measure(item: Item, classes: Classes, settings: PictureSettings) -> Measure | None:
    """Return the measurements of an entry, None if it cannot be read."""
    item = replace(item, axis=item.plane_axis(settings.slices.axis))
    found, header = Measure(patient=item.patient, study=item.study), None
    try:
        if volumes.is_volume(item.image):
            header = volumes.header(item.image, item.affine)
            found.voxel = header.grid.voxel
            found.patient, found.study = item.patient or pseudonym(header.patient), item.study or pseudonym(header.study)
        if header and item.slice is None and header.grid.plane_count(item.axis) > 1:
            values, window = volumes.voxels(item.image), header.window
            spread: Spread = partial(volumes.window_percentiles, item.image)
            found.size = values.shape[:3]
        elif not header and item.tile is None and slides.is_cut_into_tiles(item.image, settings):
            level, window = level_of(settings), None
            values = np.concatenate(slides.sample_tiles(item.image, level))
            spread = partial(slides.window_percentiles, item.image, level)
            found.size = slides.shape(item.image, level)[::-1]
        else:
            values, window, spread = read_values(item, settings)
            found.size = values.shape[1::-1]
        flat = values.reshape(-1, 1, 3) if values.ndim > len(found.size) else values.reshape(-1)  # colours, or grey
        some = flat[:: max(1, len(flat) // MOST_VALUES)]
        found.percentiles = tuple(float(v) for v in np.percentile(some, PERCENTILES))
        found.histogram = np.bincount(windowed(some, settings, window, spread).reshape(-1) // (256 // BINS), minlength=BINS)
        for labels in whole_labels(item, settings) if isinstance(item.label, Path) else ():
            found.pixels += int(np.prod(labels.shape))
            for name, wanted in (
                label_values_by_class(item, classes)
                if isinstance(classes, Mapping)
                else {str(value): [value] for value in labels.present() - {0}}
            ).items():
                found.classes[name] += int(labels.where(wanted).sum())
        if isinstance(item.label, str | int):  # the class of a whole picture counts as one pixel of one
            found.classes[class_name(item.label, list(classes or ())) or str(item.label)], found.pixels = 1, 1
    except DataError:
        return None
    return found


def _lowest_median_highest(rows: Sequence[Sequence[float]], names: Sequence[str]) -> dict[str, list[float]]:
    """Return [lowest, median, highest] of each column by its name. Rows may be shorter than `names`."""
    columns = {name: [row[i] for row in rows if len(row) > i] for i, name in enumerate(names)}
    return {name: [round(float(v), 4) for v in np.percentile(col, [0, 50, 100])] for name, col in columns.items() if col}


# cells for the guard ----------------------------------------------------------------------------------------------------------

Cells = dict[str, list[int]]
"""The indices of samples in each cell. All cells are present, in the table's order."""

_SIDES = (64, 128, 256, 512, 1024, 2048, 4096)
_STEPS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_LENGTHS = (64, 256, 1024, 4096, 16384)


def bin_names(edges: Sequence[float]) -> tuple[str, ...]:
    """Return the names of the bins that these edges separate."""
    return f"under {edges[0]:g}", *[f"{low:g} to {high:g}" for low, high in pairwise(edges)], f"{edges[-1]:g} and over"


SIZES, LENGTHS = bin_names(_SIDES), bin_names(_LENGTHS)
SPACING = (*bin_names(_STEPS), "not known")
OTHERS = "none/others"
"""The last cell of the classes, for samples of no class of the job. No class can have this name."""


def grey_bin_names(count: int) -> tuple[str, ...]:
    """Return the names of `count` equal parts of the 256 grey levels."""
    return tuple(f"{n * 256 // count} to {(n + 1) * 256 // count - 1}" for n in range(count))


def class_cells(task: Any) -> tuple[tuple[str, ...], bool]:
    """Return the cells of a task's classes, () without classes, and whether each sample is in exactly one of them."""
    found = getattr(task, "classes", None)
    single = not isinstance(found, Mapping)
    return (*(found or ()), *([OTHERS] if found and single else [])), single


@dataclass
class Tally:
    """The cells of a site's samples. `people`, `patients`, `classes` and `absent` are by split, the rest is training only.

    `people`: the person of every sample, see `person_of`. `patients`: whether every sample names its patient. `classes`: the
    samples that show each class. `absent`: for masks, the samples that show nothing of a class. `areas`: by class, the share of
    the picture that it covers in each sample that shows it. `light`: per sample, the share of pixels in each bin of grey
    levels.
    """

    people: dict[str, list[str]] = field(default_factory=dict)
    patients: dict[str, bool] = field(default_factory=dict)
    classes: dict[str, Cells] = field(default_factory=dict)
    absent: dict[str, Cells] = field(default_factory=dict)
    areas: dict[str, list[float]] = field(default_factory=dict)
    sizes: Cells = field(default_factory=dict)
    spacing: Cells = field(default_factory=dict)
    lengths: Cells = field(default_factory=dict)
    light: list[np.ndarray] = field(default_factory=list)


def tally(data: DataList, task: Any, count: int, before_sample: Callable[[], None] = lambda: None) -> Tally:
    """Return the cells of a data list for a job's `task` section, with `count` bins of grey levels.

    Every label and every training picture is read. A sample that does not fit the job counts under OTHERS, or shows no class. A
    picture that is too large for the job has the last size. `before_sample`: called before each sample, may raise. Raises
    DataError.
    """
    names, single = class_cells(task)
    settings = task if isinstance(task, PictureSettings) else DEFAULTS
    found = Tally(sizes={n: [] for n in SIZES}, spacing={n: [] for n in SPACING}, lengths={n: [] for n in LENGTHS})
    found.areas = {name: [] for name in names}
    for split in SPLITS:
        items = data.splits[split]
        found.people[split] = [person_of(item) for item in items]
        found.patients[split] = bool(items) and all(item.patient for item in items)
        found.classes[split], found.absent[split] = {n: [] for n in names}, {n: [] for n in names}
        for number, item in enumerate(items):
            before_sample()
            for name, share in _class_shares(item, task, settings).items() if names else ():
                (found.classes if share else found.absent)[split][name].append(number)
                if share and not single and split == "training":
                    found.areas[name].append(share)
            if split == "training" and isinstance(item, Text):
                found.lengths[_bin_name(len(item.prompt) + len(item.outputs[0]), _LENGTHS, LENGTHS)].append(number)
            elif split == "training" and isinstance(item, Item):
                size, spacing, light = _picture_cells(item, settings, count)
                found.sizes[size].append(number)
                found.spacing[spacing].append(number)
                found.light.append(light)
    return found


def person_of(item: Any) -> str:
    """Return the identifier of a sample's person: its patient, else its study, else the sample itself."""
    if isinstance(item, Item):
        return item.patient or item.study or str(item.image)
    return str(item.patient or item.name)


def _class_shares(item: Item | Text, task: Any, settings: PictureSettings) -> dict[str, float]:
    """Return the share of a picture that each annotated class covers; 1 for a sample's only class. Raises DataError."""
    if isinstance(item, Text):
        return {class_name(text_label(item.label, task.classes), task.classes) or OTHERS: 1.0}
    if not isinstance(task.classes, Mapping):
        return {class_name(item.label, task.classes) or OTHERS: 1.0}
    try:
        labels, classes = read_labels(item, settings), label_values_by_class(item, task.classes)
    except UnfitError:
        return {}
    check_values(item, labels, classes)
    shown = [name for name in classes if item.annotated is None or name in item.annotated]
    return {name: float(labels.where(classes[name]).mean()) if labels.shape else 0.0 for name in shown}


def _picture_cells(item: Item, settings: PictureSettings, count: int) -> tuple[str, str, np.ndarray]:
    """Return a picture's cells of size and spacing, and the share of its pixels in each bin of greys. Raises DataError."""
    try:
        image = read_image(item, settings)
    except UnfitError:
        return SIZES[-1], SPACING[-1], np.zeros(count)
    if isinstance(item.label, Path) and not volumes.is_volume(item.label):
        with suppress(UnfitError):
            check_mask_shape(item, image.shape[:2], read_labels(item, settings))
    pixel = volumes.header(item.image, item.affine).grid.pixel(item.axis) if volumes.is_volume(item.image) else None
    spacing = SPACING[-1] if pixel is None else _bin_name(max(pixel), _STEPS, SPACING)  # the larger side, in mm
    levels = np.bincount(image.reshape(-1), minlength=256).reshape(count, -1).sum(1)
    return _bin_name(max(image.shape[:2]), _SIDES, SIZES), spacing, levels / levels.sum()


def _bin_name(value: float, edges: Sequence[float], names: Sequence[str]) -> str:
    return names[int(np.searchsorted(edges, value, side="right"))]
