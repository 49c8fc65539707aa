"""Polyps as their publishers and PraNet's benchmark name them, with what such folders really hold besides."""

from pathlib import Path

import numpy as np
import pytest

from consilium.config.site import Given, find_site
from consilium.core.errors import DataError
from tests.data.importing import (
    INNER,
    OUTER,
    groups_apart,
    import_set,
    items_of,
    mask,
    picture,
    read_mask,
    run_import,
    splits_of,
)


def etis(images: Path, masks: Path, count: int = 20) -> None:
    """Write N.tif and pN.tif, with what macOS and Windows leave behind."""
    for number in range(1, count + 1):
        picture(images / f"{number}.tif")
        mask(masks / f"p{number}.tif", {255: OUTER})
    for name in ("._3.tif", "Thumbs.db", ".DS_Store"):
        (images / name).write_bytes(b"\0")


@pytest.mark.parametrize(
    ("images", "masks", "source"),
    [
        ("ETIS-LaribPolypDB/ETIS-LaribPolypDB", "ETIS-LaribPolypDB/Ground Truth", "."),
        ("ETIS-LaribPolypDB/ETIS-LaribPolypDB", "ETIS-LaribPolypDB/Ground Truth", "ETIS-LaribPolypDB"),
        ("ETIS-LaribPolypDB", "Ground Truth", "."),
        ("ETIS-LaribPolypDB", "ground truth", "ETIS-LaribPolypDB"),
        ("etis/images", "etis/masks", "."),
    ],
)
def test_etis_as_published_and_as_passed_on(images: str, masks: str, source: str, tmp_path: Path) -> None:
    root = tmp_path / "set"
    etis(root / images, root / masks)
    (root / ".ETIS-LaribPolypDB").mkdir()
    found = run_import("polyp", root / source, tmp_path / "out")
    assert found["sites"] == {"etis-laribpolypdb": {"training": 14, "validation": 2, "test": 4}}
    for item in items_of(tmp_path / "out", "etis-laribpolypdb"):
        assert item.label == root / masks / f"p{item.image.stem}.tif"
        assert item.patient == ""
    runs = splits_of(tmp_path / "out", "etis-laribpolypdb")
    assert groups_apart(runs, lambda item: str((int(item.image.stem) - 1) // 2))


def test_names_in_another_case_are_partners(tmp_path: Path) -> None:
    for number in range(4):
        picture(tmp_path / f"Kvasir-SEG/Images/CJU{number}.JPG")
        mask(tmp_path / f"Kvasir-SEG/Masks/cju{number}.png", {255: OUTER})
    assert list(run_import("polyp", tmp_path, tmp_path / "out")["sites"]) == ["kvasir-seg"]


@pytest.fixture
def pranet(tmp_path: Path) -> Path:
    """20 frames and 10 pictures in 15 and 7 for training, 5 and 3 for test, and 10 frames of a third set for test."""
    source = tmp_path / "PraNet"
    for number in range(1, 21):
        kind, folders = ("TestDataset/CVC-ClinicDB", "s") if number % 4 == 0 else ("TrainDataset", "")
        picture(source / kind / f"image{folders}/{number}.png")
        mask(source / kind / f"mask{folders}/{number}.png", {255: OUTER})
    for number in range(10):
        kind, folders = ("TestDataset/Kvasir", "s") if number > 6 else ("TrainDataset", "")
        picture(source / kind / f"image{folders}/cju{number}x.png")
        mask(source / kind / f"mask{folders}/cju{number}x.png", {127: OUTER, 200: INNER})
    for number in range(1, 11):
        picture(source / f"TestDataset/CVC-300/images/{number}.png")
        mask(source / f"TestDataset/CVC-300/masks/{number}.png", {255: OUTER})
    (source / "TestDataset/results").mkdir()
    (source / "__MACOSX/TrainDataset/image").mkdir(parents=True)
    (source / "TrainDataset/image/._1.png").write_bytes(b"\0")
    return source


def test_pranets_split_stays_and_test_sets_alone_only_test(pranet: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    found = run_import("polyp-pranet", pranet, dest)
    assert found["sites"]["kvasir-seg"] == {"training": 6, "validation": 1, "test": 3}
    assert sum(found["sites"]["cvc-clinicdb"].values()) == 20
    assert found["sites"]["cvc-clinicdb"]["test"] == 5
    assert found["sites"]["cvc-300"] == {"training": 0, "validation": 0, "test": 10}
    assert found["notes"][-1] == "test samples only, so their site.yaml says test_only: cvc-300"
    assert find_site("cvc-300", Given(dest)).test_only
    assert find_site("cvc-300", Given(dest)).datalist == dest / "cvc-300/datalist.json"
    assert not find_site("kvasir-seg", Given(dest)).test_only
    tested = splits_of(dest, "cvc-clinicdb")["test"]
    assert sorted(int(item.image.stem) for item in tested) == [4, 8, 12, 16, 20]
    for item in items_of(dest, "kvasir-seg"):
        assert np.argwhere(read_mask(item.label) == 255).tolist() == [[r, c] for r in range(4, 7) for c in range(4, 7)]


def test_pranet_broken(pranet: Path, tmp_path: Path) -> None:
    (pranet / "TrainDataset/mask/cju3x.png").unlink()
    with pytest.raises(DataError, match=r"cju3x\.png: expected a mask named cju3x; found none among 21"):
        import_set("polyp-pranet", pranet, tmp_path / "out")
    with pytest.raises(DataError, match=r"expected TrainDataset/\{image,mask\}/.*; found images/, masks/$"):
        import_set("polyp-pranet", pranet / "TestDataset/Kvasir", tmp_path / "out")
    with pytest.raises(DataError, match=r"no site is left .* or --resplit where a site has test samples only"):
        import_set("polyp-pranet", pranet / "TestDataset", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_etis_without_a_drawing_is_named(tmp_path: Path) -> None:
    etis(tmp_path / "ETIS-LaribPolypDB/ETIS-LaribPolypDB", tmp_path / "ETIS-LaribPolypDB/Ground Truth")
    (tmp_path / "ETIS-LaribPolypDB/Ground Truth/p7.tif").unlink()
    with pytest.raises(DataError, match=r"7\.tif: expected a mask named p7; found none among 19; complete the set"):
        import_set("polyp", tmp_path, tmp_path / "out")
