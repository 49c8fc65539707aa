"""Every importer on a tiny set in its published layout: samples open, labels are right, patients stay whole."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image

from consilium.data.check import check_datalist
from consilium.data.datalist import SPLITS, Item, read_datalist
from consilium.data.images import read_image, read_mask
from consilium.data.importers import registry
from consilium.data.importers.base import Found, Options, Reading, mask_png
from consilium.data.importers.classes import KVASIR_CLASSES, OCT_CLASSES
from consilium.data.importers.registry import IMPORTERS, import_set
from consilium.data.partition import partition
from consilium.errors import ConfigError, DataError
from tests.test_cli import run

RNG = np.random.default_rng(0)
SIZE = (12, 16)
"""Rows and columns of the tiny pictures."""


def picture(path: Path) -> Path:
    """Save a picture of noise that is like no other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(RNG.integers(0, 255, (*SIZE, 3), np.uint8)).save(path)
    return path


def mask(path: Path, values: dict[int, tuple[slice, slice]], fill: int = 0) -> Path:
    """Save a grey picture of rectangles, later ones on top."""
    array = np.full(SIZE, fill, np.uint8)
    for value, where in values.items():
        array[where] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)
    return path


OUTER, INNER = (slice(2, 10), slice(2, 10)), (slice(4, 7), slice(4, 7))
"""Two rectangles, of 64 and 9 pixels."""


def run_import(name: str, source: Path, dest: Path, **options: Any) -> dict[str, Any]:
    """Import, then open every sample of every site and find no problem."""
    summary = import_set(name, source, dest, Options(**options))
    classes = summary["classes"]
    for site, counts in summary["sites"].items():
        report = check_datalist(dest / site / "datalist.json", classes)
        assert report.problems == {}
        assert report.samples == counts
    assert json.loads((dest / "import.json").read_text()) == summary
    assert not [p for p in dest.rglob("*") if p.name.startswith(".")]
    return summary


def splits_of(dest: Path, site: str, classes: bool = False) -> dict[str, tuple[Item, ...]]:
    return read_datalist(dest / site / "datalist.json", classes).splits


def items_of(dest: Path, site: str) -> list[Item]:
    return [item for items in splits_of(dest, site).values() for item in items]


def groups_apart(splits: dict[str, tuple[Item, ...]], group: Callable[[Item], str]) -> bool:
    """Tell whether no patient is in two splits."""
    held = [{group(item) for item in splits[split]} for split in SPLITS]
    return not (held[0] & held[1] or held[0] & held[2] or held[1] & held[2])


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# --- pictures


@pytest.fixture
def polyps(tmp_path: Path) -> Path:
    source = tmp_path / "polyps"
    for i in range(10):
        picture(source / f"Kvasir-SEG/Kvasir-SEG/images/cju{i}.jpg")
        mask(source / f"Kvasir-SEG/Kvasir-SEG/masks/cju{i}.jpg", {255: OUTER})
    for i in range(1, 21):
        picture(source / f"CVC-ClinicDB/Original/{i}.tif")
        mask(source / f"CVC-ClinicDB/Ground Truth/{i}.tif", {255: OUTER})
        picture(source / f"CVC-ColonDB/images/{i}.png")
        mask(source / f"CVC-ColonDB/masks/{i}.png", {127: OUTER, 128: INNER})
    rows = [f"{i},{(i + 3) // 4}" for i in range(1, 21)]
    (source / "CVC-ClinicDB/metadata.csv").write_text("\n".join(["frame_id,sequence_id", *rows]))
    return source


def test_polyp_masks_are_converted_only_where_they_must(polyps: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    summary = run_import("polyp", polyps, dest)
    assert summary["sites"] == {
        "kvasir-seg": {"training": 7, "validation": 1, "test": 2},
        "cvc-clinicdb": {"training": 12, "validation": 4, "test": 4},
        "cvc-colondb": {"training": 14, "validation": 2, "test": 4},
    }
    assert summary["notes"] == [
        "cvc-colondb: names no videos, so runs of consecutive frames are kept together",
        "kvasir-seg: names no patients, so one patient's pictures may be in two splits",
    ]
    for item in items_of(dest, "kvasir-seg"):
        assert item.image.parent == polyps / "Kvasir-SEG/Kvasir-SEG/images"
        assert item.label == dest / f"kvasir-seg/masks/{item.image.stem}.png"
        assert np.unique(read_mask(item.label)).tolist() == [0, 255]
    assert {item.label.parent for item in items_of(dest, "cvc-clinicdb")} == {polyps / "CVC-ClinicDB/Ground Truth"}
    assert not (dest / "cvc-clinicdb/masks").exists()
    for item in items_of(dest, "cvc-colondb"):
        assert np.argwhere(read_mask(item.label) == 255).tolist() == [[r, c] for r in range(4, 7) for c in range(4, 7)]


def test_polyp_frames_of_a_video_stay_together(polyps: Path, tmp_path: Path) -> None:
    for seed in range(3):
        run_import("polyp", polyps, tmp_path / str(seed), seed=seed)
        named = splits_of(tmp_path / str(seed), "cvc-clinicdb")
        assert groups_apart(named, lambda item: str((int(item.image.stem) + 3) // 4))
        runs = splits_of(tmp_path / str(seed), "cvc-colondb")
        assert groups_apart(runs, lambda item: str((int(item.image.stem) - 1) // 2))


def test_polyp_set_alone_and_broken(polyps: Path, tmp_path: Path) -> None:
    assert list(run_import("polyp", polyps / "CVC-ColonDB", tmp_path / "one")["sites"]) == ["cvc-colondb"]
    (polyps / "CVC-ColonDB/masks/7.png").unlink()
    with pytest.raises(DataError, match=r"7\.png: expected a mask named 7; found none among 19"):
        import_set("polyp", polyps, tmp_path / "out")
    unknown = (polyps / "Kvasir-SEG/Kvasir-SEG").rename(polyps.parent / "unknown")
    with pytest.raises(DataError, match=r"expected folders Kvasir-SEG .*; found images/, masks/$"):
        import_set("polyp", unknown, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def fundus(tmp_path: Path) -> Path:
    source = tmp_path / "fundus"
    for folder, names in (("Training400/Glaucoma", ["g0001", "n0001"]), ("Val", ["V0001"]), ("Test400", ["T0001"])):
        for name in names:
            picture(source / f"REFUGE/{folder}/{name}.jpg")
            mask(source / f"REFUGE/GT-{folder}/Disc_Cup_Masks/{name}.bmp", {128: OUTER, 0: INNER}, fill=255)
    picture(source / "REFUGE/Disc_Cup_Fovea_Illustration/g0001.jpg")
    for i in range(10):
        picture(source / f"ORIGA/Images/{i:03}.jpg")
        mask(source / f"ORIGA/Masks/{i:03}.png", {1: OUTER, 2: INNER})
        picture(source / f"G1020/Images_Square/image_{i}.jpg")
        mask(source / f"G1020/Masks_Square/image_{i}.png", {1: OUTER})
    for i in range(1, 11):
        part, truth = ("Test", "Test_GT") if i > 8 else ("Training", "GT")
        name = f"drishtiGS_{i:03}"
        picture(source / f"Drishti-GS1_files/{part}/Images/GLAUCOMA/{name}.png")
        soft = source / f"Drishti-GS1_files/{part}/{truth}/{name}/SoftMap"
        mask(soft / f"{name}_ODsegSoftmap.png", {64: (slice(0, 12), slice(0, 12)), 128: OUTER})
        mask(soft / f"{name}_cupsegSoftmap.png", {127: OUTER, 191: INNER})
    return source


def test_fundus_encodings_all_become_rim_and_cup(fundus: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    found = run_import("fundus", fundus, dest)
    assert found["classes"] == {"disc": [1, 2], "cup": [2]}
    assert found["sites"]["refuge"] == {"training": 2, "validation": 1, "test": 1}
    assert found["sites"]["origa"] == found["sites"]["g1020"] == {"training": 7, "validation": 1, "test": 2}
    assert found["sites"]["drishti-gs1"] == {"training": 7, "validation": 1, "test": 2}
    for site, cup in (("refuge", 9), ("origa", 9), ("g1020", 0), ("drishti-gs1", 9)):
        for item in items_of(dest, site):
            values = read_mask(item.label)
            assert (int((values > 0).sum()), int((values == 2).sum())) == (64, cup)
            assert values[OUTER].min() >= 1
    assert [item.image.stem for item in splits_of(dest, "refuge")["test"]] == ["T0001"]
    assert {item.image.stem for item in splits_of(dest, "drishti-gs1")["test"]} == {"drishtiGS_009", "drishtiGS_010"}
    assert {item.label.parent for item in items_of(dest, "origa")} == {fundus / "ORIGA/Masks"}


def test_fundus_broken(fundus: Path, tmp_path: Path) -> None:
    mask(fundus / "REFUGE/GT-Val/Disc_Cup_Masks/V0001.bmp", {77: OUTER}, fill=255)
    with pytest.raises(DataError, match=r"expected 0 \(cup\), 128 \(rim\) and 255 \(background\); found 77"):
        import_set("fundus", fundus, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "mat/ORIGA/Images").mkdir(parents=True)
    (tmp_path / "mat/ORIGA/001.mat").write_bytes(b"")
    with pytest.raises(DataError, match=r"expected Masks/\*\.png .*found \.mat annotations only"):
        import_set("fundus", tmp_path / "mat", tmp_path / "out")
    mask(fundus / "ORIGA/Masks/003.png", {128: OUTER})
    with pytest.raises(DataError, match=r"003\.png: expected one channel of 0, 1 \(rim\) and 2 \(cup\)"):
        import_set("fundus", fundus / "ORIGA", tmp_path / "out")


# --- nuclei


@pytest.fixture
def pannuke(tmp_path: Path) -> Path:
    source = tmp_path / "pannuke"
    for fold in (1, 2, 3):
        images = RNG.integers(0, 255, (6, *SIZE, 3)).astype(np.float64)
        masks = np.zeros((6, *SIZE, 6))
        masks[:, *OUTER, 0], masks[:, *INNER, 0], masks[:, *INNER, 4] = 17, 0, 3
        masks[..., 5] = masks.max(axis=3) == 0
        for kind, arrays in (("images", {"images": images, "types": _tissues()}), ("masks", {"masks": masks})):
            folder = source / f"Fold {fold}/{kind}/fold{fold}"
            folder.mkdir(parents=True)
            for name, array in arrays.items():
                np.save(folder / f"{name}.npy", array)
    return source


def _tissues() -> np.ndarray:
    return np.array(["Breast"] * 3 + ["Bile-duct"] * 2 + ["Adrenal_gland"])


def test_pannuke_arrays_become_pictures_per_tissue(pannuke: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    found = run_import("pannuke", pannuke, dest, minimum=6)
    assert found["sites"] == {
        "bile-duct": {"training": 2, "validation": 2, "test": 2},
        "breast": {"training": 3, "validation": 3, "test": 3},
    }
    assert any("adrenal-gland" in note for note in found["notes"])
    item = splits_of(dest, "bile-duct")["validation"][1]
    assert item.image == dest / "bile-duct/images/fold2-00004.png"
    original = np.load(pannuke / "Fold 2/images/fold2/images.npy")[4]
    assert np.array_equal(read_image(item.image), original.astype(np.float32))
    assert np.array_equal(read_mask(item.label) == 1, _filled(OUTER))


def _filled(where: tuple[slice, slice]) -> np.ndarray:
    array = np.zeros(SIZE, bool)
    array[where] = True
    return array


def test_pannuke_types_and_a_lone_fold(pannuke: Path, tmp_path: Path) -> None:
    found = run_import("pannuke", pannuke / "Fold 1", tmp_path / "out", types=True, validation=0.34, test=0.33)
    assert found["sites"]["breast"] == {"training": 1, "validation": 1, "test": 1}
    values = read_mask(items_of(tmp_path / "out", "breast")[0].label)
    assert found["classes"]["epithelial"] == [5]
    assert np.array_equal(values == 5, _filled(INNER))
    assert np.array_equal(values == 1, _filled(OUTER) & ~_filled(INNER))


def test_pannuke_broken(pannuke: Path, tmp_path: Path) -> None:
    (pannuke / "Fold 2/masks/fold2/masks.npy").unlink()
    with pytest.raises(
        DataError, match=r"expected masks\.npy there, or in .*Fold 2/masks/fold2; found images\.npy, types\.npy"
    ):
        import_set("pannuke", pannuke, tmp_path / "out")
    np.save(pannuke / "Fold 2/masks/fold2/masks.npy", np.zeros((5, *SIZE, 6)))
    with pytest.raises(DataError, match=r"expected N images .*found \(6, 12, 16, 3\), \(5, 12, 16, 6\), \(6,\)"):
        import_set("pannuke", pannuke, tmp_path / "out")


def aperio(path: Path, boxes: list[tuple[str, int, int, int, int]]) -> None:
    """Write polygons as Aperio does: an Annotation per class, corners in x and y."""
    parts = []
    for name, left, top, right, bottom in boxes:
        corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
        vertices = "".join(f'<Vertex X="{x}.0" Y="{y}.0" Z="0"/>' for x, y in corners)
        attribute = f'<Attributes><Attribute Name="{name}" Id="0" Value=""/></Attributes>'
        parts.append(f"<Annotation>{attribute}<Regions><Region><Vertices>{vertices}</Vertices></Region></Regions></Annotation>")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"<Annotations>{''.join(parts)}</Annotations>")


def test_monuseg_polygons_patients_and_number_of_sites(tmp_path: Path) -> None:
    source, dest = tmp_path / "monuseg/MoNuSeg 2018 Training Data", tmp_path / "out"
    for i in range(10):
        for part in (1, 2):
            name = f"TCGA-18-{i:04}-01Z-00-DX{part}"
            picture(source / f"Tissue Images/{name}.tif")
            aperio(source / f"Annotations/{name}.xml", [("", 3, 2, 8, 6)])
    found = run_import("monuseg", source.parent, dest)
    assert found["sites"] == {"monuseg": {"training": 14, "validation": 2, "test": 4}}
    assert groups_apart(splits_of(dest, "monuseg"), lambda item: item.image.name[:12])
    values = read_mask(items_of(dest, "monuseg")[0].label)
    assert np.array_equal(values == 1, _filled((slice(2, 7), slice(3, 9))))
    picture(source.parent / "MoNuSegTestData/TCGA-2Z-A9J9-01A-01-TS1.tif")
    aperio(source.parent / "MoNuSegTestData/TCGA-2Z-A9J9-01A-01-TS1.xml", [("", 1, 1, 4, 4)])
    found = run_import("monuseg", source.parent, tmp_path / "two", sites=2, validation=0.2)
    assert found["sites"]["site-1"] == {"training": 8, "validation": 2, "test": 1}
    assert found["sites"]["site-2"] == {"training": 6, "validation": 2, "test": 2}
    held = [{item.image.name[:12] for item in items_of(tmp_path / "two", site)} for site in ("site-1", "site-2")]
    assert not held[0] & held[1]


def test_monusac_sites_are_hospitals_and_classes_are_kept_on_demand(tmp_path: Path) -> None:
    source, dest = tmp_path / "MoNuSAC_images_and_annotations", tmp_path / "out"
    boxes = [("Epithelial", 1, 1, 5, 5), ("Neutrophil", 8, 2, 10, 4), ("Ambiguous", 12, 8, 14, 10)]
    for hospital, patients in (("A2", 10), ("5P", 1)):
        for i in range(patients):
            name = f"TCGA-{hospital}-A{i:03}-01Z-00-DX1"
            for part in (1, 2):
                image = picture(source / name / f"{name}_{part}.tif")
                aperio(image.with_suffix(".xml"), boxes)
            image.rename(image.with_suffix(".svs"))
    found = run_import("monusac", source, dest, types=True)
    assert found["sites"]["tcga-a2"] == {"training": 14, "validation": 2, "test": 4}
    assert found["sites"]["tcga-5p"] == {"training": 2, "validation": 0, "test": 0}
    assert groups_apart(splits_of(dest, "tcga-a2"), lambda item: item.image.name[:12])
    assert {item.image.suffix for item in items_of(dest, "tcga-a2")} == {".tif", ".svs"}
    values = read_mask(items_of(dest, "tcga-a2")[0].label)
    assert [int((values == v).sum()) for v in range(5)] == [192 - 25 - 9, 25, 0, 0, 9]
    found = run_import("monusac", source, tmp_path / "one", sites=1)
    assert list(found["sites"]) == ["monusac"]
    assert np.unique(read_mask(items_of(tmp_path / "one", "monusac")[0].label)).tolist() == [0, 1]
    aperio(source / "TCGA-5P-A000-01Z-00-DX1/TCGA-5P-A000-01Z-00-DX1_1.xml", [("Mitosis", 1, 1, 3, 3)])
    with pytest.raises(DataError, match=r"expected a class of epithelial, .*found 'mitosis'"):
        import_set("monusac", source, tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_tnbc_is_split_by_slide(tmp_path: Path) -> None:
    source, dest = tmp_path / "TNBC_NucleiSegmentation", tmp_path / "out"
    for slide in range(1, 12):
        for part in (1, 2):
            picture(source / f"Slide_{slide:02}/{slide:02}_{part}.png")
            mask(source / f"GT_{slide:02}/{slide:02}_{part}.png", {255: OUTER})
    found = run_import("tnbc", source, dest)
    assert found["sites"] == {"tnbc": {"training": 16, "validation": 2, "test": 4}}
    assert groups_apart(splits_of(dest, "tnbc"), lambda item: item.image.parent.name)
    assert np.array_equal(read_mask(items_of(dest, "tnbc")[0].label) == 1, _filled(OUTER))
    (source / "GT_04").rename(source / "other")
    with pytest.raises(DataError, match=r"expected GT_04 beside Slide_04; found GT_01/, .*and 16 more"):
        import_set("tnbc", source, tmp_path / "bad")


# --- volumes

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
        assert np.array_equal(read_mask(item.label, item.slice) == 1, read_image(item.image, item.slice)[..., 0] > 128)


def test_prostate_broken(tmp_path: Path) -> None:
    volume(tmp_path / "s/BMC/Case03.nii.gz", np.zeros((4, 4, 2), np.int16))
    with pytest.raises(DataError, match=r"Case03\.nii\.gz: expected Case03_segmentation\.nii\.gz beside it; found none"):
        import_set("prostate", tmp_path / "s", tmp_path / "out")
    volume(tmp_path / "s/BMC/Case03_Segmentation.nii.gz", np.zeros((4, 4, 3), np.uint8))
    with pytest.raises(DataError, match=r"expected the 3-D shape of Case03\.nii\.gz \(4, 4, 2\); found \(4, 4, 3\)"):
        import_set("prostate", tmp_path / "s", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"expected folders RUNMC, .*; found nothing"):
        import_set("prostate", tmp_path / "empty", tmp_path / "out")


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
    with pytest.raises(DataError, match=r"A03Z9_sa\.nii\.gz: expected its ES frame within 0\.\.3; found '9'"):
        import_set("mnms", hearts, tmp_path / "out")
    table.write_text(text.replace("3,A03Z9,Siemens,A,1,0,2\n", ""))
    with pytest.raises(DataError, match=r"expected its code in 211230_information\.csv; found no row A03Z9"):
        import_set("mnms", hearts, tmp_path / "out")
    table.unlink()
    with pytest.raises(DataError, match=r"expected a \*\.csv with 'External code'.*found Training/"):
        import_set("mnms", hearts, tmp_path / "out")


# --- classes


def test_kvasir_is_split_class_by_class_and_can_be_shared_out(tmp_path: Path) -> None:
    source, dest = tmp_path / "kvasir-dataset-v2", tmp_path / "out"
    for name in KVASIR_CLASSES:
        for i in range(10):
            picture(source / name / f"{i}.png")
    found = run_import("kvasir-v2", tmp_path, dest)
    assert found["sites"] == {"kvasir-v2": {"training": 56, "validation": 8, "test": 16}}
    assert "data partition" in found["notes"][0]
    splits = splits_of(dest, "kvasir-v2", classes=True)
    for name in KVASIR_CLASSES:
        assert [sum(item.label == name for item in splits[split]) for split in SPLITS] == [7, 1, 2]
    assert all(item.image.parent == source / item.label for items in splits.values() for item in items)
    shared = partition(dest / "kvasir-v2/datalist.json", tmp_path / "sites", 3, 1.0, 0, 4)
    assert sum(sum(counts.values()) for counts in shared["training"].values()) == 56


def test_oct_keeps_the_published_splits_and_names_what_is_missing(tmp_path: Path) -> None:
    source = tmp_path / "RetinalOCT_Dataset/RetinalOCT_Dataset"
    for split, count in (("train", 3), ("val", 1), ("test", 2)):
        for name in OCT_CLASSES:
            for i in range(count):
                picture(source / split / name / f"{i}.png")
    found = run_import("oct-c8", tmp_path, tmp_path / "out")
    assert found["sites"] == {"oct-c8": {"training": 24, "validation": 8, "test": 16}}
    assert {item.image.parent.parent.name for item in splits_of(tmp_path / "out", "oct-c8", True)["test"]} == {"test"}
    (source / "val").rename(source / "dev")
    with pytest.raises(DataError, match=r"expected train/, val/ and test/ .*; found dev/, test/, train/"):
        import_set("oct-c8", source, tmp_path / "bad")


# --- all


def test_same_seed_same_bytes_other_seed_other_split(polyps: Path, hearts: Path, tmp_path: Path) -> None:
    for name, source in (("polyp", polyps), ("mnms", hearts)):
        for dest, seed in (("a", 0), ("b", 0), ("c", 1)):
            import_set(name, source, tmp_path / name / dest, Options(seed=seed))
        first, second, other = (tree(tmp_path / name / dest) for dest in "abc")
        assert first == second
        assert first != other


def test_what_cannot_be_is_refused_and_a_failure_leaves_nothing(
    polyps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_set("polyp", polyps, tmp_path / "out")
    before = tree(tmp_path / "out")
    for problem, error, name, options in (
        ("holds sites already; give another folder", DataError, "polyp", Options()),
        (r"'polips': expected one of polyp, .*did you mean 'polyp'", ConfigError, "polips", Options()),
        ("expected shares of at least 0 that sum to less than 1", ConfigError, "polyp", Options(validation=0.5, test=0.5)),
        ("polyp has no classes of cells", ConfigError, "polyp", Options(types=True)),
    ):
        with pytest.raises(error, match=problem):
            import_set(name, polyps, tmp_path / "out", options)
    with pytest.raises(DataError, match="61 sites need as many patients; the set has"):
        import_set("polyp", polyps, tmp_path / "x", Options(sites=61))
    with pytest.raises(DataError, match="no site is left with 99 samples"):
        import_set("polyp", polyps, tmp_path / "x", Options(minimum=99))
    with pytest.raises(DataError, match="no such folder; expected folders Kvasir-SEG"):
        import_set("polyp", tmp_path / "none", tmp_path / "x")
    assert tree(tmp_path / "out") == before
    assert not (tmp_path / "x").exists()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/notes.txt").write_text("mine")
    bad = [Found("a", "1", polyps / "x.png", mask_png("ok", _filled, OUTER)), Found("b", "1", polyps, mask_png("no", _fail))]
    monkeypatch.setitem(IMPORTERS, "polyp", registry.Importer("", lambda source, options: Reading(bad, {"a": [1]})))
    with pytest.raises(DataError, match="broken"):
        import_set("polyp", polyps, tmp_path / "kept")
    assert list(tree(tmp_path / "kept")) == ["notes.txt"]


def _fail() -> np.ndarray:
    raise DataError("broken")


def test_the_command_lists_imports_and_fails_in_one_line(
    polyps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "data", "import", "--list", "--format", "json") == 0
    assert list(json.loads(capsys.readouterr().out)) == list(IMPORTERS)
    assert run(monkeypatch, "data", "import") == 0
    assert len(capsys.readouterr().out.splitlines()) == len(IMPORTERS)
    assert run(monkeypatch, "data", "import", "polyp", polyps, tmp_path / "out", "--test", 0.3) == 0
    shown = capsys.readouterr().out
    assert "cvc-colondb" in shown
    assert 'task.classes: {"polyp": [255]}' in shown
    assert run(monkeypatch, "data", "import", "polyp", polyps, tmp_path / "two", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["sites"]["kvasir-seg"]["training"] == 7
    assert run(monkeypatch, "data", "import", "polyp", polyps, tmp_path / "two") == 2
    assert "holds sites already" in capsys.readouterr().err
    assert run(monkeypatch, "data", "import", "polyp", polyps) == 2
    assert "SOURCE and DEST: missing" in capsys.readouterr().err
