"""Volumes in NIfTI."""

from pathlib import Path
from typing import Any

import nibabel
import numpy as np

from consilium.data.grid import Grid
from consilium.data.labels import Labels
from consilium.data.numbers import whole_numbers
from consilium.data.opening import MOST_VOLUME_FILE, check_volume, reading
from consilium.data.volumes import Header
from consilium.errors import DataError

MILLIMETRES = {"meter": 1e3, "mm": 1.0, "micron": 1e-3}
"""Of the units of length that a header may name."""


def is_own(path: Path) -> bool:
    """Tell whether a path is a NIfTI file, by its name."""
    return path.name.lower().endswith((".nii", ".nii.gz"))


def header(path: Path) -> Header:
    """Return the grid of a volume of two or three dimensions. Raises DataError."""
    with reading(path, "cannot be read as NIfTI", most=MOST_VOLUME_FILE):
        volume = _open(path)
        return Header(Grid(_shape(path, volume), _millimetres(volume) @ np.asarray(volume.affine, np.float64)))


def voxels(path: Path) -> np.ndarray:
    """Return real numbers (i, j, k): float32 where the header scales them, else the file's own type. Raises DataError."""
    with reading(path, "cannot be read as NIfTI", most=MOST_VOLUME_FILE):
        volume = _open(path)
        scaled = any(value not in (None, 0.0, 1.0) for value in volume.header.get_slope_inter())
        data = np.asarray(volume.dataobj, dtype=np.float32 if scaled else None)
        return data.reshape(_shape(path, volume))


def labels(path: Path, image: Header) -> Labels:
    """Return the label values on the file's own grid (i, j, k). Raises DataError for values that are no whole numbers."""
    return Labels(values=whole_numbers(path, voxels(path)))


def _millimetres(volume: Any) -> np.ndarray:
    """Return what takes the file's unit of length to millimetres, (4, 4); one that it does not name is taken for them."""
    unit = MILLIMETRES.get(volume.header.get_xyzt_units()[0], 1.0)
    return np.diag([unit, unit, unit, 1.0])


def _open(path: Path) -> Any:
    volume = nibabel.load(path)
    check_volume(path, volume)
    return volume


def _shape(path: Path, volume: Any) -> tuple[int, int, int]:
    """Return the three dimensions; further ones may only be 1."""
    shape = tuple(int(n) for n in volume.shape)
    if len(shape) < 2 or any(n != 1 for n in shape[3:]):
        raise DataError(f"{path}: has shape {shape}; save it as volumes of three dimensions", "not three dimensions")
    i, j, k = (*shape, 1)[:3]
    return i, j, k
