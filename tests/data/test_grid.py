"""Planes of volumes, whatever way a file lies. Expected pictures come from where the voxels lie in the patient."""

import json
from itertools import permutations, product
from pathlib import Path

import nibabel
import numpy as np
import pytest
from nibabel.processing import resample_from_to

from consilium.data import volumes
from consilium.data.check_samples import check_sample
from consilium.data.datalist import DataList, Item, read_datalist
from consilium.data.grid import Grid, grid_difference, resample_labels
from consilium.data.images import read_image, read_labels, read_sample
from consilium.data.planes_and_tiles import expand
from consilium.data.settings import Axis, PictureSettings
from tests.conftest import refused

ORIENTATIONS = [
    "".join(code)
    for letters in permutations(("RL", "AP", "SI"))
    for code in product(*letters)
]  # fmt: skip
"""All 48 ways to store a volume."""
SIDE = {"R": 7, "A": 6, "S": 5}
"""Voxels from left to right, from back to front, from feet to head."""


def body() -> np.ndarray:
    """Return a volume (right, front, up) in which every voxel has a value of its own."""
    return np.arange(7 * 6 * 5, dtype=np.uint8).reshape(7, 6, 5)


def stored(orientation: str, tilt: np.ndarray | None = None) -> nibabel.Nifti1Image:
    """Return the body as a file of that orientation holds it; nibabel says where its voxels are."""
    upright = nibabel.Nifti1Image(body(), (np.eye(4) if tilt is None else tilt) @ np.diag([2.0, 3.0, 4.0, 1.0]))
    ours = nibabel.orientations.axcodes2ornt("RAS")
    turn = nibabel.orientations.ornt_transform(ours, nibabel.orientations.axcodes2ornt(orientation))
    return upright.as_reoriented(turn)


def seen(axis: str, number: int) -> np.ndarray:
    """Return the picture that a radiologist sees: patient's right on the left, front or head at the top."""
    r, a, s = SIDE["R"], SIDE["A"], SIDE["S"]
    if axis == "axial":
        rows = [[body()[x, y, number] for x in reversed(range(r))] for y in reversed(range(a))]
    elif axis == "coronal":
        rows = [[body()[x, number, z] for x in reversed(range(r))] for z in reversed(range(s))]
    else:
        rows = [[body()[number, y, z] for y in reversed(range(a))] for z in reversed(range(s))]
    return np.array(rows)


def oblique() -> np.ndarray:
    """Return a rotation by 20 degrees about one axis and 10 about another."""
    c, s = np.cos(np.radians(20)), np.sin(np.radians(20))
    d, t = np.cos(np.radians(10)), np.sin(np.radians(10))
    about_z, about_x = np.eye(4), np.eye(4)
    about_z[:2, :2], about_x[1:3, 1:3] = [[c, -s], [s, c]], [[d, -t], [t, d]]
    return about_z @ about_x


@pytest.mark.parametrize(("orientation", "tilted"), [(one, n % 2 == 0) for n, one in enumerate(ORIENTATIONS)])
def test_a_plane_looks_the_same_however_it_is_stored(orientation: str, tilted: bool) -> None:
    image = stored(orientation, oblique() if tilted else None)
    grid, values = Grid(image.shape, image.affine), np.asarray(image.dataobj)
    axes: tuple[Axis, ...] = ("axial", "coronal", "sagittal")
    for axis, letter in zip(axes, "SAR", strict=True):
        assert grid.plane_count(axis) == SIDE[letter]
        for number in range(SIDE[letter]):
            assert np.array_equal(grid.cut(values, axis, number), seen(axis, number))
    assert grid.pixel("axial") == pytest.approx((3, 2))
    assert grid.pixel("coronal") == pytest.approx((4, 2))
    assert grid.pixel("sagittal") == pytest.approx((4, 3))


@pytest.mark.parametrize("axis", ["stored", "axial", "coronal", "sagittal"])
@pytest.mark.parametrize("orientation", ["RAS", "LPI", "SAL", "PIR"])
def test_what_is_cut_is_put_back(orientation: str, axis: Axis) -> None:
    image = stored(orientation)
    grid, values = Grid(image.shape, image.affine), np.asarray(image.dataobj)
    back = np.zeros_like(values)
    for number in range(grid.plane_count(axis)):
        grid.put(back, axis, number, grid.cut(values, axis, number))
    assert np.array_equal(back, values)


def test_without_a_place_a_plane_is_the_files_rows_and_columns() -> None:
    values = np.arange(24).reshape(4, 3, 2)  # columns, rows, frames, as DICOM counts
    assert np.array_equal(Grid((4, 3, 2)).cut(values, "stored", 1), values[:, :, 1].T)
    assert Grid((4, 3, 2)).pixel("stored") is None


def test_a_mask_must_lie_where_its_image_does() -> None:
    one, moved, turned = np.diag([1.0, 1, 2, 1]), np.diag([1.0, 1, 2, 1]), np.diag([-1.0, 1, 2, 1])
    moved[0, 3] = 0.09
    assert grid_difference(Grid((8, 8, 4), one), Grid((8, 8, 4), moved)) == ""
    moved[0, 3] = 0.11
    assert grid_difference(Grid((8, 8, 4), one), Grid((8, 8, 4), moved)) == "its corners lie 0.1 mm apart"
    assert grid_difference(Grid((8, 8, 4), one), Grid((8, 8, 4), turned)) == "its corners lie 14.0 mm apart"
    assert grid_difference(Grid((8, 8, 4), one), Grid((8, 8, 4), one * 1.1)) != ""
    assert grid_difference(Grid((8, 8, 4), one), Grid((8, 4, 8), one)) == "8x4x8 voxels, not 8x8x4"


def test_resampling_is_nibabels() -> None:
    mask = stored("PIR", oblique())
    wanted = Grid((9, 8, 7), np.diag([1.7, 2.3, 3.1, 1.0]))
    expected = resample_from_to(mask, (wanted.shape, wanted.affine), order=0, mode="constant")
    ours = resample_labels(np.asarray(mask.dataobj), Grid(mask.shape, mask.affine), wanted)
    index = nibabel.affines.apply_affine(
        np.linalg.inv(mask.affine) @ wanted.affine, np.moveaxis(np.indices(wanted.shape), 0, -1)
    )
    between = ((index >= 0) & (index <= np.array(mask.shape) - 1)).all(-1)  # nibabel gives 0 on the outer half of outer voxels
    assert between.sum() > 30
    assert np.array_equal(ours[between], np.asarray(expected.dataobj)[between])
    outside = ((index < -0.5) | (index > np.array(mask.shape) - 0.5)).any(-1)
    assert not ours[outside].any()


def write(folder: Path, image: nibabel.Nifti1Image, name: str = "v.nii.gz") -> Path:
    nibabel.save(image, folder / name)
    return folder / name


def test_a_mask_on_another_grid_is_refused_or_resampled(tmp_path: Path) -> None:
    image = write(tmp_path, stored("RAS"))
    mask = write(tmp_path, stored("LPI"), "m.nii.gz")  # the same body, stored otherwise
    item, classes = Item(image, mask, 2, "axial"), {"all": list(range(1, 256))}
    refused(r"m\.nii\.gz: the mask's grid differs from its image's .*; set task.resample_masks", read_sample, item, classes, 32)
    labels = read_labels(item, PictureSettings(resample_masks=True))
    assert np.array_equal(labels.values, seen("axial", 2))


def listed(folder: Path, *entries: dict[str, object]) -> DataList:
    (folder / "d.json").write_text(json.dumps({"training": list(entries), "test": list(entries)}))
    return read_datalist(folder / "d.json")


def test_a_volume_becomes_its_planes(tmp_path: Path) -> None:
    volume = np.zeros((7, 6, 5), np.uint8)
    volume[2:4, 3, 1:3] = 1
    write(tmp_path, nibabel.Nifti1Image(volume, np.diag([1.0, 1, -3, 1])))
    data = listed(tmp_path, {"image": "v.nii.gz", "label": "v.nii.gz", "patient": 7})
    everything = expand(data, PictureSettings())
    assert [i.slice for i in everything.splits["training"]] == [0, 1, 2, 3, 4]
    assert len({i.patient for i in everything.splits["training"] + everything.splits["test"]}) == 1
    thin = expand(data, PictureSettings.model_validate({"slices": {"axis": "axial", "empty": "drop"}}))
    assert [(i.slice, i.axis) for i in thin.splits["training"]] == [(2, "axial"), (3, "axial")]  # the file counts downwards
    assert len(thin.splits["test"]) == 5
    fewer = expand(data, PictureSettings.model_validate({"slices": {"axis": "sagittal", "every": 3}}))
    assert [i.slice for i in fewer.splits["training"]] == [0, 3, 6]


def test_a_share_of_the_planes_without_labels_stays(tmp_path: Path) -> None:
    volume = np.zeros((4, 4, 400), np.uint8)
    volume[:, :, 100] = 1
    write(tmp_path, nibabel.Nifti1Image(volume, np.eye(4)))
    data = listed(tmp_path, {"image": "v.nii.gz", "label": "v.nii.gz"})
    settings = PictureSettings.model_validate({"slices": {"empty": 0.25}})
    first, again = (expand(data, settings).splits["training"] for _ in range(2))
    assert first == again
    assert 100 in {i.slice for i in first}
    assert 60 < len(first) < 140  # 100 expected; five standard deviations are 43


@pytest.mark.parametrize(("unit", "voxel"), [("micron", 0.002), ("mm", 2.0), ("meter", 2000.0), ("unknown", 2.0)])
def test_a_nifti_s_unit_of_length_counts(unit: str, voxel: float, tmp_path: Path) -> None:
    volume = nibabel.Nifti1Image(np.zeros((3, 4, 5), np.uint8), np.diag([2, 2, 2, 1]))
    volume.header.set_xyzt_units(unit)
    nibabel.save(volume, tmp_path / "v.nii")
    assert volumes.header(tmp_path / "v.nii").grid.voxel == pytest.approx((voxel,) * 3)


def test_an_entrys_own_axis_comes_before_the_jobs(tmp_path: Path) -> None:
    write(tmp_path, stored("SPL"))
    data = listed(tmp_path, {"image": "v.nii.gz", "axis": "coronal"}, {"image": "v.nii.gz"})
    found = expand(data, PictureSettings.model_validate({"slices": {"axis": "axial"}})).splits["test"]
    assert [(i.axis, i.slice) for i in found] == [("coronal", n) for n in range(6)] + [("axial", n) for n in range(5)]
    assert all(np.array_equal(read_image(item)[..., 0], seen(item.axis, item.slice)) for item in found)


def test_a_single_plane_across_the_patients_axis_is_that_plane(tmp_path: Path) -> None:
    thin = np.arange(42, dtype=np.uint8).reshape(1, 6, 7)  # stored from feet to head first, of one voxel
    image = nibabel.Nifti1Image(thin, np.array([[0, 0, 1.0, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]]))
    write(tmp_path, image)
    (item,) = expand(
        listed(tmp_path, {"image": "v.nii.gz"}), PictureSettings.model_validate({"slices": {"axis": "axial"}})
    ).splits["test"]
    assert np.array_equal(read_image(item)[..., 0], thin[0][::-1, ::-1])


def test_the_check_of_data_looks_at_the_planes_that_training_sees(tmp_path: Path) -> None:
    write(tmp_path, stored("SPL"))
    data = listed(tmp_path, {"image": "v.nii.gz", "axis": "coronal"}, {"image": "v.nii.gz"})
    settings = PictureSettings.model_validate({"slices": {"axis": "axial"}})
    found = [check_sample(item, settings, None) for item in data.splits["test"]]
    assert [(one.planes, one.size) for one in found] == [
        (6, "x".join(map(str, seen("coronal", 0).shape[::-1]))),
        (5, "x".join(map(str, seen("axial", 0).shape[::-1]))),
    ]


@pytest.mark.parametrize("orientation", ["RAS", "LPS", "RPS", "ALS", "RAI", "SPL", "ASR"])
def test_a_stored_plane_is_the_files_own(orientation: str) -> None:
    image = stored(orientation)
    grid, values = Grid(image.shape, image.affine), np.asarray(image.dataobj)
    for number in range(grid.plane_count("stored")):
        assert set(grid.cut(values, "stored", number).ravel()) == set(values[:, :, number].ravel())
        if orientation.endswith("S"):  # the patient's right is at the left, however rows and columns are stored
            assert np.array_equal(grid.cut(values, "stored", number), seen("axial", number))
