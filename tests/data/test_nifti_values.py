"""Scaled and smoothed masks, and NIfTI files whose qform and sform disagree. Grids and values are worked by hand."""

import json
from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from consilium.cli.data_lists import _check_data_set, find_data_sets
from consilium.data import volumes
from consilium.data.check import check_datalist
from consilium.data.check_report import Findings
from consilium.data.datalist import Item
from consilium.data.pixel_values import is_anti_aliased
from consilium.data.settings import DEFAULTS
from consilium.report.page.data_pages import read_picture_or_plane
from tests.data.importing import read_mask

LESION = {"lesion": [1]}
SFORM = np.diag([-1.0, 2.0, 3.0, 1.0])
QFORM = np.array([[1.0, 0, 0, 50], [0, 2, 0, 0], [0, 0, 3, 0], [0, 0, 0, 1]])


def volume(path: Path, values: np.ndarray, qform: np.ndarray | None, sform: np.ndarray | None) -> Path:
    """Write a NIfTI file with one or two places; None: none of this kind (code 0)."""
    made = nibabel.Nifti1Image(values, None)
    made.set_qform(qform, 0 if qform is None else 1)
    made.set_sform(sform, 0 if sform is None else 2)
    nibabel.save(made, path)
    return path


def mask() -> np.ndarray:
    found = np.zeros((6, 5, 4), np.uint8)
    found[:2] = 1
    return found


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site whose image and mask have the same two places: the sform lies to the left, the qform to the right."""
    values = np.random.default_rng(0).integers(0, 1000, (6, 5, 4)).astype(np.int16)
    volume(tmp_path / "image.nii", values, QFORM, SFORM)
    volume(tmp_path / "mask.nii", mask(), QFORM, SFORM)
    (tmp_path / "datalist.json").write_text(json.dumps({"training": [{"image": "image.nii", "label": "mask.nii"}]}))
    return tmp_path


def checked(site: Path) -> Findings:
    return _check_data_set(next(iter(find_data_sets(site).values())), None, None)


def test_an_image_of_two_places_is_named_and_neither_is_advised(site: Path) -> None:
    (line,) = checked(site).problems["qform and sform disagree"]
    assert "image.nii: its qform and its sform give its voxels two places (its corners lie 60.0 mm apart)" in line
    assert "nifti_affine: qform or nifti_affine: sform into site.yaml" in line


@pytest.mark.parametrize(("chosen", "affine"), [("sform", SFORM), ("qform", QFORM)])
@pytest.mark.parametrize(
    "form", ["nifti_affine: {}\ndatalist: datalist.json", "datasets: {{a: {{datalist: datalist.json, nifti_affine: {}}}}}"]
)
def test_site_yaml_chooses_for_image_and_mask(chosen: str, affine: np.ndarray, form: str, site: Path) -> None:
    (site / "site.yaml").write_text(form.format(chosen))
    assert not checked(site).problems
    image = volumes.header(site / "image.nii", chosen)
    assert np.array_equal(image.grid.affine, affine)
    assert np.array_equal(volumes.labels(site / "mask.nii", image).values, mask())


def test_a_mask_of_two_places_is_named_as_well(site: Path) -> None:
    volume(site / "image.nii", np.arange(120, dtype=np.int16).reshape(6, 5, 4), None, SFORM)
    (line,) = checked(site).problems["qform and sform disagree"]
    assert "mask.nii: its qform and its sform" in line
    assert "resample" not in line


def test_the_other_code_set_to_0_ends_the_conflict(site: Path) -> None:
    for name in ("image.nii", "mask.nii"):
        made = nibabel.load(site / name)
        volume(site / name, np.asarray(made.dataobj), None, SFORM)
    assert not checked(site).problems


def test_rounded_and_single_places_are_no_conflict(tmp_path: Path) -> None:
    close = SFORM + 1e-3
    for number, (qform, sform) in enumerate(
        [(None, SFORM), (SFORM, None), (None, None), (SFORM, np.vstack([close[:3], SFORM[3]]))]
    ):
        assert volumes.header(volume(tmp_path / f"{number}.nii", mask(), qform, sform)).second is None


@pytest.mark.parametrize(
    ("slope", "intercept", "stored", "wanted"),
    [(1 / 255, 0, 255, 1), (10 / 255, 0, 255, 10), (0.5, -1, 4, 1), (0.9999, 0, 1, 1)],
)
def test_labels_of_a_scaled_mask_are_whole(slope: float, intercept: float, stored: int, wanted: int, tmp_path: Path) -> None:
    made = nibabel.Nifti1Image(np.full((3, 3, 1), stored, np.uint8), np.eye(4))
    made.header.set_slope_inter(slope, intercept)
    nibabel.save(made, tmp_path / "m.nii")
    assert (read_mask(tmp_path / "m.nii") == wanted).all()


@pytest.mark.parametrize(
    "smooth", [lambda m: m.filter(ImageFilter.GaussianBlur(1)), lambda m: m.resize((90, 90), Image.Resampling.BICUBIC)]
)
def test_a_smoothed_mask_is_called_that_and_its_remedy_ends_it(
    smooth: Callable[[Image.Image], Image.Image], tmp_path: Path
) -> None:
    drawn = Image.new("L", (64, 64))
    ImageDraw.Draw(drawn).ellipse((12, 20, 50, 44), fill=255)
    smoothed = smooth(drawn)
    smoothed.save(tmp_path / "m.png")
    Image.effect_noise(smoothed.size, 50).save(tmp_path / "i.png")
    (tmp_path / "list.json").write_text(json.dumps({"training": [{"image": "i.png", "label": "m.png"}]}))
    (line,) = check_datalist(tmp_path / "list.json", {"cell": [255]}).problems["mask with smoothed edges"]
    assert "m.png: mask is anti-aliased" in line
    assert "save label values, by the nearest voxel" in str(
        check_datalist(tmp_path / "list.json").warnings["mask with smoothed edges"]
    )
    drawn.resize(smoothed.size, Image.Resampling.NEAREST).save(tmp_path / "m.png")
    assert not check_datalist(tmp_path / "list.json", {"cell": [255]}).problems


def test_labels_that_nobody_declared_are_no_smoothed_edges() -> None:
    values = np.kron(np.arange(1, 10).reshape(3, 3), np.ones((6, 6), int)).astype(np.uint8)
    assert not is_anti_aliased(values, {0, 1, 9})
    assert not is_anti_aliased(np.eye(8, dtype=np.uint8) * 2, {0, 1})


def test_pictures_of_reports_are_cut_as_the_list_says(site: Path) -> None:
    item = Item(site / "image.nii", None, axis="coronal", affine="qform")
    found = read_picture_or_plane(item, DEFAULTS)
    assert found is not None
    assert found.shape == (4, 6, 3)  # heights by columns from right to left
