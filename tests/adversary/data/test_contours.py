"""Outlined structures (RTSTRUCT) that are made to take a site's time: many contours, or edges, over a large picture."""

import time
from pathlib import Path

import nibabel
import numpy as np
import pytest

from consilium.core.errors import DataError
from consilium.data import volumes
from consilium.data.pixel_values import Labels
from tests.data import dicoms  # skips where the extra is missing

from consilium.data.dicom import masks  # isort: skip

SIDE = 2048


def read(folder: Path, contours: list[np.ndarray]) -> Labels:
    """Read a structure of contours (N, 2) on a picture of SIDE x SIDE, which takes a few kB."""
    nibabel.save(nibabel.Nifti1Image(np.zeros((SIDE, SIDE, 1), np.uint8), np.diag([-1, -1, 1, 1])), folder / "image.nii.gz")
    flat = [np.pad(points, ((0, 0), (0, 1))) for points in contours]
    dicoms.save(dicoms.outlines({"a": flat}), folder / "rt")
    return volumes.labels(folder / "rt", volumes.header(folder / "image.nii.gz"))


def square(low: float, high: float) -> np.ndarray:
    return np.array([[low, low], [high, low], [high, high], [low, high]])


def test_contours_over_the_whole_picture_take_their_edges_and_no_plane_each(tmp_path: Path) -> None:
    """One of 6 kB took 10 seconds. Of 75 equal squares, and a smaller one within, the inner points are in an even number."""
    began = time.process_time()
    found = read(tmp_path, [square(0, SIDE - 1)] * 75 + [square(100, 200)]).regions["a"][:, :, 0]
    assert time.process_time() - began < 3
    assert found.sum() == (SIDE - 1) ** 2 - 100**2
    assert not found[100:200, 100:200].any()


def test_edges_across_too_many_lines_are_refused_before_they_are_followed(tmp_path: Path) -> None:
    zigzag = np.stack([np.arange(40_000) % SIDE, np.arange(40_000) % 2 * (SIDE - 1)], axis=1)
    with pytest.raises(
        DataError, match=r"edges that cross 8\d,\d{3},\d{3} lines of voxels, at most 67,108,864 are allowed.*leave structures"
    ):
        read(tmp_path, [zigzag])


def test_too_many_contours_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "MOST_CONTOURS", 99)
    with pytest.raises(DataError, match=r"100 contours, at most 99 are allowed.*leave structures"):
        read(tmp_path, [square(1, 2)] * 100)
