"""Values of pictures and masks: real and finite, whole in masks, windowed to the 8 bits of a picture."""

from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np

from consilium.core.errors import DataError
from consilium.data.settings import PictureSettings, Value

MOST = 1e38
"""The largest value: pictures are made in float32, whose range ends soon after."""
WHOLE = 1e-3
"""Distance from a whole number up to which a label value is that number: a header's scale is a number of 32 bits."""
UNSMOOTHED = "save label values, by the nearest voxel where it was resized, and not as JPEG"
_EDGE_VALUES, _FLAT, _ON_EDGES, _WIDTH, _PLANES = 3, 0.2, 0.6, 9, 16
"""Of smoothed edges: the fewest values; the share that may lie amid equal ones, and that lies between lower and higher ones;
pixels across which both sides are seen; planes of a volume that are looked at."""
Spread = Callable[[], tuple[float, float]]
"""Returns the values that become black and white."""


def check_numbers(path: Path, array: np.ndarray) -> np.ndarray:
    """Return an array with at least one element, each a real number of at most `MOST`. Raises DataError for any other."""
    what = "" if array.size else "no value at all"
    if array.dtype.kind not in "uif":
        what = "complex numbers" if array.dtype.kind == "c" else "colours or records, and no single numbers"
    elif not what and array.dtype.kind == "f" and not (float(array.min()) >= -MOST and float(array.max()) <= MOST):
        beyond = array.size - int((np.abs(array) <= MOST).sum())
        what = f"NaN, infinite numbers or some over {MOST:g} at {beyond:,} of {array.size:,} places"
    if what:
        raise DataError(f"{path}: holds {what}; save it as real, finite numbers", "not finite numbers")
    return array


def whole_numbers(path: Path, array: np.ndarray) -> np.ndarray:
    """Return label values as integers. Raises DataError for fractions, NaN and Inf."""
    if check_numbers(path, array).dtype.kind != "f":
        return array
    whole = np.rint(array)
    off = array - whole
    if (between := np.abs(off, out=off) > WHOLE).any():
        what = f"mask holds values between whole numbers, such as {float(array[between][0]):.4g}"
        raise DataError(f"{path}: {what}: it is anti-aliased, or holds probabilities; {UNSMOOTHED}", "mask of broken numbers")
    return whole.astype(np.int64)


def is_anti_aliased(values: np.ndarray, declared: Collection[Value]) -> bool:
    """Tell whether the values of a mask (H, W) or (i, j, k) that are not `declared` are those of smoothed edges.

    These are several with gaps between them, have no region of their own, and lie between a lower and a higher neighbour and
    between two other labels. Labels that are thin lie on their background, and those in a row are numbered without gaps.
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


def windowed(values: np.ndarray, settings: PictureSettings, own: tuple[float, float] | None, spread: Spread) -> np.ndarray:
    """Return values as 8 bits: by the job's window, else the file's `own` (center, width), else as they are or by percentiles.

    Colours stay as they are. `spread` returns the values that become black and white where there is no window.
    """
    colours = values.ndim == 3 and values.dtype == np.uint8
    if colours or (values.dtype == np.uint8 and settings.window is None and own is None):
        return values
    if settings.window is not None:
        own = (settings.window.center, settings.window.width)
    low, high = spread() if own is None else (own[0] - own[1] / 2, own[0] + own[1] / 2)
    share = (values.astype(np.float32) - low) / max(high - low, 1e-6)
    return (np.clip(share, 0, 1) * 255 + 0.5).astype(np.uint8)
