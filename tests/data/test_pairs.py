"""Which files of a folder are masks, and whose: by any names that hospitals use, never by chance."""

from pathlib import Path

import pytest
from PIL import Image

from consilium.core.errors import ConfigError, DataError
from consilium.data.folders import has_classes
from consilium.data.importers.base import Options, find_files
from consilium.data.pairs import find_pairs, parse
from tests.conftest import refused
from tests.data.hospitals import drawn, hospital, photo
from tests.data.importing import import_set, items_of

HABITS = [
    ("images/{}.jpg", "masks/{}.png"),
    ("images/{}.png", "masks/{}_mask.png"),
    ("images/{}.tif", "labels/{}_label.tif"),
    ("Images/{}.png", "Masks/mask_{}.png"),
    ("{}.bmp", "{}_seg.png"),
    ("{}.png", "{}_MASK.png"),
    ("img_{}.png", "mask_{}.png"),
    ("scan {}.png", "scan {} (segmentation).png"),
    ("imagesTr/case_{:03}_0000.png", "labelsTr/case_{:03}.png"),
    ("case_{}/image.png", "case_{}/mask.png"),
    ("Bilder/{}.png", "Masken/{}.png"),
    ("Fotos/{}.png", "contornos/{}_tumor.png"),
    ("{}.png", "truth/{}.png"),
    ("{}.png", "{}_tumor.png"),
    ("data_with_masks/images/{}.png", "data_with_masks/masks/{}.png"),
    ("scans2020/{}.png", "annotations/{}.png"),
    ("images/P1/{}.PNG", "masks/P1/{}.PNG"),
    ("{}-image.png", "{}-label.png"),
    ("{}/img.png", "{}/lbl.png"),
    ("Image{}.png", "Mask{}.png"),
]


@pytest.mark.parametrize(("mode", "image", "mask"), [(("RGB", "L")[n % 2], *habit) for n, habit in enumerate(HABITS)])
def test_every_picture_gets_its_own_mask(image: str, mask: str, mode: str, tmp_path: Path) -> None:
    hospital(tmp_path / "a", image, mask, count=12, mode=mode)
    import_set("own", tmp_path, tmp_path / "lists", Options(test=0.2, validation=0.1))
    items = items_of(tmp_path / "lists", "a")
    expected = {str(tmp_path / "a" / image.format(n)): str(tmp_path / "a" / mask.format(n)) for n in range(12)}
    assert {str(item.image): str(item.label) for item in items} == expected


@pytest.mark.parametrize(("image", "mask"), HABITS[::3])
def test_the_pattern_that_is_shown_gives_the_same_pairs_when_it_is_written(image: str, mask: str, tmp_path: Path) -> None:
    hospital(tmp_path, image, mask, count=12)
    found = find_pairs(tmp_path, find_files(tmp_path, (".png", ".jpg", ".bmp", ".tif")))
    assert found is not None
    again = find_pairs(tmp_path, find_files(tmp_path, (".png", ".jpg", ".bmp", ".tif")), [parse(str(found.pattern))])
    assert again is not None
    assert again.found == found.found


def test_folders_of_classes_are_no_pairs(tmp_path: Path) -> None:
    """Equal names in every class, one class of few grey levels, and classes that are called after masks."""
    for number in range(8):
        photo(tmp_path / "plain" / "with_mask" / f"{number}.png")
        photo(tmp_path / "plain" / "without_mask" / f"{number}.png")
        photo(tmp_path / "dark" / "burr" / f"{number}.png", "L")
        photo(tmp_path / "dark" / "target" / f"t{number}.png", "L")
    drawn(tmp_path / "dark" / "target" / "t0.png", 3)
    assert has_classes(tmp_path / "plain")
    assert has_classes(tmp_path / "dark")
    told = import_set("own", tmp_path / "dark", tmp_path / "lists")
    assert told["classes"] == ["burr", "target"]


def test_two_masks_a_picture_are_not_chosen_from_by_chance(tmp_path: Path) -> None:
    hospital(tmp_path / "a", "{}.png", "{}_cup_mask.png")
    hospital(tmp_path / "a", "{}.png", "{}_disc_mask.png", (2,))
    with pytest.raises(
        DataError, match=r"every picture has masks by '{}_cup_mask' and '{}_disc_mask', and one is read"
    ) as error:
        import_set("own", tmp_path, tmp_path / "lists")
    remedy = str(error.value).rpartition("--mask-pattern ")[2].strip("'")
    told = import_set("own", tmp_path, tmp_path / "lists", Options(mask_patterns=(parse(remedy),)))
    assert told["classes"] == {"object": [1]}
    assert "a: 6 masks not used, the first 0_disc_mask.png" in told["notes"]


def test_pictures_without_a_mask_are_named_and_left_out_when_the_pattern_is_written(tmp_path: Path) -> None:
    hospital(tmp_path / "a", "images/{}.png", "masks/{}_mask.png", count=8)
    (tmp_path / "a/masks/3_mask.png").rename(tmp_path / "a/masks/33_mask.png")
    with pytest.raises(DataError, match=r"3\.png: expected a mask named 3_mask; by .* 7 of 8 pictures have one") as error:
        import_set("own", tmp_path, tmp_path / "lists")
    assert "found masks/0_mask.png, masks/1_mask.png" in str(error.value)
    remedy = str(error.value).rpartition("--mask-pattern ")[2].split("'")[1]
    told = import_set("own", tmp_path, tmp_path / "lists", Options(mask_patterns=(parse(remedy),)))
    assert sum(told["sites"]["a"].values()) == 7
    assert "a: 1 pictures without a mask left out, the first images/3.png" in told["notes"]


def test_a_folder_of_unlabelled_test_pictures_is_left_out(tmp_path: Path) -> None:
    hospital(tmp_path / "Task07", "imagesTr/p_{}.png", "labelsTr/p_{}.png")
    for number in range(3):
        photo(tmp_path / "Task07" / "imagesTs" / f"q_{number}.png")
    told = import_set("own", tmp_path / "Task07", tmp_path / "lists")
    assert sum(told["sites"]["Task07"].values()) == 6
    assert any("3 pictures without a mask left out, the first imagesTs/q_0.png" in note for note in told["notes"])


def test_folders_of_splits_stay_splits(tmp_path: Path) -> None:
    hospital(tmp_path / "a", "train/images/{}.png", "train/masks/{}.png", count=5)
    hospital(tmp_path / "a", "test/images/{}.png", "test/masks/{}.png", count=2)
    told = import_set("own", tmp_path, tmp_path / "lists", Options(validation=0))
    assert told["sites"]["a"] == {"training": 5, "validation": 0, "test": 2}
    alone = import_set("own", tmp_path / "a", tmp_path / "alone", Options(validation=0))
    assert alone["sites"]["a"] == told["sites"]["a"]


def test_names_that_share_nothing_are_shown_with_what_to_write(tmp_path: Path) -> None:
    for number in range(4):
        photo(tmp_path / "a" / "images" / f"{'abcd'[number] * 3}.png")
        drawn(tmp_path / "a" / "masks" / f"{'vwxz'[number] * 3}.png", 1)
    with pytest.raises(
        DataError, match=r"aaa\.png: expected a mask of its name; found masks/vvv\.png, masks/www\.png, .*IMAGE=MASK"
    ):
        import_set("own", tmp_path, tmp_path / "lists")


@pytest.mark.parametrize("text", ["", "mask", "{}_{}", "{}=mask", "a={}"])
def test_a_pattern_has_one_place_for_the_shared_part(text: str) -> None:
    refused(r"--mask-pattern: .*expected MASK or IMAGE=MASK without endings", parse, text, error=ConfigError)


def test_two_endings_of_one_name_are_refused(tmp_path: Path) -> None:
    hospital(tmp_path / "a", "images/{}.png", "masks/{}.png")
    Image.open(tmp_path / "a/images/2.png").save(tmp_path / "a/images/2.jpg")
    refused(r"2\.png: has the same name as .*2\.jpg; keep one of the two", import_set, "own", tmp_path, tmp_path / "lists")
