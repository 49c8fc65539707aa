"""Importers of MRI volumes on tiny sets in their published layouts."""

import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest

from consilium.data.datalist import pseudonym
from consilium.data.images import read_image
from tests.conftest import refused
from tests.data.importing import RNG, SIZE, check_repeats, groups_apart, import_set, items_of, read_mask, run_import, splits_of

LPS = np.diag([-1.0, -1, 1, 1])


def volume(path: Path, array: np.ndarray, affine: np.ndarray = LPS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(array, affine), path)


def prostate(planes: dict[int, int]) -> np.ndarray:
    """Return a mask of 5 planes with a rectangle of the value given on some."""
    array = np.zeros((*SIZE, 5), np.uint8)
    for plane, value in planes.items():
        array[2:6, 3:9, plane] = value
    return array


def test_prostate_lists_planes_with_prostate_by_case(tmp_path: Path) -> None:
    source, dest = tmp_path / "prostate", tmp_path / "out"
    for site, ending in (("RUNMC", "segmentation"), ("HK", "Segmentation")):
        for i in range(10):
            volume(source / f"{site}/Case{i:02}.nii.gz", RNG.integers(0, 900, (*SIZE, 5)).astype(np.int16))
            volume(source / f"{site}/Case{i:02}_{ending}.nii.gz", prostate({1: 1, 2: 2, 3: 1}))
    found = run_import("prostate", source, dest)
    assert found["sites"] == {s: {"training": 21, "validation": 3, "test": 6} for s in ("hk", "runmc")}
    assert found["notes"] == ["not there: BMC, I2CVB, UCL, BIDMC"]
    for site in ("hk", "runmc"):
        assert groups_apart(splits_of(dest, site), lambda item: item.image.name)
        assert {item.slice for item in items_of(dest, site)} == {1, 2, 3}
        assert all(read_mask(item.label, item.slice).any() for item in items_of(dest, site))
    assert not (dest / "hk/masks").exists()


def test_prostate_under_the_names_of_fedfms(tmp_path: Path) -> None:
    source, dest = tmp_path / "Prostate", tmp_path / "out"
    for site in ("ISBI", "ISBI_1.5"):
        for i in range(5):
            volume(source / f"{site}/Case{i:02}.nii.gz", RNG.integers(0, 900, (*SIZE, 5)).astype(np.int16))
            volume(source / f"{site}/Case{i:02}_segmentation.nii.gz", prostate({1: 1, 2: 1}))
        (source / site / "._Case00.nii.gz").write_bytes(b"\0")
    for i in range(5):
        volume(source / f"ucl/images/Case{i:02}.nii.gz", RNG.integers(0, 900, (*SIZE, 5)).astype(np.int16))
        volume(source / f"ucl/labels/Case{i:02}.nii.gz", prostate({4: 1}))
    found = run_import("prostate", source, dest)
    assert found["sites"]["runmc"] == found["sites"]["bmc"] == {"training": 6, "validation": 2, "test": 2}
    assert found["sites"]["ucl"] == {"training": 3, "validation": 1, "test": 1}
    assert found["notes"] == ["ISBI is RUNMC", "ISBI_1.5 is BMC", "not there: I2CVB, BIDMC, HK"]
    assert {item.image.parent.name for item in items_of(dest, "bmc")} == {"ISBI_1.5"}
    assert {(item.image.parent.name, item.label.parent.name) for item in items_of(dest, "ucl")} == {("images", "labels")}
    assert {item.patient for item in items_of(dest, "ucl")} == {pseudonym(f"case0{i}") for i in range(5)}
    (source / "ucl/labels/Case03.nii.gz").unlink()
    asked = import_set, "prostate", source, tmp_path / "bad"
    refused(r"images/Case03\.nii\.gz: expected its _segmentation\.nii\.gz beside it, or", *asked)
    volume(source / "RUNMC/Case00.nii.gz", RNG.integers(0, 900, (*SIZE, 5)).astype(np.int16))
    refused(r"ISBI: is RUNMC by another name; found .*RUNMC too; keep one of the two", *asked)


def test_prostate_mask_with_another_header_is_written_in_the_images_order(tmp_path: Path) -> None:
    source, dest = tmp_path / "prostate", tmp_path / "out"
    lit = prostate({0: 1, 3: 1})
    volume(source / "UCL/Case00.nii.gz", lit.astype(np.int16) * 800 + 5)
    volume(source / "UCL/Case00_segmentation.nii.gz", lit, np.diag([1.0, -1, -1, 1]))
    run_import("prostate", source, dest)
    items = items_of(dest, "ucl")
    assert [item.slice for item in items] == [0, 3]
    assert items[0].label == dest / "ucl/masks/case00.nii.gz"
    for item in items:
        assert np.array_equal(read_mask(item.label, item.slice) == 1, read_image(item)[..., 0] > 128)


def test_prostate_broken(tmp_path: Path) -> None:
    volume(tmp_path / "s/BMC/Case03.nii.gz", np.zeros((4, 4, 2), np.int16))
    asked = import_set, "prostate", tmp_path / "s", tmp_path / "out"
    refused(r"Case03\.nii\.gz: expected its _segmentation\.nii\.gz beside it", *asked)
    volume(tmp_path / "s/BMC/Case03_Segmentation.nii.gz", np.zeros((4, 4, 3), np.uint8))
    refused(r"expected the 3-D shape of Case03\.nii\.gz \(4, 4, 2\); found \(4, 4, 3\)", *asked)
    (tmp_path / "empty").mkdir()
    refused(r"expected folders RUNMC, .*; found nothing", import_set, "prostate", tmp_path / "empty", tmp_path / "out")


@pytest.fixture
def hearts(tmp_path: Path) -> Path:
    source = tmp_path / "mnms"
    rows = [",External code,VendorName,Vendor,Centre,ED,ES"]
    for number, (vendor, letter) in enumerate([("Siemens", "A")] * 10 + [("GE", "C")] * 2):
        code = f"A{number:02}Z9"
        part = "Training/Unlabeled" if number == 11 else "Training/Labeled"
        rows.append(f"{number},{code},{vendor},{letter},1,0,2")
        frames = RNG.integers(0, 900, (*SIZE, 3, 4)).astype(np.int16)
        truth = np.zeros((*SIZE, 3, 4), np.uint8)
        if number != 11:
            truth[2:10, 2:10, 1, [0, 2]], truth[4:7, 4:7, 1, [0, 2]], truth[1, 1, 2, 2] = 2, 1, 3
        volume(source / f"{part}/{code}/{code}_sa.nii.gz", frames)
        volume(source / f"{part}/{code}/{code}_sa_gt.nii.gz", truth)
    rows.append("12,Z9Z9Z9,Canon,D,5,0,7")
    (source / "211230_information.csv").write_text("\n".join(rows))
    return source


def test_mnms_frames_of_both_phases_by_vendor(hearts: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    found = run_import("mnms", hearts, dest)
    assert found["sites"] == {
        "ge": {"training": 3, "validation": 0, "test": 0},
        "siemens": {"training": 21, "validation": 3, "test": 6},
    }
    assert found["notes"] == ["1 cases without labels are left out", "1 cases of 211230_information.csv have no volume there"]
    assert groups_apart(splits_of(dest, "siemens"), lambda item: item.image.name[:5])
    item = next(one for one in items_of(dest, "siemens") if one.name == "A03Z9_ES.nii.gz[1]")
    original = nibabel.load(hearts / "Training/Labeled/A03Z9/A03Z9_sa.nii.gz")
    assert np.array_equal(np.asarray(nibabel.load(item.image).dataobj), np.asarray(original.dataobj)[..., 2])
    values = read_mask(item.label, item.slice)
    assert [int((values == v).sum()) for v in (1, 2, 3)] == [9, 55, 0]


def test_mnms_broken(hearts: Path, tmp_path: Path) -> None:
    table = hearts / "211230_information.csv"
    text = table.read_text()
    table.write_text(text.replace("3,A03Z9,Siemens,A,1,0,2", "3,A03Z9,Siemens,A,1,0,9"))
    refused(r"A03Z9_sa\.nii\.gz: expected its ES frame within 0\.\.3; found '9'", import_set, "mnms", hearts, tmp_path / "out")
    table.write_text(text.replace("3,A03Z9,Siemens,A,1,0,2\n", ""))
    refused(r"expected its code in 211230_information\.csv; found no row A03Z9", import_set, "mnms", hearts, tmp_path / "out")
    table.unlink()
    refused(r"expected a \*\.csv with 'External code'.*found Training/", import_set, "mnms", hearts, tmp_path / "out")


def test_written_frames_are_the_same_bytes_every_time(hearts: Path, tmp_path: Path) -> None:
    for case in sorted((hearts / "Training/Labeled").iterdir())[2:]:
        shutil.rmtree(case)
    check_repeats("mnms", hearts, tmp_path)
