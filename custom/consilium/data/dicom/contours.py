"""Outlined structures of radiotherapy (RTSTRUCT): polygons in millimetres, filled on the planes of their image."""

from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from pydicom import Dataset

from consilium.core.errors import DataError
from consilium.data.dicom.frames import TOLERANCE
from consilium.data.grid import Grid
from consilium.data.labels import Labels
from consilium.data.safe_open import MOST_VOLUME
from consilium.data.settings import Value
from consilium.data.volumes import Header

CLOSED = frozenset({"CLOSED_PLANAR", "CLOSEDPLANAR_XOR"})
"""Kinds of contours that enclose something; points and open lines do not."""
_AT_ONCE = 2**22
_LONGEST_NUMBER = 64
"""Characters; the standard has 16. numpy makes all numbers of a contour as long as the longest."""


def check_space(path: Path, elements: Dataset, image: Header) -> None:
    """Raise DataError where a mask was drawn in another frame of reference than its image's: nobody knows where it lies."""
    own = str(elements.get("ReferencedFrameOfReferenceUID") or elements.get("FrameOfReferenceUID") or "").strip()
    if own and image.space and own != image.space:
        raise DataError(f"{path}: was drawn in another frame of reference than its image's; give the image it was drawn on")


def contours(path: Path, elements: Dataset, image: Header) -> Labels:
    """Return what closed contours enclose, by the structure's name: voxels whose middle lies inside, holes left out.

    Raises DataError for contours that lie on no plane of the image, or in another frame of reference.
    """
    if image.grid.affine is None:
        raise DataError(f"{path}: holds contours in millimetres, and its image does not say where it lies; use another mask")
    names = {int(roi.ROINumber): roi for roi in elements.get("StructureSetROISequence") or []}
    drawn = [(names[int(roi.ReferencedROINumber)], roi) for roi in elements.get("ROIContourSequence") or []]
    drawn = [(about, roi) for about, roi in drawn if roi.get("ContourSequence")]
    if (needed := len(drawn) * prod(image.grid.shape)) > MOST_VOLUME:
        found = f"{len(drawn)} structures, {needed:,} bytes; at most {MOST_VOLUME:,} are"
        raise DataError(f"{path}: cannot be read as masks ({found}); leave structures out")
    regions: dict[Value, np.ndarray] = {}
    for about, roi in drawn:
        check_space(path, about, image)
        name, mask = str(about.get("ROIName") or "").strip(), _filled(path, roi.ContourSequence, image.grid)
        regions[name] = regions[name] | mask if name in regions else mask
    return Labels(regions=regions)


def _filled(path: Path, sequence: Iterable[Dataset], grid: Grid) -> np.ndarray:
    """Return the voxels (i, j, k) inside an odd number of a structure's contours: an inner one is a hole."""
    found = np.zeros(grid.shape[::-1], bool).T  # slices in one piece
    for contour in sequence:
        if contour.get("ContourGeometricType") not in CLOSED:
            continue
        voxel = _voxels(_points(path, contour), grid)
        plane = round(float(np.median(voxel[:, 2])))
        if np.abs(voxel[:, 2] - plane).max() > TOLERANCE or not 0 <= plane < grid.shape[2]:
            if grid.shape[2] == 1:
                continue  # another slice of the series that the image is one of
            raise DataError(f"{path}: has a contour on no plane of its image; give the image it was drawn on")
        found[:, :, plane] ^= inside(voxel[:, :2], grid.shape[:2])
    return found


def _points(path: Path, contour: Dataset) -> np.ndarray:
    """Return the points (N, 3) of a contour, from the file's own text: pydicom makes an object of every number.

    Raises DataError for a number that is too long.
    """
    raw: Any = contour.get_item("ContourData")
    values = raw.value.split(b"\\") if isinstance(raw.value, bytes) else list(raw.value)
    if isinstance(raw.value, bytes) and max(map(len, values)) > _LONGEST_NUMBER:
        what = f"has a contour with a number of over {_LONGEST_NUMBER} characters"
        raise DataError(f"{path}: {what}; replace it or take it off the list")
    return np.array(values).astype(np.float64).reshape(-1, 3)


def _voxels(points: np.ndarray, grid: Grid) -> np.ndarray:
    """Return DICOM's points (N, 3) in mm as voxels (i, j, k)."""
    if grid.affine is None or not np.isfinite(points).all():
        raise ValueError("a contour's points lie nowhere")
    own = points * [-1, -1, 1] - grid.affine[:3, 3]
    return np.linalg.solve(grid.affine[:3, :3], own.T).T


def inside(polygon: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return the points (I, J) of a grid inside a polygon (N, 2) by the even-odd rule; of its edge the lower sides.

    Along every line of points the crossings with the polygon are counted; an odd number of them lies before a point inside.
    """
    found = np.zeros(shape, bool)
    low = np.floor(polygon.min(0)).clip(0, shape).astype(np.int64)
    high = (np.floor(polygon.max(0)) + 1).clip(low, shape).astype(np.int64)
    box = int(high[0] - low[0]), int(high[1] - low[1])
    if 0 not in box:
        found[low[0] : high[0], low[1] : high[1]] = np.cumsum(_crossings(polygon - low, box), axis=0)[:-1] % 2 == 1
    return found


def _crossings(polygon: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return how many edges pass before each point (I + 1, J) of a line of them, and behind the one before it."""
    found = np.zeros((shape[0] + 1) * shape[1], np.int64)
    ends, step = np.roll(polygon, -1, axis=0), max(1, _AT_ONCE // shape[1])
    for start in range(0, len(polygon), step):
        one, other = polygon[start : start + step], ends[start : start + step]
        first, last = (np.ceil(f(one[:, 1], other[:, 1])).clip(0, shape[1]).astype(np.int64) for f in (np.minimum, np.maximum))
        edge = np.repeat(np.arange(len(one)), last - first)
        line = np.arange(len(edge)) - np.repeat(np.cumsum(last - first) - last, last - first)
        share = (line - one[edge, 1]) / (other[edge, 1] - one[edge, 1])
        at = np.ceil(one[edge, 0] + share * (other[edge, 0] - one[edge, 0])).clip(0, shape[0]).astype(np.int64)
        found += np.bincount(at * shape[1] + line, minlength=len(found))
    return found.reshape(shape[0] + 1, shape[1])
