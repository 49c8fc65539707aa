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
_EDGE_VALUES, _FLAT = 3, 0.2
"""The fewest values of a smoothed edge, and the share of them that may lie amid equal ones."""
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
    """Return label values as integers. Raises DataError for fractions, and for values that are no numbers."""
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

    These are several, lie between others, and fill hardly any square of 3 x 3, as a label's own region would. A JPEG's noise
    looks alike.
    """
    odd = ~np.isin(values, [value for value in declared if isinstance(value, int)])
    found = np.unique(values[odd])
    if len(found) < _EDGE_VALUES or not values.min() < found[len(found) // 2] < values.max() or min(values.shape[:2]) < 3:
        return False
    inner = values[1:-1, 1:-1]
    rows, columns = inner.shape[:2]
    flat = odd[1:-1, 1:-1].copy()
    for down, across in np.ndindex(3, 3):
        flat &= values[down : down + rows, across : across + columns] == inner
    return bool(flat.sum() < _FLAT * odd.sum())


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
