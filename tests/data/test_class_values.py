"""Values of masks that differ by hospital: import, check and job say the same, for all sites, and it ends the complaint."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from consilium.core.errors import DataError
from consilium.data.class_checks import classes_for, undeclared_remedy
from consilium.data.datalist import read_datalist
from consilium.data.images import read_sample
from tests.conftest import JOBS, Capture, Patch, refused
from tests.data.hospitals import drawn, hospital, photo, said
from tests.data.importing import import_set


@pytest.mark.parametrize(
    ("sites", "classes"),
    [
        ([{0, 1}, {0, 255}], {"object": [1, 255]}),
        ([{0, 1}, {0, 255}, {0}, {128}], {"object": [1, 128, 255]}),
        ([{0, 1, 2}], {"value-1": [1], "value-2": [2]}),
        ([{0, 1}, {0, 1, 255}], {"value-1": [1], "value-255": [255]}),
    ],
)
def test_values_that_never_occur_together_are_one_class(sites: list[set[int]], classes: dict[str, list[int]]) -> None:
    assert classes_for(sites) == classes


@pytest.mark.parametrize(
    ("sites", "classes", "written"),
    [
        ([{0, 1}, {0, 255}], {"nucleus": [1]}, {"nucleus": [1, 255]}),
        ([{0, 255}, {0, 128}], {"nucleus": [1]}, {"nucleus": [1, 128, 255]}),
        ([{0, 1, 255}], {"nucleus": [1]}, {"nucleus": [1], "value-255": [255]}),
        ([{0, 1}, {0, 7}], {"disc": [1, 2], "cup": [2]}, {"disc": [1, 2], "cup": [2], "value-7": [7]}),
    ],
)
def test_what_is_written_declares_every_value(
    sites: list[set[int]], classes: dict[str, list[int]], written: dict[str, list[int]]
) -> None:
    found = re.search(r"task\.classes: ({.*?})", undeclared_remedy(sites, classes))
    assert found is not None
    assert yaml.safe_load(found[1]) == written


def test_a_value_that_no_job_can_declare_is_mapped_by_the_site() -> None:
    found = re.search(r"labels: ({.*?}) for", undeclared_remedy([{0, 1, -1}], {"nucleus": [1]}))
    assert found is not None
    assert yaml.safe_load(found[1]) == {-1: [], 1: ["nucleus"]}


def test_a_check_of_numbered_objects_says_what_to_save(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    entry = {"image": photo(tmp_path / "a.png").name, "label": "m.png"}
    numbered = np.kron(np.arange(36).reshape(6, 6), np.ones((10, 10))).astype(np.uint8)
    Image.open(tmp_path / "a.png").resize((60, 60)).save(tmp_path / "a.png")
    Image.fromarray(numbered).save(tmp_path / "m.png")
    (tmp_path / "datalist.json").write_text(json.dumps({"training": [entry]}))
    words = ["data", "check", tmp_path, "--job", JOBS / "quickstart", "--set", "task.classes={nucleus: [1]}"]
    told = said(monkeypatch, capsys, *words, codes=(1,))
    assert "34 values are single objects or grey levels, no classes; save masks with one value for each class" in told
    Image.fromarray((numbered > 0).astype(np.uint8)).save(tmp_path / "m.png")
    said(monkeypatch, capsys, *words)


@pytest.mark.parametrize("sites", [{"a": (1,), "Süd 2": (255,), "c": (128,)}, {"a": (1,), "b": (1, 255)}])
def test_the_check_proposes_for_all_sites_and_that_is_the_end(
    sites: dict[str, tuple[int, ...]], tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    for site, values in sites.items():
        hospital(tmp_path / "raw" / site, "images/{}.png", "masks/{}.png", values)
    told = import_set("own", tmp_path / "raw", tmp_path / "lists")
    words = ["data", "check", tmp_path / "lists", "--job", JOBS / "quickstart", "--set"]
    told_now = said(monkeypatch, capsys, *words, "task.classes={nucleus: [1]}", codes=(1,))
    assert told_now.count("write task.classes") == 1
    found = re.search(r"for all masks: write task\.classes: ({.*?})", told_now)
    assert found is not None
    said(monkeypatch, capsys, *words, f"task.classes={found[1]}")
    values = sorted(value for some in yaml.safe_load(found[1]).values() for value in some)
    assert values == sorted(value for some in told["classes"].values() for value in some)  # the import says the same
    proposed = json.loads(said(monkeypatch, capsys, *words, "task.classes={nucleus: [1]}", "--format", "json", codes=(1,)))[
        "proposals"
    ]
    assert any(found[1] in one for one in proposed)


def test_a_check_without_a_job_shows_values_that_differ(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    for site, value in (("a", 1), ("b", 255)):
        hospital(tmp_path / "raw" / site, "images/{}.png", "masks/{}.png", (value,))
    import_set("own", tmp_path / "raw", tmp_path / "lists")
    told = said(monkeypatch, capsys, "data", "check", tmp_path / "lists")
    assert "values of the masks differ by site (a: 1; b: 255); all are in task.classes: {object: [1, 255]}" in told


def test_a_job_names_the_same_classes(tmp_path: Path) -> None:
    """What the error of one mask says to write lets that mask and those of the other hospitals be read."""
    for name, value in (("a", 1), ("b", 255)):
        photo(tmp_path / f"{name}.png")
        drawn(tmp_path / f"{name}-m.png", value)
    entries = [{"image": f"{name}.png", "label": f"{name}-m.png"} for name in "ab"]
    (tmp_path / "datalist.json").write_text(json.dumps({"training": entries}))
    items = read_datalist(tmp_path / "datalist.json").splits["training"]
    with pytest.raises(DataError, match=r"label value 255 belongs to no class; write task\.classes") as error:
        read_sample(items[1], {"nucleus": [1]}, 8)
    found = re.search(r"task\.classes: ({.*?})", str(error.value))
    assert found is not None
    for item in items:
        assert read_sample(item, yaml.safe_load(found[1]), 8)["label"].sum() > 0


def test_imports_one_after_the_other_agree_on_the_one_class(tmp_path: Path) -> None:
    for site, value in (("a", 1), ("b", 255)):
        hospital(tmp_path / site / site, "images/{}.png", "masks/{}.png", (value,))
        told = import_set("own", tmp_path / site, tmp_path / "lists", add=site == "b")
    assert told["classes"] == {"object": [1, 255]}
    hospital(tmp_path / "c" / "c", "images/{}.png", "masks/{}.png", (1, 2))
    refused("expected the classes of own", import_set, "own", tmp_path / "c", tmp_path / "lists", add=True)


def test_overrides_need_a_job(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    for verb in ("check", "stats"):
        assert "--set: is of a job; give --job too" in said(
            monkeypatch, capsys, "data", verb, tmp_path, "--set", "task.crop=32", codes=(2,)
        )
