"""Pixel values and labels of pictures and volumes, independent of the file's format.

Values are checked to be real and finite, rounded in masks, and windowed to 8 bits. Labels have one value per voxel, or regions
that may overlap.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from consilium.core.errors import DataError
from consilium.data.grid import Grid
from consilium.data.settings import PictureSettings, Value

MOST = 1e38
"""The largest value. Pictures are computed in float32, whose range ends at 3.4e38."""
WHOLE = 1e-3
"""A label value at most this far from a whole number is that number, because the scale in a header has only 32 bits."""
UNSMOOTHED = "save label values, by the nearest voxel where it was resized, and not as JPEG"
_EDGE_VALUES, _FLAT, _ON_EDGES, _WIDTH, _PLANES = 3, 0.2, 0.6, 9, 16
"""Thresholds of `is_anti_aliased`, in order:

the fewest undeclared values; below this share of pixels amid equal ones, a value has no region of its own; the share of
pixels with such values that must lie between lower and higher ones; the window in which both sides are sought, in pixels; the
number of planes of a volume that are examined."""
MOST_COUNTED = 2**22
"""Values of an array whose percentiles are computed exactly."""
Spread = Callable[[], tuple[float, float]]
"""A function that returns the values that become black and white."""


def check_numbers(path: Path, array: np.ndarray) -> np.ndarray:
    """Return the array. Raises DataError if it is empty, or an element is no real number of a size up to `MOST`."""
    what = "" if array.size else "no value at all"
    if array.dtype.kind not in "uif":
        what = "complex numbers" if array.dtype.kind == "c" else "colours or records, and no single numbers"
    elif not what and array.dtype.kind == "f" and not (float(array.min()) >= -MOST and float(array.max()) <= MOST):
        beyond = array.size - int((np.abs(array) <= MOST).sum())
        what = f"NaN, infinite numbers or some over {MOST:g} at {beyond:,} of {array.size:,} places"
    if what:
        raise DataError(f"{path}: holds {what}; save it as real, finite numbers", "not finite numbers")
    return array


def to_integers(path: Path, array: np.ndarray) -> np.ndarray:
    """Return label values as integers. Raises DataError for fractions, NaN and infinity."""
    if check_numbers(path, array).dtype.kind != "f":
        return array
    whole = np.rint(array)
    off = array - whole
    if (between := np.abs(off, out=off) > WHOLE).any():
        raise DataError(
            f"{path}: mask holds values between whole numbers, such as {float(array[between][0]):.4g}: it is anti-aliased, or "
            f"holds probabilities; {UNSMOOTHED}",
            "mask of broken numbers",
        )
    return whole.astype(np.int64)


def is_anti_aliased(values: np.ndarray, declared: Collection[Value]) -> bool:
    """Tell whether the values of a mask (H, W) or (i, j, k) that are not `declared` come from smoothed edges.

    Such values are several, with gaps in their numbers. They have no region of their own, and lie between a lower and a higher
    neighbour, and between two other labels. In contrast, thin labels lie on background, and neighbouring labels usually have
    consecutive numbers.
    """
    known = [value for value in declared if isinstance(value, int)]
    found, last = np.setdiff1d(np.unique(values), known), int(values.max(initial=0))
    if len(found) < _EDGE_VALUES or min(values.shape[:2]) < 3 or last - int(values.min()) <= 2 * len(found):
        return False
    from scipy.ndimage import maximum_filter, minimum_filter

    stack = values.reshape(*values.shape[:2], -1)
    planes = np.flatnonzero(~np.isin(stack, known).all((0, 1)))
    between, all_odd = 0, 0
    for plane in planes[:: -(-len(planes) // _PLANES)]:
        shown = stack[..., plane].astype(np.float64)
        low, high = minimum_filter(shown, 3), maximum_filter(shown, 3)
        own, counts = np.unique(shown, return_counts=True)
        inner = np.array([(shown[low == high] == value).sum() for value in own])
        odd = np.isin(shown, found) & ~np.isin(shown, own[inner >= _FLAT * counts])
        below = minimum_filter(np.where(odd, np.inf, shown), _WIDTH)
        above = maximum_filter(np.where(odd, -np.inf, shown), _WIDTH)
        between += int((odd & (low < shown) & (shown < high) & (below < shown) & (shown < above)).sum())
        all_odd += int(odd.sum())
    return between > 0 and between >= _ON_EDGES * all_odd


def percentiles(values: np.ndarray) -> tuple[float, float]:
    """Return the 0.5 and 99.5 percentiles of an array. A large array is sampled at every n-th value."""
    # reshape would copy a volume with contiguous slices
    low, high = np.percentile(values.flat[:: max(1, values.size // MOST_COUNTED)], [0.5, 99.5])
    return float(low), float(high)


def windowed(
    values: np.ndarray, settings: PictureSettings, file_window: tuple[float, float] | None, percentile_limits: Spread
) -> np.ndarray:
    """Return values as uint8, windowed by the job's window, else by the file's (center, width), else by `percentile_limits`.

    `percentile_limits` returns the values that become black and white. Colours, and 8-bit values without a window, stay as they
    are.
    """
    colours = values.ndim == 3 and values.dtype == np.uint8
    if colours or (values.dtype == np.uint8 and settings.window is None and file_window is None):
        return values
    if settings.window is not None:
        file_window = (settings.window.center, settings.window.width)
    low, high = (
        percentile_limits()
        if file_window is None
        else (file_window[0] - file_window[1] / 2, file_window[0] + file_window[1] / 2)
    )
    return (np.clip((values.astype(np.float32) - low) / max(high - low, 1e-6), 0, 1) * 255 + 0.5).astype(np.uint8)


# labels -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Labels:
    """Either `values`, integers of the image's shape, or `regions`, boolean masks by number or name, which may overlap.

    `grid`: the grid of the regions if it is not the image's. `faults`: by name, the errors of regions that cannot be read. An
    error is raised only when its region is used.
    """

    values: np.ndarray | None = None
    regions: dict[Value, np.ndarray] | None = None
    grid: Grid | None = None
    faults: Mapping[Value, DataError] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the arrays; () without regions."""
        if self.values is not None:
            return self.values.shape
        return next((mask.shape for mask in (self.regions or {}).values()), ())

    def present(self) -> set[Value]:
        """Return the labels that at least one voxel has; 0 is background."""
        if self.values is not None:
            if self.values.dtype in (np.uint8, np.uint16):  # bincount is ten times faster than unique
                return set(np.flatnonzero(np.bincount(self.values.reshape(-1))).tolist())
            return set(np.unique(self.values).tolist())
        return {name for name, mask in (self.regions or {}).items() if mask.any()}

    def where(self, wanted: Collection[Value]) -> np.ndarray:
        """Return a mask of the voxels with one of the `wanted` labels. Raises DataError for a region that cannot be read."""
        if self.values is not None:
            return np.isin(self.values, [value for value in wanted if isinstance(value, int)])
        self.check(wanted)
        own = self.regions or {}
        chosen = [own[name] for name in matching_labels(wanted, own)]
        return np.logical_or.reduce(chosen) if chosen else np.zeros(self.shape, bool)

    def check(self, wanted: Iterable[Value]) -> None:
        """Raise the DataError of the first `wanted` region that cannot be read. Return if all can be read."""
        for name in matching_labels(wanted, {**(self.regions or {}), **self.faults}):
            if name in self.faults:
                raise self.faults[name]

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> "Labels":
        """Return the labels with `change` applied to every array, such as cutting a plane or resizing."""
        if self.values is not None:
            return Labels(values=change(self.values))
        own = self.regions or {}
        changed = {id(mask): change(mask) for mask in {id(mask): mask for mask in own.values()}.values()}
        return Labels(regions={name: changed[id(mask)] for name, mask in own.items()}, faults=self.faults)


def matching_labels(wanted: Iterable[Value], there: Collection[Value]) -> list[Value]:
    """Return the labels of `there` that match a `wanted` label.

    An equal label matches; if a name has none, all names match that differ from it in case and blanks only.
    """
    found: dict[Value, None] = {}
    for name in wanted:
        near = (
            [one for one in there if isinstance(one, str) and _normalize_name(one) == _normalize_name(name)]
            if isinstance(name, str)
            else []
        )
        found |= dict.fromkeys([name] if name in there else near)
    return list(found)


def _normalize_name(name: str) -> str:
    return " ".join(name.split()).casefold()
