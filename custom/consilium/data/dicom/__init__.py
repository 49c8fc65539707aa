"""Volumes in DICOM: one file, several frames in one file, or a folder that holds a series.

The reading itself is in files.py (files), frames.py (where frames lie), pixels.py (values) and
masks.py (segmentations, contours). They need the extra `dicom`; knowing a DICOM file when one sees it does not.
"""

from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from consilium.core.errors import DataError
from consilium.data.labels import Labels
from consilium.data.volumes import Header

SUFFIXES = (".dcm", ".dicom")
"""What files without the usual first bytes are called."""
MOST_FILES = 20_000
"""Files of a folder, and frames of a series."""


def is_own(path: Path) -> bool:
    """Tell whether a path is a DICOM file, by how it starts or by its name, or a folder with such a file in it."""
    try:
        return any(map(_is_file, islice(path.iterdir(), MOST_FILES))) if path.is_dir() else _is_file(path)
    except (OSError, ValueError):
        return False


def header(path: Path) -> Header:
    """Return where a file's or a series' voxels lie, and whose they are; of a segmentation, its own. Raises DataError."""
    found: Header = _part(path, "frames").header(path)
    return found


def voxels(path: Path) -> np.ndarray:
    """Return values (i, j, k) of columns, rows and slices, rescaled, or colours (i, j, k, 3) of 8 bits. Raises DataError."""
    found: np.ndarray = _part(path, "pixels").voxels(path)
    return found


def labels(path: Path, image: Header) -> Labels:
    """Return the regions of a DICOM-SEG or an RTSTRUCT, or the label values of an image (i, j, k). Raises DataError."""
    found: Labels = _part(path, "masks").labels(path, image)
    return found


def _part(path: Path, name: str) -> Any:
    try:
        return import_module(f"consilium.data.dicom.{name}")
    except ModuleNotFoundError:
        raise DataError(f"{path}: is DICOM; install consilium[dicom] to read it") from None


def _is_file(path: Path) -> bool:
    if not path.is_file():  # a pipe would never end
        return False
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM" or path.name.lower().endswith(SUFFIXES)
