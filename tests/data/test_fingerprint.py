"""What tells a site's data from others, wherever they lie and without reading a picture."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from consilium.data.fingerprint import fingerprint


def listed(folder: Path) -> Path:
    """Write a list of two pictures with masks and a folder of DICOM files beside a class."""
    (folder / "scan").mkdir(parents=True)
    for name, size in (("a.png", 3), ("b.png", 4), ("mask.png", 2), ("scan/1.dcm", 5)):
        (folder / name).write_bytes(b"x" * size)
    entries = [{"image": "a.png", "label": "mask.png"}, {"image": str(folder / "b.png"), "label": "mask.png", "patient": "p"}]
    told = {"training": entries, "test": [{"image": "scan", "label": "normal"}], "annotated": ["nucleus"]}
    (folder / "datalist.json").write_text(json.dumps(told))
    return folder / "datalist.json"


def texts(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text('{"input": "a", "output": "b"}\n')
    return folder


def classes(folder: Path) -> Path:
    for split, name in (("train", "a"), ("test", "b")):
        (folder / split / name).mkdir(parents=True)
        (folder / split / name / "1.png").write_bytes(b"x")
    return folder


@pytest.mark.parametrize("make", [listed, texts, classes])
def test_the_same_data_elsewhere_are_the_same(make: Callable[[Path], Path], tmp_path: Path) -> None:
    there, here = make(tmp_path / "there"), make(tmp_path / "elsewhere" / "here")
    assert fingerprint(there) == fingerprint(here)
    assert len(fingerprint(there)) == 16


def test_a_hidden_file_of_a_file_browser_changes_nothing(tmp_path: Path) -> None:
    before = fingerprint(listed(tmp_path))
    (tmp_path / "scan/.DS_Store").write_bytes(b"x")
    assert fingerprint(tmp_path / "datalist.json") == before


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


CHANGES: dict[str, Callable[[Path], object]] = {
    "a picture": lambda folder: grow(folder / "a.png"),
    "a mask": lambda folder: grow(folder / "mask.png"),
    "a DICOM file": lambda folder: grow(folder / "scan/1.dcm"),
    "one more": lambda folder: (folder / "scan/2.dcm").touch(),
    "one gone": lambda folder: (folder / "b.png").unlink(),
    "a class": lambda folder: change(folder, "normal", "other"),
    "a patient": lambda folder: change(folder, '"p"', '"q"'),
    "what is annotated": lambda folder: change(folder, "nucleus", "cell"),
}


def change(folder: Path, old: str, new: str) -> None:
    path = folder / "datalist.json"
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize("what", CHANGES)
def test_an_entry_or_a_size_that_changes_shows(what: str, tmp_path: Path) -> None:
    before = fingerprint(listed(tmp_path))
    CHANGES[what](tmp_path)
    assert fingerprint(tmp_path / "datalist.json") not in (before, "")


def test_texts_count_whole_and_by_split(tmp_path: Path) -> None:
    folder = texts(tmp_path / "t")
    before = fingerprint(folder)
    assert fingerprint(folder / "train.jsonl") == before
    (folder / "test.jsonl").write_text('{"input": "a", "output": "c"}\n')
    assert fingerprint(folder) != before
    (folder / "test.jsonl").rename(folder / "validation.jsonl")
    assert len({before, fingerprint(folder), ""}) == 3


def test_a_picture_in_another_class_or_split_shows(tmp_path: Path) -> None:
    folder = classes(tmp_path / "c")
    before = fingerprint(folder)
    (folder / "train/b").mkdir()
    shutil.move(folder / "train/a/1.png", folder / "train/b/1.png")
    assert fingerprint(folder) != before


@pytest.mark.parametrize("content", ["", "[1]", '{"training": 3}', '{"training": [3]}', "[" * 100_000])
def test_what_cannot_be_read_has_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "datalist.json").write_text(content)
    assert fingerprint(tmp_path / "datalist.json") == fingerprint(tmp_path / "gone.json") == fingerprint(tmp_path) == ""


@pytest.mark.parametrize("name", ["a.png", "sub\\\\b.png"], ids=["plain", "backslash"])
@pytest.mark.parametrize("form", ['{{"training": ["{}"]}}', '{{"training": [], "testing": [{{"image": "{}"}}]}}'])
def test_every_spelling_of_an_entry_counts_its_file(form: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    path = tmp_path / "datalist.json"
    path.write_text(form.format(name))
    found = set()
    for size in (1, 2):
        for file in ("a.png", "sub/b.png"):
            (tmp_path / file).write_bytes(b"x" * size)
        found.add(fingerprint(path))
    assert len(found - {""}) == 2
