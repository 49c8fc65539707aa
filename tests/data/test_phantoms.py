"""Generated data: seeded, and appearance and annotation shifts that do not touch one another; cells and sentences."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from consilium.data.check import check_datalist
from consilium.data.datalist import read_datalist
from consilium.data.images import read_sample
from consilium.data.synthetic.phantoms import CELLS, class_shares, draw_phantom, equal_class_shares, habits, make_phantoms
from consilium.data.synthetic.sentences import FINDINGS, LABELS, site_probabilities
from consilium.data.text import Text, read_texts


@pytest.mark.parametrize("kind", ["fundus", "nuclei"])
def test_files_are_deterministic_and_readable(kind: str, tmp_path: Path) -> None:
    paths = [make_phantoms(tmp_path / d, kind, "site-1", 3, 2, 1, 1, 48, 0.5, 0.5) for d in "ab"]
    lists = [read_datalist(p) for p in paths]
    assert [len(v) for v in lists[0].splits.values()] == [2, 1, 1]
    for one, other in zip(*(d.splits["training"] for d in lists), strict=True):
        assert one.image.read_bytes() == other.image.read_bytes()
        assert one.label.read_bytes() == other.label.read_bytes()
    classes = {"disc": [1, 2], "cup": [2]} if kind == "fundus" else {"nucleus": [1]}
    label = read_sample(lists[0].splits["training"][0], classes, 48)["label"]
    assert (label.float().flatten(1).mean(1) > 0.005).all()


def test_an_equal_spec_is_not_written_again_and_another_is(tmp_path: Path) -> None:
    path = make_phantoms(tmp_path, "fundus", "site-1", 0, 1, 0, 0, 32, 0.5, 0.5)
    (tmp_path / "images" / "training-000.png").write_bytes(b"mine")
    make_phantoms(tmp_path, "fundus", "site-1", 0, 1, 0, 0, 32, 0.5, 0.5)
    assert (tmp_path / "images" / "training-000.png").read_bytes() == b"mine"
    make_phantoms(tmp_path, "fundus", "site-1", 1, 1, 0, 0, 32, 0.5, 0.5)
    assert (tmp_path / "images" / "training-000.png").read_bytes() != b"mine"
    assert path.is_file()


@pytest.mark.parametrize("kind", ["fundus", "nuclei"])
def test_each_shift_changes_only_its_side(kind: str) -> None:
    def draw(appearance: float, annotation: float, site: str = "site-2") -> tuple[np.ndarray, np.ndarray]:
        return draw_phantom(np.random.default_rng(0), kind, 64, habits(site, 0, appearance, annotation))

    image, mask = draw(0, 0)
    assert all(np.array_equal(a, b) for a, b in zip((image, mask), draw(0, 0, "site-3"), strict=True))
    looks, drawn = draw(1, 0)
    assert not np.array_equal(looks, image)
    assert np.array_equal(drawn, mask)
    same, other = draw(0, 1)
    assert np.array_equal(same, image)
    assert (other != mask).mean() > 0.005


def test_sites_of_a_group_look_alike_and_draw_alike() -> None:
    first, second, third, fourth = (habits(f"site-{i}", 0, 1, 1, groups=2) for i in (1, 2, 3, 4))
    for one, other in ((first, third), (second, fourth)):
        assert np.array_equal(one.look, other.look)
        assert np.array_equal(one.hand, other.hand)
    assert np.linalg.norm(first.look - second.look) > 0.8


def test_codes_mean_the_same_everywhere_and_are_seen_unevenly(tmp_path: Path) -> None:
    def written(site: str, seed: int, split: str) -> list[tuple[str, str]]:
        folder = make_phantoms(tmp_path / f"{site}-{seed}", "codes", site, seed, 160, 0, 48, 0, 0.7, 1.0)
        records = map(json.loads, (folder / f"{split}.jsonl").read_text().splitlines())
        return [(re.search(r"code (\w+)", one["input"])[1], one["output"]) for one in records]

    here, there = (written(site, 0, "training") for site in ("site-1", "site-2"))
    tested = written("site-1", 0, "test")
    assert len({code for code, _ in tested}) == 48
    assert set(here) | set(there) <= set(tested)
    assert {code for code, _ in written("site-1", 1, "test")} != {code for code, _ in tested}
    often, seldom = (Counter(code for code, _ in one) for one in (here, there))
    assert sum(abs(often[code] - seldom[code]) for code, _ in tested) > 80
    assert max(often.values()) > 4 * min(often.values())


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
    shares = [equal_class_shares(f"site-{i}", 2).tolist() for i in (1, 2, 3)]
    assert shares == [[0.5, 0.5, 0, 0, 0], [0, 0, 0.5, 0.5, 0], [0.5, 0, 0, 0, 0.5]]
    path = make_phantoms(tmp_path, "cells", "site-2", 0, 12, 6, 5, 32, 0.3, 0.7, classes=2)
    found = {s: {item["label"] for item in json.loads(path.read_text())[s]} for s in ("training", "validation", "test")}
    assert found == {"training": {"target", "teardrop"}, "validation": {"target", "teardrop"}, "test": set(CELLS)}


def label(text: Text) -> str:
    return text.outputs[0].partition(":")[0]


def make(folder: Path, site: str = "site-1", seed: int = 0, annotation: float = 1.0) -> dict[str, tuple[Text, ...]]:
    return read_texts(make_phantoms(folder, "sentences", site, seed, 60, 0, 9, 0, 0.7, annotation)).splits


def test_the_same_seed_and_site_give_the_same_records(tmp_path: Path) -> None:
    assert make(tmp_path / "a") == make(tmp_path / "b") == make(tmp_path / "a")
    assert make(tmp_path / "a") != make(tmp_path / "c", seed=1)
    assert make(tmp_path / "a") != make(tmp_path / "d", site="site-2")


def test_what_a_finding_means_is_the_same_everywhere_and_the_test_split_is_balanced(tmp_path: Path) -> None:
    splits = make(tmp_path)
    assert Counter(label(t) for t in splits["test"]) == dict.fromkeys(LABELS, 3)
    assert all(any(f in t.input for f in FINDINGS[label(t)]) for t in splits["training"])


def test_the_skew_grows_with_its_strength() -> None:
    even, uneven = site_probabilities(0, "site-1", "label", 3, 0.0), site_probabilities(0, "site-1", "label", 3, 1.0)
    np.testing.assert_allclose(even, 1 / 3)
    assert abs(uneven.sum() - 1) < 1e-9
    assert uneven.max() / uneven.min() > 2
