"""Masks in DICOM: segmentations, contours, and images whose values are labels.

A segment is a region by its number and by its label, an outlined structure by its name. Regions may overlap.
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np
from pydicom import Dataset

from consilium.core.errors import DataError
from consilium.data.dicom.contours import check_space, contours
from consilium.data.dicom.files import CONTOURS, SEGMENTATIONS, alone, open_file, reading
from consilium.data.dicom.frames import Frame, stack
from consilium.data.dicom.pixels import pictures, voxels
from consilium.data.grid import TOLERANCE, Grid
from consilium.data.labels import Labels
from consilium.data.pixel_values import whole_numbers
from consilium.data.safe_open import MOST_VOLUME
from consilium.data.settings import Value
from consilium.data.volumes import Header

HALF = 0.5
"""A pixel of a fractional segment belongs to it from this share on."""
_TO_RAS = np.array([-1.0, -1.0, 1.0])


def labels(path: Path, image: Header) -> Labels:
    """Return the labels of a file on the grid of `image` (i, j, k), or on their own where they fit no voxels of it.

    Raises DataError, also for masks of another frame of reference, and for contours that fit no plane of the image.
    """
    with reading(path):
        path = alone(path)
        elements = Dataset() if path.is_dir() else open_file(path)
        kind = elements.get("SOPClassUID")
        if kind in SEGMENTATIONS:
            check_space(path, elements, image)
            return _segments(path, elements, image.grid)
        if kind == CONTOURS:
            return contours(path, elements, image)
        return Labels(values=whole_numbers(path, voxels(path, padding=True)))


def _segments(path: Path, elements: Dataset, image: Grid) -> Labels:
    """Return the segments on the image's grid, or on their own where they fit no voxels of it."""
    found = stack(path)
    grid, places = image, [_onto(frame, image) for frame in found.frames]
    if any(place is None for place in places):
        grid = found.header.grid
        if grid.affine is None or image.affine is None:
            raise DataError(f"{path}: does not say where its segments lie on the image; save it with positions")
        places = [_onto(frame, grid) for frame in found.frames]
    masks = _empty(path, elements, grid)
    by_number = {frame.number: (frame, place) for frame, place in zip(found.frames, places, strict=True)}
    for number, picture in enumerate(pictures(path)):
        frame, place = by_number[number]
        for segment, mask in _split(picture, frame, elements):
            _mark(path, masks[segment], mask, place)
    return Labels(regions=_named(elements, masks), grid=None if grid is image else grid)


def _onto(frame: Frame, grid: Grid) -> np.ndarray | None:
    """Return the voxel of a frame's first pixel, and the steps to the next column and row: (3, 3) whole numbers, as columns.

    None where its pixels are no voxels of the grid. A frame beside an image of one plane is put outside of it.
    """
    if frame.place is None or grid.affine is None:
        return _onto_source(frame, grid)
    steps = np.stack([frame.place.origin, frame.place.i, frame.place.j], axis=1) * _TO_RAS[:, None]
    found = np.linalg.solve(grid.affine[:3, :3], steps - np.outer(grid.affine[:3, 3], [1, 0, 0]))
    if grid.shape[2] == 1 and abs(found[2, 0]) > TOLERANCE:
        found[2, 0] = -1
    whole = np.rint(found)
    rows, columns = frame.shape
    off = np.abs((found - whole) @ [[1, 1, 1, 1], [0, columns - 1, 0, columns - 1], [0, 0, rows - 1, rows - 1]]).max()
    straight = (np.abs(whole[:, 1:]).sum(0) == 1).all()
    return whole.astype(np.int64) if off <= TOLERANCE and straight else None


def _onto_source(frame: Frame, grid: Grid) -> np.ndarray | None:
    """Return the same by the frame of the image that a frame was drawn on, where nobody knows places."""
    sources = frame.own.get("SourceImageSequence")
    number = int((sources[0].get("ReferencedFrameNumber") if sources else None) or 1) - 1
    fits = frame.shape[::-1] == grid.shape[:2] and (sources or grid.shape[2] == 1) and grid.affine is None
    return np.array([[0, 1, 0], [0, 0, 1], [number, 0, 0]]) if fits else None


def _empty(path: Path, elements: Dataset, grid: Grid) -> dict[int, np.ndarray]:
    """Return a mask without voxels for every segment. Raises DataError for more than memory is given to."""
    numbers = [int(segment.SegmentNumber) for segment in elements.get("SegmentSequence") or []]
    needed = len(numbers) * prod(grid.shape)
    if needed > MOST_VOLUME:
        found = f"{len(numbers)} segments, {needed:,} bytes; at most {MOST_VOLUME:,} are"
        raise DataError(f"{path}: cannot be read as masks ({found}); leave segments out")
    return {number: np.zeros(grid.shape[::-1], bool).T for number in numbers if number}


def _split(picture: np.ndarray, frame: Frame, elements: Dataset) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the segments of a frame (H, W) with their masks."""
    kind = elements.get("SegmentationType")
    if kind == "LABELMAP":
        for number in np.unique(picture[picture > 0]).tolist():
            yield number, picture == number
    elif kind == "FRACTIONAL":
        yield int(frame.own.ReferencedSegmentNumber), picture >= HALF * float(elements.MaximumFractionalValue)
    else:
        yield int(frame.own.ReferencedSegmentNumber), picture > 0


def _mark(path: Path, region: np.ndarray, mask: np.ndarray, place: np.ndarray | None) -> None:
    """Add a frame's mask (H, W) to a region (i, j, k). Raises DataError for pixels outside of a volume."""
    if place is None:
        raise DataError(f"{path}: its segments lie on no even grid; save them on their image's planes")
    rows, columns = np.nonzero(mask)
    voxel = place[:, :1] + place[:, 1:] @ np.stack([columns, rows])
    inside = ((voxel >= 0) & (voxel < np.array(region.shape)[:, None])).all(0)
    if region.shape[2] > 1 and not inside.all():
        raise DataError(f"{path}: marks voxels outside its image; give the image it was drawn on")
    region[tuple(voxel[:, inside])] = True


def _named(elements: Dataset, masks: dict[int, np.ndarray]) -> dict[Value, np.ndarray]:
    """Return masks by number and by label; segments of one label are one region."""
    found: dict[Value, np.ndarray] = {number: mask for number, mask in masks.items()}
    for segment in elements.get("SegmentSequence") or []:
        name, number = str(segment.get("SegmentLabel") or "").strip(), int(segment.SegmentNumber)
        if name and number in masks:
            found[name] = found[name] | masks[number] if name in found else masks[number]
    return found
