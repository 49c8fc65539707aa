"""Headers, voxels and labels of volumes. The formats are read by nifti.py, mha_nrrd.py and dicom/."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import BoundedSemaphore, local
from typing import Any, TypeVar

import numpy as np

from consilium.core.errors import DataError, UnfitError
from consilium.data.grid import Grid, grid_difference, resample_labels
from consilium.data.pixel_values import Labels, check_numbers, percentiles, to_integers
from consilium.data.safe_open import FileResultCache, forget_formats, is_volume as is_volume, stamp, volume_format
from consilium.data.settings import NiftiAffine

T = TypeVar("T")
KEPT = 2
"""Volumes in memory, and as many masks. Besides, this number of threads may hold volumes of their own, see `hold_volumes`."""
_holders, _local = BoundedSemaphore(KEPT), local()


@dataclass(frozen=True, eq=False)
class VolumeHeader:
    """A volume's header. `window`: the (center, width) in the file.

    `second`: the grid by a NIfTI file's qform, if its sform disagrees; `affine`: which of the two was chosen. `patient`,
    `study` and `space` (the frame of reference) are the identifiers in the file. They never leave this process, see
    patients.py.
    """

    grid: Grid
    window: tuple[float, float] | None = None
    patient: str = ""
    study: str = ""
    space: str = ""
    second: Grid | None = None
    affine: NiftiAffine | None = None


@contextmanager
def hold_volumes() -> Iterator[None]:
    """Keep all volumes that this thread reads in the block in memory until its end, to read their planes one after another.

    Only KEPT threads may hold volumes at a time, so that memory is bounded; others wait.
    """
    with _holders:
        _local.held = {}
        try:
            yield
        finally:
            del _local.held


class _Held(FileResultCache[T]):
    """A function whose last KEPT results stay in memory, and within `hold_volumes` those that this thread has read."""

    def __call__(self, path: Path, *args: Any) -> T:
        mine: dict[object, T] | None = getattr(_local, "held", None)
        if mine is None:
            return super().__call__(path, *args)
        if (key := (self, stamp(path), path, *args)) not in mine:
            if len(mine) == 2 * KEPT:  # there may be one mask per plane
                del mine[next(iter(mine))]
            mine[key] = super().__call__(path, *args)
        return mine[key]


def drop_caches() -> None:
    """Drop all volumes, headers and percentiles from memory."""
    for kept in (header, voxels, labels, window_percentiles):
        kept.cache_clear()
    forget_formats()


@partial(FileResultCache, most=4096)
def header(path: Path, affine: NiftiAffine | None = None) -> VolumeHeader:
    """Return a volume's header. Raises DataError.

    `affine`: which transform to use for a NIfTI file whose qform and sform disagree; None refuses such a file.
    """
    found: VolumeHeader = replace(_read_by_format("header", path), affine=affine)
    if found.second is not None and affine is None:
        raise DataError(
            f"{path}: its qform and its sform give its voxels two places ({grid_difference(found.grid, found.second)}); write "
            "nifti_affine: qform or nifti_affine: sform into site.yaml, whichever is right, or set the other's code to 0",
            "qform and sform disagree",
        )
    if found.second is not None and affine == "qform":
        found = replace(found, grid=found.second)
    place = found.grid.affine
    if place is not None and not (np.isfinite(place).all() and abs(np.linalg.det(place[:3, :3])) > 0):
        raise DataError(
            f"{path}: its header gives the voxels no size or place (an affine that cannot be inverted); write the header anew",
            "broken geometry",
        )
    return found


@partial(_Held, most=KEPT)
def voxels(path: Path) -> np.ndarray:
    """Return a volume's real numbers (i, j, k), or 8-bit colours (i, j, k, 3). Raises DataError."""
    return check_numbers(path, _read_by_format("voxels", path))


@partial(_Held, most=KEPT)
def labels(path: Path, image: VolumeHeader, resample: bool = False) -> Labels:
    """Return the labels of a file on the grid of its image (i, j, k).

    Raises UnfitError if they lie on another grid, unless `resample` is set.
    """
    if volume_format(path) == "dicom":
        found: Labels = _read_by_format("labels", path, image)
    else:
        found = Labels(values=to_integers(path, _read_by_format("voxels", path)))
    if found.regions is not None and found.grid is None:
        return found  # drawn on the image's own grid
    own = found.grid or header(path, image.affine).grid
    if not (wrong := grid_difference(image.grid, own)):
        return found
    if resample and own.affine is not None and image.grid.affine is not None:
        return found.map(lambda values: resample_labels(values, own, image.grid))
    raise UnfitError(
        f"{path}: the mask's grid differs from its image's ({wrong}); set task.resample_masks, or fix the file",
        "mask on another grid",
    )


@partial(FileResultCache, most=4096)
def window_percentiles(path: Path) -> tuple[float, float]:
    """Return the 0.5 and 99.5 percentiles of a volume's voxels, see `percentiles`. Raises DataError."""
    return percentiles(voxels(path))


_DICOM = {"header": "frames", "voxels": "pixels", "labels": "masks"}
"""The module of dicom/ that reads each part of a volume."""


def _read_by_format(what: str, path: Path, *more: object) -> Any:
    """Return `what` ("header", "voxels" or "labels") of a volume, read by the module of its format. Raises DataError."""
    kind = volume_format(path)
    if kind is None:
        raise DataError(f"{path}: is not a volume; give NIfTI, DICOM, MetaImage or NRRD")
    try:
        module = import_module(f"consilium.data.{kind}{f'.{_DICOM[what]}' if kind == 'dicom' else ''}")
    except ModuleNotFoundError:
        raise DataError(f"{path}: is DICOM; install consilium-flare[dicom] to read it") from None
    return getattr(module, what)(path, *more)
