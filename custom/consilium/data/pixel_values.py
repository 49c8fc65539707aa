"""Values of pictures and masks: real and finite, whole in masks, windowed to the 8 bits of a picture."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from consilium.core.errors import DataError
from consilium.data.settings import PictureSettings

MOST = 1e38
"""The largest value: pictures are made in float32, whose range ends soon after."""
Spread = Callable[[], tuple[float, float]]
"""Returns the values that become black and white."""


def check_numbers(path: Path, array: np.ndarray) -> np.ndarray:
    """Return an array with at least one element, each a real number of at most `MOST`. Raises DataError for any other."""
    is_float = array.dtype.kind == "f"
    in_range = array.size and array.dtype.kind in "uif"
    if is_float and in_range:
        in_range = float(array.min()) >= -MOST and float(array.max()) <= MOST  # false for NaN
    if not in_range:
        beyond = f" with NaN or Inf, or over {MOST:g}" if is_float else ""
        what = f"{array.dtype} of shape {array.shape}{beyond}"
        raise DataError(f"{path}: holds {what}; save it as real, finite numbers", "not finite numbers")
    return array


def whole_numbers(path: Path, array: np.ndarray) -> np.ndarray:
    """Return label values as integers. Raises DataError for fractions, and for values that are no numbers."""
    if check_numbers(path, array).dtype.kind != "f":
        return array
    if not np.array_equal(array, np.rint(array)):
        what = "mask holds values between whole numbers"
        raise DataError(f"{path}: {what}; save label values as whole numbers", "mask of broken numbers")
    return array.astype(np.int64)


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
