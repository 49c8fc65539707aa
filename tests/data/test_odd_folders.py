"""Folders, masks and tables as hospitals have them: read rightly, or refused with a remedy that ends the complaint."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image, ImageOps
from scipy import ndimage

from consilium.config.site import load_site
from consilium.core.errors import ConfigError, ConsiliumError, DataError
from consilium.data import pictures, volumes
from consilium.data.check import check_datalist
from consilium.data.datalist import read_datalist
from consilium.data.images import read_labels
from consilium.data.importers.base import Options
from tests.conftest import Capture, Patch, refused
from tests.data.hospitals import SIDE, drawn, hospital, photo, said
from tests.data.importing import import_set


def entries(lists: Path, site: str) -> list[dict[str, Any]]:
    found = json.loads((lists / site / "datalist.json").read_text())
    return [entry for split in ("training", "validation", "test") for entry in found[split]]


def block(*values: int) -> np.ndarray:
    mask = np.zeros((SIDE, SIDE), np.uint8)
    for number, value in enumerate(values):
        mask[4 + 4 * number : 8 + 4 * number, 3:20] = value
    return mask


# folders of patients ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["patient{:03}", "sub-{:02}", "Case {}", "P{:04}", "TCGA_AB_{:04}"])
@pytest.mark.parametrize("files", [("image/{}.png", "mask/{}.png"), ("scan.png", "scan_seg.png")])
def test_folders_of_patients_are_one_site(name: str, files: tuple[str, str], tmp_path: Path) -> None:
    for number in range(10):
        for image in range(2 if "{}" in files[0] else 1):
            photo(tmp_path / "raw" / name.format(number) / files[0].format(image))
            drawn(tmp_path / "raw" / name.format(number) / files[1].format(image), 1)
    told = import_set("own", tmp_path / "raw", tmp_path / "lists")
    assert list(told["sites"]) == ["raw"]
    found = entries(tmp_path / "lists", "raw")
    assert {entry["patient"] for entry in found} == {name.format(number) for number in range(10)}
    assert all(entry["patient"] in entry["image"] for entry in found)
    assert check_datalist(tmp_path / "lists/raw/datalist.json").problems == {}  # no patient in two splits


@pytest.mark.parametrize("option", ["--patient-folders", "--no-patient-folders"])
def test_folders_that_may_be_patients_are_asked_for(option: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    for name in ("AB", "CD", "EF", "GH", "IJ", "KL"):
        hospital(tmp_path / "raw" / name, "image/{}.png", "mask/{}.png", count=2)
    words = ("data", "import", "own", tmp_path / "raw", tmp_path / "lists")
    told = said(monkeypatch, capsys, *words, codes=(2,))
    assert "6 folders, AB to KL, half of them with at most 2 samples, which may be patients or sites" in told
    assert option in told
    said(monkeypatch, capsys, *words, option)
    sites = json.loads((tmp_path / "lists/import.json").read_text())["imports"][0]["sites"]
    assert list(sites) == (["raw"] if option == "--patient-folders" else ["AB", "CD", "EF", "GH", "IJ", "KL"])


def test_hospitals_with_folders_of_patients_keep_both(tmp_path: Path) -> None:
    for site in ("north", "south"):
        for number in range(6):
            hospital(tmp_path / "raw" / site / f"pat_{number}", "images/{}.png", "masks/{}.png", count=3)
    told = import_set("own", tmp_path / "raw", tmp_path / "lists")
    assert set(told["sites"]) == {"north", "south"}
    assert {entry["patient"] for entry in entries(tmp_path / "lists", "north")} == {f"pat_{number}" for number in range(6)}


def test_folders_of_patients_in_folders_of_classes_are_no_classes(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    for label in ("benign", "malignant"):
        for number in range(5):
            for image in range(2):
                photo(tmp_path / "raw" / label / f"patient{number}{label[0]}" / f"{image}.png")
    told = import_set("own", tmp_path / "raw", tmp_path / "lists")
    assert told["classes"] == ["benign", "malignant"]
    for entry in entries(tmp_path / "lists", "raw"):
        assert entry["label"] in entry["image"]
        assert entry["patient"] in entry["image"]
    assert "a folder for each patient" in said(monkeypatch, capsys, "data", "check", tmp_path / "raw/benign", codes=(2,))


# only what is asked for -------------------------------------------------------------------------------------------------------


def test_other_sites_are_not_read(tmp_path: Path) -> None:
    hospital(tmp_path / "raw" / "South 2", "images/{}.png", "masks/{}.png")
    hospital(tmp_path / "raw" / "b", "images/{}.png", "masks/{}.png")
    (tmp_path / "raw/b/masks/0.png").write_bytes(b"broken")
    (tmp_path / "raw/b/masks/1.png").unlink()
    for number, name in enumerate(("South 2", "south-2")):
        told = import_set("own", tmp_path / "raw", tmp_path / f"lists{number}", Options(only=(name,)))
        assert list(told["sites"]) == ["south-2"]
    with pytest.raises(DataError, match=r"--only: no site 'c'; there are South 2, b"):
        import_set("own", tmp_path / "raw", tmp_path / "other", Options(only=("c",)))
    rows = ["a,0.png,x", "a,1.png,y", "b,gone.png,x"]
    photo(tmp_path / "t/0.png"), photo(tmp_path / "t/1.png")
    (tmp_path / "t/t.csv").write_text("\n".join(["site,image,label", *rows]))
    assert list(import_set("csv", tmp_path / "t/t.csv", tmp_path / "csv", Options(only=("a",), minimum=1))["sites"]) == ["a"]


def test_a_new_name_ends_a_clash_of_names(tmp_path: Path) -> None:
    for site in ("site 1", "site-1"):
        hospital(tmp_path / "raw" / site, "images/{}.png", "masks/{}.png")
    with pytest.raises(DataError) as error:
        import_set("own", tmp_path / "raw", tmp_path / "lists")
    (old,) = re.findall(r"--rename '(.+)=NAME'", str(error.value))
    told = import_set("own", tmp_path / "raw", tmp_path / "lists", Options(rename={old: "north"}))
    assert set(told["sites"]) == {"north", "site-1"}
    with pytest.raises(ConsiliumError, match="--rename: no site 'west'"):
        import_set("own", tmp_path / "raw", tmp_path / "more", Options(rename={"west": "x", old: "north"}))


# how a camera turns a picture -------------------------------------------------------------------------------------------------


def turned(path: Path, way: int, shape: tuple[int, int], behind: bool = False, seed: int = 0) -> Path:
    tags = Image.Exif()
    tags[0x0112] = way
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (*shape, 3), np.uint8)
    Image.fromarray(noise).save(path, exif=tags)
    if behind:  # the chunk goes behind the pixels
        data = path.read_bytes()
        at = data.index(b"eXIf") - 4
        length = 12 + int.from_bytes(data[at : at + 4])
        rest = data[:at] + data[at + length :]
        end = rest.index(b"IEND") - 4
        path.write_bytes(rest[:end] + data[at : at + length] + rest[end:])
    return path


@pytest.mark.parametrize(("name", "behind"), [("a.jpg", False), ("a.png", False), ("a.png", True)])
@pytest.mark.parametrize("way", [1, 3, 6, 8])
def test_a_size_is_that_of_the_picture_as_it_is_read(name: str, behind: bool, way: int, tmp_path: Path) -> None:
    path = turned(tmp_path / name, way, (20, 30), behind)
    assert pictures.picture_shape(path) == pictures.read(path).shape[:2] == ((20, 30) if way < 5 else (30, 20))


def test_import_and_check_agree_on_turned_pictures(tmp_path: Path) -> None:
    """A mask drawn on the picture as it is shown fits; one drawn on the sensor's grid is refused, and the remedy works."""
    raw = tmp_path / "raw/a"
    for number in range(4):
        turned(raw / "images" / f"{number}.jpg", 6, (20, 30), seed=number)
        (raw / "masks").mkdir(exist_ok=True)
        Image.fromarray(np.pad(np.ones((9, 9), np.uint8), ((5, 16), (4, 7)))).save(raw / "masks" / f"{number}.png")
    import_set("own", tmp_path / "raw", tmp_path / "lists")
    found = check_datalist(tmp_path / "lists/a/datalist.json")
    assert (found.problems, [kind for kind in found.warnings if "EXIF" in kind]) == ({}, [])
    for number in range(4):
        path = raw / "masks" / f"{number}.png"
        Image.open(path).rotate(90, expand=True).save(path)
    with pytest.raises(DataError, match=r"mask is 30x20 pixels \(width x height\), its .* 20x30; .*EXIF tag turns it"):
        import_set("own", tmp_path / "raw", tmp_path / "other")
    for number in range(4):
        picture = Image.open(raw / "images" / f"{number}.jpg")
        Image.fromarray(np.asarray(picture)).save(raw / "images" / f"{number}.jpg")  # as the mask lies, without the tag
    import_set("own", tmp_path / "raw", tmp_path / "other")


def test_the_note_on_a_turned_square_ends_with_its_remedy(tmp_path: Path) -> None:
    turned(tmp_path / "a.png", 6, (SIDE, SIDE))
    drawn(tmp_path / "m.png", 1)
    (tmp_path / "datalist.json").write_text(json.dumps({"training": [{"image": "a.png", "label": "m.png"}]}))
    (line,) = check_datalist(tmp_path / "datalist.json").warnings["turned by its EXIF tag"]
    assert "PIL.ImageOps.exif_transpose" in line
    ImageOps.exif_transpose(Image.open(tmp_path / "a.png")).save(tmp_path / "a.png")
    assert "turned by its EXIF tag" not in check_datalist(tmp_path / "datalist.json").warnings


# masks ------------------------------------------------------------------------------------------------------------------------


def as_rgb(path: Path, mask: np.ndarray) -> None:
    Image.fromarray(np.repeat(mask[..., None], 3, 2)).save(path)


def as_rgba(path: Path, mask: np.ndarray) -> None:
    Image.fromarray(np.dstack([mask, mask, mask, np.full_like(mask, 255)])).save(path)


def as_clear(path: Path, mask: np.ndarray) -> None:
    Image.fromarray(np.dstack([mask, mask, mask, (mask > 0) * np.uint8(255)])).save(path)


def as_grey_alpha(path: Path, mask: np.ndarray) -> None:
    Image.fromarray(mask).convert("LA").save(path)


def as_palette(path: Path, mask: np.ndarray) -> None:
    """A palette that begins with white, as programs that reduce colours write it."""
    picture = Image.fromarray((mask == 0).astype(np.uint8), mode="P")
    picture.putpalette([255, 255, 255, 0, 0, 0])
    picture.save(path)


def as_gif(path: Path, mask: np.ndarray) -> None:
    Image.fromarray(mask).save(path)


KINDS = {
    "rgb": (as_rgb, "png"),
    "rgba": (as_rgba, "png"),
    "clear background": (as_clear, "png"),
    "grey and alpha": (as_grey_alpha, "png"),
    "white first": (as_palette, "png"),
    "gif": (as_gif, "gif"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_masks_of_grey_are_read_whatever_holds_them(kind: str, tmp_path: Path) -> None:
    write, ending = KINDS[kind]
    for number in range(6):
        photo(tmp_path / "raw/a/images" / f"{number}.png")
        (tmp_path / "raw/a/masks").mkdir(exist_ok=True)
        write(tmp_path / "raw/a/masks" / f"{number}.{ending}", block(255))
    told = import_set("own", tmp_path / "raw", tmp_path / "lists")
    assert told["classes"] == {"object": [255]}
    data = read_datalist(tmp_path / "lists/a/datalist.json")
    for item in data.splits["training"]:
        assert np.array_equal(read_labels(item).values, block(255))


def colours(path: Path) -> None:
    Image.fromarray(block(1)[..., None] * np.array([200, 0, 0], np.uint8)).save(path)


def transparency(path: Path) -> None:
    Image.fromarray(np.dstack([np.full((SIDE, SIDE, 3), 255, np.uint8), block(255)])).save(path)


@pytest.mark.parametrize(("write", "why"), [(colours, "mask has colours"), (transparency, "drawn by its transparency")])
def test_masks_that_could_mean_several_things_are_refused(write: Any, why: str, tmp_path: Path) -> None:
    photo(tmp_path / "raw/a/images/0.png")
    (tmp_path / "raw/a/masks").mkdir()
    write(tmp_path / "raw/a/masks/0.png")
    refused(why, import_set, "own", tmp_path / "raw", tmp_path / "lists")


def atlas(rng: np.random.Generator) -> np.ndarray:
    """Thin vessels of many values on an empty ground."""
    mask = np.zeros((96, 96), np.uint8)
    for number in range(9):
        mask[4 + 10 * number, 3:90] = 20 + 25 * number
    return mask


def layers(rng: np.random.Generator) -> np.ndarray:
    """Ten layers of a retina, two pixels each, along a slope."""
    rows, columns = np.indices((96, 96))
    depth = rows - 20 - columns // 4
    return np.where((depth >= 0) & (depth < 20), depth // 2 + 1, 0).astype(np.uint8)


@pytest.mark.parametrize("make", [atlas, layers])
def test_thin_labels_are_labels(make: Any, tmp_path: Path) -> None:
    photo(tmp_path / "raw/a/images/0.png")
    mask = make(np.random.default_rng(0))
    (tmp_path / "raw/a/masks").mkdir()
    Image.fromarray(mask).save(tmp_path / "raw/a/masks/0.png")
    Image.fromarray(np.dstack([mask] * 3)).save(tmp_path / "raw/a/images/0.png")
    told = import_set("own", tmp_path / "raw", tmp_path / "lists")
    assert told["classes"] == {f"value-{value}": [value] for value in np.unique(mask).tolist() if value}


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_smoothed_edges_are_told_and_may_be_taken_as_labels(
    scale: int, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    small = ndimage.binary_opening(ndimage.gaussian_filter(np.random.default_rng(2).normal(size=(32, 32)), 3) > 0.02)
    mask = Image.fromarray((small * 255).astype(np.uint8)).resize((32 * scale, 32 * scale), Image.Resampling.BILINEAR)
    mask = Image.fromarray(np.asarray(mask) // 16 * 16)  # few enough to be classes
    (tmp_path / "raw/a/images").mkdir(parents=True)
    (tmp_path / "raw/a/masks").mkdir()
    mask.save(tmp_path / "raw/a/masks/0.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (32 * scale, 32 * scale, 3), np.uint8)).save(
        tmp_path / "raw/a/images/0.png"
    )
    words = ("data", "import", "own", tmp_path / "raw", tmp_path / "lists")
    told = said(monkeypatch, capsys, *words, codes=(2,))
    assert "mask is anti-aliased" in told
    assert "--exact-values" in told
    assert "value-112" in said(monkeypatch, capsys, *words, "--exact-values")


def test_several_masks_of_a_picture_are_united(tmp_path: Path) -> None:
    """BUSI: `benign (3)_mask_1.png` is a second lesion of `benign (3)`."""
    for number in range(6):
        photo(tmp_path / "raw/a" / f"benign ({number}).png")
        drawn(tmp_path / "raw/a" / f"benign ({number})_mask.png", 255)
    for number, name in ((1, "_mask_1"), (1, "_mask_2"), (4, "_mask_1")):
        mask = np.zeros((SIDE, SIDE), np.uint8)
        mask[12 if name == "_mask_1" else 20 :, :5] = 255
        mask[20:, 4:] = 0
        Image.fromarray(mask).save(tmp_path / "raw/a" / f"benign ({number}){name}.png")
    told = import_set("own", tmp_path / "raw", tmp_path / "lists")
    assert any("several masks of 2 pictures are united" in note for note in told["notes"])
    assert told["classes"] == {"object": [255]}
    found = {Path(entry["image"]).name: entry["label"] for entry in entries(tmp_path / "lists", "a")}
    whole = np.asarray(Image.open(tmp_path / "lists/a" / found["benign (4).png"]))
    parts = [np.asarray(Image.open(tmp_path / f"raw/a/benign (4)_mask{end}.png")) for end in ("", "_1")]
    assert np.array_equal(whole, np.maximum(*parts))
    assert check_datalist(tmp_path / "lists/a/datalist.json", {"object": [255]}).problems == {}


def test_drawings_of_one_object_by_two_readers_are_not_united(tmp_path: Path) -> None:
    for number in range(4):
        photo(tmp_path / "raw/a" / f"{number}.png")
        for end in ("_mask", "_mask_1"):
            drawn(tmp_path / "raw/a" / f"{number}{end}.png", 255)
    refused(r"mostly cover each other.*choose one by --mask-pattern", import_set, "own", tmp_path / "raw", tmp_path / "lists")


# names of classes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [{"background": 0, "liver": 1, "tumor": 2}, {"0": "background", "1": "liver", "2": "tumor"}])
def test_classes_have_the_names_of_dataset_json(labels: dict[str, Any], tmp_path: Path) -> None:
    hospital(tmp_path / "raw", "imagesTr/a_{:03}_0000.png", "labelsTr/a_{:03}.png", (1, 2))
    (tmp_path / "raw/dataset.json").write_text(json.dumps({"labels": labels, "channel_names": {"0": "CT"}}))
    told = import_set("own", tmp_path / "raw", tmp_path / "lists")
    assert told["classes"] == {"liver": [1], "tumor": [2]}
    (tmp_path / "raw/dataset.json").write_text(json.dumps({"labels": {"0": "no", "1": "lesion", "2": "lesion"}}))
    assert import_set("own", tmp_path / "raw", tmp_path / "more")["classes"] == {"lesion": [1, 2]}


@pytest.mark.parametrize("remedy", ["zero", "named"])
def test_pixels_to_ignore_are_no_class(remedy: str, tmp_path: Path) -> None:
    hospital(tmp_path / "raw", "imagesTr/a_{:03}_0000.png", "labelsTr/a_{:03}.png", (1, 2))
    labels = {"background": 0, "liver": 1, "ignore": 3}
    (tmp_path / "raw/dataset.json").write_text(json.dumps({"labels": {**labels, "tumor": 2}}))
    assert import_set("own", tmp_path / "raw", tmp_path / "lists")["classes"] == {"liver": [1], "tumor": [2]}
    (tmp_path / "raw/dataset.json").write_text(json.dumps({"labels": labels | {"ignore": 2}}))
    with pytest.raises(
        DataError, match=r"raw: dataset.json calls 2 'ignore', .* set them to 0, or give the value another name"
    ):
        import_set("own", tmp_path / "raw", tmp_path / "more")
    if remedy == "zero":
        hospital(tmp_path / "raw", "imagesTr/a_{:03}_0000.png", "labelsTr/a_{:03}.png", (1, 0))
    else:
        (tmp_path / "raw/dataset.json").write_text(json.dumps({"labels": {"background": 0, "liver": 1, "unsure": 2}}))
    told = import_set("own", tmp_path / "raw", tmp_path / "more")
    assert told["classes"] == ({"liver": [1]} if remedy == "zero" else {"liver": [1], "unsure": [2]})


def test_a_list_of_auto3dseg_is_read(tmp_path: Path) -> None:
    photo(tmp_path / "a.png"), drawn(tmp_path / "m.png", 1)
    entry = {"image": "a.png", "label": "m.png"}
    (tmp_path / "d.json").write_text(json.dumps({"training": [entry], "testing": [entry]}))
    assert len(read_datalist(tmp_path / "d.json").splits["test"]) == 1


# tables -----------------------------------------------------------------------------------------------------------------------


def one_hot(folder: Path, rows: list[str]) -> Path:
    for number in range(len(rows)):
        photo(folder / "img" / f"ISIC_{number}.png")
    path = folder / "gt.csv"
    path.write_text("\n".join(["image,melanoma,nevus,bkl", *(f"ISIC_{n},{row}" for n, row in enumerate(rows))]))
    return path


def test_columns_of_0_and_1_are_classes(tmp_path: Path) -> None:
    path = one_hot(tmp_path / "raw", ["1.0,0.0,0.0", "0.0,1.0,0.0", "0.0,0.0,1.0"] * 4)
    told = import_set("csv", path, tmp_path / "lists")
    assert told["classes"] == ["bkl", "melanoma", "nevus"]
    found = {Path(entry["image"]).stem: entry["label"] for entry in entries(tmp_path / "lists", "gt")}
    assert [found[f"ISIC_{n}"] for n in range(3)] == ["melanoma", "nevus", "bkl"]


def test_several_findings_a_picture_are_refused_and_columns_can_be_named(tmp_path: Path) -> None:
    path = one_hot(tmp_path / "raw", ["1,0,1", "0,1,1", "1,0,0", "0,1,0"])
    with pytest.raises(DataError, match=r"2 of 4 lines do not have exactly one 1 in .*, the first is line 2") as error:
        import_set("csv", path, tmp_path / "lists")
    assert "--column label=A,B" in str(error.value)
    told = import_set("csv", path, tmp_path / "lists", Options(columns={"label": "melanoma,nevus"}))
    assert told["classes"] == ["melanoma", "nevus"]


def test_all_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    for number in range(4):
        photo(tmp_path / "raw/b" / f"scan_{number}.png")
    path = tmp_path / "raw/t.csv"
    path.write_text("file,kind\n" + "\n".join(f"a/scan{n}.png,{'xy'[n % 2]}" for n in range(8)))
    with pytest.raises(ConfigError, match=r"'lable': .*'label'.*no column 'fiel' \(did you mean 'file'\?\)"):
        import_set("csv", path, tmp_path / "lists", Options(columns={"image": "fiel", "lable": "kind"}))
    with pytest.raises(ConfigError, match=r"no column 'image' and no column 'label'.*--column image=file --column label=kind"):
        import_set("csv", path, tmp_path / "lists")
    with pytest.raises(DataError, match=r"line 2: .*line 6: .* and 3 more of 8: no such file; paths start at"):
        import_set("csv", path, tmp_path / "lists", Options(columns={"image": "file", "label": "kind"}))


def test_a_picture_is_never_its_own_mask(tmp_path: Path) -> None:
    for number in range(4):
        photo(tmp_path / "raw/a" / f"{number}.png")
    (tmp_path / "raw/t.csv").write_text("\n".join(["image,label", *(f"{n}.png,{n}.png" for n in range(4))]))
    refused(r"line 2: label '0\.png', .*no such file", import_set, "csv", tmp_path / "raw/t.csv", tmp_path / "lists")
    for number in range(4):
        drawn(tmp_path / "raw/masks" / f"{number}.png", 1)
        (tmp_path / "raw/images").mkdir(exist_ok=True)
        (tmp_path / "raw/a" / f"{number}.png").rename(tmp_path / "raw/images" / f"{number}.png")
    import_set("csv", tmp_path / "raw/t.csv", tmp_path / "lists")
    assert all("/images/" in entry["image"] and "/masks/" in entry["label"] for entry in entries(tmp_path / "lists", "t"))


# files that are damaged or of other kinds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cut", "changed", "plain"])
def test_damage_of_packed_files_is_told_in_our_words(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "v.nii.gz"
    voxels = (np.random.default_rng(0).normal(size=(24, 24, 9)) * 9).astype(np.int16)
    nibabel.Nifti1Image(voxels, np.eye(4)).to_filename(path)
    data = path.read_bytes()
    changed = data[:100] + b"\xff" * 400 + data[500:]
    path.write_bytes({"cut": data[: len(data) // 2], "changed": changed, "plain": gzip.decompress(data)}[kind])
    with pytest.raises(DataError) as error:
        volumes.voxels(path)
    wanted = "its content is not packed by gzip" if kind == "plain" else "its packed content is cut off or damaged"
    assert wanted in str(error.value)


def test_dicom_and_other_kinds_are_named_with_the_way_in(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    for label in ("a", "b"):
        for number in range(3):
            path = tmp_path / "raw" / label / f"IM{number}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(128) + b"DICM")
    told = said(monkeypatch, capsys, "data", "import", "own", tmp_path / "raw", tmp_path / "lists", codes=(2,))
    assert "DICOM (6)" in told
    assert "in a table for `consilium data import csv`" in told
    (tmp_path / "raw/t.csv").write_text("image,label\n" + "\n".join(f"{c}/IM{n},{c}" for c in "ab" for n in range(3)))
    assert "DICOM (6)" not in said(monkeypatch, capsys, "data", "import", "own", tmp_path / "raw", tmp_path / "lists")
    hospital(tmp_path / "mixed/a", "images/{}.png", "masks/{}.png")
    (tmp_path / "mixed/a/images/7.webp").write_bytes(b"RIFF")
    told = said(monkeypatch, capsys, "data", "import", "own", tmp_path / "mixed", tmp_path / "other")
    assert ".webp (1)" in told


# site.yaml --------------------------------------------------------------------------------------------------------------------


def test_labels_beside_datalist_are_those_of_the_list(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    for number in range(6):
        photo(tmp_path / f"{number}.png"), drawn(tmp_path / f"m{number}.png", 7)
    lists = {"training": [{"image": f"{n}.png", "label": f"m{n}.png"} for n in range(6)]}
    (tmp_path / "datalist.json").write_text(json.dumps(lists))
    (tmp_path / "site.yaml").write_text("datalist: datalist.json\nlabels: {7: [disc, cup]}\nannotated: [disc, cup]\n")
    _, found = load_site(tmp_path / "site.yaml").dataset(None, "site")
    assert found is not None
    assert (dict(found.labels or {}), found.annotated) == ({7: ("disc", "cup")}, ("disc", "cup"))
    job = ("--job", "jobs/quickstart")
    for place in (tmp_path, tmp_path / "datalist.json"):
        assert "class disc: 6 training" in said(monkeypatch, capsys, "data", "check", place, *job)
    (tmp_path / "site.yaml").write_text("datasets: {a: {datalist: datalist.json}}\nlabels: {7: nucleus}\n")
    refused("write them in the entries of datasets", load_site, tmp_path / "site.yaml", error=ConfigError)


# what a job does with folds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("privacy", "training"), [("", 3), ("{unit: record, noise_multiplier: 1}", 6)])
def test_the_check_cuts_folds_as_the_job_does(
    privacy: str, training: int, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    listed = []
    for number in range(6):
        photo(tmp_path / f"{number}.png"), drawn(tmp_path / f"m{number}.png", 1, 2)
        listed.append({"image": f"{number}.png", "label": f"m{number}.png", "fold": number % 2})
    (tmp_path / "d.json").write_text(json.dumps({"training": listed}))
    changes = ("--set", f"privacy={privacy}", "--set", "strategy={name: fedit}") if privacy else ()
    told = said(monkeypatch, capsys, "data", "check", tmp_path / "d.json", "--job", "jobs/quickstart", *changes)
    assert f"{training} training, {6 - training} validation" in told
    assert ("`fold` is not used under record" in told) == bool(privacy)
