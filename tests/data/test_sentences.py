"""Generated sentences: repeatable, skewed by site where asked, the test split balanced."""

from collections import Counter
from pathlib import Path

import numpy as np

from consilium.data.synthetic.phantoms import make_phantoms
from consilium.data.synthetic.sentences import FINDINGS, LABELS, site_probabilities
from consilium.data.text import Text, read_texts


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
