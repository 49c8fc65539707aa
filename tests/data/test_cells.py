"""Single-cell phantoms: five kinds that differ, sites that see them unevenly, lists with class names."""

import json
from collections import Counter
from pathlib import Path

import numpy as np

from consilium.data.check import check_datalist
from consilium.data.synthetic.cells import CELLS
from consilium.data.synthetic.phantoms import class_shares, few_classes, habits, make_phantoms


def test_sites_see_the_classes_unevenly_but_test_them_alike(tmp_path: Path) -> None:
    path = make_phantoms(tmp_path, "cells", "site-1", 0, 40, 4, 10, 32, 0.5, 1.0)
    raw = json.loads(path.read_text())
    assert Counter(e["label"] for e in raw["test"]) == dict.fromkeys(CELLS, 2)
    training = Counter(e["label"] for e in raw["training"])
    assert max(training.values()) > 2 * 40 / len(CELLS)
    assert not (tmp_path / "masks").exists()
    assert not check_datalist(path, CELLS).problems
    assert np.allclose(class_shares(habits("site-1", 0, 1.0, 0.0)), 1 / len(CELLS))


def test_sites_in_turn_learn_from_two_classes_and_are_tested_on_all(tmp_path: Path) -> None:
    shares = [few_classes(f"site-{i}", 2).tolist() for i in (1, 2, 3)]
    assert shares == [[0.5, 0.5, 0, 0, 0], [0, 0, 0.5, 0.5, 0], [0.5, 0, 0, 0, 0.5]]
    path = make_phantoms(tmp_path, "cells", "site-2", 0, 12, 6, 5, 32, 0.3, 0.7, classes=2)
    found = {s: {item["label"] for item in json.loads(path.read_text())[s]} for s in ("training", "validation", "test")}
    assert found == {"training": {"target", "teardrop"}, "validation": {"target", "teardrop"}, "test": set(CELLS)}
