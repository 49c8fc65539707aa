"""Sharing a set out: every sample once, the same every time, skewed as asked, nobody too poor."""

import json
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image

from consilium.core.errors import DataError
from consilium.data.datalist import Item, read_datalist
from consilium.data.partition import partition, share_out
from tests.conftest import Capture, Patch, refused, run

CLASSES = ["a", "b", "c", "d"]


@pytest.fixture(autouse=True)
def _one_picture(request: pytest.FixtureRequest, monkeypatch: Patch) -> None:
    """Draw it in one test alone: it takes longer than all else."""
    if "picture" not in request.node.name:
        monkeypatch.setattr("consilium.data.partition.write_figure", lambda *parts, **more: None)


NAMES = [f"site-{i}" for i in range(1, 6)]


def items(split: str, count: int) -> list[Item]:
    return [Item(Path(f"{split}/{c}{i}.png"), c) for c in CLASSES for i in range(count)]


def shared(beta: float, seed: int = 0, minimum: int = 3) -> dict[str, dict[str, list[Item]]]:
    splits = {"training": items("train", 60), "validation": items("val", 20), "test": items("test", 2)}
    return share_out(splits, CLASSES, NAMES, beta, seed, minimum)


@pytest.mark.parametrize("beta", [0.05, 1.0, 100.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_sample_goes_to_one_site_and_the_test_split_to_all(beta: float, seed: int) -> None:
    found = shared(beta, seed)
    for split, count in (("training", 60), ("validation", 20)):
        given = [item for site in found.values() for item in site[split]]
        assert sorted(given, key=str) == sorted(items("train" if split == "training" else "val", count), key=str)
    assert all(site["test"] == items("test", 2) for site in found.values())
    assert min(len(site["training"]) for site in found.values()) >= 3
    assert {len(site["training"]) for site in shared(0.01, minimum=48).values()} == {48}  # near everything


def patients(**samples: str) -> list[Item]:
    """Return the samples of patients, a letter a class: `one="aab"`."""
    return [
        Item(Path(f"{who}{i}.png"), label, patient=who) for who, labels in samples.items() for i, label in enumerate(labels)
    ]


def of_patients(training: list[Item], sites: int, minimum: int, seed: int = 0) -> list[set[str]]:
    """Return who is at each site, and find every sample there once."""
    names = NAMES[:sites]
    found = share_out({"training": training, "validation": [], "test": []}, CLASSES, names, None, seed, minimum)
    assert sorted((item for site in found.values() for item in site["training"]), key=str) == sorted(training, key=str)
    assert min(len(site["training"]) for site in found.values()) >= minimum
    return [{item.patient for item in site["training"]} for site in found.values()]


@pytest.mark.parametrize("minimum", [1, 25])
def test_a_patient_is_at_one_site_whatever_its_samples_show(minimum: int) -> None:
    everyone = {f"p{i}": ("abcd" * 2)[i % 3 : 1 + i % 8] or "d" for i in range(60)}
    found = of_patients(patients(**everyone), 5, minimum)
    assert sorted(who for site in found for who in site) == sorted(everyone)


def test_a_patient_counts_as_the_class_that_most_of_its_samples_have() -> None:
    for seed in range(8):  # by first samples all would be of class b, and p1 and p2 at one site in a third of the seeds
        (one, other) = of_patients(patients(p1="baa", p2="baa", p3="bbb", p4="bbb"), 2, 1, seed)
        assert len(one & {"p1", "p2"}) == len(other & {"p1", "p2"}) == 1


def test_a_patient_of_two_splits_trains_and_validates_at_one_site() -> None:
    both = patients(**{f"p{i}": "ab" for i in range(12)})
    for seed in range(8):
        found = share_out({"training": both, "validation": both, "test": []}, "ab", ["x", "y"], 0.5, seed, 2)
        for site in found.values():
            assert {item.patient for item in site["training"]} == {item.patient for item in site["validation"]}
        assert sum(len(site["validation"]) for site in found.values()) == len(both)


def test_patients_too_large_to_give_every_site_its_minimum_are_named() -> None:
    assert of_patients(patients(p1="aaaaaa", p2="aaaaaa"), 2, 6) in ([{"p1"}, {"p2"}], [{"p2"}, {"p1"}])
    large = patients(p1="a" * 30, p2="b" * 8, p3="b", p4="c" * 8, p5="c")  # the largest site has none to give, another has
    assert all(sum(map(len, of_patients(large, 3, 8, seed))) == 5 for seed in range(8))
    with pytest.raises(
        DataError, match="--minimum: 4: patients are not cut apart, and none can go to a site of 0 samples; ask"
    ):
        of_patients(patients(p1="aaaaaa", p2="aaaaaa"), 3, 4)


def skew(beta: float) -> float:
    """Return the mean share of a site's most frequent class; 0.25 is even."""
    sites = [[item.label for item in site["training"]] for seed in range(3) for site in shared(beta, seed).values()]
    return float(np.mean([max(site.count(c) for c in CLASSES) / len(site) for site in sites]))


def test_small_beta_is_skewed_and_large_beta_nearly_even() -> None:
    assert shared(0.3, 1) == shared(0.3, 1)
    assert shared(0.3, 1) != shared(0.3, 2)
    assert skew(0.1) > 0.7
    assert skew(100) < 0.4


def test_validation_follows_training() -> None:
    for site in shared(0.3, minimum=1).values():
        for label in CLASSES:
            train, val = (sum(item.label == label for item in site[split]) for split in ("training", "validation"))
            assert abs(train / 60 - val / 20) <= 0.06


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for split, count in (("train", 8), ("test", 2)):
        for number, label in enumerate(CLASSES):
            (tmp_path / "set" / split / label).mkdir(parents=True)
            for i in range(count):
                shade = np.full((8, 8), 40 * number + i, np.uint8)
                Image.fromarray(shade).save(tmp_path / "set" / split / label / f"{i}.png")
    return tmp_path / "set"


def test_lists_summary_and_picture_are_written(pictures: Path, tmp_path: Path) -> None:
    summary = partition(pictures, tmp_path / "out", 3, 0.5, 0, 2)
    assert json.loads((tmp_path / "out/partition.json").read_text()) == summary
    assert summary["classes"] == CLASSES
    lists = [read_datalist(tmp_path / f"out/site-{i}/datalist.json", labels_are_classes=True) for i in (1, 2, 3)]
    for one, counts in zip(lists, summary["training"].values(), strict=True):
        labels = [item.label for item in one.splits["training"]]
        assert {c: labels.count(c) for c in CLASSES} == counts
        assert all(item.image.is_file() and item.image.parent.name == item.label for item in one.splits["training"])
        assert len(one.splits["test"]) == 8
    assert sum(len(one.splits["training"]) for one in lists) == 32
    with Image.open(tmp_path / "out/partition.png") as picture:
        assert picture.size[0] > 500
        assert len(np.unique(np.asarray(picture.convert("P")))) > 5


def test_without_the_test_split_all_else_is_the_same(
    pictures: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    asked = ("--sites", 3, "--beta", 0.5, "--minimum", 2)
    for name, more in (("whole", ()), ("choosing", ("--no-test",))):
        assert run(monkeypatch, "data", "partition", pictures, tmp_path / name, *asked, *more) == 0
    for site in ("site-1", "site-2", "site-3"):
        whole, choosing = (
            read_datalist(tmp_path / name / site / "datalist.json", labels_are_classes=True).splits
            for name in ("whole", "choosing")
        )
        assert choosing == whole | {"test": ()}
        assert len(whole["test"]) == 8
    (tmp_path / "texts.jsonl").write_text("{}\n")
    assert run(monkeypatch, "data", "partition", tmp_path / "texts.jsonl", tmp_path / "none", "--no-test") == 2
    assert "--no-test: is for pictures" in capsys.readouterr().err


def test_a_site_can_be_shared_out_again_and_errors_are_clear(pictures: Path, tmp_path: Path) -> None:
    partition(pictures, tmp_path / "out", 2, 1.0, 0, 2)
    again = partition(tmp_path / "out/site-1/datalist.json", tmp_path / "again", 2, 1.0, 0, 1)
    assert again["classes"] == CLASSES
    refused("holds sites already", partition, pictures, tmp_path / "out", 2, 1.0, 0, 2)
    refused("32 training samples are too few for 5 sites of 8", partition, pictures, tmp_path / "x", 5, 1.0, 0, 8)
    refused("no pictures in folders", partition, tmp_path / "set/train/a", tmp_path / "x", 2, 1.0, 0, 2)


def test_keys_of_an_entry_are_kept(tmp_path: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(np.zeros((8, 9, 10), np.int16), np.eye(4)), tmp_path / "v.nii")
    more = {"axis": "coronal", "patient": "p", "study": "s"}
    entries = [{"image": "v.nii", "label": CLASSES[n % 2], "slice": n, "fold": 0, **more} for n in range(6)]
    (tmp_path / "datalist.json").write_text(json.dumps({"training": entries}))
    partition(tmp_path / "datalist.json", tmp_path / "sites", 1, None, seed=0, minimum=1)
    found = json.loads((tmp_path / "sites/site-1/datalist.json").read_text())["training"]
    wanted = [{**one, "image": str(tmp_path / "v.nii")} for one in entries]
    assert sorted(found, key=lambda one: one["slice"]) == [{k: v for k, v in one.items() if k != "fold"} for one in wanted]


def test_a_number_and_its_text_are_one_class(tmp_path: Path) -> None:
    entries = [{"image": f"{n}.png", "label": label} for n, label in enumerate([1, "1", 0, "0"] * 3)]
    for entry in entries:
        (tmp_path / str(entry["image"])).touch()
    (tmp_path / "datalist.json").write_text(json.dumps({"training": entries}))
    found = partition(tmp_path / "datalist.json", tmp_path / "sites", 2, None, seed=0, minimum=1)
    assert found["classes"] == ["0", "1"]
    assert sum(sum(own.values()) for own in found["training"].values()) == len(entries)
