"""Positions and value scales of the frames of DICOM images, one frame per file or many, sorted by position.

DICOM's millimetres run to the left, back and up; those of a grid run to the right, front and up. A voxel is (column, row,
slice), with slices along the normal of columns and rows, so that a plane across the last axis is the stored picture.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from pydicom import Dataset
from pydicom.pixels import apply_modality_lut, apply_voi
from pydicom.uid import UID, ParametricMapStorage, RTDoseStorage, RTStructureSetStorage

from consilium.core.errors import DataError
from consilium.data.dicom.files import SEGMENTATIONS, patient_identifier, series, wrap_dicom_errors
from consilium.data.grid import Grid, check_spacing
from consilium.data.safe_open import MOST_FILES, most_unpacked, raise_first_fault
from consilium.data.volumes import VolumeHeader

Window = tuple[float, float]


@dataclass(frozen=True, eq=False)
class Scale:
    """The scale from stored values to the file's unit: value = stored * slope + intercept, or by tables.

    `window`: the values that are shown black and white. `curve`: how values between them are shown if not linearly (SIGMOID,
    LUT). `stored`: the least and the largest value of the stored bits. `inverted`: MONOCHROME1, where the largest value is the
    darkest. `padding`: stored values from the first to the second are not measurements.
    """

    slope: float
    intercept: float
    window: Window | None
    curve: str
    stored: Window
    inverted: bool
    padding: Window | None
    tables: Dataset

    @property
    def is_identity(self) -> bool:
        """Whether stored values are already in the file's unit."""
        return (self.slope, self.intercept) == (1.0, 0.0) and not self.curve and "ModalityLUTSequence" not in self.tables


def scale_of(file: Path, own: Dataset) -> Scale:
    """Return the scale of a frame's values, from its own elements. Raises DataError."""
    bits, signed = int(own.get("BitsStored") or own.get("BitsAllocated") or 16), bool(own.get("PixelRepresentation"))
    stored = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1) if signed else (0.0, 2.0**bits - 1)
    number = partial(_first_number, own)
    slope, intercept = number("RescaleSlope", 1.0), number("RescaleIntercept", 0.0)
    if not slope:
        raise DataError(f"{file}: its RescaleSlope is 0; replace it or take it off the list")
    window: Window | None = None  # of several windows, the first (DICOM PS3.3, C.11.2.1.2)
    curve = ""
    if own.get("WindowCenter") in (None, "") or own.get("WindowWidth") in (None, ""):
        curve = "LUT" if own.get("VOILUTSequence") else ""
    else:
        center, width = number("WindowCenter", 0.0), number("WindowWidth", 0.0)
        function = str(own.get("VOILUTFunction") or "LINEAR")
        if width >= 1 or (width > 0 and function != "LINEAR"):
            window = (center - width / 2, center + width / 2 - (function == "LINEAR"))
            curve = "SIGMOID" if function == "SIGMOID" else ""
    padding: Window | None = None
    if own.get("PixelPaddingValue") is not None:
        first = number("PixelPaddingValue", 0.0)
        last = number("PixelPaddingRangeLimit", first)
        if signed:  # some devices write -2000 as 63536
            half = 2.0 ** (int(own.get("BitsAllocated") or 16) - 1)
            first, last = (value - 2 * half if value >= half else value for value in (first, last))
        padding = min(first, last), max(first, last)
    inverted = own.get("PhotometricInterpretation") == "MONOCHROME1"
    if inverted and "ModalityLUTSequence" in own:
        raise DataError(f"{file}: has a table of values and the largest is the darkest (MONOCHROME1), which is not read")
    return Scale(slope, intercept, window, curve, stored, inverted, padding, own)


def _first_number(own: Dataset, keyword: str, otherwise: float) -> float:
    """Return the first number of an element, `otherwise` if it is absent. Raises ValueError for other values."""
    value: Any = own.get(keyword)
    if value is None or value == "":
        return otherwise
    found = float(value if isinstance(value, str | int | float) else value[0])
    if not np.isfinite(found):
        raise ValueError(keyword)
    return found


def rescaled_center_and_width(scale: Scale) -> Window | None:
    """Return the file's window (center, width) for the values that `apply_rescale` returns; None for a file without one."""
    if scale.curve:
        return 0.5, 1.0
    if scale.window is None:
        return None
    low, high = scale.window
    if scale.inverted:
        low, high = (sum(scale.stored) * scale.slope + 2 * scale.intercept - value for value in (high, low))
    return (low + high) / 2, high - low


def apply_rescale(stored: np.ndarray, scale: Scale) -> np.ndarray:
    """Return stored values (H, W) in the file's unit, such as HU: float32, or as stored if the scale is the identity.

    If the file shows values by a curve, the curve's values are returned, 0 to 1. MONOCHROME1 is inverted at the middle of the
    range of the stored bits, or of the curve.
    """
    if scale.inverted and not scale.curve:
        stored = (sum(scale.stored) - stored.astype(np.float64)).astype(stored.dtype)
    if scale.is_identity:
        return stored
    if "ModalityLUTSequence" in scale.tables:
        values = np.asarray(apply_modality_lut(stored, scale.tables), np.float64)
    else:
        values = stored.astype(np.float64) * scale.slope + scale.intercept
    if scale.curve == "SIGMOID" and scale.window is not None:
        low, high = scale.window
        values = 1 / (1 + np.exp(np.clip(-4 * (values - (low + high) / 2) / (high - low), -80, 80)))
    elif scale.curve:
        table = np.asarray(apply_voi(np.rint(values).astype(np.int64), scale.tables), np.float64)
        values = table / (2.0 ** int(scale.tables.VOILUTSequence[0].LUTDescriptor[2]) - 1)
    return (1 - values if scale.curve and scale.inverted else values).astype(np.float32)


SLICE_TOLERANCE = 0.25
"""Share of the slice distance by which a slice may be off its position."""
_SAME = 1e-3
"""Tolerance in millimetres between equal positions, and between direction cosines."""
_MEASURED = "set the scanner's in the file, or take it off the list"
_OF_FRAME = 32
"""The fewest bytes that a segment's frame with its position takes in a deflated file."""
_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])


@dataclass(frozen=True, eq=False)
class Place:
    """A frame's position in mm on DICOM's axes: the centre (3,) of its first pixel, the steps (3,) to the next column (`i`)
    and to the next row (`j`), and the distance between slices, `depth`.
    """

    origin: np.ndarray
    i: np.ndarray
    j: np.ndarray
    depth: float


@dataclass(frozen=True, eq=False)
class Frame:
    """A frame of a file. `number`: its number in the file, from 0. `own`: the elements that apply to it."""

    file: Path
    number: int
    shape: tuple[int, int]
    place: Place | None
    scale: Scale
    own: Dataset


@dataclass(frozen=True, eq=False)
class Stack:
    """Frames sorted by position, and the DICOM data elements of each file.

    `colours`: whether frames are in colour instead of grey. `kind`: the SOP class of the first file.
    """

    frames: tuple[Frame, ...]
    files: dict[Path, Dataset]
    header: VolumeHeader
    colours: bool
    kind: str


def header(path: Path) -> VolumeHeader:
    """Return the VolumeHeader of a DICOM file, series folder or segmentation. Raises DataError."""
    with wrap_dicom_errors(path):
        return read_stack_headers(path).header


def read_stack_headers(path: Path) -> Stack:
    """Return the frames of a file or a series, in order of position. Use within `wrap_dicom_errors`. Raises DataError."""
    files = dict(series(path))
    first = next(iter(files.values()))
    if "Rows" not in first:
        uid = UID(str(first.get("SOPClassUID") or ""))
        what = f"holds no image but what the standard calls {uid.name}" if uid.name != uid else "holds no image"
        what = "holds contours, which need their image's grid" if uid == RTStructureSetStorage else what
        raise DataError(f"{path}: {what}; name an image")
    if unread := {ParametricMapStorage: "a parametric map", RTDoseStorage: "a dose"}.get(first.get("SOPClassUID")):
        raise DataError(f"{path}: is {unread}, which is not read; save it as NIfTI, or as an image of whole numbers")
    _check_decoded_bytes(path, files)
    frames = list(chain.from_iterable(frames_of(file, elements) for file, elements in files.items()))
    if len(frames) > 1 and len(files) > 1 and any(frame.place is None for frame in frames):
        raise DataError(f"{path}: holds {len(files)} images that do not say where they lie; name each by its file")
    kind = str(first.get("SOPClassUID") or "")
    ordered, count, affine = sorted_frames_count_affine(path, frames, kind in SEGMENTATIONS)
    rows, columns = ordered[0].shape
    middle = ordered[len(ordered) // 2]
    sides = [float(side) for side in np.atleast_1d(middle.own.get("PixelSpacing") or ())] if affine is None else []
    grid = Grid((columns, rows, count), affine, (sides[0], sides[1]) if len(sides) == 2 and count == 1 else None)
    study, space = (str(first.get(key) or "").strip() for key in ("StudyInstanceUID", "FrameOfReferenceUID"))
    colours = int(first.get("SamplesPerPixel") or 1) > 1 or first.get("PhotometricInterpretation") == "PALETTE COLOR"
    found = VolumeHeader(
        grid, None if colours else rescaled_center_and_width(middle.scale), patient_identifier(first), study, space
    )
    return Stack(tuple(ordered), files, found, colours, kind)


def frame_count(elements: Dataset) -> int:
    """Return the number of frames in a file."""
    return max(1, int(elements.get("NumberOfFrames") or 1))


_MACROS = (
    "PlanePositionSequence", "PlaneOrientationSequence", "PixelMeasuresSequence", "PixelValueTransformationSequence",
    "FrameVOILUTSequence", "SegmentIdentificationSequence", "DerivationImageSequence",
)  # fmt: skip
"""Functional groups of a multi-frame file that are read. They may be per frame or shared by all frames."""
_COMMON = (
    "PhotometricInterpretation", "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "RescaleSlope",
    "RescaleIntercept", "ModalityLUTSequence", "WindowCenter", "WindowWidth", "VOILUTFunction", "VOILUTSequence",
    "PixelPaddingValue", "PixelPaddingRangeLimit",
)  # fmt: skip
"""Elements of a multi-frame file that apply to each frame, if its functional groups do not say otherwise."""


def frames_of(file: Path, elements: Dataset) -> Iterator[Frame]:
    """Yield the frames of one file, in the file's order, each with the elements that a single-frame file would have."""
    count, shape = frame_count(elements), (int(elements.Rows), int(elements.Columns))
    shared, each = (elements.get(f"{kind}FunctionalGroupsSequence") for kind in ("Shared", "PerFrame"))
    own = elements
    if shared or each or count > 1:
        own = Dataset()
        own.update({e.tag: e for e in (elements[k] for k in _COMMON if k in elements)})
    common = own
    for number in range(count):
        if shared or each:
            own = Dataset()
            own.update(common._dict)
            for group in (shared[0] if shared else Dataset(), each[number] if each else Dataset()):
                for macro in _MACROS:
                    if group.get(macro):
                        own.update(group[macro][0])
        yield Frame(file, number, shape, _read_place(file, own), scale_of(file, own), own)


def _read_place(file: Path, own: Dataset) -> Place | None:
    """Return a frame's position; None if the file does not state it. Raises DataError for pixels of invalid size."""
    position, turn, pixel = (own.get(k) for k in ("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing"))
    if pixel:
        check_spacing(file, "PixelSpacing", [float(side) for side in np.atleast_1d(pixel)], _MEASURED)
    if not (position and turn and pixel):
        return None
    origin, turned, spacing = (np.array(values, np.float64) for values in (position, turn, pixel))
    i, j = turned.reshape(2, 3)
    depth = abs(float(own.get("SpacingBetweenSlices") or own.get("SliceThickness") or 1.0))  # negative in nuclear medicine
    check_spacing(file, "SpacingBetweenSlices or SliceThickness", [depth], _MEASURED)
    is_finite = origin.shape == (3,) and spacing.shape == (2,) and np.isfinite([*origin, *turned, *spacing, depth]).all()
    if not is_finite or abs(i @ j) > _SAME or max(abs(np.linalg.norm([i, j], axis=1) - 1)) > _SAME:
        raise ValueError("a position is not three numbers, or directions are not at right angles")
    return Place(origin, i * spacing[1], j * spacing[0], depth)


def sorted_frames_count_affine(
    path: Path, frames: Sequence[Frame], is_segmentation: bool
) -> tuple[list[Frame], int, np.ndarray | None]:
    """Return frames sorted along their normal, the number of slices, and the affine (4, 4) to mm.

    The affine is None if frames have no position. `is_segmentation`: frames of a segmentation, where several may share a slice
    and empty slices have none. Raises DataError for frames that are not parallel, and for an uneven stack: different sizes, two
    frames at one position, a missing slice.
    """
    if not is_segmentation and any(frame.shape != frames[0].shape for frame in frames):
        raise DataError(f"{path}: holds images of several sizes; give each series a folder of its own")
    places = [frame.place for frame in frames if frame.place is not None]
    if len(places) < len(frames):
        return list(frames), len(frames), None
    one, turns = places[0], np.array([(place.i, place.j) for place in places])
    if not np.allclose(turns, turns[0], atol=_SAME):
        raise DataError(f"{path}: holds images turned or scaled differently; give each series a folder of its own")
    normal = np.cross(one.i, one.j) / np.linalg.norm(np.cross(one.i, one.j))
    origins = np.array([place.origin for place in places])
    order = np.argsort(origins @ normal, kind="stable")
    origins, count = origins[order], len(order) - 1
    heights = origins @ normal
    if is_segmentation:
        gaps = np.diff(heights)
        least = min(gaps[gaps > _SAME], default=one.depth)
        count = round(float(heights[-1] - heights[0]) / least)
        if count + 1 > MOST_FILES:
            raise DataError(f"{path}: its segments lie {least:.4f} mm apart over {count * least:.0f} mm; replace it")
    step = (origins[-1] - origins[0]) / count if count else normal * one.depth
    if not is_segmentation:
        _check_even(path, heights, origins, step)
    affine = np.eye(4)
    affine[:3] = np.stack([one.i, one.j, step, origins[0]], axis=1)
    return [frames[n] for n in order], count + 1, _TO_RAS @ affine


def _check_even(path: Path, heights: np.ndarray, origins: np.ndarray, step: np.ndarray) -> None:
    """Raise DataError for sorted positions (N, 3) that are not evenly spaced on a line."""
    gaps = np.diff(heights)
    if not len(gaps):
        return
    taken, usual = int((gaps < _SAME).sum()), float(np.median(gaps))
    wide = np.flatnonzero(gaps > (1 + SLICE_TOLERANCE) * usual)
    at = int(wide[0]) if len(wide) else 0
    missing = int((np.rint(gaps[wide] / max(usual, _SAME)) - 1).clip(1).sum())
    where = f"between slices {at} and {at + 1} lie {gaps[at]:.2f} mm, elsewhere {usual:.2f}"
    even = origins[0] + np.arange(len(origins))[:, None] * step
    off = float(np.linalg.norm(origins - even, axis=1).max()) > SLICE_TOLERANCE * usual
    uneven = off or gaps.min() < (1 - SLICE_TOLERANCE) * usual
    count, remedy = len(heights), "save each echo, phase or time as a series of its own"
    raise_first_fault(
        path,
        (taken, f"holds {count} images at {count - taken} places; {remedy}"),
        (len(wide), f"{missing} slices are missing or uneven ({where}); complete the series"),
        (uneven, f"its slices lie unevenly, {gaps.min():.2f} to {gaps.max():.2f} mm apart; resample the series"),
    )


def _check_decoded_bytes(path: Path, files: Mapping[Path, Dataset]) -> None:
    """Raise DataError, before decoding, for images that need more memory than files of their size may take."""
    segments = next(iter(files.values())).get("SOPClassUID") in SEGMENTATIONS  # frames are added to masks, see masks.py
    most, frames, needed = MOST_FILES * (10 if segments else 1), 0, 0
    packed = sum(file.stat().st_size for file in files)
    for elements in files.values():
        count, rows, columns = frame_count(elements), int(elements.Rows), int(elements.Columns)
        if rows < 1 or columns < 1:
            raise DataError(f"{path}: has {rows}x{columns} pixels; replace it or take it off the list")
        frames += count
        needed += (1 if segments else count) * rows * columns * max(4, int(elements.get("SamplesPerPixel") or 1))
    most = min(most, MOST_FILES + packed // _OF_FRAME)
    if needed > (largest := most_unpacked(packed)) or frames > most:
        raise DataError(
            f"{path}: cannot be read as DICOM ({frames:,} frames, {needed:,} bytes; "
            f"at most {most:,} frames and {largest:,} bytes are allowed for files of this size); cut it into smaller ones"
        )
