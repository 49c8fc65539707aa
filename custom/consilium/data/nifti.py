"""Volumes in NIfTI."""

import gzip
import struct
from math import prod
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from nibabel.volumeutils import apply_read_scaling

from consilium.core.errors import DataError
from consilium.data.grid import Grid, check_spacing, disagreement
from consilium.data.labels import Labels
from consilium.data.pixel_values import whole_numbers
from consilium.data.safe_open import MOST_VOLUME_FILE, most_unpacked, reading
from consilium.data.volumes import Header

MILLIMETRES = {"meter": 1e3, "mm": 1.0, "micron": 1e-3}
"""Of the units of length that a header may name."""
MOST_EXTENSIONS = 2**26
"""Bytes of a header's extensions, which lie before the voxels and are read with the header."""
CIFTI = range(3000, 3100)
"""Intents of files that hold no voxels."""
_HEADERS = {348: (nibabel.Nifti1Image, 108, "f"), 540: (nibabel.Nifti2Image, 168, "q")}
"""By the header's size: nibabel's class, and offset and format of the field that says where voxels begin."""


def header(path: Path) -> Header:
    """Return the grid of a volume of two or three dimensions. Raises DataError."""
    with reading(path, "cannot be read as NIfTI", most=MOST_VOLUME_FILE):
        volume = load(path)
        unit = MILLIMETRES.get(volume.header.get_xyzt_units()[0], 1.0)  # an unnamed unit is millimetres
        to_mm = np.diag([unit, unit, unit, 1.0])
        own, other = (Grid(_shape(path, volume), to_mm @ affine) for affine in _affines(volume))
        return Header(own, second=other if disagreement(own, other) else None)


def _affines(volume: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return nibabel's affine (4, 4), by the sform where there is one, and that by a qform beside it, else the same again."""
    own, both = np.asarray(volume.affine, np.float64), min(int(volume.header[f"{kind}form_code"]) for kind in "sq") > 0
    return own, np.asarray(volume.header.get_qform(), np.float64) if both else own


def voxels(path: Path) -> np.ndarray:
    """Return real numbers (i, j, k): float32 where the header scales them, else the file's own type. Raises DataError."""
    with reading(path, "cannot be read as NIfTI", most=MOST_VOLUME_FILE):
        volume = load(path)
        data = _scaled(volume.dataobj) if _is_scaled(volume) else np.asarray(volume.dataobj)
        return data.reshape(_shape(path, volume))


def _scaled(stored: Any) -> np.ndarray:
    """Return stored values in their unit, in float32; nibabel itself makes all of them float64 first."""
    raw = stored.get_unscaled()
    found = np.empty(raw.shape, np.float32, order="F")
    for k in range(raw.shape[-1]):
        found[..., k] = apply_read_scaling(raw[..., k], stored.slope, stored.inter)
    return found


def labels(path: Path, image: Header) -> Labels:
    """Return the label values on the file's own grid (i, j, k). Raises DataError for values that are not whole numbers."""
    return Labels(values=whole_numbers(path, voxels(path)))


def load(path: Path) -> Any:
    """Return a NIfTI volume of nibabel's, whose voxels are not yet read. Use within `reading`.

    Raises DataError for one without voxels, whose voxels have no size, or that asks for more memory than its size allows.
    """
    with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
        head = file.read(max(_HEADERS))
    order = next((order for order in "<>" if len(head) > 4 and struct.unpack_from(f"{order}i", head)[0] in _HEADERS), None)
    if order is None:
        raise ValueError("no header of NIfTI")
    kind, at, form = _HEADERS[size := struct.unpack_from(f"{order}i", head)[0]]
    if (before := int(struct.unpack_from(order + form, head, at)[0])) > MOST_EXTENSIONS:
        raise DataError(f"{path}: has {before:,} bytes before its voxels, at most {MOST_EXTENSIONS:,} are read; write it anew")
    stored = kind.header_class(head[:size], check=False)  # nibabel's checked header has 1 for a zero, 2 for -2
    sides = [float(side) for side, count in zip(stored["pixdim"][1:4], stored["dim"][1:4], strict=True) if count > 1]
    check_spacing(path, "pixdim", sides, "write it anew: nibabel.Nifti1Image(image.dataobj, AFFINE).to_filename(NEW)")
    volume = kind.from_filename(path)
    _check_size(path, volume)
    return volume


def _check_size(path: Path, volume: Any) -> None:
    """Raise DataError for a volume without voxels, or that takes more memory than a file of its size may."""
    each = volume.get_data_dtype().itemsize + 4 * _is_scaled(volume)
    needed, most = prod(volume.shape) * each, most_unpacked(path.stat().st_size)
    if min(volume.shape, default=0) < 1 or needed > most:
        found = f"{'x'.join(map(str, volume.shape))} voxels, {needed:,} bytes; at most {most:,} are of a file of its size"
        raise DataError(f"{path}: cannot be read as NIfTI ({found}); cut it into smaller ones", "too large")


def _is_scaled(volume: Any) -> bool:
    return (volume.dataobj.slope, volume.dataobj.inter) != (1.0, 0.0)  # nibabel takes both off the header that it returns


def _shape(path: Path, volume: Any) -> tuple[int, int, int]:
    """Return the three dimensions; further ones may only be 1."""
    shape = tuple(int(n) for n in volume.shape)
    if int(volume.header["intent_code"]) in CIFTI:
        raise DataError(f"{path}: is CIFTI, values on a surface and not of voxels; give a volume", "not three dimensions")
    if len(shape) < 2 or any(n != 1 for n in shape[3:]):
        what = f"has {len(shape)} dimensions, {'x'.join(map(str, shape))}"
        raise DataError(f"{path}: {what}; save its sequences or times as volumes of three", "not three dimensions")
    i, j, k = (*shape, 1)[:3]
    return i, j, k
