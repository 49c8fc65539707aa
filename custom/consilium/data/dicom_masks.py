"""Masks in DICOM: segmentations, contours, and images whose values are labels."""

from pathlib import Path

from consilium.data.dicom_pixels import voxels
from consilium.data.labels import Labels
from consilium.data.opening import whole_numbers
from consilium.data.volumes import Header


def labels(path: Path, image: Header) -> Labels:
    """Return the labels of a file on the grid of `image` (i, j, k). Raises DataError."""
    return Labels(values=whole_numbers(path, voxels(path, padding=True)))
