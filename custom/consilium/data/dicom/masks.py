"""Masks in DICOM: segmentations, contours (RTSTRUCT), and images whose values are labels.

A segment becomes a region under its number and under its label, an outlined structure a region under its name. Regions may
overlap. Contours are polygons in millimetres; they are filled on the planes of their image.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from pydicom import Dataset
from pydicom.uid import RTStructureSetStorage

from consilium.core.errors import DataError
from consilium.data.dicom.files import SEGMENTATIONS, only_file_or_path, open_file, wrap_dicom_errors
from consilium.data.dicom.frames import SLICE_TOLERANCE, Frame, read_stack_headers
from consilium.data.dicom.pixels import pictures, voxels
from consilium.data.grid import TOLERANCE, Grid
from consilium.data.pixel_values import Labels, to_integers
from consilium.data.safe_open import MOST_VOLUME
from consilium.data.settings import Value
from consilium.data.volumes import VolumeHeader

CLOSED = frozenset({"CLOSED_PLANAR", "CLOSEDPLANAR_XOR"})
"""Types of contours that enclose an area. Points and open lines do not."""
MOST_CONTOURS = 2**16
"""Contours of a file. 60 structures on 500 slices have about half as many. pydicom and numpy take 0.4 ms per contour."""
MOST_CROSSINGS = 2**26
"""Crossings of contours' edges with lines of voxels, per file. A body's outline on 500 slices has about a million."""
Planes = dict[int, list[np.ndarray]]
"""Polygons (N, 2), in voxels, by plane."""
TOO_LARGE = "too large"
"""The kind of an error that refuses the whole file, in whichever structure it occurs."""
_AT_ONCE = 2**22
_LONGEST_NUMBER = 64
"""Characters of a number in a contour; the standard allows 16. numpy stores all numbers of a contour as wide as the longest."""


def check_frame_of_reference(path: Path, elements: Dataset, image: VolumeHeader) -> None:
    """Raise DataError if mask and image have different frames of reference, as the mask's position is then unknown."""
    own = str(elements.get("ReferencedFrameOfReferenceUID") or elements.get("FrameOfReferenceUID") or "").strip()
    if own and image.space and own != image.space:
        raise DataError(f"{path}: was drawn in another frame of reference than its image's; give the image it was drawn on")


def read_contours(path: Path, elements: Dataset, image: VolumeHeader) -> Labels:
    """Return the regions that closed contours enclose, by the structure's name: voxels whose centre is inside, without holes.

    A structure that cannot be read, or lies beside the image, becomes a fault of that structure alone. Raises DataError for an
    image without a position, for too many contours or crossings, and for numbers that are too long.
    """
    if image.grid.affine is None:
        raise DataError(f"{path}: holds contours in millimetres, and its image does not say where it lies; use another mask")
    structures = {str(roi.get("ROINumber")): roi for roi in elements.get("StructureSetROISequence") or []}
    every = [(structures.get(str(roi.get("ReferencedROINumber"))), roi) for roi in elements.get("ROIContourSequence") or []]
    drawn = [(about, roi) for about, roi in every if about is not None and roi.get("ContourSequence")]
    needed, count = len(drawn) * prod(image.grid.shape), sum(len(roi.ContourSequence) for _, roi in drawn)
    if needed > MOST_VOLUME or count > MOST_CONTOURS:
        found = f"{len(drawn)} structures, {needed:,} bytes; at most {MOST_VOLUME:,} are allowed"
        found = found if needed > MOST_VOLUME else f"{count:,} contours, at most {MOST_CONTOURS:,} are allowed"
        raise DataError(f"{path}: cannot be read as masks ({found}); leave structures out")
    planes: list[tuple[str, Planes]] = []
    faults: dict[Value, DataError] = {}
    for about, roi in drawn:
        name = _structure_name(about)
        try:
            with wrap_dicom_errors(path):
                check_frame_of_reference(path, about, image)
                planes.append((name, _contours_by_plane(path, roi.ContourSequence, image.grid)))
        except DataError as error:
            if error.kind == TOO_LARGE:
                raise
            why = str(error).removeprefix(f"{path}: ")
            faults[name] = DataError(f"{path}: structure {name!r} {why}", error.kind)
    polygons = (polygon for _, one in planes for some in one.values() for polygon in some)
    ends = (np.ceil(polygon[:, 1]).clip(0, image.grid.shape[1]).astype(np.int64) for polygon in polygons)
    if (lines := sum(int(np.abs(np.roll(one, -1) - one).sum()) for one in ends)) > MOST_CROSSINGS:
        raise DataError(
            f"{path}: cannot be read as masks (edges that cross {lines:,} lines of voxels, at most {MOST_CROSSINGS:,} are "
            "allowed); "
            "leave structures out"
        )
    nothing = np.zeros(image.grid.shape[::-1], bool).T  # each slice contiguous
    regions: dict[Value, np.ndarray] = {name: nothing for name in map(_structure_name, structures.values())}
    for name, one in planes:
        if one:
            mask = regions[name] = nothing.copy(order="K") if regions[name] is nothing else regions[name]
        for plane, some in one.items():
            mask[:, :, plane] |= points_inside(some, image.grid.shape[:2])
    return Labels(regions={name: mask for name, mask in regions.items() if name not in faults} or {"": nothing}, faults=faults)


def _structure_name(structure: Dataset) -> str:
    return str(structure.get("ROIName") or "").strip()


def _contours_by_plane(path: Path, sequence: Iterable[Dataset], grid: Grid) -> Planes:
    """Return the closed contours of a structure by plane.

    Raises DataError for a contour on no plane of the grid, and for a number that is too long.
    """
    found: Planes = {}
    for contour in sequence:
        if contour.get("ContourGeometricType") not in CLOSED or "ContourData" not in contour:
            continue
        raw: Any = contour.get_item("ContourData")
        if not raw.value:
            continue
        # the text is parsed here, because pydicom creates an object per number
        values = raw.value.split(b"\\") if isinstance(raw.value, bytes) else list(raw.value)
        if isinstance(raw.value, bytes) and max(map(len, values)) > _LONGEST_NUMBER:
            raise DataError(
                f"{path}: has a contour with a number of over {_LONGEST_NUMBER} characters; replace it or take it off the list",
                TOO_LARGE,
            )
        points = np.array(values).astype(np.float64).reshape(-1, 3)
        if grid.affine is None or not np.isfinite(points).all():
            raise ValueError("a contour's points lie nowhere")
        own = points * [-1, -1, 1] - grid.affine[:3, 3]  # from DICOM's axes, in mm
        voxel = np.linalg.solve(grid.affine[:3, :3], own.T).T
        plane = round(float(np.median(voxel[:, 2])))
        if np.abs(voxel[:, 2] - plane).max() > SLICE_TOLERANCE or not 0 <= plane < grid.shape[2]:
            if grid.shape[2] == 1:
                continue  # the image is one slice of a series, and this contour is on another slice
            raise DataError(f"{path}: has a contour on no plane of its image; give the image it was drawn on")
        found.setdefault(plane, []).append(voxel[:, :2])
    return found


def points_inside(polygons: Sequence[np.ndarray], shape: tuple[int, int]) -> np.ndarray:
    """Return which points (I, J) of a grid are inside polygons (N, 2), by the even-odd rule: an inner polygon is a hole.

    A point on an edge is inside at the lower edge of a polygon only. Along every line of points, the crossings with all
    polygons are counted together: a point is inside if an odd number of crossings precedes it.
    """
    found = np.zeros(shape, bool)
    boxes = [np.floor([one.min(0), one.max(0) + 1]).clip(0, shape).astype(np.int64) for one in polygons]
    low, high = np.minimum.reduce(boxes)[0], np.maximum.reduce(boxes)[1]
    wide, tall = (high - low).tolist()
    if wide and tall:
        long = -(-tall // 8) * 8  # pad lines to 8 bytes, to process them as 64-bit integers
        odd, waiting, size = np.zeros((wide + 1) * long, np.uint8), list[np.ndarray](), 0
        for place in (place for one, box in zip(polygons, boxes, strict=True) for place in _crossings(one, box, low, long)):
            waiting.append(place)
            size += len(place)
            if size >= _AT_ONCE:
                odd ^= _odd_occurrence_mask(waiting, len(odd))
                waiting, size = [], 0
        odd ^= _odd_occurrence_mask(waiting, len(odd))
        before = np.bitwise_xor.accumulate(odd.view(np.uint64).reshape(wide + 1, long // 8)[:-1], axis=0).view(bool)
        found[low[0] : high[0], low[1] : high[1]] = before[:, :tall]
    return found


def _odd_occurrence_mask(places: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Return (length,) bytes: 1 for each index that occurs in `places` an odd number of times, else 0."""
    return np.bincount(np.concatenate(places) if places else np.zeros(0, np.int64), minlength=length).astype(np.uint8) & 1


def _crossings(polygon: np.ndarray, bounds: np.ndarray, start: np.ndarray, tall: int) -> Iterator[np.ndarray]:
    """Yield the crossings of a polygon's edges with lines of points, as flat indices into an array (I + 1, `tall`).

    A crossing has the index of the first point behind it. The array starts at the point `start` of the grid. The polygon is
    within `bounds` (low and high corner) and is moved to the low corner, because floats near 0 are more precise.
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


HALF = 0.5
"""A pixel belongs to a fractional segment if its value is at least this share of the maximum."""


def labels(path: Path, image: VolumeHeader) -> Labels:
    """Return the labels of a file on the grid of `image` (i, j, k), or on their own grid if they match no voxels of the image.

    Raises DataError, also for masks with another frame of reference, and for contours on no plane of the image.
    """
    with wrap_dicom_errors(path):
        path = only_file_or_path(path)
        elements = Dataset() if path.is_dir() else open_file(path)
        kind = elements.get("SOPClassUID")
        if kind in SEGMENTATIONS:
            check_frame_of_reference(path, elements, image)
            return _read_segments(path, elements, image.grid)
        if kind == RTStructureSetStorage:
            return read_contours(path, elements, image)
        return Labels(values=to_integers(path, voxels(path, keep_padding=True)))


def _read_segments(path: Path, elements: Dataset, image: Grid) -> Labels:
    """Return the segments as regions on the image's grid, or on their own grid if they match no voxels of the image."""
    found = read_stack_headers(path)
    grid, places = image, [_map_to_grid(frame, image) for frame in found.frames]
    if any(place is None for place in places):
        grid = found.header.grid
        if grid.affine is None or image.affine is None:
            raise DataError(f"{path}: does not say where its segments lie on the image; save it with positions")
        places = [_map_to_grid(frame, grid) for frame in found.frames]
    segments = [
        (int(one.SegmentNumber), str(one.get("SegmentLabel") or "").strip()) for one in elements.get("SegmentSequence") or []
    ]
    if (needed := len(segments) * prod(grid.shape)) > MOST_VOLUME:
        raise DataError(
            f"{path}: cannot be read as masks ({len(segments)} segments, {needed:,} bytes; at most {MOST_VOLUME:,} are "
            "allowed); "
            "leave segments out"
        )
    masks = {number: np.zeros(grid.shape[::-1], bool).T for number, _ in segments if number}
    by_number = {frame.number: (frame, place) for frame, place in zip(found.frames, places, strict=True)}
    kind = elements.get("SegmentationType")
    least = HALF * float(elements.MaximumFractionalValue) if kind == "FRACTIONAL" else 1
    for number, picture in enumerate(pictures(path)):
        frame, place = by_number[number]
        drawn = np.unique(picture[picture > 0]).tolist() if kind == "LABELMAP" else [int(frame.own.ReferencedSegmentNumber)]
        for segment in drawn:
            mask = picture == segment if kind == "LABELMAP" else picture >= least
            if place is None:
                raise DataError(f"{path}: its segments lie on no even grid; save them on their image's planes")
            region, (rows, columns) = masks[segment], np.nonzero(mask)
            voxel = place[:, :1] + place[:, 1:] @ np.stack([columns, rows])
            inside = ((voxel >= 0) & (voxel < np.array(region.shape)[:, None])).all(0)
            if region.shape[2] > 1 and not inside.all():
                raise DataError(f"{path}: marks voxels outside its image; give the image it was drawn on")
            region[tuple(voxel[:, inside])] = True
    regions: dict[Value, np.ndarray] = dict(masks.items())
    for number, name in segments:
        if name and number in masks:  # segments with the same label are one region
            regions[name] = regions[name] | masks[number] if name in regions else masks[number]
    return Labels(regions=regions, grid=None if grid is image else grid)


def _map_to_grid(frame: Frame, grid: Grid) -> np.ndarray | None:
    """Return integers (3, 3) whose columns are the voxel of a frame's first pixel and the steps to the next column and row.

    None if the frame's pixels do not match voxels of the grid. For a grid of one plane, a frame off the plane gets plane -1.
    """
    if frame.place is None or grid.affine is None:  # no positions: use the frame number of the source image
        sources = frame.own.get("SourceImageSequence")
        number = int((sources[0].get("ReferencedFrameNumber") if sources else None) or 1) - 1
        fits = frame.shape[::-1] == grid.shape[:2] and (sources or grid.shape[2] == 1) and grid.affine is None
        return np.array([[0, 1, 0], [0, 0, 1], [number, 0, 0]]) if fits else None
    steps = np.stack([frame.place.origin, frame.place.i, frame.place.j], axis=1) * [[-1], [-1], [1]]  # from DICOM's axes
    found = np.linalg.solve(grid.affine[:3, :3], steps - np.outer(grid.affine[:3, 3], [1, 0, 0]))
    if grid.shape[2] == 1 and abs(found[2, 0]) > TOLERANCE:
        found[2, 0] = -1
    whole = np.rint(found)
    rows, columns = frame.shape
    off = np.abs((found - whole) @ [[1, 1, 1, 1], [0, columns - 1, 0, columns - 1], [0, 0, rows - 1, rows - 1]]).max()
    return whole.astype(np.int64) if off <= TOLERANCE and (np.abs(whole[:, 1:]).sum(0) == 1).all() else None
