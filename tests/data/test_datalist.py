"""Data lists: the Decathlon layout, and one clear line for everything else."""

import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from consilium.core.errors import DataError
from consilium.data.datalist import DataList, Item, Lost, cropped_item, pool, read_datalist, with_challenge_splits
from consilium.data.safe_open import path_in_any_unicode_form
from tests.conftest import refused


def write(folder: Path, content: object, *files: str) -> Path:
    for name in files:
        (folder / name).touch()
    path = folder / "datalist.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_reads_relative_paths_plain_strings_and_slices(tmp_path: Path) -> None:
    entries = {"training": [{"image": "a.png", "label": "m.png", "fold": 0, "patient": None}], "test": ["b.png"]}
    entries["validation"] = [{"image": "v.nii.gz", "label": "l.nii.gz", "slice": 3}]
    data = read_datalist(write(tmp_path, entries, "a.png", "m.png", "b.png", "v.nii.gz", "l.nii.gz"))
    assert data.splits["training"] == (Item(tmp_path / "a.png", tmp_path / "m.png"),)
    assert data.splits["test"] == (Item(tmp_path / "b.png", None),)
    assert data.splits["validation"][0].name == "v.nii.gz[3]"
    both = pool([data, data])
    assert [len(both.splits[s]) for s in ("training", "validation", "test")] == [2, 2, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ('{"training": [], "test": [], "training": [{"image": "a.png"}]}', "'training' occurs twice"),
        ({"validation": []}, 'has no key "training"'),
        ({"training": {}}, "training: is a dict, not a list"),
        ({"training": [{"label": "m.png"}]}, r'training\[0\]: has no "image" path'),
        ({"training": [{"image": "a.png", "mask": "m.png"}]}, r"training\[0\]: unknown key 'mask'"),
        ({"training": [{"image": "gone.png"}]}, r"training\[0\]: .*gone\.png: no such file"),
        ({"training": [{"image": "a.png", "slice": 7}]}, r"training\[0\]: .*without planes"),
        ({"training": [{"image": "v.nii", "tile": [0, 0, 8, 8]}]}, r"training\[0\]: .*without tiles"),
        ({"training": [{"image": "a.png", "fold": "first"}]}, r'\[0\]: fold .first. is not a whole number; write "fold": 0'),
        ({"training": [{"image": ["a.png", "b.png"]}]}, r'\[0\]: "image" is a list of 2 files, and several images of one'),
        ({"training": [], "tests": []}, "key 'tests' is not read; call it 'test'"),
        ({"training": [], "val": []}, "key 'val' is not read; call it 'validation'"),
        ({"training": [], "valid": []}, "key 'valid' is not read; call it 'validation'"),
    ],
)
def test_errors_name_file_entry_and_remedy(content: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read_datalist(write(tmp_path, content, "a.png", "v.nii"))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_labels_may_be_classes(tmp_path: Path) -> None:
    entries = [{"image": "a.png", "label": label} for label in (2, "burr", "m.png")]
    path = write(tmp_path, {"training": entries}, "a.png", "m.png")
    assert [i.label for i in read_datalist(path, labels_are_classes=True).splits["training"]] == [2, "burr", "m.png"]
    assert [i.label for i in read_datalist(path, labels_are_classes=None).splits["training"]] == [2, "burr", tmp_path / "m.png"]
    refused(r"training\[1\]: .*burr: no such file", read_datalist, path)
    with pytest.raises(DataError, match=r"training\[0\]: label True is neither"):
        read_datalist(write(tmp_path, {"training": [{"image": "a.png", "label": True}]}, "a.png"), labels_are_classes=True)


def test_a_volume_s_file_may_have_the_four_gigabytes_that_a_volume_may(tmp_path: Path) -> None:
    path = write(tmp_path, {"training": ["v.nii"]}, "v.nii")
    with (tmp_path / "v.nii").open("wb") as file:
        file.truncate(4 * 1024**3 + 352)  # voxels of 4 GiB behind a header; nothing of it takes room on the disk
    assert read_datalist(path).splits["training"][0].name == "v.nii"


def names(data: DataList, split: str) -> list[str]:
    return [item.image.name for item in data.splits[split]]


def listed(folder: Path, folds: list[int | None], **more: object) -> DataList:
    """Return a list of labelled pictures of these folds, as it is used."""
    files = [f"{n}.png" for n in range(len(folds))]
    entries = [{"image": f, "label": "m.png"} | ({} if k is None else {"fold": k}) for f, k in zip(files, folds, strict=True)]
    return with_challenge_splits(read_datalist(write(folder, {"training": entries, **more}, "m.png", *files)))


def test_the_lowest_fold_is_for_validation_and_is_told(tmp_path: Path) -> None:
    found = listed(tmp_path, [1, 2, 1, 3, None])
    assert names(found, "validation") == ["0.png", "2.png"]
    assert names(found, "training") == ["1.png", "3.png", "4.png"]
    ((kind, note),) = found.notes
    assert (kind, note.partition(";")[0]) == ("folds", "fold 1 of 1, 2, 3 is the validation split")


@pytest.mark.parametrize(
    ("folds", "more", "why"),
    [([0, 0], {}, "all are of fold 0"), ([0, 1], {"validation": [{"image": "0.png", "label": "m.png"}]}, "a validation split")],
)
def test_folds_that_are_not_used_are_told(folds: list[int | None], more: dict[str, object], why: str, tmp_path: Path) -> None:
    found = listed(tmp_path, folds, **more)
    assert names(found, "training") == ["0.png", "1.png"]
    assert why in found.notes[0][1]


@pytest.mark.parametrize("entry", ["0.png", {"image": "0.png"}])
def test_a_test_split_without_labels_is_left_out_and_told(entry: object, tmp_path: Path) -> None:
    found = listed(tmp_path, [None], test=[entry])
    assert names(found, "test") == []
    assert found.notes == (("test split without labels", "its 1 samples are left out"),)
    some = listed(tmp_path, [None], test=[entry, {"image": "0.png", "label": "m.png"}])
    assert len(names(some, "test")) == 2  # one mask is missing, which the check reports
    unlabelled = read_datalist(write(tmp_path, {"training": ["0.png"], "test": [entry]}))
    assert with_challenge_splits(unlabelled) == unlabelled


def test_paths_of_windows_are_read(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    path = write(
        tmp_path, {"training": [{"image": "images\\a.png", "label": ".\\images\\m.png"}]}, "images/a.png", "images/m.png"
    )
    assert read_datalist(path).splits["training"] == (Item(tmp_path / "images/a.png", tmp_path / "images/m.png"),)


@pytest.mark.parametrize(("label", "is_class"), [("1.0", True), ("St. Gallen", True), ("gone.png", False), ("m.npy", False)])
def test_a_class_may_have_a_dot(label: str, is_class: bool, tmp_path: Path) -> None:
    path = write(tmp_path, {"training": [{"image": "a.png", "label": label}]}, "a.png", "m.npy")
    lost: list[Lost] = []
    found = [item.label for item in read_datalist(path, None, lost).splits["training"]]
    assert found == [label] if is_class else found == [tmp_path / label] or lost[0][1].kind == "missing file"


def test_name_that_is_no_unicode_is_read_if_the_file_is_there(tmp_path: Path) -> None:
    """Archives of Windows have such names, and imports write them into lists."""
    name = os.fsdecode(b"B\xe4r.png")
    path = write(tmp_path, {"training": [{"image": name, "label": "a"}]}, name)
    (item,) = read_datalist(path, True).splits["training"]
    assert item.image == tmp_path / name
    assert cropped_item(item, 32, 0).crop is not None  # whose place is drawn from the name
    (tmp_path / name).unlink()
    refused("has half a character in it", read_datalist, path, True)


def test_class_names_are_not_looked_up_on_the_disk(tmp_path: Path) -> None:
    path = write(tmp_path, {"training": [{"image": "a.png", "label": "benign"}]}, "a.png")
    with patch("consilium.data.datalist.path_in_any_unicode_form", wraps=path_in_any_unicode_form) as looked_up:
        read_datalist(path, None)
    assert [call.args[1] for call in looked_up.call_args_list] == ["a.png"]
