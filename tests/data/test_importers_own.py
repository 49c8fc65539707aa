"""A folder of one's own: what is paired, which classes it has, and one line for everything that is not as it must be."""

import json
import unicodedata
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from consilium.config.site import Given, find_site
from consilium.core.errors import DataError
from consilium.data.datalist import read_datalist
from consilium.data.importers.base import Options
from tests.conftest import Capture, Patch, refused, run
from tests.data.importing import import_set


def put(root: Path, site: str, name: str, values: tuple[int, ...] = (0, 255), ending: str = "png") -> None:
    """Write a picture of 8 x 8 pixels, and a mask whose rows have these values."""
    for folder in ("images", "masks"):
        (root / site / folder).mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (10, 20, 30)).save(root / site / "images" / f"{name}.jpg")
    rows = np.resize(np.array(values, dtype=np.uint8), 8)
    Image.fromarray(np.repeat(rows[:, None], 8, 1)).save(root / site / "masks" / f"{name}.{ending}")


def test_pairs_by_name_and_one_class_of_one_value(tmp_path: Path) -> None:
    for site in ("north", "South 2"):
        for number in range(10):
            put(tmp_path / "raw", site, f"{number}")
    (tmp_path / "raw" / "notes").mkdir()
    told = import_set("own", tmp_path / "raw", tmp_path / "lists")
    assert told["classes"] == {"object": [255]}
    assert set(told["sites"]) == {"north", "south-2"}
    found = json.loads((tmp_path / "lists" / "north" / "datalist.json").read_text())
    assert [len(found[split]) for split in ("training", "validation", "test")] == [7, 1, 2]
    for entry in found["training"]:
        assert Path(entry["image"]).stem == Path(entry["label"]).stem


def test_every_value_is_a_class(tmp_path: Path) -> None:
    for number, values in enumerate([(0, 1), (0, 1, 2), (0,)]):
        put(tmp_path / "raw", "a", f"{number}", values)
    told = import_set("own", tmp_path / "raw", tmp_path / "lists")
    assert told["classes"] == {"value-1": [1], "value-2": [2]}


def test_one_line_for_what_is_wrong(tmp_path: Path) -> None:
    def told() -> str:
        with pytest.raises(DataError) as error:
            import_set("own", tmp_path, tmp_path / "lists")
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "expected a folder per site: images/ and masks/" in told()
    put(tmp_path, "a", "1", (0,))
    assert "all masks are empty" in told()
    put(tmp_path, "a", "2", tuple(range(0, 256, 32)), "jpg")
    put(tmp_path, "a", "2")
    assert "has the same name as" in told()
    (tmp_path / "a" / "masks" / "2.png").unlink()
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8) * 4).save(tmp_path / "a" / "masks" / "2.jpg", quality=100)
    assert "mask is a JPEG, which changes values" in told()
    assert "save label values, by the nearest voxel where it was resized, and not as JPEG" in told()
    (tmp_path / "a" / "masks" / "2.jpg").unlink()
    assert "expected a mask named 2" in told()
    Image.new("RGB", (8, 8), (0, 90, 0)).save(tmp_path / "a" / "masks" / "2.png")
    assert "mask has colours, such as (0, 90, 0)" in told()
    Image.new("L", (4, 8), 1).save(tmp_path / "a" / "masks" / "2.png")
    assert "mask is 4x8 pixels (width x height), its image" in told()
    (tmp_path / "a" / "masks" / "2.png").write_text("no picture")
    assert "mask cannot be read" in told()


def test_names_in_another_form_of_unicode_are_the_same(tmp_path: Path) -> None:
    put(tmp_path / "raw", "a", unicodedata.normalize("NFC", "Zähler 2"))
    mask = tmp_path / "raw/a/masks" / unicodedata.normalize("NFC", "Zähler 2.png")
    mask.rename(mask.with_name(unicodedata.normalize("NFD", mask.name)))
    assert import_set("own", tmp_path / "raw", tmp_path / "lists")["sites"]["a"]["training"] == 1


def test_a_site_is_called_as_its_folder_and_what_is_changed_is_told(tmp_path: Path) -> None:
    for site in ("Klinik Süd", "Groß-Ost.2", "Łódź", "Praxis_7"):
        put(tmp_path / "raw", unicodedata.normalize("NFD", site), "1")
    told = import_set("own", tmp_path / "raw", tmp_path / "lists")
    assert set(told["sites"]) == {"klinik-sud", "gross-ost-2", "lodz", "Praxis_7"}
    notes = [unicodedata.normalize("NFC", note) for note in told["notes"]]
    assert notes[:-1] == ["Groß-Ost.2 -> gross-ost-2", "Klinik Süd -> klinik-sud", "Łódź -> lodz"]


def test_sites_without_a_latin_letter_are_numbered(tmp_path: Path) -> None:
    for site in ("Москва", "東京", "site-1"):
        put(tmp_path / "raw", site, "1")
    told = import_set("own", tmp_path / "raw", tmp_path / "lists")
    assert set(told["sites"]) == {"site-1", "site-2", "site-3"}
    assert told["notes"][:2] == ["Москва -> site-2", "東京 -> site-3"]


def put_class(root: Path, *names: str) -> None:
    """Write pictures of no label but their folder."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (10, 20, 30)).save(root / name)


def layout(*levels: tuple[str, ...]) -> list[str]:
    """Return the paths of two pictures in every folder of these levels."""
    return ["/".join(parts) + ".png" for parts in product(*levels, "12")]


KINDS = ("normal", "tumour")
UNKNOWN = [
    ("no class in common", [*layout(("normal",), ("11", "12")), *layout(("tumour",), ("21", "22"))]),
    ("numbers for classes", layout(KINDS, ("001", "002"))),
    ("numbers for classes", layout(KINDS, ("0012", "10"))),
    ("numbers for classes", layout(KINDS, ("X001", "X002"))),
    ("numbers for classes", layout(KINDS, ("2020-01-02",))),
    ("called after classes", layout(KINDS, ("1", "2"))),
    ("called after classes", layout(KINDS, ("ab", "cd"))),
    ("called after classes", [*layout(("normal",), ("10", "11")), *layout(("tumour",), ("11", "12"))]),
]
"""Why folders of folders may be classes with a folder for each patient, and their pictures."""


@pytest.mark.parametrize(("why", "pictures"), UNKNOWN)
def test_folders_that_may_be_classes_with_patients_are_asked_for(why: str, pictures: list[str], tmp_path: Path) -> None:
    put_class(tmp_path / "raw", *pictures)
    refused(f"{why}.*--patient-folders reads them so", import_set, "own", tmp_path / "raw", tmp_path / "lists")
    for patients, sites in ((True, ["raw"]), (False, list(KINDS))):
        told = import_set("own", tmp_path / "raw", tmp_path / f"{patients}", Options(patient_folders=patients))
        assert list(told["sites"]) == sites
        assert not patients or told["classes"] == list(KINDS)


def test_a_class_without_folders_of_patients_is_not_left_out(tmp_path: Path) -> None:
    put_class(tmp_path / "raw", *layout(("BENIGN",), ("001", "002")), *layout(("MALIGN",)))
    refused("write which: --patient-folders", import_set, "own", tmp_path / "raw", tmp_path / "lists")
    with pytest.raises(DataError, match="not every folder has a folder for each patient"):
        import_set("own", tmp_path / "raw", tmp_path / "lists", Options(patient_folders=True))


@pytest.mark.parametrize("names", [("001", "002", "003"), ("patient1", "patient2", "patient3")])
def test_patients_with_folders_of_classes_are_one_site(names: tuple[str, ...], tmp_path: Path) -> None:
    put_class(tmp_path / "raw", *(f"{n}/{kind}/{i}.png" for n in names for kind in ("cut", "whole") for i in "12"))
    if names[0].isdecimal():
        refused("write which: --patient-folders makes one site", import_set, "own", tmp_path / "raw", tmp_path / "lists")
    told = import_set("own", tmp_path / "raw", tmp_path / "lists", Options(patient_folders=True))
    assert (list(told["sites"]), told["classes"]) == (["raw"], ["cut", "whole"])
    found = json.loads((tmp_path / "lists/raw/datalist.json").read_text())
    assert {one["patient"] for split in ("training", "validation", "test") for one in found[split]} == set(names)


@pytest.mark.parametrize("above", ["train/", "north/", "north/train/"])
def test_numbered_patients_below_splits_and_sites_are_read_when_said(above: str, tmp_path: Path) -> None:
    also = above.replace("train", "test").replace("north", "south" if "train" not in above else "north")
    named = [f"{place}{kind}/{n}/{i}.png" for place in (above, also) for kind in "ab" for n in ("001", "002") for i in "12"]
    put_class(tmp_path / "raw", *named)
    if above != "north/train/":
        refused("--patient-folders reads them so", import_set, "own", tmp_path / "raw", tmp_path / "lists")
    told = import_set("own", tmp_path / "raw", tmp_path / "lists", Options(patient_folders=True))
    assert told["classes"] == ["a", "b"]
    lists = [json.loads(path.read_text()) for path in (tmp_path / "lists").rglob("datalist.json")]
    assert {one["patient"] for found in lists for split in ("training", "test") for one in found[split]} == {"001", "002"}


def test_classes_of_a_sites_patients_are_read(tmp_path: Path) -> None:
    kinds = ("benign", "malignant")
    put_class(
        tmp_path / "raw", *(f"{s}/case{n}/{k}/{i}.png" for s in ("north", "south") for n in "12" for k in kinds for i in "12")
    )
    told = import_set("own", tmp_path / "raw", tmp_path / "lists")
    assert (sorted(told["sites"]), told["classes"]) == (["north", "south"], list(kinds))
    put_class(tmp_path / "eyes", *(f"{k}/P{n}/{side}/1.png" for k in kinds for n in "12" for side in ("left", "right")))
    for said in (None, True):
        told = import_set("own", tmp_path / "eyes", tmp_path / f"eyes-{said}", Options(patient_folders=said))
        assert (list(told["sites"]), told["classes"]) == (["eyes"], list(kinds))


def test_masks_below_folders_of_classes_are_asked_for(tmp_path: Path) -> None:
    for kind in ("benign", "normal"):
        for number in range(3):
            put(tmp_path / "raw", kind, f"{number}")
    with pytest.raises(DataError, match=r"benign, normal are called after classes, .* --sites 1 makes one site of all"):
        import_set("own", tmp_path / "raw", tmp_path / "lists")
    assert len(import_set("own", tmp_path / "raw", tmp_path / "lists", Options(sites=1))["sites"]) == 1
    told = import_set("own", tmp_path / "raw", tmp_path / "apart", Options(patient_folders=False))
    assert sorted(told["sites"]) == ["benign", "normal"]


@pytest.mark.parametrize(
    "labels", [({" Ignore ": 2, "a": 1},), ({"ignore": "2", "a": "1"},), ({"ignore": 2, "a": 1}, {"a": 1, "b": 2})]
)
def test_ignored_pixels_are_never_a_class(labels: tuple[dict[str, int | str], ...], tmp_path: Path) -> None:
    for site, own in zip(("north", "south"), labels, strict=False):
        put(tmp_path / "raw", site, "1", (0, 1, 2))
        (tmp_path / "raw" / site / "dataset.json").write_text(json.dumps({"labels": own}))
    refused("2 'ignore'", import_set, "own", tmp_path / "raw", tmp_path / "lists")


def test_grades_are_classes(tmp_path: Path) -> None:
    put_class(tmp_path / "raw", *(f"{site}/{grade}/{i}.png" for site in ("north", "south") for grade in "01234" for i in "123"))
    assert import_set("own", tmp_path / "raw", tmp_path / "lists")["classes"] == ["0", "1", "2", "3", "4"]


def test_splits_of_classes_with_patients_are_read(tmp_path: Path) -> None:
    numbers = {"train": (1, 2, 3), "test": (4, 5)}
    put_class(
        tmp_path / "raw",
        *(f"{s}/{k}/patient{n}{k}/{i}.png" for s, own in numbers.items() for k in "ab" for n in own for i in "12"),
    )
    told = import_set("own", tmp_path / "raw", tmp_path / "lists", Options(validation=0))
    assert told["sites"] == {"raw": {"training": 12, "validation": 0, "test": 8}}
    found = json.loads((tmp_path / "lists/raw/datalist.json").read_text())
    assert {(one["patient"], one["label"]) for one in found["test"]} == {(f"patient{n}{k}", k) for k in "ab" for n in (4, 5)}


def test_pictures_beside_folders_of_classes_are_told(tmp_path: Path) -> None:
    put_class(tmp_path / "raw", *(f"{site}/{kind}/{i}.png" for site in ("n", "s") for kind in "ab" for i in range(4)))
    put_class(tmp_path / "raw", "n/loose.png")
    told = import_set("own", tmp_path / "raw", tmp_path / "lists")
    assert [note for note in told["notes"] if note.startswith("n: 1 pictures lie in no folder of a class")]
    put_class(tmp_path / "raw", *(f"n/loose{i}.png" for i in range(4)))
    refused("5 pictures lie in no folder of a class", import_set, "own", tmp_path / "raw", tmp_path / "again")


def test_splits_beside_another_folder_are_no_sites(tmp_path: Path) -> None:
    put_class(tmp_path / "raw", *layout(("train", "dev", "test"), ("a", "b")))
    refused("test is called after a split, and dev beside it is not", import_set, "own", tmp_path / "raw", tmp_path / "lists")


def test_folds_are_no_sites(tmp_path: Path) -> None:
    put_class(tmp_path / "raw", *layout(("fold1", "fold2", "fold3"), ("a", "b")))
    with pytest.raises(DataError, match="fold1, fold2, fold3 are called after folds of one site's data"):
        import_set("own", tmp_path / "raw", tmp_path / "lists")
    for fold in ("1", "2", "3"):
        (tmp_path / f"raw/fold{fold}").rename(tmp_path / f"raw/ward-{fold}")
    assert import_set("own", tmp_path / "raw", tmp_path / "lists")["sites"].keys() == {"ward-1", "ward-2", "ward-3"}


def test_patients_in_two_splits_are_told(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for number in range(3):
            put(tmp_path / "raw" / split, f"patient{number}", "1")
    told = import_set("own", tmp_path / "raw", tmp_path / "lists")
    assert any("3 patients are in several splits" in note for note in told["notes"])
    told = import_set("own", tmp_path / "raw", tmp_path / "anew", Options(resplit=True))
    assert not any("several splits" in note for note in told["notes"])


LONE = [("test", (0, 0, 8)), ("test_set", (0, 0, 8)), ("train", (8, 0, 0)), ("Training", (8, 0, 0))]
"""Names of the only folder of a split, and the samples by split that follow."""


@pytest.mark.parametrize(("name", "counts"), LONE)
@pytest.mark.parametrize("kind", ["masks", "classes", "patients"])
@pytest.mark.parametrize("above", ["", "new-hospital/"])
def test_a_lone_folder_of_a_split_is_that_split(
    above: str, kind: str, name: str, counts: tuple[int, ...], tmp_path: Path
) -> None:
    place = tmp_path / "raw" / above / name
    for number in range(8 if kind == "masks" else 0):
        put(place.parent, name, f"{number}")
    below = ("a", "b") if kind == "classes" else ("a/patient1", "a/patient2", "b/patient3", "b/patient4")
    for folder in below if kind != "masks" else ():
        put_class(place, *(f"{folder}/{i}.png" for i in range(8 // len(below))))
    told = import_set("own", tmp_path / "raw", tmp_path / "lists")
    site = above.strip("/") or "raw"
    assert [tuple(own.values()) for own in told["sites"].values()] == [counts]
    split = "test" if counts[2] else "training"
    assert f"{site}: {name}/ is taken as the {split} split; --resplit cuts it anew" in told["notes"]
    assert find_site(site, Given(tmp_path / "lists")).test_only is (split == "test")
    anew = import_set("own", tmp_path / "raw", tmp_path / "anew", Options(test=0.5, resplit=True))
    assert 0 < anew["sites"][site]["training"] < 8
    assert not any("is taken as" in note for note in anew["notes"])


def test_a_lone_split_of_one_hospital_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    for number in range(10):
        put(tmp_path / "raw", "north", f"{number}")
        put(tmp_path / "raw/south", "test", f"{number}")
    told = import_set("own", tmp_path / "raw", tmp_path / "lists")
    assert {site: tuple(own.values()) for site, own in told["sites"].items()} == {"north": (7, 1, 2), "south": (0, 0, 10)}
    assert "test samples only, so their site.yaml says test_only: south" in told["notes"]


def test_a_lone_validation_folder_is_refused_with_its_remedy(tmp_path: Path) -> None:
    for number in range(8):
        put(tmp_path / "raw", "val", f"{number}")
    with pytest.raises(DataError, match=r"no site is left .* --resplit where a site has .* validation samples only"):
        import_set("own", tmp_path / "raw", tmp_path / "lists")
    told = import_set("own", tmp_path / "raw", tmp_path / "lists", Options(resplit=True))
    assert told["sites"]["raw"] == {"training": 5, "validation": 1, "test": 2}


def test_a_split_beside_another_folder_is_not_lone(tmp_path: Path) -> None:
    put_class(tmp_path / "kinds", *layout(("north", "south"), ("normal", "test")))
    refused("expected a folder per site", import_set, "own", tmp_path / "kinds", tmp_path / "lists")
    put_class(tmp_path / "raw", *layout(("north", "south"), ("train",), KINDS), "north/test/1.png", "south/test/1.png")
    told = import_set("own", tmp_path / "raw", tmp_path / "lists", Options(validation=0, test=0.5))
    assert not any("is taken as" in note for note in told["notes"])
    assert [own["test"] for own in told["sites"].values()] == [2, 2]


def test_nnunets_training_folders_alone_are_split(tmp_path: Path) -> None:
    for number in range(10):
        put(tmp_path / "raw", "", f"{number}")
    for old, new in (("images", "imagesTr"), ("masks", "labelsTr")):
        (tmp_path / "raw" / old).rename(tmp_path / "raw" / new)
    assert import_set("own", tmp_path / "raw", tmp_path / "lists")["sites"]["raw"] == dict(training=7, validation=1, test=2)


def test_all_pictures_may_be_tested(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    for number in range(3):
        put(tmp_path / "raw", "ward", f"{number}")
    shares = ("--validation", 0, "--test", 1)
    assert run(monkeypatch, "data", "import", "own", tmp_path / "raw", tmp_path / "lists", *shares) == 0
    assert "test samples only, so their site.yaml says test_only: ward" in capsys.readouterr().out
    found = json.loads((tmp_path / "lists/ward/datalist.json").read_text())
    assert [len(found[split]) for split in ("training", "validation", "test")] == [0, 0, 3]
    assert find_site("ward", Given(tmp_path / "lists")).test_only
    assert run(monkeypatch, "data", "check", tmp_path / "lists") == 0
    assert run(monkeypatch, "data", "import", "own", tmp_path / "raw", tmp_path / "no", "--test", 1) == 2
    assert "for a site that only tests, --validation 0 --test 1" in capsys.readouterr().err
    put_class(tmp_path / "kinds", *layout(KINDS))
    told = import_set("own", tmp_path / "kinds", tmp_path / "classes", Options(validation=0, test=1))
    assert told["sites"] == {"kinds": {"training": 0, "validation": 0, "test": 4}}


def test_texts_need_training_records(tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text("text,label\n" + "".join(f"note {i},{i % 2}\n" for i in range(8)))
    with pytest.raises(DataError, match="--test 1 is for pictures; for texts, ask for less"):
        import_set("csv-text", tmp_path / "notes.csv", tmp_path / "lists", Options(validation=0, test=1))


@pytest.mark.parametrize("links", [("images",), ("images", "masks")], ids="-".join)
def test_linked_folders_of_images_and_masks_are_no_classes(links: tuple[str, ...], tmp_path: Path) -> None:
    for number in range(4):
        put(tmp_path / "raw", "a", f"{number}")
    for name in links:
        (tmp_path / "raw" / "a" / name).rename(tmp_path / name)
        (tmp_path / "raw" / "a" / name).symlink_to(tmp_path / name)
    assert import_set("own", tmp_path / "raw", tmp_path / "lists")["classes"] == {"object": [255]}
    refused("holds pictures beside their masks, and no folders of classes", read_datalist, tmp_path / "raw" / "a")
