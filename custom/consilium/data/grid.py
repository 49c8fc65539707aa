"""The positions of a volume's voxels, and its planes as pictures: cut out of a volume and put back.

A plane is in radiological orientation, however the file stores it: rows run from front to back or from head to feet, columns
from the patient's right to left or from front to back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from consilium.core.errors import DataError
from consilium.data.settings import Axis

CANONICAL: dict[Axis, int] = {"sagittal": 0, "coronal": 1, "axial": 2}
TOLERANCE = 0.1
"""Two grids are equal if their corners are at most this share of the smallest voxel side apart."""


@dataclass(frozen=True, eq=False)
class Grid:
    """The grid of a volume's voxels (i, j, k). `affine` (4, 4) maps indices to millimetres (right, front, up).

    Without an affine, the position of the voxels is unknown, as for frames of a video or a plain picture. `plane` may then
    still have the millimetres between rows and between columns.
    """

    shape: tuple[int, int, int]
    affine: np.ndarray | None = None
    plane: tuple[float, float] | None = None

    @property
    def voxel(self) -> tuple[float, float, float] | None:
        """Millimetres between neighbours along i, j and k."""
        if self.affine is None:
            return None
        i, j, k = np.linalg.norm(self.affine[:3, :3], axis=0)
        return float(i), float(j), float(k)

    @property
    def tilt(self) -> float:
        """The largest angle in degrees between a stored axis and the patient's axis closest to it."""
        if self.affine is None:
            return 0.0
        steps = np.abs(self.affine[:3, :3]) / np.linalg.norm(self.affine[:3, :3], axis=0)
        return float(np.degrees(np.arccos(np.clip(steps.max(0), 0, 1))).max())

    def stored_axis(self, axis: Axis) -> int:
        """Return the stored axis, 0 to 2, along which planes of orientation `axis` are counted.

        For an oblique volume it is the closest one.
        """
        return self._axes(axis)[0][0]

    def plane_count(self, axis: Axis) -> int:
        """Return the number of planes of an orientation."""
        return self.shape[self.stored_axis(axis)]

    def cut(self, voxels: np.ndarray, axis: Axis, number: int) -> np.ndarray:
        """Return a copy of plane `number` of `voxels` (i, j, k, ...) as a picture (rows, columns, ...).

        Axial planes count upwards, coronal forwards, sagittal to the right.
        """
        return self._oriented(voxels, axis)[number].copy()

    def put(self, voxels: np.ndarray, axis: Axis, number: int, picture: np.ndarray) -> None:
        """Write a picture (rows, columns) back into its plane of `voxels` (i, j, k): the inverse of `cut`."""
        self._oriented(voxels, axis)[number] = picture

    def pixel(self, axis: Axis) -> tuple[float, float] | None:
        """Return the millimetres between rows and between columns of a plane, None if unknown."""
        if self.voxel is None:
            return self.plane
        _, (rows, _), (columns, _) = self._axes(axis)
        return self.voxel[rows], self.voxel[columns]

    def _oriented(self, voxels: np.ndarray, axis: Axis) -> np.ndarray:
        """Return a view of `voxels` (i, j, k, ...) as (planes, rows, columns, ...) in radiological orientation."""
        stored, steps = zip(*self._axes(axis), strict=True)
        return voxels.transpose(*stored, *range(3, voxels.ndim))[tuple(slice(None, None, step) for step in steps)]

    def _axes(self, axis: Axis) -> tuple[tuple[int, int], ...]:
        """Return the stored axis of a picture's planes, rows and columns, each with 1, or -1 if it is counted backwards."""
        if self.affine is None:
            return (2, 1), (1, 1), (0, 1)
        patient = [one for one, _ in self._orientation]
        across = 2 if axis == "stored" else patient.index(CANONICAL[axis])
        columns, rows = sorted({0, 1, 2} - {across}, key=patient.__getitem__)
        counted = 1 if axis == "stored" else self._orientation[across][1]
        return (across, counted), (rows, -self._orientation[rows][1]), (columns, -self._orientation[columns][1])

    @cached_property
    def _orientation(self) -> list[tuple[int, int]]:
        """For each stored axis, the closest of the patient's axes (0 right, 1 front, 2 up) and the sign of its direction."""
        from nibabel.orientations import io_orientation  # a server imports this module and needs no nibabel

        return [(int(axis), int(sign)) for axis, sign in io_orientation(self.affine)]  # cached: it takes half a millisecond


def check_spacing(path: Path, field: str, values: Sequence[float], remedy: str) -> None:
    """Raise DataError unless all `values` of a header's `field`, in millimetres between voxels, are finite and over 0.

    Every reader calls it, because libraries silently replace an invalid spacing by 1, and all distances would be wrong.
    """
    if not all(np.isfinite(value) and value > 0 for value in values):
        found = " x ".join(f"{value:g}" for value in values)
        raise DataError(f"{path}: {field} is {found}, and a voxel's sides are over 0 mm; {remedy}", "broken geometry")


def grid_difference(one: Grid, other: Grid) -> str:
    """Return how two grids differ; "" if they agree: equal shapes, and corners at most a tenth of a voxel apart."""
    if one.shape != other.shape:
        return f"{_format_shape(other.shape)} voxels, not {_format_shape(one.shape)}"
    if one.affine is None or other.affine is None or np.allclose(one.affine, other.affine):
        return ""
    corners = np.stack(np.meshgrid(*([0, n - 1] for n in one.shape), [1], indexing="ij")).reshape(4, -1)
    apart = float(np.linalg.norm(((one.affine - other.affine) @ corners)[:3], axis=0).max())
    return f"its corners lie {apart:.1f} mm apart" if apart > TOLERANCE * min(one.voxel or (1.0,)) else ""


def resample_labels(values: np.ndarray, own: Grid, wanted: Grid) -> np.ndarray:
    """Return label values (i, j, k) of grid `own`, resampled to grid `wanted` by the nearest voxel; 0 outside.

    Raises ValueError for a grid without an affine.
    """
    if own.affine is None or wanted.affine is None:
        raise ValueError("a grid without an affine lies nowhere")
    from scipy.ndimage import affine_transform  # imported here, because a server loads this module and resamples nothing

    step = np.linalg.inv(own.affine) @ wanted.affine
    # grid-constant: the outer half of an outer voxel still has its value
    return affine_transform(values, step[:3, :3], step[:3, 3], wanted.shape, order=0, mode="grid-constant")


def _format_shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
