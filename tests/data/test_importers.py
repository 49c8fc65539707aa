"""Importers of pictures and classes on tiny sets in their published layouts, and what all importers keep."""

import json
from pathlib import Path

import numpy as np
import pytest

from consilium.core.errors import ConfigError, DataError
from consilium.data.datalist import SPLITS
from consilium.data.importers import published_pictures, registry
from consilium.data.importers.base import ImportResult, Options, SourceSample, mask_png
from consilium.data.importers.published_pictures import KVASIR_V2, OCT_C8
from consilium.data.importers.registry import IMPORTERS
from consilium.data.partition import partition
from tests.conftest import Capture, Patch, refused, run
from tests.data.importing import (
    INNER,
    OUTER,
    check_repeats,
    filled,
    groups_apart,
    import_set,
    items_of,
    mask,
    picture,
    read_mask,
    run_import,
    splits_of,
    tree,
)


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
        "kvasir-seg: names no patients, so one patient's pictures may be in two splits",
        "cvc-colondb: names no videos, so runs of consecutive frames are kept together",
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
    for seed in range(2):
        run_import("polyp", polyps, tmp_path / str(seed), seed=seed)
        named = splits_of(tmp_path / str(seed), "cvc-clinicdb")
        assert groups_apart(named, lambda item: str((int(item.image.stem) + 3) // 4))
        runs = splits_of(tmp_path / str(seed), "cvc-colondb")
        assert groups_apart(runs, lambda item: str((int(item.image.stem) - 1) // 2))


def test_polyp_set_alone_and_broken(polyps: Path, tmp_path: Path) -> None:
    assert list(run_import("polyp", polyps / "CVC-ColonDB", tmp_path / "one")["sites"]) == ["cvc-colondb"]
    (polyps / "CVC-ColonDB/masks/7.png").unlink()
    refused(r"7\.png: expected a mask named 7; found none among 19", import_set, "polyp", polyps, tmp_path / "out")
    unknown = (polyps / "Kvasir-SEG/Kvasir-SEG").rename(polyps.parent / "unknown")
    refused(r"expected folders Kvasir-SEG .*; found images/, masks/$", import_set, "polyp", unknown, tmp_path / "out")
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
    refused(r"expected 0 \(cup\), 128 \(rim\) and 255 \(background\); found 77", import_set, "fundus", fundus, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "mat/ORIGA/Images").mkdir(parents=True)
    with pytest.raises(
        DataError, match=r"expected Images/ beside Masks/ or Images_Square/ beside Masks_Square/; found Images/"
    ):
        import_set("fundus", tmp_path / "mat", tmp_path / "out")
    mask(fundus / "ORIGA/Masks/003.png", {128: OUTER})
    refused(r"003\.png: expected one channel of 0, 1, 2; found other", import_set, "fundus", fundus / "ORIGA", tmp_path / "out")


def test_kvasir_is_split_class_by_class_and_can_be_shared_out(tmp_path: Path) -> None:
    source, dest = tmp_path / "kvasir-dataset-v2", tmp_path / "out"
    for name in KVASIR_V2:
        for i in range(10):
            picture(source / name / f"{i}.png")
    found = run_import("kvasir-v2", tmp_path, dest)
    assert found["sites"] == {"kvasir-v2": {"training": 56, "validation": 8, "test": 16}}
    assert "data partition" in found["notes"][0]
    splits = splits_of(dest, "kvasir-v2", classes=True)
    for name in KVASIR_V2:
        assert [sum(item.label == name for item in splits[split]) for split in SPLITS] == [7, 1, 2]
    assert all(item.image.parent == source / item.label for items in splits.values() for item in items)
    shared = partition(dest / "kvasir-v2/datalist.json", tmp_path / "sites", 3, 1.0, 0, 4)
    assert sum(sum(counts.values()) for counts in shared["training"].values()) == 56


def test_oct_keeps_the_published_splits_and_names_what_is_missing(tmp_path: Path) -> None:
    source = tmp_path / "RetinalOCT_Dataset/RetinalOCT_Dataset"
    for split, count in (("train", 3), ("val", 1), ("test", 2)):
        for name in OCT_C8:
            for i in range(count):
                picture(source / split / name / f"{i}.png")
    found = run_import("oct-c8", tmp_path, tmp_path / "out")
    assert found["sites"] == {"oct-c8": {"training": 24, "validation": 8, "test": 16}}
    assert {item.image.parent.parent.name for item in splits_of(tmp_path / "out", "oct-c8", True)["test"]} == {"test"}
    (source / "val").rename(source / "dev")
    refused(r"expected train/, val/ and test/ .*; found dev/, test/, train/", import_set, "oct-c8", source, tmp_path / "bad")


def test_what_cannot_be_is_refused_and_a_failure_leaves_nothing(polyps: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    import_set("polyp", polyps, tmp_path / "out")
    before = tree(tmp_path / "out")
    for problem, error, name, options in (
        ("holds sites already; give another folder", DataError, "polyp", Options()),
        (r"'polips': expected one of own, csv, csv-text, polyp, .*did you mean 'polyp'", ConfigError, "polips", Options()),
        ("expected shares of at least 0 that sum to less than 1", ConfigError, "polyp", Options(validation=0.5, test=0.5)),
        ("--exact-values: polyp does not take it", ConfigError, "polyp", Options(exact_values=True)),
    ):
        refused(problem, import_set, name, polyps, tmp_path / "out", options, error=error)
    refused("61 sites need as many patients; the set has", import_set, "polyp", polyps, tmp_path / "x", Options(sites=61))
    refused("no site is left with 99 samples", import_set, "polyp", polyps, tmp_path / "x", Options(minimum=99))
    refused("no such folder; expected folders Kvasir-SEG", import_set, "polyp", tmp_path / "none", tmp_path / "x")
    assert tree(tmp_path / "out") == before
    assert not (tmp_path / "x").exists()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/notes.txt").write_text("mine")
    bad = [
        SourceSample("a", "1", polyps / "x.png", mask_png("ok", filled, OUTER)),
        SourceSample("b", "1", polyps, mask_png("no", _fail)),
    ]
    monkeypatch.setitem(
        published_pictures.SETS, "polyp", registry.Importer("", lambda source, options: ImportResult(bad, {"a": [1]}))
    )
    refused("broken", import_set, "polyp", polyps, tmp_path / "kept")
    assert list(tree(tmp_path / "kept")) == ["notes.txt"]


def _fail() -> np.ndarray:
    raise DataError("broken")


def test_the_command_lists_imports_and_fails_in_one_line(
    polyps: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
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


def test_same_seed_same_bytes_other_seed_other_split(polyps: Path, tmp_path: Path) -> None:
    check_repeats("polyp", polyps, tmp_path)
