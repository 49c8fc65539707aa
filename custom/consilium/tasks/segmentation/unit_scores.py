"""Scores of segmentation by unit: an image, a volume or a patient.

Volumes are scored one after the other, so that the masks of at most one are in memory, with 1 bit per voxel. Without distances
only counts are stored.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from scipy.ndimage import binary_erosion
from scipy.spatial import KDTree
from torch import Tensor

from consilium.data import volumes
from consilium.data.check_samples import cropped_shape
from consilium.data.datalist import Item
from consilium.tasks.bootstrap import bootstrap_unit, intervals, number_groups, sum_by_group
from consilium.tasks.registry import COUNT
from consilium.tasks.segmentation import DISTANCES, MILLIMETRES, NAMES, SegmentationScoresConfig

# measures --------------------------------------------------------------------------------------------------------------
# Dice loss, and Dice, IoU, HD95 and ASSD of binary masks, in two dimensions or three.
#
# Dice loss and surfaces equal MONAI's to the bit. MONAI itself is not imported, because that takes seconds in every process.

SMOOTH = 1e-5
"""Added to numerator and denominator of the Dice loss."""
_MOST_SORTED = 2**24
"""The most values that torch.quantile accepts."""


def dice_loss(logits: Tensor, label: Tensor) -> Tensor:
    """Return the soft Dice loss (N, C) for logits and labels in 0..1 (N, C, ...), as `monai.losses.DiceLoss(sigmoid=True)`."""
    guess, plane = torch.sigmoid(logits), list(range(2, logits.ndim))
    both, all_guess, all_label = (part.sum(plane) for part in (guess * label, guess, label))
    return 1 - (2 * both + SMOOTH) / (2 * (both + 0.5 * (all_guess - both) + 0.5 * (all_label - both)) + SMOOTH)


def overlap_counts(guess: Tensor, reference: Tensor) -> Tensor:
    """Return counts (4, C) for bool masks (C, ...): voxels in both, in the prediction, in the reference, and in all."""
    each = [[np.count_nonzero(one) for one in mask.numpy()] for mask in (guess & reference, guess, reference)]
    return torch.tensor([*each, [guess[0].numel()] * len(guess)])  # numpy: torch's sum of a mask takes thirty times longer


def overlaps(found: Tensor, count_empty: bool, background: bool = False) -> dict[str, Tensor]:
    """Return Dice and IoU (C,) from the counts of `overlap_counts`.

    With `background` IoU is the mean of the class's IoU and the background's.

    For an empty reference Dice and the class's IoU are NaN; with `count_empty` they are 1 if the prediction is empty too, else
    0. If both masks cover the whole picture, the background's IoU is 1.
    """
    both, guess, reference, _ = found.float()
    absent = torch.where(guess == 0, 1.0, 0.0) if count_empty else torch.full_like(guess, float("nan"))
    ratios = {"dice": 2.0 * both / (guess + reference), "iou": both / (guess + reference - both)}
    scores = {name: torch.where(reference == 0, absent, ratio).double() for name, ratio in ratios.items()}
    if background:
        both, guess, reference, whole = found.double()
        outside = torch.where(both == whole, 1.0, (whole - guess - reference + both) / (whole - both))
        scores["iou"] = (scores["iou"] + outside) / 2
    return scores


def distances(guess: np.ndarray, reference: np.ndarray, spacing: Sequence[float]) -> tuple[float, float]:
    """Return (HD95, ASSD) of two masks of one class, in the unit of `spacing` along each axis.

    HD95: the larger of the 95th percentiles of both directions. ASSD: the mean over both surfaces. Both are NaN for an empty
    reference, and the grid's diagonal for an empty prediction.
    """
    if not reference.any():
        return float("nan"), float("nan")
    if not guess.any():
        far = float(np.float32(np.sqrt(sum((n * step) ** 2 for n, step in zip(guess.shape, spacing, strict=True)))))
        return far, far
    both, axes = guess | reference, range(guess.ndim)
    cut = []
    for axis in axes:  # the smallest box around both masks has all surfaces, and most of a volume is outside of it
        there = np.flatnonzero(both.any(axis=tuple(other for other in axes if other != axis)))
        cut.append(slice(there[0], there[-1] + 1))
    del both  # the search for neighbours below takes memory of its own
    padded, step = [np.pad(mask[tuple(cut)], 1) for mask in (guess, reference)], np.asarray(spacing, dtype=np.float64)
    surfaces = [np.argwhere(mask ^ binary_erosion(mask)) * step for mask in padded]  # voxels at a border, (V, axes)
    apart = [_nearest(*surfaces), _nearest(*reversed(surfaces))]
    percentiles = [np.quantile(one.numpy(), 0.95) if one.numel() > _MOST_SORTED else torch.quantile(one, 0.95) for one in apart]
    return max(map(float, percentiles)), float(torch.cat(apart).mean())


def _nearest(these: np.ndarray, others: np.ndarray) -> Tensor:
    """Return the distance of each point of `these` to the nearest point of `others`, float32."""
    return torch.from_numpy(KDTree(others, leafsize=32).query(these)[0]).float()


# units -----------------------------------------------------------------------------------------------------------------

Row = dict[str, Tensor]
"""Scores by metric, (C,) for one unit or (U, C) for several; NaN if undefined."""


@dataclass(frozen=True)
class Plane:
    """One picture's item, its predicted and reference masks (C, rows, columns) bool, and the mask of scored classes (C,)."""

    item: Item
    guess: Tensor
    reference: Tensor
    known: Tensor


@dataclass
class _Unit:
    """An image or a volume that is being collected.

    `shape`: of its pictures. `planes`: by plane number, the packed masks of prediction and reference, if distances are
    computed. `shown`: the picture with the largest reference so far, of `most` pixels.
    """

    item: Item
    shape: tuple[int, int]
    counts: Tensor
    known: Tensor
    shown: Item
    most: int = -1
    planes: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


class Units:
    """Collects the pictures of a split, added in the order of `order`, and scores a unit after its last picture.

    If bad samples are left out, the last picture may be missing. Then the next unit's first picture, or the end of the split,
    completes the unit.
    """

    def __init__(self, items: Sequence[Item], config: SegmentationScoresConfig, far: bool) -> None:
        self._config, self._far, self.rows = config, far, list[tuple[Item, Row]]()
        self.shown = list[Item]()
        self._left = Counter(map(volume_key, items if config.per != "image" else ()))
        self._open = dict[object, _Unit]()

    def add(self, plane: Plane) -> None:
        """Add one picture to its unit."""
        name, found = volume_key(plane.item), overlap_counts(plane.guess, plane.reference)
        self._score_open_units(but=name)
        rows, columns = plane.guess.shape[1:]
        unit = self._open.setdefault(name, _Unit(plane.item, (rows, columns), torch.zeros_like(found), plane.known, plane.item))
        unit.counts, unit.known = unit.counts + found, unit.known & plane.known
        if (size := int(found[2].sum())) > unit.most:
            unit.shown, unit.most = plane.item, size
        if self._far:
            unit.planes[plane.item.slice or 0] = _pack_bits(plane.guess), _pack_bits(plane.reference)
        self._left[name] -= 1
        if self._left[name] < 1:
            self._score_open_units()

    def scores(self) -> tuple[list[Item], Row]:
        """Return one item per unit, and the scores (U, C) by metric. A patient's scores are the means over its volumes.

        Afterwards `shown` has, per unit, the picture with the largest reference; for a patient that of its first volume.
        """
        self._score_open_units()
        items, table = [item for item, _ in self.rows], _table([row for _, row in self.rows])
        if self._config.per != "patient":
            return items, table
        whose = number_groups([bootstrap_unit(item) for item in items])
        places = [int(np.flatnonzero(whose == number)[0]) for number in range(whose.max() + 1)]
        first, self.shown = [items[place] for place in places], [self.shown[place] for place in places]
        means = {}
        for name, values in table.items():  # (U, C) to (G, C), over the known values
            known = (~values.isnan()).numpy().astype(float)
            with np.errstate(invalid="ignore"):
                means[name] = torch.from_numpy(sum_by_group(values.nan_to_num(0).numpy(), whose) / sum_by_group(known, whose))
        return first, means

    def _score_open_units(self, but: object = None) -> None:
        """Score all open units except the one named `but`."""
        for name in [name for name in self._open if name != but]:
            unit = self._open.pop(name)
            row = overlaps(unit.counts, self._config.empty_references == "count", self._config.iou == "both")
            whole, image = self._config.per != "image", unit.item.image
            # tiles overlap and differ in scale, so they have no common surface
            if self._far and not (whole and unit.item.tile is not None):
                spacing, depth = spacing_of(unit.item, unit.shape), 1  # a volume with one plane is treated as a picture
                if whole and volumes.is_volume(image):
                    depth = volumes.header(image, unit.item.affine).grid.plane_count(unit.item.axis)
                steps = (spacing or (1.0, 1.0, 1.0))[0 if depth > 1 else 1 :]
                far = [distances(_mask(unit, 0, c, depth), _mask(unit, 1, c, depth), steps) for c in range(len(unit.known))]
                both = zip(DISTANCES, torch.tensor(far, dtype=torch.float64).T, strict=True)
                row |= {f"{name}{MILLIMETRES if spacing else ''}": values for name, values in both}
            self.shown.append(unit.shown)
            self.rows.append((unit.item, {name: values.masked_fill(~unit.known, math.nan) for name, values in row.items()}))


def order(items: Sequence[Item], config: SegmentationScoresConfig) -> list[int]:
    """Return the indices in the order of evaluation: the list's order, but with a volume's planes together."""
    if config.per == "image":
        return list(range(len(items)))
    first: dict[object, int] = {}
    return sorted(range(len(items)), key=lambda i: first.setdefault(volume_key(items[i]), i))


def volume_key(item: Item) -> object:
    """Return a key for an item's volume and slicing direction. A picture is a volume of its own.

    A volume with two masks (two raters) counts as two.
    """
    by_plane = volumes.is_volume(item.image) and isinstance(item.label, Path) and not volumes.is_volume(item.label)
    return item.image, item.axis, None if by_plane else item.label


def spacing_of(item: Item, shape: tuple[int, int]) -> tuple[float, float, float] | None:
    """Return the spacing in millimetres between planes, rows and columns of an item resized to `shape`; None if unknown."""
    grid = volumes.header(item.image, item.affine).grid if volumes.is_volume(item.image) else None
    if grid is None or (pixel := grid.pixel(item.axis)) is None:
        return None
    rows, columns = (step * old / new for step, old, new in zip(pixel, cropped_shape(item), shape, strict=True))
    return grid.voxel[grid.stored_axis(item.axis)] if grid.voxel else 1.0, rows, columns  # 1.0: a single plane has no depth


def count_and_intervals(items: Sequence[Item], table: Row) -> dict[str, float]:
    """Return the number of scored units, and 95 % intervals of the means over classes by a bootstrap over patients."""
    scored = (~table["dice"].isnan()).any(1).sum()
    whose = number_groups([bootstrap_unit(item) for item in items])
    sums = {name: sum_by_group(values.nan_to_num(0).numpy(), whose) for name, values in table.items()}
    known = {name: sum_by_group((~values.isnan()).numpy().astype(float), whose) for name, values in table.items()}

    def means(weights: np.ndarray) -> dict[str, np.ndarray]:
        found = {}
        for name in table:  # the mean over the classes that have a score in a sample of patients; NaN if none has
            total, count = weights @ sums[name], weights @ known[name]
            there = count > 0
            each = np.divide(total, count, out=np.zeros_like(total), where=there)
            classes = there.sum(1)
            found[name] = np.divide(each.sum(1), classes, out=np.full(len(classes), np.nan), where=classes > 0)
        return found

    return {COUNT: float(scored)} | intervals(int(whose.max()) + 1, means)


def _pack_bits(masks: Tensor) -> np.ndarray:
    return np.packbits(masks.flatten(1).numpy(), axis=1)


def _mask(unit: _Unit, which: int, number: int, depth: int) -> np.ndarray:
    """Return the mask of class `number`: (depth, rows, columns), or (rows, columns) if `depth` is 1.

    `which`: 0 for the prediction, 1 for the reference.
    """
    found = np.zeros((depth, *unit.shape), bool)
    for place, packed in unit.planes.items():
        found[place if depth > 1 else 0] = np.unpackbits(packed[which][number], count=math.prod(unit.shape)).reshape(unit.shape)
    return found if depth > 1 else found[0]


def _table(rows: Sequence[Row]) -> Row:
    """Return all rows stacked as (U, C); NaN where a row lacks a metric, such as a distance in the other unit."""
    names = [name for name in NAMES if any(name in row for row in rows)]
    absent = torch.full_like(rows[0]["dice"], math.nan)
    return {name: torch.stack([row.get(name, absent) for row in rows]) for name in names}
