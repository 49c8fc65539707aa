"""Numbers as files hold them: real and finite in pictures, whole in masks."""

from pathlib import Path

import numpy as np

from consilium.core.errors import DataError

MOST = 1e38
"""The largest value: pictures are made in float32, which ends soon after."""


def check_numbers(path: Path, array: np.ndarray) -> np.ndarray:
    """Return an array that holds something, each a real number of at most `MOST`. Raises DataError for any other."""
    if not array.size or array.dtype.kind not in "uif" or (array.dtype.kind == "f" and not _is_small(array)):
        beyond = f" with NaN or Inf, or over {MOST:g}" if array.dtype.kind == "f" else ""
        what = f"{array.dtype} of shape {array.shape}{beyond}"
        raise DataError(f"{path}: holds {what}; save it as real, finite numbers", "not finite numbers")
    return array


def whole_numbers(path: Path, array: np.ndarray) -> np.ndarray:
    """Return label values as integers. Raises DataError for values between them, or that are no numbers."""
    if check_numbers(path, array).dtype.kind != "f":
        return array
    if not np.array_equal(array, np.rint(array)):
        what = "mask holds values between whole numbers"
        raise DataError(f"{path}: {what}; save label values as whole numbers", "mask of broken numbers")
    return array.astype(np.int64)


def _is_small(array: np.ndarray) -> bool:
    return float(array.min()) >= -MOST and float(array.max()) <= MOST  # false for NaN
