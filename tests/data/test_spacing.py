"""Voxels whose header gives them a side of zero, below zero or none at all: refused before any distance is in wrong units."""

import gzip
import re
import struct
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from pydicom import config

from consilium.core.errors import DataError
from consilium.data import volumes
from consilium.data.datalist import Item
from consilium.tasks.segmentation.unit_scores import spacing_of
from tests.conftest import refused
from tests.data.dicoms import image, placed, save, stack

WRONG = [0.0, -2.0, float("nan"), float("inf")]
FORMS = [("NIfTI-2", "v.nii", "<"), ("NIfTI-1", "v.nii.gz", "<"), ("NIfTI-1", "v.nii", ">")]
KINDS = {"NIfTI-1": (nibabel.Nifti1Image, 76, "f"), "NIfTI-2": (nibabel.Nifti2Image, 104, "d")}
SHAPE = (6, 5, 3)


def nifti(path: Path, kind: str, codes: tuple[int, int], side: float, shape: tuple[int, ...] = SHAPE, order: str = "<") -> Path:
    """Write a volume of 1 x 1 x 3 mm whose pixdim[3] is then overwritten, as a careless program would."""
    made, offset, form = KINDS[kind]
    image = made(np.arange(np.prod(shape), dtype=np.int16).reshape(shape), np.diag([1, 1, 3, 1.0]))
    if order == ">":
        image = made(image.dataobj, image.affine, image.header.as_byteswapped(">"))
    image.set_qform(image.affine, codes[0])
    image.set_sform(image.affine, codes[1])
    raw = bytearray(image.to_bytes())
    struct.pack_into(order + form, raw, offset + 3 * struct.calcsize(form), side)
    path.write_bytes(gzip.compress(bytes(raw)) if path.suffix == ".gz" else bytes(raw))
    return path


@pytest.mark.parametrize("side", WRONG)
@pytest.mark.parametrize("codes", [(1, 0), (0, 1), (1, 1), (0, 0)], ids=["qform", "sform", "both", "neither"])
def test_a_nifti_s_side_that_is_no_size_is_refused(side: float, codes: tuple[int, int], tmp_path: Path) -> None:
    """nibabel would take 1 mm for 0 and 2 mm for -2, and not say so."""
    with pytest.raises(
        DataError, match=rf"v\.nii: pixdim is 1 x 1 x {side:g}, and a voxel's sides are over 0 mm; write it anew"
    ):
        volumes.header(nifti(tmp_path / "v.nii", "NIfTI-1", codes, side))


@pytest.mark.parametrize(("kind", "name", "order"), FORMS)
def test_every_form_of_nifti_is_checked(kind: str, name: str, order: str, tmp_path: Path) -> None:
    refused(r"pixdim is 1 x 1 x 0,", volumes.voxels, nifti(tmp_path / name, kind, (1, 1), 0.0, order=order))
    found = volumes.header(nifti(tmp_path / f"good-{name}", kind, (1, 1), 3.0, order=order))
    assert found.grid.voxel == pytest.approx((1, 1, 3))


def test_a_direction_of_one_voxel_needs_no_size(tmp_path: Path) -> None:
    """A picture saved as a volume of one plane often has 0 there."""
    path = nifti(tmp_path / "v.nii", "NIfTI-1", (1, 1), 0.0, (6, 5, 1))
    assert volumes.header(path).grid.pixel("stored") == pytest.approx((1, 1))


def test_the_remedies_that_the_errors_name_work(tmp_path: Path) -> None:
    path, new = nifti(tmp_path / "v.nii", "NIfTI-1", (1, 0), 0.0), tmp_path / "new.nii"
    with pytest.raises(DataError) as error:
        volumes.header(path)
    call = re.search(r"nibabel\.Nifti1Image\(image\.dataobj, AFFINE\)\.to_filename\(NEW\)", str(error.value))
    assert call
    eval(call[0], {"nibabel": nibabel, "image": nibabel.load(path), "AFFINE": np.diag([1, 1, 3, 1.0]), "NEW": new})
    assert volumes.header(new).grid.voxel == pytest.approx((1, 1, 3))
    made = placed(np.zeros((4, 4), np.int16), (0, 0, 0), PixelSpacing=[0.5, 0])
    refused(r"PixelSpacing is 0\.5 x 0, .*; set the scanner's in the file", volumes.header, save(made, tmp_path / "a.dcm"))
    made.PixelSpacing = [0.5, 0.5]
    assert volumes.header(save(made, tmp_path / "b.dcm")).grid.pixel("stored") == pytest.approx((0.5, 0.5))


@pytest.mark.parametrize(
    ("where", "more", "said"),
    [
        (placed, {"PixelSpacing": [0, 0]}, "PixelSpacing is 0 x 0"),
        (placed, {"PixelSpacing": [-0.7, 0.7]}, r"PixelSpacing is -0\.7 x 0\.7"),
        (placed, {"PixelSpacing": ["NaN", "1"]}, "PixelSpacing is nan x 1"),
        (placed, {"SliceThickness": "inf"}, "SpacingBetweenSlices or SliceThickness is inf"),
        (image, {"PixelSpacing": [0, 1]}, "PixelSpacing is 0 x 1"),
    ],
)
def test_a_dicom_s_spacing_that_is_no_size_is_refused(where: Any, more: dict[str, Any], said: str, tmp_path: Path) -> None:
    place = () if where is image else ((0, 0, 0),)
    made = where(np.zeros((4, 4), np.int16), *place)
    with config.disable_value_validation():
        for keyword, value in more.items():
            setattr(made, keyword, value)
    refused(said, volumes.header, save(made, tmp_path / "a.dcm"))


def test_a_dicom_picture_without_a_place_has_its_pixels_size(tmp_path: Path) -> None:
    """A radiograph: 0.2 mm between rows and 0.3 mm between columns, and no position. Distances of its masks are in mm."""
    made = image(np.zeros((4, 6), np.int16), PixelSpacing=[0.2, 0.3])
    grid = volumes.header(save(made, tmp_path / "a.dcm")).grid
    assert (grid.voxel, grid.pixel("stored")) == (None, (0.2, 0.3))
    assert spacing_of(Item(tmp_path / "a.dcm", None), (8, 3)) == pytest.approx((1, 0.1, 0.6))


def test_one_wrong_file_of_a_series_is_named(tmp_path: Path) -> None:
    made = stack(tmp_path / "s", np.zeros((3, 4, 4), np.int16))
    made[1].PixelSpacing = [0, 0]
    made[1].save_as(sorted((tmp_path / "s").iterdir())[1], enforce_file_format=True)
    refused(r"\.dcm: PixelSpacing is 0 x 0", volumes.header, tmp_path / "s")
