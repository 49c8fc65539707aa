"""Phantoms: seeded, and appearance and annotation shifts that do not touch one another."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from consilium.data.datalist import read_datalist
from consilium.data.images import read_sample
from consilium.data.synthetic.phantoms import draw_phantom, habits, make_phantoms
from consilium.data.synthetic.sentences import make_texts


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
        folder = make_texts(tmp_path / f"{site}-{seed}", "codes", site, seed, 160, 0, 48, 0.7, 1.0)
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
