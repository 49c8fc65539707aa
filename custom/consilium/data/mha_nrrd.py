"""Volumes in MetaImage (.mha) and NRRD (.nrrd): a text header, then the voxels, plain or deflated.

Own code, because ITK's readers open any file that a header names, and decode it before they report its size. A header whose
voxels are in another file is refused, because the sample cache notices changes only of the file that a data list names.
"""

import io
import re
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from consilium.core.errors import DataError
from consilium.data.grid import Grid, check_spacing
from consilium.data.safe_open import (
    MOST_VOLUME_FILE,
    TAKE_OFF,
    check_unpacked,
    raise_first_fault,
    volume_shape,
    wrap_decoding_errors,
)
from consilium.data.volumes import VolumeHeader

MOST_HEADER = 2**20
"""Bytes of a header. 3D Slicer's segmentations have some 600 bytes per segment."""
_META_TYPES = {
    "CHAR": "i1", "UCHAR": "u1", "SHORT": "i2", "USHORT": "u2", "INT": "i4", "UINT": "u4", "LONG_LONG": "i8",
    "ULONG_LONG": "u8", "FLOAT": "f4", "DOUBLE": "f8",
}  # fmt: skip
_NRRD_TYPES = {
    "i1": ("signed char", "int8", "int8_t"), "u1": ("uchar", "unsigned char", "uint8", "uint8_t"),
    "i2": ("short", "short int", "signed short", "signed short int", "int16", "int16_t"),
    "u2": ("ushort", "unsigned short", "unsigned short int", "uint16", "uint16_t"),
    "i4": ("int", "signed int", "int32", "int32_t"), "u4": ("uint", "unsigned int", "uint32", "uint32_t"),
    "i8": ("longlong", "long long", "long long int", "signed long long", "signed long long int", "int64", "int64_t"),
    "u8": ("ulonglong", "unsigned long long", "unsigned long long int", "uint64", "uint64_t"),
    "f4": ("float",), "f8": ("double",),
}  # fmt: skip
_SPACES = {"right-anterior-superior": (1, 1, 1), "left-anterior-superior": (-1, 1, 1), "left-posterior-superior": (-1, -1, 1)}
"""Signs that turn the axes of a NRRD's space to the patient's right, front and up."""
_SPATIAL = ("domain", "space", "time", "???", "none")
"""NRRD's kinds of axes along which voxels lie. Along others, such as RGB-color, lie the values of one voxel."""
_SPACES |= {"".join(word[0] for word in name.split("-")): signs for name, signs in _SPACES.items()}


@dataclass(frozen=True)
class _Layout:
    """The layout of a file's voxels: their type, the grid, the first byte, and whether they are deflated.

    `grid` has no affine if the file does not state a position.
    """

    dtype: np.dtype
    grid: Grid
    start: int
    packed: bool


def header(path: Path) -> VolumeHeader:
    """Return the header of a volume of two or three dimensions. Raises DataError if it cannot be read."""
    with wrap_decoding_errors(path, _UNREADABLE, most=MOST_VOLUME_FILE):
        return VolumeHeader(_read_layout(path).grid)


def voxels(path: Path) -> np.ndarray:
    """Return real numbers (i, j, k) of the type in the file. Raises DataError if they cannot be read."""
    with wrap_decoding_errors(path, _UNREADABLE, most=MOST_VOLUME_FILE):
        found = _read_layout(path)
        needed = prod(found.grid.shape) * found.dtype.itemsize
        with path.open("rb") as file:
            file.seek(found.start)
            data = zlib.decompressobj(_ANY_HEADER).decompress(file.read(), needed) if found.packed else file.read(needed)
        if len(data) < needed:
            raise DataError(f"{path}: its voxels end early; {TAKE_OFF}")
        return np.frombuffer(data, found.dtype).reshape(found.grid.shape, order="F")


_UNREADABLE = "cannot be read as MetaImage or NRRD"
_CONVERT = "which is not read; convert it to NIfTI, or save it in one file as .mha or .nrrd"
_SPACED = "write the right numbers into its header, which is text"
_ANY_HEADER = 47
"""zlib's `wbits` for a stream of zlib or gzip with a window of any size."""


def _read_layout(path: Path) -> _Layout:
    with path.open("rb") as file:
        head = file.read(MOST_HEADER)
    try:
        found = (_read_nrrd if head[:4] == b"NRRD" else _read_metaimage)(path, head)
    except KeyError as error:
        raise DataError(f"{path}: {_UNREADABLE} (its header has no {error.args[0]}); {TAKE_OFF}") from None
    check_unpacked(path, found.grid.shape, found.dtype.itemsize, _UNREADABLE)
    return found


def _affine(steps: np.ndarray, origin: np.ndarray, signs: Any = (-1, -1, 1)) -> np.ndarray:
    """Return the affine (4, 4) to mm (right, front, up) from steps (D, D), one row per axis, and an origin (D,).

    Both are in millimetres. `signs` turn their axes to right, front and up.
    """
    found, count = np.eye(4), min(3, len(steps))  # a fourth axis is of length 1
    found[:count, :count], found[:count, 3] = steps[:count, :count].T, origin[:count]
    return np.diag([*signs, 1.0]) @ found


def _read_metaimage(path: Path, head: bytes) -> _Layout:
    """Return the layout from a MetaImage's header. Its matrix has one row per axis, in DICOM's directions."""
    fields, lines = dict[str, str](), io.BytesIO(head)
    while "ElementDataFile" not in fields:
        name, equal, value = (line := lines.readline()).decode("latin-1").partition("=")
        if not (equal and line.endswith(b"\n")):
            raise DataError(f"{path}: {_UNREADABLE} (no line of its header names the voxels); {TAKE_OFF}")
        fields[name.strip()] = value.strip()

    def is_true(*names: str) -> bool:
        return any(fields.get(name, "").lower() in ("true", "1") for name in names)

    kind = _META_TYPES.get(fields["ElementType"].removeprefix("MET_"), "")
    raise_first_fault(
        path,
        (fields["ElementDataFile"] != "LOCAL", f"has its voxels in another file, {_CONVERT}"),
        (int(fields.get("ElementNumberOfChannels", 1)) != 1, f"holds several values a voxel, {_CONVERT}"),
        (
            not kind or (not is_true("BinaryData") and "BinaryData" in fields),
            f"holds numbers as text, or of an unknown type, {_CONVERT}",
        ),
    )
    sizes = [int(n) for n in fields["DimSize"].split()]
    shape, count = volume_shape(path, sizes), len(sizes)
    order = ">" if is_true("BinaryDataByteOrderMSB", "ElementByteOrderMSB") else "<"

    def numbers(names: tuple[str, ...], otherwise: np.ndarray) -> np.ndarray:
        given = next((fields[name] for name in names if name in fields), None)
        return otherwise if given is None else np.array(given.split(), np.float64).reshape(otherwise.shape)

    turn = numbers(("TransformMatrix", "Rotation", "Orientation"), np.eye(count))
    spacing = numbers(("ElementSpacing", "ElementSize"), np.ones(count))
    check_spacing(path, "ElementSpacing", spacing.tolist(), _SPACED)
    return _Layout(
        np.dtype(order + kind),
        Grid(shape, _affine(turn * spacing[:, None], numbers(("Offset", "Position", "Origin"), np.zeros(count)))),
        lines.tell(),
        is_true("CompressedData"),
    )


def _read_nrrd(path: Path, head: bytes) -> _Layout:
    """Return the layout from the header of a NRRD (teem.sourceforge.net/nrrd/format.html)."""
    end = re.search(rb"\r?\n\r?\n", head)
    pairs = (
        line.partition(":")
        for line in head[: end.start() if end else None].decode("latin-1").splitlines()[1:]
        if not line.startswith("#")
    )
    fields = {name.strip().lower(): value.strip() for name, _, value in pairs if not value.startswith("=")}
    raise_first_fault(path, (bool({"data file", "datafile"} & fields.keys()), f"has its voxels in another file, {_CONVERT}"))
    if end is None:
        raise DataError(f"{path}: {_UNREADABLE} (its header has no end); {TAKE_OFF}")
    kind = next((kind for kind, names in _NRRD_TYPES.items() if fields["type"].lower() in names), "")
    encoding = fields["encoding"].lower()
    skips = {fields.get(name, "0") for name in ("line skip", "lineskip", "byte skip", "byteskip")}
    raise_first_fault(
        path,
        (
            not kind or encoding not in ("raw", "gzip", "gz") or skips != {"0"},
            f"holds {fields['type']} in encoding {encoding}, {_CONVERT}",
        ),
    )
    sizes = [int(n) for n in fields["sizes"].split()]
    shape, order = volume_shape(path, sizes), ">" if fields.get("endian", "little").lower() == "big" else "<"
    several = any(
        size > 1 and kind not in _SPATIAL for size, kind in zip(sizes, fields.get("kinds", "").lower().split(), strict=False)
    )
    several = several or "none" in fields.get("space directions", "").lower().split()[:3]
    raise_first_fault(path, (several, f"holds several values a voxel, {_CONVERT}"))
    affine = None
    if "space directions" in fields:
        space = fields.get("space", "lps" if "space dimension" in fields else "").lower()  # as ITK reads it
        raise_first_fault(path, (space not in _SPACES, f"lies in a space that is not the patient's, {_CONVERT}"))
        steps = _read_vectors(fields["space directions"])
        origin = _read_vectors(fields.get("space origin", "(0,0,0)"))[0]
        check_spacing(path, "the length of its space directions", np.linalg.norm(steps, axis=1).tolist(), _SPACED)
        if steps.shape == (2, 3):  # a plane in space: its third step is perpendicular, of 1 mm
            steps = np.vstack([steps, np.cross(*steps) / np.linalg.norm(np.cross(*steps))])
        affine = _affine(steps, origin, _SPACES[space])
    elif "spacings" in fields:
        spacing = np.array(fields["spacings"].split(), np.float64)
        check_spacing(path, "spacings", spacing.tolist(), _SPACED)
        affine = _affine(np.diag(spacing), np.zeros(len(sizes)))
    return _Layout(np.dtype(order + kind), Grid(shape, affine), end.end(), encoding != "raw")


def _read_vectors(text: str) -> np.ndarray:
    return np.array([one.split(",") for one in re.findall(r"\(([^)]*)\)", text)], np.float64)
