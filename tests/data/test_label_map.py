"""A site's own labels in the job's terms."""

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image

from consilium.config.site import load_site
from consilium.core.errors import DataError
from consilium.data.datalist import read_datalist, with_job_labels
from consilium.data.images import read_sample
from consilium.data.planes_and_tiles import expand
from consilium.data.settings import PictureSettings
from tests.conftest import Capture, Patch, refused, run

CLASSES = {"disc": [1, 2], "cup": [2]}


def masks(folder: Path, **more: Any) -> Path:
    """Write one picture whose mask has 3 in its left half, 7 right, and 0 in the lower half."""
    mask = np.zeros((8, 8), np.uint8)
    mask[:4, :4], mask[:4, 4:] = 3, 7
    Image.fromarray(mask).save(folder / "mask.png")
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(folder / "image.png")
    (folder / "list.json").write_text(json.dumps({"training": [{"image": "image.png", "label": "mask.png"} | more]}))
    return folder / "list.json"


def test_a_value_may_stand_for_several_classes_and_one_for_none(tmp_path: Path) -> None:
    (item,) = with_job_labels(
        read_datalist(masks(tmp_path)), {3: ("disc", "cup", "of another job"), 7: ()}, None, CLASSES
    ).splits["training"]
    label = read_sample(item, CLASSES, 8)["label"].numpy()
    wanted = np.zeros((8, 8))
    wanted[:4, :4] = 1
    assert np.array_equal(label, np.stack([wanted, wanted]))


def test_a_class_that_no_label_stands_for_must_be_said_to_be_missing(tmp_path: Path) -> None:
    data = read_datalist(masks(tmp_path))
    labels: Any = {3: ("Disc", "cup"), 7: ()}  # a slip of the pen would train on empty discs
    refused("stands for class 'disc'", with_job_labels, data, labels, None, CLASSES)
    (item,) = with_job_labels(data, labels, ("cup",), CLASSES).splits["training"]
    assert item.annotated == ("cup",)
    listed = read_datalist(masks(tmp_path, annotated=["disc"]))  # what the list says wins
    assert with_job_labels(listed, None, ("cup",), CLASSES).splits["training"][0].annotated == ("disc",)
    (item,) = with_job_labels(data, {3: ("disc", "cup")}, None, CLASSES).splits["training"]
    refused(r"label value 7 belongs to no class; map it under `labels`", read_sample, item, CLASSES, 8)


def pictures(folder: Path, labels: list[Any]) -> Path:
    Image.new("L", (8, 8)).save(folder / "image.png")
    (folder / "list.json").write_text(json.dumps({"training": [{"image": "image.png", "label": x} for x in labels]}))
    return folder / "list.json"


def test_classes_are_renamed_counted_or_left_out(tmp_path: Path) -> None:
    data = read_datalist(pictures(tmp_path, ["nv", "mel", "mel", "unclear", 4, "4"]), True)
    labels: Any = {"nv": ("benign", "naevus"), "mel": ("malignant",), "unclear": (), 4: ("malignant",)}
    found = with_job_labels(data, labels, None, ["benign", "malignant"]).splits["training"]
    assert [item.label for item in found] == ["benign", "malignant", "malignant", "malignant", "malignant"]


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ({"nv": ("benign",)}, "'mel' is not under `labels`"),
        ({"nv": ("benign",), "mel": ("melanoma",)}, "none of the job's"),
        ({"nv": ("benign",), "mel": ("malignant", "benign")}, "'malignant', 'benign' by site.yaml"),
    ],
)
def test_a_class_without_one_meaning_is_refused(labels: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=told):
        with_job_labels(read_datalist(pictures(tmp_path, ["nv", "mel"]), True), labels, None, ["benign", "malignant"])


def test_data_check_reads_a_set_of_a_site_yaml(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    masks(tmp_path)
    sets = {"a": {"datalist": "list.json", "labels": {3: ["disc", "cup"], 7: []}}}
    (tmp_path / "site.yaml").write_text(json.dumps({"datasets": sets | {"b": {"datalist": "list.json", "patients": "a"}}}))
    assert set(load_site(tmp_path / "site.yaml").datasets) == {"a", "b"}
    words = ("data", "check", tmp_path / "site.yaml", "--job", "jobs/quickstart")
    assert run(monkeypatch, *words, "--dataset", "a") == 0
    capsys.readouterr()
    assert run(monkeypatch, *words, "--dataset", "b") == 1
    assert "undeclared label value" in capsys.readouterr().out
    assert run(monkeypatch, *words) == 1
    assert "the job names none of several data sets" in capsys.readouterr().err
    assert run(monkeypatch, "data", "check", tmp_path / "list.json", "--dataset", "a") == 2


def test_planes_that_show_only_background_of_the_map_are_empty(tmp_path: Path) -> None:
    voxels = np.zeros((6, 5, 3), np.uint8)
    voxels[..., 1], voxels[..., 2] = 9, 1
    for name in ("image", "mask"):
        nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), tmp_path / f"{name}.nii.gz")
    (tmp_path / "list.json").write_text(json.dumps({"training": [{"image": "image.nii.gz", "label": "mask.nii.gz"}]}))
    settings = PictureSettings.model_validate({"slices": {"empty": "drop"}})
    data = read_datalist(tmp_path / "list.json")
    assert [item.slice for item in expand(data, settings).splits["training"]] == [1, 2]
    mapped = with_job_labels(data, {1: ("disc",), 9: ()}, None, ["disc"])
    assert [item.slice for item in expand(mapped, settings).splits["training"]] == [2]
