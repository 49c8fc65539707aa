"""The tables of a page with classes or sites on both sides."""

import json
import math
from pathlib import Path

import numpy as np
from PIL import Image

from consilium.report.page.run_page import run_page, site_page
from consilium.report.results_table import (
    SHARED,
    confusion_tables,
    confusions,
    cross_site_matrix,
    plot_confusions,
    read_cross_site_matrix,
)
from consilium.report.run_record import read_run
from tests.conftest import small_cells
from tests.report.pages import Page, make_run

CLASSES = ["lymph", "mono"]
COUNTS = {"lymph/lymph": 3.0, "lymph/mono": 1.0, "mono/mono": 2.0}


def told(**more: float) -> dict[str, float]:
    return {f"test/global/confusion/{pair}": count for pair, count in (COUNTS | more).items()}


def test_confusions_are_summed_and_shown_for_every_site() -> None:
    """Worked by hand: of 4 lymphocytes 3 are found, so recall is 0.75; both sites together 6 of 9."""
    results = {"b": told(), "a": told(**{"lymph/mono": 2.0}), "none": {"test/global/accuracy": 1.0}}
    parts = confusion_tables(results, CLASSES)
    assert list(parts) == ["all sites", "a", "b"]
    (both,), _, (own,) = parts.values()
    assert [one.heading for one in own.columns] == ["true class", "lymph", "mono", "recall"]
    assert own.rows == [["lymph", "3", "1", "0.750"], ["mono", "0", "2", "1.000"]]
    assert both.rows == [["lymph", "6", "3", "0.667"], ["mono", "0", "4", "1.000"]]
    assert confusion_tables(results, []) == confusion_tables({}, CLASSES) == {}
    (empty,) = confusion_tables({"a": {"test/global/confusion/mono/mono": 1.0}}, CLASSES)["a"]
    assert empty.rows[0] == ["lymph", "0", "0", "-"]


def test_a_page_of_classification_has_them_with_headings_on_both_sides(tmp_path: Path) -> None:
    job = small_cells().model_dump(mode="json")
    job["task"]["classes"] = CLASSES
    folder = make_run(tmp_path / "run", simulated=False, **{key: job[key] for key in ("task", "model", "data", "adapter")})
    (folder / "results.json").write_text(json.dumps({site: told() for site in ("north", "<b>")}))
    page = Page(run_page(read_run(folder)))
    assert page.text.count("true class") == 4  # the sentence, all sites together, and each
    assert "<b>, global model" in page.text
    assert "north, global model" in page.text
    assert "confusion" in [one["id"] for one in page.of("h2")]
    cases = json.loads((folder / "sites/north/cases.json").read_text()) | {"task": job["task"], "classes": CLASSES}
    (folder / "sites/north/cases.json").write_text(json.dumps(cases | {"metrics": told()}))
    (folder / "simulation.json").write_text("{}")
    assert "0.750" in Page(site_page(folder, "north")).text


def test_a_matrix_is_read_again_and_damage_is_none(tmp_path: Path) -> None:
    rows = [(SHARED, "global", {"a": {"dice": 0.5}, "b": {}}), ("a", "personalized", {"a": {"dice": 0.75}})]
    found = cross_site_matrix("dice", "test", rows)  # type: ignore[arg-type]
    found.write(tmp_path)
    shown = found.table()
    assert [one.heading for one in shown.columns] == ["model of", "a", "b"]
    assert shown.rows == [["(shared)", "0.500", "-"], ["a", "0.750", "-"]]
    raw = json.loads((tmp_path / "cross_sites.json").read_text())
    again = read_cross_site_matrix(raw)
    assert again is not None
    assert again.values[0][1] is None
    for damage in ({"values": [[1]]}, {"stages": ["x", "y"]}, {"values": "no"}, {"sites": 3}, {"values": [["1e999"] * 2] * 2}):
        assert read_cross_site_matrix(raw | damage) is None or read_cross_site_matrix(raw | damage).values[0][0] == math.inf  # type: ignore[union-attr]
    assert read_cross_site_matrix([]) is None


THREE = ["a", "b/c", "$x^2$"]


def test_counts_are_summed_over_sites_and_kept_apart_by_model() -> None:
    one = {"test/global/confusion/a/a": 3.0, "test/global/confusion/a/b/c": 1.0, "test/global/accuracy": 0.7}
    other = {"test/global/confusion/a/a": 2.0, "test/pretrained/confusion/$x^2$/a": 4.0, "train/loss": 1.0}
    found = confusions({"s1": one, "s2": other}, THREE)
    assert list(found) == ["pretrained", "global"]
    assert found["global"].tolist() == [[5, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert found["pretrained"].tolist() == [[0, 0, 0], [0, 0, 0], [4, 0, 0]]
    assert confusions({"s1": {"test/global/dice": 1.0}}, THREE) == {}


def test_a_cell_is_as_dark_as_its_share_of_the_true_class(tmp_path: Path) -> None:
    first, second, third = THREE  # two rows are all in one cell; the last has nothing
    counts = {f"{first}/{first}": 1.0, f"{second}/{third}": 30.0}
    plot_confusions(tmp_path / "c.png", {"a": {f"test/global/confusion/{pair}": n for pair, n in counts.items()}}, THREE)
    pixels = np.asarray(Image.open(tmp_path / "c.png").convert("RGB")).reshape(-1, 3)
    darkest = int((pixels == (8, 48, 107)).all(1).sum())  # the end of matplotlib's Blues
    blank = int((pixels == (247, 251, 255)).all(1).sum())  # its beginning
    assert blank / darkest > 3
    assert darkest > 2000
