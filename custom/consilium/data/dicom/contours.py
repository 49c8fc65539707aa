"""Outlined structures of radiotherapy (RTSTRUCT): polygons in millimetres, filled on the planes of their image."""

from collections.abc import Iterable, Iterator, Sequence
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
MOST_CONTOURS = 2**16
"""Of a file: 60 structures on 500 slices have about half. Each takes pydicom and numpy 0.4 ms."""
MOST_CROSSINGS = 2**26
"""Lines of voxels that the edges of a file's contours cross: a body's outline on 500 slices crosses about a million."""
Planes = dict[int, list[np.ndarray]]
"""Polygons (N, 2) in voxels by plane."""
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
    if (count := sum(len(roi.ContourSequence) for _, roi in drawn)) > MOST_CONTOURS:
        raise _too_much(path, f"{count:,} contours, at most {MOST_CONTOURS:,} are")
    planes: list[tuple[str, Planes]] = []
    for about, roi in drawn:
        check_space(path, about, image)
        planes.append((str(about.get("ROIName") or "").strip(), _planes(path, roi.ContourSequence, image.grid)))
    polygons = (polygon for _, one in planes for some in one.values() for polygon in some)
    if (lines := sum(int(_span(polygon, image.grid.shape[:2]).sum()) for polygon in polygons)) > MOST_CROSSINGS:
        raise _too_much(path, f"edges that cross {lines:,} lines of voxels, at most {MOST_CROSSINGS:,} are")
    regions: dict[Value, np.ndarray] = {}
    for name, one in planes:
        mask = regions.setdefault(name, np.zeros(image.grid.shape[::-1], bool).T)  # slices in one piece
        for plane, some in one.items():
            mask[:, :, plane] |= inside(some, image.grid.shape[:2])
    return Labels(regions=regions)


def _too_much(path: Path, found: str) -> DataError:
    return DataError(f"{path}: cannot be read as masks ({found}); leave structures out")


def _planes(path: Path, sequence: Iterable[Dataset], grid: Grid) -> Planes:
    """Return the closed contours of a structure by plane."""
    found: Planes = {}
    for contour in sequence:
        if contour.get("ContourGeometricType") not in CLOSED:
            continue
        voxel = _voxels(_points(path, contour), grid)
        plane = round(float(np.median(voxel[:, 2])))
        if np.abs(voxel[:, 2] - plane).max() > TOLERANCE or not 0 <= plane < grid.shape[2]:
            if grid.shape[2] == 1:
                continue  # another slice of the series that the image is one of
            raise DataError(f"{path}: has a contour on no plane of its image; give the image it was drawn on")
        found.setdefault(plane, []).append(voxel[:, :2])
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


def inside(polygons: Sequence[np.ndarray], shape: tuple[int, int]) -> np.ndarray:
    """Return the points (I, J) of a grid inside an odd number of polygons (N, 2) by the even-odd rule; of edges the lower ones.

    An inner polygon is a hole. Along every line of points the crossings with all polygons are counted together; an odd number
    of them lies before a point inside.
    """
    found = np.zeros(shape, bool)
    boxes = [np.floor([one.min(0), one.max(0) + 1]).clip(0, shape).astype(np.int64) for one in polygons]
    low, high = np.minimum.reduce(boxes)[0], np.maximum.reduce(boxes)[1]
    wide, tall = (high - low).tolist()
    if wide and tall:
        long = -(-tall // 8) * 8  # a line of bytes as whole numbers of 8 bytes
        odd, waiting, size = np.zeros((wide + 1) * long, np.uint8), list[np.ndarray](), 0
        for place in (place for one, box in zip(polygons, boxes, strict=True) for place in _crossings(one, box, low, long)):
            waiting.append(place)
            size += len(place)
            if size >= _AT_ONCE:
                odd ^= _odd(waiting, len(odd))
                waiting, size = [], 0
        odd ^= _odd(waiting, len(odd))
        lines = odd.view(np.uint64).reshape(wide + 1, long // 8)
        before = np.bitwise_xor.accumulate(lines[:-1], axis=0).view(bool)
        found[low[0] : high[0], low[1] : high[1]] = before[:, :tall]
    return found


def _odd(places: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Return 1 at those of `length` places that are there an odd number of times, else 0."""
    return np.bincount(np.concatenate(places) if places else np.zeros(0, np.int64), minlength=length).astype(np.uint8) & 1


def _span(polygon: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return how many lines of points each edge crosses."""
    ends = np.ceil(polygon[:, 1]).clip(0, shape[1]).astype(np.int64)
    return np.abs(np.roll(ends, -1) - ends)


def _crossings(polygon: np.ndarray, bounds: np.ndarray, start: np.ndarray, tall: int) -> Iterator[np.ndarray]:
    """Yield where edges pass: before each point (I + 1, `tall`), and behind the one before it, in one row, from `start` on.

    The polygon, which lies within `bounds` (low and high corner), is moved to its low corner: numbers near 0 are finer.
    """
    low, box, polygon = bounds[0], bounds[1] - bounds[0], polygon - bounds[0]
    if not box.all():
        return
    ends, step = np.roll(polygon, -1, axis=0), max(1, _AT_ONCE // int(box[1]))
    for begin in range(0, len(polygon), step):
        one, other = polygon[begin : begin + step], ends[begin : begin + step]
        first, last = (np.ceil(f(one[:, 1], other[:, 1])).clip(0, box[1]).astype(np.int64) for f in (np.minimum, np.maximum))
        edge = np.repeat(np.arange(len(one)), last - first)
        line = np.arange(len(edge)) - np.repeat(np.cumsum(last - first) - last, last - first)
        share = (line - one[edge, 1]) / (other[edge, 1] - one[edge, 1])
        at = np.ceil(one[edge, 0] + share * (other[edge, 0] - one[edge, 0])).clip(0, box[0]).astype(np.int64)
        yield (at + (low[0] - start[0])) * tall + line + (low[1] - start[1])
