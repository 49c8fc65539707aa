"""Volumes in DICOM: one file, several frames in one file, or a folder that holds a series.

The reading itself is in files.py (files), frames.py (where frames lie), pixels.py (values) and
masks.py (segmentations, contours). They need the extra `dicom`; knowing a DICOM file when one sees it does not.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from consilium.core.errors import DataError
from consilium.data.labels import Labels
from consilium.data.volumes import Header


def header(path: Path) -> Header:
    """Return the header of a file, a series or a segmentation: its grid, window and identifiers. Raises DataError."""
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
        raise DataError(f"{path}: is DICOM; install consilium-flare[dicom] to read it") from None
