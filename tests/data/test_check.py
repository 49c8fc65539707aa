"""`data check` finds what would spoil a training."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from consilium.data.check import check_datalist


def picture(path: Path, seed: int, shape: tuple[int, int] = (16, 16)) -> str:
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, shape, np.uint8)).save(path)
    return path.name


def mask(path: Path, value: int, shape: tuple[int, int] = (16, 16)) -> str:
    array = np.zeros(shape, np.uint8)
    array[:4] = value
    Image.fromarray(array).save(path)
    return path.name


def test_every_kind_of_problem_is_counted_and_named(tmp_path: Path) -> None:
    good = {"image": picture(tmp_path / "a.png", 0), "label": mask(tmp_path / "ma.png", 1)}
    small = {"image": picture(tmp_path / "b.png", 1), "label": mask(tmp_path / "mb.png", 1, (8, 8))}
    odd = {"image": picture(tmp_path / "c.png", 2), "label": mask(tmp_path / "mc.png", 255)}
    empty = {"image": picture(tmp_path / "d.png", 3), "label": mask(tmp_path / "md.png", 0)}
    (tmp_path / "e.png").write_bytes(b"broken")
    broken = {"image": "e.png", "label": "ma.png"}
    unlabelled = picture(tmp_path / "f.png", 4)
    blank = {"image": picture(tmp_path / "g.png", 5), "label": mask(tmp_path / "mg.png", 0)}
    path = tmp_path / "datalist.json"
    path.write_text(
        json.dumps({"training": [good, small, odd, empty, broken], "validation": [good], "test": [unlabelled, blank]})
    )
    report = check_datalist(path, {"nucleus": [1]})
    found = {kind: len(names) for kind, names in report.problems.items()}
    assert found == {
        "mask of another size": 1,
        "undeclared label value": 1,
        "unreadable": 1,
        "no mask": 1,
        "duplicate between splits": 1,
    }
    assert report.warnings == {
        "small split": [f"{split}; its scores will say little" for split in ("validation: 1 sample", "test: 2 samples")],
        "empty mask": ["training: d.png", "test: g.png"],
        "class of the job that a split lacks": ["test: nucleus"],
    }
    assert report.problems["duplicate between splits"] == ["validation: a.png = training: a.png"]
    shown = report.to_dict()
    assert shown["samples"] == {"training": 5, "validation": 1, "test": 2}
    assert shown["images_with_label_value"] == {"0": 5, "1": 2, "255": 1}
    json.dumps(shown)


def test_classes_are_counted_and_checked(tmp_path: Path) -> None:
    entries = [{"image": picture(tmp_path / f"{i}.png", i), "label": label} for i, label in enumerate(["a", "b", 1, 2, "c"])]
    path = tmp_path / "datalist.json"
    path.write_text(json.dumps({"training": [*entries, picture(tmp_path / "x.png", 9)], "test": []}))
    report = check_datalist(path, ["a", "b"])
    assert report.problems == {
        "undeclared class": [
            "training: 3.png: label '2' is not a class of the job; it has a, b",
            "training: 4.png: label 'c' is not a class of the job; it has a, b",
        ],
        "no class": ["training: x.png"],
    }
    assert report.to_dict()["images_of_class"]["a"] == {"training": 1}
    path.write_text(json.dumps({"training": entries[:2]}))
    assert not check_datalist(path).problems
    assert not check_datalist(path, ["a", "b"]).problems
