"""`data split`: nothing that belongs together is cut, labels are spread, and nothing is written that the list did not say."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image

from consilium.core.seeding import seed_for
from consilium.data.check import check_datalist
from consilium.data.partition import Entry, linked_groups, share_by_labels, split_list
from tests.conftest import refused
from tests.data.importing import import_set


def pictures(folder: Path, count: int, patients: int = 0, **more: Any) -> Path:
    """Write a list of pictures, all of one split, every fifth of class b; picture i is of patient i % patients."""
    entries = []
    for index in range(count):
        Image.fromarray(np.full((4, 4), index % 256, np.uint8)).save(folder / f"{index}.png")
        who = {"patient": f"P{index % patients}"} if patients else {}
        entries.append({"image": f"{index}.png", "label": "b" if index % 5 == 0 else "a", **who})
    path = folder / "datalist.json"
    path.write_text(json.dumps({"name": "ours", "training": entries, **more}))
    return path


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_shares_and_classes_are_met_and_nothing_is_lost(tmp_path: Path) -> None:
    source = pictures(tmp_path, 100)
    found = split_list(source, tmp_path / "out", 0.1, 0.2, seed=3)
    counts = found["splits"]
    assert {split: c["samples"] for split, c in counts.items()} == {"training": 70, "validation": 10, "test": 20}
    assert {split: c["labels"]["b"] for split, c in counts.items()} == {"training": 14, "validation": 2, "test": 4}
    written = read(tmp_path / "out/datalist.json")
    images = [entry["image"] for split in ("training", "validation", "test") for entry in written[split]]
    assert sorted(images) == sorted(str(tmp_path / f"{i}.png") for i in range(100))
    assert written["name"] == "ours"
    assert "no entry names its" in found["notes"][0]


@pytest.mark.parametrize("folds", [0, 5])
def test_a_patient_is_never_cut(folds: int, tmp_path: Path) -> None:
    found = split_list(pictures(tmp_path, 60, patients=12), tmp_path / "out", folds=folds)
    assert found["groups"] == 12
    lists = list((tmp_path / "out").rglob("datalist.json"))
    assert len(lists) == (folds or 1)
    for path in lists:
        written = read(path)
        places: dict[str, set[str]] = {}
        for split in ("training", "validation", "test"):
            for entry in written[split]:
                places.setdefault(entry["patient"], set()).add(split)
        assert len(places) == 12
        assert {len(where) for where in places.values()} == {1}


def test_every_sample_is_in_the_test_of_one_fold(tmp_path: Path) -> None:
    found = split_list(pictures(tmp_path, 50), tmp_path / "out", validation=0.9, folds=5)
    tests = Counter(e["image"] for i in range(1, 6) for e in read(tmp_path / f"out/fold-{i}/datalist.json")["test"])
    assert len(tests) == 50
    assert set(tests.values()) == {1}
    assert [found["splits"][f"fold-{i} test"]["samples"] for i in range(1, 6)] == [10] * 5


def test_slices_of_a_volume_and_those_of_one_mask_stay_together(tmp_path: Path) -> None:
    label = np.zeros((6, 6, 4), np.uint8)
    label[1:3, 1:3, 2] = 1
    entries = []
    for number in range(10):
        for name, array in (("v", np.random.default_rng(number).integers(0, 9, (6, 6, 4)).astype(np.int16)), ("s", label)):
            nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), tmp_path / f"{name}{number}.nii.gz")
        entries += [{"image": f"v{number}.nii.gz", "label": f"s{number}.nii.gz", "slice": k} for k in range(4)]
    (tmp_path / "datalist.json").write_text(json.dumps({"training": entries}))
    found = split_list(tmp_path / "datalist.json", tmp_path / "out", 0.2, 0.3)
    counts = found["splits"]
    assert {split: c["groups"] for split, c in counts.items()} == {"training": 5, "validation": 2, "test": 3}
    assert {split: c["labels"] for split, c in counts.items()} == {
        "training": {"1": 5},
        "validation": {"1": 2},
        "test": {"1": 3},
    }


def test_link_to_a_volume_keeps_the_ending_of_its_name(tmp_path: Path) -> None:
    """Caches of downloads, as the Hugging Face Hub's, hold files whose names have no ending, and links to them."""
    for name, most in (("images", 900), ("masks", 2)):
        (tmp_path / "site" / name).mkdir(parents=True)
        for number in range(4):
            values = np.random.default_rng(number).integers(0, most, (8, 8, 4)).astype(np.int16)
            nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), tmp_path / "a.nii.gz")
            blob = (tmp_path / "a.nii.gz").rename(tmp_path / f"{name}{number}")
            (tmp_path / "site" / name / f"{number}.nii.gz").symlink_to(blob)
    import_set("own", tmp_path / "site", tmp_path / "lists")
    split_list(tmp_path / "lists/site/datalist.json", tmp_path / "out", 0, 0.5)
    for path in (tmp_path / "lists/site/datalist.json", tmp_path / "out/datalist.json"):
        assert check_datalist(path).problems == {}


def test_keys_join_groups_through_others() -> None:
    samples = [Entry("training", {"n": n}, keys, frozenset()) for n, keys in enumerate([("a",), ("b",), ("c",), ("a", "c")])]
    assert [[s.entry["n"] for s in group] for group in linked_groups(samples)] == [[0, 2, 3], [1]]


@pytest.mark.parametrize("seed", range(20))
def test_a_rare_label_reaches_every_part(seed: int) -> None:
    """3 of 100 samples have it: one part each, as the shares of 0.34, 0.33 and 0.33 ask."""
    labels = [frozenset({"rare"} if n < 3 else {"often"}) for n in range(100)]
    samples = [Entry("training", {"n": n}, (n,), labels[n]) for n in range(100)]
    parts = share_by_labels(samples, {"x": 0.34, "y": 0.33, "z": 0.33}, seed_for(seed, "t"))
    assert [sum("rare" in s.labels for s in part) for part in parts.values()] == [1, 1, 1]
    assert sorted(map(len, parts.values())) == [33, 33, 34]


def test_the_own_test_split_can_stay(tmp_path: Path) -> None:
    source = pictures(tmp_path, 20)
    content = read(source)
    content["test"] = content["training"][:5]
    content["training"] = content["training"][5:]
    source.write_text(json.dumps(content))
    split_list(source, tmp_path / "out", validation=0.2, keep_test=True)
    written = read(tmp_path / "out/datalist.json")
    assert [e["image"] for e in written["test"]] == [str(tmp_path / f"{i}.png") for i in range(5)]
    assert (len(written["training"]), len(written["validation"])) == (12, 3)
    split_list(source, tmp_path / "more", validation=0.8, test=0.2, keep_test=True)  # `test` is not used
    assert len(read(tmp_path / "more/datalist.json")["training"]) == 3


def test_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    source = pictures(tmp_path, 6, patients=2)
    refused("2 patients or volumes are too few for 3 folds", split_list, source, tmp_path / "out", folds=3)
    refused("leave nothing to train on", split_list, source, tmp_path / "out", 0.5, 0.5)
    found = split_list(source, tmp_path / "out", 0.1, 0.4)
    assert [note for note in found["notes"] if "validation: no sample" in note]
    refused("holds a split already", split_list, source, tmp_path / "out")


def test_folds_end_with_a_new_cut_and_a_test_split_without_labels_is_left_out(tmp_path: Path) -> None:
    source = pictures(tmp_path, 20, test=["0.png"])
    made = read(source)
    made["training"] = [entry | {"fold": number % 5} for number, entry in enumerate(made["training"][1:])]
    source.write_text(json.dumps(made))
    split_list(source, tmp_path / "out", 0.1, 0.2)
    written = read(tmp_path / "out/datalist.json")
    entries = [entry for split in ("training", "validation", "test") for entry in written[split]]
    assert len(entries) == 19
    assert not [entry for entry in entries if "fold" in entry or "label" not in entry]
