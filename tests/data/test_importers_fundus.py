"""RIM-ONE DL and FedDG's domains in their published layouts, with what such folders really hold besides."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from consilium.core.errors import DataError
from tests.conftest import refused
from tests.data.importing import (
    INNER,
    OUTER,
    SIZE,
    filled,
    import_set,
    items_of,
    mask,
    picture,
    read_mask,
    run_import,
    splits_of,
)

IMAGES, DRAWINGS = "RIM-ONE_DL_images", "RIM-ONE_DL_reference_segmentations"


def rim_one(source: Path, partitions: tuple[str, ...] = ("partitioned_by_hospital", "partitioned_randomly")) -> Path:
    """Write 10 pictures; by hospital 5 are for training, at random 8."""
    for number in range(1, 11):
        kind, name = ("glaucoma", f"r2_Im{number:03}") if number % 2 else ("normal", f"r1_Im{number:03}")
        for partition in partitions:
            test = number > (8 if partition == "partitioned_randomly" else 5)
            picture(source / IMAGES / partition / ("test_set" if test else "training_set") / kind / f"{name}.png")
        expert = 2 if number == 3 else 1
        mask(source / DRAWINGS / kind / f"{name}-{expert}-Disc-T.png", {255: OUTER})
        mask(source / DRAWINGS / kind / f"{name}-{expert}-Cup-T.png", {255: INNER})
        (source / DRAWINGS / kind / f"{name}-{expert}-Disc-T.txt").write_text("DCSeg")
    (source / IMAGES / "license.txt").write_text("CC")
    return source


def test_rim_one_pictures_meet_their_drawings(tmp_path: Path) -> None:
    source, dest = rim_one(tmp_path / "set"), tmp_path / "out"
    found = run_import("fundus", source, dest)
    assert found["sites"] == {"rim-one-dl": {"training": 7, "validation": 1, "test": 2}}
    for item in items_of(dest, "rim-one-dl"):
        values = read_mask(item.label)
        assert np.array_equal(values == 2, filled(INNER))
        assert np.array_equal(values >= 1, filled(OUTER))
        assert "partitioned_randomly" in item.image.parts
    tested = sorted(item.image.stem for item in splits_of(dest, "rim-one-dl")["test"])
    assert tested == ["r1_Im010", "r2_Im009"]


def test_rim_one_in_one_folder_and_by_hospital_alone(tmp_path: Path) -> None:
    rim_one(tmp_path / "set/RIM-ONE DL", ("partitioned_by_hospital",))
    found = run_import("fundus", tmp_path / "set", tmp_path / "out", validation=0)
    assert found["sites"] == {"rim-one-dl": {"training": 5, "validation": 0, "test": 5}}


def test_rim_one_broken(tmp_path: Path) -> None:
    source = rim_one(tmp_path / "set")
    (source / DRAWINGS / "normal/r1_Im004-1-Cup-T.png").unlink()
    refused(r"expected a drawing named r1_Im004-1-Cup-T; found none among 9", import_set, "fundus", source, tmp_path / "out")
    for drawing in (source / DRAWINGS).rglob("*.png"):
        drawing.unlink()
    refused(r"expected \*-Disc-T\.png; found contours \(\*\.txt\) only", import_set, "fundus", source, tmp_path / "out")
    (source / IMAGES / "partitioned_randomly").rename(source / IMAGES / "all")
    (source / IMAGES / "all/test_set").rename(source / IMAGES / "all/tests")
    (source / IMAGES / "partitioned_by_hospital").rename(source / "elsewhere")
    refused(r"expected partitioned_randomly/ or partitioned_by_hospital/", import_set, "fundus", source, tmp_path / "out")


def smooth(path: Path, name: str) -> None:
    """Save a mask of the benchmark: background 255, rim 128, cup 0, its edges smoothed."""
    mask(path / name, {128: OUTER, 0: INNER}, fill=255)
    with Image.open(path / name) as drawn:
        soft = drawn.resize((SIZE[1] * 4, SIZE[0] * 4)).filter(ImageFilter.GaussianBlur(0.6))
    soft.resize((SIZE[1], SIZE[0]), Image.Resampling.BOX).save(path / name)


@pytest.fixture
def domains(tmp_path: Path) -> Path:
    source = tmp_path / "Fundus-doFE/Fundus"
    for domain, names in (("Domain1", "gdrishtiGS_{:03}"), ("Domain2", "G-{}-L"), ("domain4", "V{:04}")):
        for number in range(1, 11):
            rois = source / domain / ("test" if number > 8 else "train") / "ROIs"
            picture(rois / "image" / f"{names.format(number)}.png")
            smooth(rois / "mask", f"{names.format(number)}.png")
        (source / domain / "train/ROIs/image/.DS_Store").write_bytes(b"\0")
        (source / domain / "train/ROIs/boundary").mkdir()
    picture(source / "Domain2/train/ROIs/image/G-1-R.png")
    smooth(source / "Domain2/train/ROIs/mask", "G-1-R.png")
    return source.parent


def test_feddgs_domains_are_sites_of_rim_and_cup(domains: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    found = run_import("fundus-feddg", domains, dest)
    assert found["classes"] == {"disc": [1, 2], "cup": [2]}
    assert found["sites"]["domain1"] == found["sites"]["domain4"] == {"training": 7, "validation": 1, "test": 2}
    assert sum(found["sites"]["domain2"].values()) == 11
    for site in found["sites"]:
        for item in items_of(dest, site):
            values = read_mask(item.label)
            assert np.array_equal(values == 2, filled(INNER))
            assert np.array_equal(values >= 1, filled(OUTER))
    for seed in range(4):
        run_import("fundus-feddg", domains, tmp_path / str(seed), seed=seed)
        eyes = splits_of(tmp_path / str(seed), "domain2")
        assert len({s for s, items in eyes.items() for i in items if i.image.stem in ("G-1-L", "G-1-R")}) == 1


def test_feddg_broken(domains: Path, tmp_path: Path) -> None:
    inverted = domains / "Fundus/Domain1/test/ROIs/mask/gdrishtiGS_009.png"
    mask(inverted, {128: OUTER, 255: INNER})
    asked = import_set, "fundus-feddg", domains, tmp_path / "out"
    refused(r"gdrishtiGS_009\.png: expected 255 \(background\) in the corners.*found a dark corner", *asked)
    inverted.unlink()
    refused(r"gdrishtiGS_009\.png: expected a mask named gdrishtiGS_009; found none among 1", *asked)
    (domains / "Fundus/Domain1/test").rename(domains / "Fundus/Domain1/val")
    refused(r"Domain1: expected train/ROIs and test/ROIs; found train/, val/", *asked)
    with pytest.raises(DataError, match=r"expected folders Domain1 to Domain4, .*; found image/, mask/"):
        import_set("fundus-feddg", domains / "Fundus/Domain2/test/ROIs", tmp_path / "out")
