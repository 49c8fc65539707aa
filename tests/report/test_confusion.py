"""Confusion tables of all sites together, and their picture."""

from pathlib import Path

import numpy as np
from PIL import Image

from consilium.report.confusion import confusions, plot_confusions

CLASSES = ["a", "b/c", "$x^2$"]


def test_counts_are_summed_over_sites_and_kept_apart_by_model() -> None:
    one = {"test/global/confusion/a/a": 3.0, "test/global/confusion/a/b/c": 1.0, "test/global/accuracy": 0.7}
    other = {"test/global/confusion/a/a": 2.0, "test/pretrained/confusion/$x^2$/a": 4.0, "train/loss": 1.0}
    found = confusions({"s1": one, "s2": other}, CLASSES)
    assert list(found) == ["pretrained", "global"]
    assert found["global"].tolist() == [[5, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert found["pretrained"].tolist() == [[0, 0, 0], [0, 0, 0], [4, 0, 0]]
    assert confusions({"s1": {"test/global/dice": 1.0}}, CLASSES) == {}


def test_a_cell_is_as_dark_as_its_share_of_the_true_class(tmp_path: Path) -> None:
    counts = {"global": np.array([[1.0, 0, 0], [0, 0, 30], [0, 0, 0]])}  # both rows are all in one cell; the last has nothing
    plot_confusions(tmp_path / "c.png", counts, CLASSES)
    pixels = np.asarray(Image.open(tmp_path / "c.png").convert("RGB")).reshape(-1, 3)
    darkest = int((pixels == (8, 48, 107)).all(1).sum())  # the end of matplotlib's Blues
    blank = int((pixels == (247, 251, 255)).all(1).sum())  # its beginning
    assert blank / darkest > 3
    assert darkest > 2000
