"""From pictures to the unit of a score: an image, a volume, a patient.

Volumes come one after the other, so that the masks of one at most are kept, a bit a voxel. Without distances only counts are.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from consilium.data import volumes
from consilium.data.datalist import Item
from consilium.data.sample_check import cropped_shape
from consilium.tasks.bootstrap import group_of, grouped, intervals, numbered
from consilium.tasks.registry import COUNT
from consilium.tasks.segmentation.measures import counts, distances, overlaps
from consilium.tasks.segmentation.scores import DISTANCES, MILLIMETRES, NAMES, SegmentationScoresConfig

Row = dict[str, Tensor]
"""Scores (C,) by metric; NaN where there is none."""


@dataclass(frozen=True)
class Plane:
    """One picture's masks (C, rows, columns) bool, the classes (C,) that are scored, and its item."""

    item: Item
    guess: Tensor
    reference: Tensor
    known: Tensor


@dataclass
class _Unit:
    """An image or a volume under way, whose pictures have `shape`. `planes` by number: the packed masks of prediction and
    reference, where distances are wanted. `shown`: the picture with the largest reference, of `most` pixels.
    """

    item: Item
    shape: tuple[int, int]
    counts: Tensor
    known: Tensor
    shown: Item
    most: int = -1
    planes: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


class Units:
    """Takes the pictures of a split in the order of `order`, and scores a unit as soon as its last one has come.

    Where bad samples are left out it may not come: then the next unit's first one ends it, or the end of the split.
    """

    def __init__(self, items: Sequence[Item], config: SegmentationScoresConfig, far: bool) -> None:
        self._config, self._far, self.rows = config, far, list[tuple[Item, Row]]()
        self.shown = list[Item]()
        self._left = Counter(map(volume_of, items if config.per != "image" else ()))
        self._open = dict[object, _Unit]()

    def add(self, plane: Plane) -> None:
        """Take one picture."""
        name, found = volume_of(plane.item), counts(plane.guess, plane.reference)
        self._end(but=name)
        rows, columns = plane.guess.shape[1:]
        unit = self._open.setdefault(name, _Unit(plane.item, (rows, columns), torch.zeros_like(found), plane.known, plane.item))
        unit.counts, unit.known = unit.counts + found, unit.known & plane.known
        if (size := int(found[2].sum())) > unit.most:
            unit.shown, unit.most = plane.item, size
        if self._far:
            unit.planes[plane.item.slice or 0] = _packed(plane.guess), _packed(plane.reference)
        self._left[name] -= 1
        if self._left[name] < 1:
            self._end()

    def scores(self) -> tuple[list[Item], Row]:
        """Return one item of each unit, and the scores (U, C) of all; a patient's are the means over its volumes.

        `shown` then has the picture of each unit that shows most of the reference; of a patient, in its first volume.
        """
        self._end()
        items, table = [item for item, _ in self.rows], _table([row for _, row in self.rows])
        if self._config.per != "patient":
            return items, table
        whose = numbered([group_of(item) for item in items])
        places = [int(np.flatnonzero(whose == number)[0]) for number in range(whose.max() + 1)]
        first, self.shown = [items[place] for place in places], [self.shown[place] for place in places]
        return first, {name: _means(values, whose) for name, values in table.items()}

    def _end(self, but: object = None) -> None:
        """Score the unit under way, unless it is the one named."""
        for name in [name for name in self._open if name != but]:
            self._close(self._open.pop(name))

    def _close(self, unit: _Unit) -> None:
        row = overlaps(unit.counts, self._config.empty_references == "count", self._config.iou == "both")
        parted = (
            self._config.per != "image" and unit.item.tile is not None
        )  # tiles overlap, and differ in scale: no one surface
        row |= _distances(unit, self._config.per != "image") if self._far and not parted else {}
        self.shown.append(unit.shown)
        self.rows.append((unit.item, {name: values.masked_fill(~unit.known, math.nan) for name, values in row.items()}))


def order(items: Sequence[Item], config: SegmentationScoresConfig) -> list[int]:
    """Return the indices in the order of evaluation: the list's own, but a volume's planes stay together."""
    if config.per == "image":
        return list(range(len(items)))
    first: dict[object, int] = {}
    return sorted(range(len(items)), key=lambda i: first.setdefault(volume_of(items[i]), i))


def volume_of(item: Item) -> object:
    """Return a key of an item's volume and cutting direction; a picture is its own volume.

    One volume with two masks is two: two raters are not added up.
    """
    by_plane = volumes.is_volume(item.image) and isinstance(item.label, Path) and not volumes.is_volume(item.label)
    return item.image, item.axis, None if by_plane else item.label


def spacing_of(item: Item, shape: tuple[int, int]) -> tuple[float, float, float] | None:
    """Return millimetres between planes, rows and columns of an item brought to `shape`; None where unknown."""
    grid = volumes.header(item.image, item.affine).grid if volumes.is_volume(item.image) else None
    if grid is None or (pixel := grid.pixel(item.axis)) is None:
        return None
    rows, columns = (step * old / new for step, old, new in zip(pixel, cropped_shape(item), shape, strict=True))
    return grid.voxel[grid.across(item.axis)] if grid.voxel else 1.0, rows, columns  # one plane alone has no depth


def summary(items: Sequence[Item], table: Row) -> dict[str, float]:
    """Return how many units were scored, and 95 % intervals of the means over classes by a bootstrap over patients."""
    scored = (~table["dice"].isnan()).any(1).sum()
    whose = numbered([group_of(item) for item in items])
    sums = {name: grouped(values.nan_to_num(0).numpy(), whose) for name, values in table.items()}
    known = {name: grouped((~values.isnan()).numpy().astype(float), whose) for name, values in table.items()}

    def means(weights: np.ndarray) -> dict[str, np.ndarray]:
        return {name: _mean_of_known(weights @ sums[name], weights @ known[name]) for name in table}

    return {COUNT: float(scored)} | intervals(int(whose.max()) + 1, means)


def _mean_of_known(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return the means (B,) over classes of sums (B, C) over counts (B, C); NaN where nothing was counted."""
    there = count > 0
    each = np.divide(total, count, out=np.zeros_like(total), where=there)
    classes = there.sum(1)
    return np.divide(each.sum(1), classes, out=np.full(len(classes), np.nan), where=classes > 0)


def _packed(masks: Tensor) -> np.ndarray:
    return np.packbits(masks.flatten(1).numpy(), axis=1)


def _distances(unit: _Unit, whole: bool) -> Row:
    """Return HD95 and ASSD (C,) under the names of their unit; a volume of one plane is a picture."""
    spacing, image = spacing_of(unit.item, unit.shape), unit.item.image
    depth = volumes.header(image, unit.item.affine).grid.planes(unit.item.axis) if whole and volumes.is_volume(image) else 1
    steps = (spacing or (1.0, 1.0, 1.0))[0 if depth > 1 else 1 :]
    found = [distances(_mask(unit, 0, c, depth), _mask(unit, 1, c, depth), steps) for c in range(len(unit.known))]
    values = torch.tensor(found, dtype=torch.float64).T
    return {f"{name}{MILLIMETRES if spacing else ''}": row for name, row in zip(DISTANCES, values, strict=True)}


def _mask(unit: _Unit, which: int, number: int, depth: int) -> np.ndarray:
    """Return a class's mask, of the prediction (0) or the reference (1): (depth, rows, columns), a picture's without depth."""
    found = np.zeros((depth, *unit.shape), bool)
    for place, packed in unit.planes.items():
        found[place if depth > 1 else 0] = np.unpackbits(packed[which][number], count=math.prod(unit.shape)).reshape(unit.shape)
    return found if depth > 1 else found[0]


def _table(rows: Sequence[Row]) -> Row:
    """Return all rows as (U, C); NaN where a row lacks a metric, such as a distance in another unit."""
    names = [name for name in NAMES if any(name in row for row in rows)]
    absent = torch.full_like(rows[0]["dice"], math.nan)
    return {name: torch.stack([row.get(name, absent) for row in rows]) for name in names}


def _means(values: Tensor, whose: np.ndarray) -> Tensor:
    """Return the means (G, C) over the known values (U, C) of each group."""
    known = (~values.isnan()).numpy().astype(float)
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(grouped(values.nan_to_num(0).numpy(), whose) / grouped(known, whose))
