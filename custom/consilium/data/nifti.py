"""Reader of volumes in NIfTI."""

import gzip
import struct
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from nibabel.volumeutils import apply_read_scaling

from consilium.core.errors import DataError
from consilium.data.grid import Grid, check_spacing, grid_difference
from consilium.data.safe_open import MOST_VOLUME_FILE, check_unpacked, volume_shape, wrap_decoding_errors
from consilium.data.volumes import VolumeHeader

MILLIMETRES = {"meter": 1e3, "mm": 1.0, "micron": 1e-3}
"""Millimetres per unit of length that a header may name."""
MOST_EXTENSIONS = 2**26
"""Bytes of a header's extensions, which precede the voxels and are read with the header."""
CIFTI = range(3000, 3100)
"""Intent codes of CIFTI files, which hold no voxels."""
_HEADERS = {348: (nibabel.Nifti1Image, 108, "f"), 540: (nibabel.Nifti2Image, 168, "q")}
"""By the header's size: nibabel's class, and the offset and format of the field vox_offset, where voxels begin."""


def header(path: Path) -> VolumeHeader:
    """Return the header of a volume of two or three dimensions. Raises DataError."""
    with wrap_decoding_errors(path, "cannot be read as NIfTI", most=MOST_VOLUME_FILE):
        volume = load(path)
        unit = MILLIMETRES.get(volume.header.get_xyzt_units()[0], 1.0)  # an unnamed unit is millimetres
        to_mm = np.diag([unit, unit, unit, 1.0])
        own = Grid(_volume_shape(path, volume), to_mm @ np.asarray(volume.affine, np.float64))  # the sform, if there is one
        if min(int(volume.header[f"{kind}form_code"]) for kind in "sq") < 1:
            return VolumeHeader(own)
        other = Grid(own.shape, to_mm @ np.asarray(volume.header.get_qform(), np.float64))
        return VolumeHeader(own, second=other if grid_difference(own, other) else None)


def voxels(path: Path) -> np.ndarray:
    """Return real numbers (i, j, k): float32 if the header scales them, else of the file's type. Raises DataError."""
    with wrap_decoding_errors(path, "cannot be read as NIfTI", most=MOST_VOLUME_FILE):
        volume = load(path)
        if not _is_scaled(volume):
            return np.asarray(volume.dataobj).reshape(_volume_shape(path, volume))
        raw = volume.dataobj.get_unscaled()
        found = np.empty(raw.shape, np.float32, order="F")
        for k in range(raw.shape[-1]):  # nibabel would convert all of them to float64 first
            found[..., k] = apply_read_scaling(raw[..., k], volume.dataobj.slope, volume.dataobj.inter)
        return found.reshape(_volume_shape(path, volume))


def load(path: Path) -> Any:
    """Return nibabel's image of a file, whose voxels are not read yet. Use within `wrap_decoding_errors`.

    Raises DataError for a file without voxels, with an invalid voxel size, or whose voxels need more memory than a file of its
    size may take. Raises ValueError if it is no NIfTI.
    """
    with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
        head = file.read(max(_HEADERS))
    order = next((order for order in "<>" if len(head) > 4 and struct.unpack_from(f"{order}i", head)[0] in _HEADERS), None)
    if order is None:
        raise ValueError("no header of NIfTI")
    kind, at, form = _HEADERS[size := struct.unpack_from(f"{order}i", head)[0]]
    if (before := int(struct.unpack_from(order + form, head, at)[0])) > MOST_EXTENSIONS:
        raise DataError(f"{path}: has {before:,} bytes before its voxels, at most {MOST_EXTENSIONS:,} are read; write it anew")
    stored = kind.header_class(head[:size], check=False)  # nibabel's checked header turns 0 into 1, -2 into 2
    sides = [float(side) for side, count in zip(stored["pixdim"][1:4], stored["dim"][1:4], strict=True) if count > 1]
    check_spacing(path, "pixdim", sides, "write it anew: nibabel.Nifti1Image(image.dataobj, AFFINE).to_filename(NEW)")
    volume = kind.from_filename(path)
    check_unpacked(path, volume.shape, volume.get_data_dtype().itemsize + 4 * _is_scaled(volume), "cannot be read as NIfTI")
    return volume


def _is_scaled(volume: Any) -> bool:
    return (volume.dataobj.slope, volume.dataobj.inter) != (1.0, 0.0)  # nibabel removes both from its header


def _volume_shape(path: Path, volume: Any) -> tuple[int, int, int]:
    """Return the shape (i, j, k). Raises DataError for CIFTI, and for a further dimension that is not 1."""
    if int(volume.header["intent_code"]) in CIFTI:
        raise DataError(f"{path}: is CIFTI, values on a surface and not of voxels; give a volume", "not three dimensions")
    return volume_shape(path, volume.shape)
