"""Statistics of one site's data: counts, sizes, spacing, intensities, classes. They show how sites differ.

The numbers are exact and stay at the site. Statistics that may leave it are in privacy/disclosure_control.py.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from consilium.core.errors import DataError
from consilium.data import slides, volumes
from consilium.data.check_samples import Classes, map_by_file
from consilium.data.class_checks import class_name
from consilium.data.datalist import SPLITS, DataList, Item
from consilium.data.images import label_values_by_class, level_of, read_values, whole_labels
from consilium.data.patients import pseudonym
from consilium.data.pixel_values import Spread, windowed
from consilium.data.settings import DEFAULTS, PictureSettings

PERCENTILES = (1, 25, 50, 75, 99)
BINS = 32
MOST_VALUES = 2**20
"""About this many values of an image are sampled, evenly spread."""


@dataclass
class Measure:
    """The measurements of one entry of a list.

    `size`: rows and columns, or a volume's shape (i, j, k). `voxel`: mm between voxels. `percentiles`: PERCENTILES of the
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
    found = map_by_file(items, lambda ones: [_measure(one, classes, settings) for one in ones])
    seen = [one for one in found if one is not None]
    stats: dict[str, Any] = {"samples": {split: len(data.splits[split]) for split in SPLITS}}
    stats |= {"unreadable": len(found) - len(seen), "images": len({item.image for item in items})}
    stats |= {"patients": len({m.patient for m in seen} - {""}), "studies": len({m.study for m in seen} - {""})}
    stats["size"] = _lowest_median_highest([m.size for m in seen], ("rows", "columns", "planes"))
    stats["spacing"] = _lowest_median_highest([m.voxel for m in seen if m.voxel], ("i", "j", "k"))
    medians = np.median(np.array([m.percentiles for m in seen]), 0) if seen else ()
    stats["intensity"] = {f"p{p}": round(float(v), 4) for p, v in zip(PERCENTILES, medians, strict=False)}
    total = sum((m.histogram for m in seen), np.zeros(BINS, np.int64))
    stats["histogram"] = [round(float(n), 5) for n in total / max(1, total.sum())]
    pixels = max(1, sum(m.pixels for m in seen))
    stats["classes"] = {}
    for name in sorted({name for m in seen for name in m.classes}):
        own = [m.classes[name] for m in seen if m.classes[name]]
        stats["classes"][name] = {"samples": len(own), "share": round(sum(own) / pixels, 6)}
    return stats


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
            found.size = slides.shape(item.image, level)
        else:
            values, window, spread = read_values(item, settings)
            found.size = values.shape[:2]
        colours = values.dtype == np.uint8 and values.shape[-1] == 3 and values.ndim > 2
        flat = values.reshape(-1, 1, 3) if colours else values.reshape(-1)
        some = flat[:: max(1, len(flat) // MOST_VALUES)]
        found.percentiles = tuple(float(v) for v in np.percentile(some, PERCENTILES))
        grey = windowed(some, settings, window, spread)
        found.histogram = np.bincount(grey.reshape(-1) // (256 // BINS), minlength=BINS)
        if isinstance(item.label, Path):
            _count_labels(found, item, classes, settings)
        elif item.label is not None:  # the class of a whole picture counts as one pixel of one
            name = class_name(item.label, list(classes or ()))
            found.classes[str(item.label) if name is None else name], found.pixels = 1, 1
    except DataError:
        return None
    return found


def _count_labels(found: Measure, item: Item, classes: Classes, settings: PictureSettings) -> None:
    """Count the pixels of each class in the mask of an entry."""
    for labels in whole_labels(item, settings):
        found.pixels += int(np.prod(labels.shape))
        by_value = {str(value): [value] for value in labels.present() - {0}}
        for name, wanted in (label_values_by_class(item, classes) if isinstance(classes, Mapping) else by_value).items():
            found.classes[name] += int(labels.where(wanted).sum())


def _lowest_median_highest(rows: Sequence[Sequence[float]], names: Sequence[str]) -> dict[str, list[float]]:
    """Return [lowest, median, highest] of each column by its name. Rows may be shorter than `names`."""
    columns = {name: [row[i] for row in rows if len(row) > i] for i, name in enumerate(names)}
    return {name: [round(float(v), 4) for v in np.percentile(col, [0, 50, 100])] for name, col in columns.items() if col}
