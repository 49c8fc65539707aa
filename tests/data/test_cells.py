"""Single-cell phantoms: five kinds that differ, sites that see them unevenly, lists with class names."""

import json
from collections import Counter
from pathlib import Path

import numpy as np

from consilium.data.check import check_datalist
from consilium.data.synthetic.cells import CELLS, draw_cell
from consilium.data.synthetic.phantoms import class_shares, few_classes, habits, make_phantoms


def darkness(kind: str, seed: int) -> np.ndarray:
    return draw_cell(np.random.default_rng(seed), kind, 64).mean(2) < 0.62


def test_the_kinds_differ_where_their_names_say() -> None:
    """Measured on the stained area in the middle: its long side over its short one, and whether its middle is dark."""
    ratio = {}
    for kind in ("round", "elongated"):
        found = []
        for seed in range(12):
            y, x = np.nonzero(darkness(kind, seed)[12:52, 12:52])
            short, long = np.sqrt(np.linalg.eigvalsh(np.cov(np.stack([y, x]))))
            found.append(long / short)
        ratio[kind] = np.median(found)
    assert ratio["round"] < 1.3 < 1.6 < ratio["elongated"]
    ring = [draw_cell(np.random.default_rng(s), "target", 64).mean(2) for s in range(8)]
    middles = [(p[28:36, 28:36].min(), np.sort(p[20:44, 20:44].ravel())[-30]) for p in ring]
    assert np.mean([bright - dark for dark, bright in middles]) > 0.15


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
