"""A site that makes up statistics: they are such as the job could have, or the site counts as refusing."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from pydantic import ValidationError

from consilium.config.job import JobConfig
from consilium.core.errors import RefusedError
from consilium.data.stats import grey_bin_names
from consilium.privacy.disclosure_control import SiteStatistics, disclose
from consilium.server.statistics_round import FILE, StatisticsRound
from tests.adversary.fuzzing import VALUES, attack, fuzzed
from tests.conftest import small_cells, small_config
from tests.privacy.test_statistics import masks


def config(cells: bool = False) -> JobConfig:
    return JobConfig.model_validate((small_cells() if cells else small_config("fedit")).model_dump() | {"statistics": {}})


def honest() -> dict[str, Any]:
    counted = masks({"disc": "+" * 24, "cup": "+" * 24}, 24)
    counted.sizes["64 to 128"] = list(range(24))
    return disclose(counted, config(), 10).model_dump(mode="json")


def test_a_message_has_at_most_256_groups() -> None:
    statistics = honest()
    for place in ("sizes", "greys"):
        one = {"names": ["a"], "samples": 24} if place == "sizes" else {"names": ["a"], "share": 0.5}
        assert len(getattr(SiteStatistics.model_validate(statistics | {place: [one] * 256}), place)) == 256
        with pytest.raises(ValidationError, match="at most 256"):
            SiteStatistics.model_validate(statistics | {place: [one] * 257})


def survey(folder: Path) -> StatisticsRound:
    made = StatisticsRound(config(), folder, lambda event: None)
    made.asked = {"a", "b"}
    return made


def test_an_answer_after_the_end_is_refused(tmp_path: Path) -> None:
    """The files are written and would not hold it."""
    made = survey(tmp_path)
    made.accept("a", honest())
    made.finish()
    with pytest.raises(RefusedError, match="was not asked for statistics, or has sent them already"):
        made.accept("b", honest())


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return honest statistics with another value in one place."""
    found = json.loads(json.dumps(honest()))
    *places, last = path.split("/")
    here = found
    for place in places:
        here = here[int(place) if place.isdigit() else place]
    here[int(last) if last.isdigit() else last] = value
    return found


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("minimum", 1),
        ("minimum", True),
        ("more", 1),
        ("splits", {}),
        ("splits", {"training": honest()["splits"]["training"]}),
        ("splits/training/samples", 9),
        ("splits/training/samples", 1e300),
        ("splits/training/samples", 10**12),
        ("splits/training/samples", "24"),
        ("splits/training/patients", 3),
        ("splits/training/classes/0/names/0", "\x1b[2J"),
        ("splits/training/classes/0/names/0", "cup"),
        ("splits/training/classes/0/names", ["disc", "cup"]),
        ("splits/training/classes/0/samples", 25),
        ("splits/training/classes/0/samples", 9),
        ("sizes/1/samples", 25),
        ("sizes", [{"names": ["64 to 128"], "samples": 24}]),
        ("areas/0/names/0", "cup"),
        ("areas/0/share", 1.5),
        ("areas/0/share", float("nan")),
        ("greys", [{"names": ["0 to 15"], "share": 0.5}]),
        ("lengths", [{"names": ["x"] * 10_000, "samples": 24}]),
    ],
)
def test_forged_statistics_are_refused(path: str, value: Any, tmp_path: Path) -> None:
    made = survey(tmp_path)
    with pytest.raises(RefusedError, match="statistics") as caught:
        made.accept("a", changed(path, value))
    assert len(str(caught.value)) < 200
    assert "\x1b" not in str(caught.value)
    assert not made.found
    made.accept("a", honest())  # the same that is honest is taken


def test_classes_that_exclude_one_another_add_up(tmp_path: Path) -> None:
    names = ["round", "elongated", "target", "teardrop", "spiky"]
    made = StatisticsRound(config(cells=True), tmp_path, lambda event: None)
    made.asked = {"a"}
    empty: dict[str, Any] = {"areas": [], "sizes": [], "spacing": [], "lengths": [], "greys": []}

    def told(*counts: int) -> dict[str, Any]:
        groups = [{"names": [name], "samples": count} for name, count in zip(names, counts, strict=True)]
        split = {"samples": 60, "patients": None, "classes": groups}
        return {"minimum": 10, "splits": {"training": split, "validation": None, "test": None}} | empty

    for wrong in ((20, 20, 20, 0, 20), (20, 20, 9, 11, 0)):
        with pytest.raises(RefusedError):
            made.accept("a", told(*wrong))
    made.accept("a", told(20, 30, 10, 0, 0))


def test_shares_of_grey_levels_are_at_most_the_whole_up_to_their_rounding(tmp_path: Path) -> None:
    made, names = survey(tmp_path), grey_bin_names(16)
    for dark, taken in ((0.519, True), (0.521, False)):
        greys = [{"names": names[:4], "share": dark}, {"names": names[4:], "share": 0.5}]
        with nullcontext() if taken else pytest.raises(RefusedError, match="more than the whole"):
            made.accept("a" if taken else "b", honest() | {"greys": greys})


def test_nobody_answers_twice_or_unasked(tmp_path: Path) -> None:
    made, events = survey(tmp_path), list[Any]()
    made.observer = events.append
    made.decline("a", "not yet")
    made.accept("a", honest())
    for name in ("a", "c"):
        with pytest.raises(RefusedError, match="was not asked for statistics"):
            made.accept(name, honest())
    assert events == [{"event": "statistics", "site": "a"}]
    made.decline("a", "changed its mind")
    made.finish()
    assert json.loads((tmp_path / FILE).read_text())["sites"] == {"a": honest(), "b": {"refused": "no answer"}}
    made.decline("b", "too late")
    assert not made.is_pending


def test_a_refusals_text_does_nothing_to_the_table(tmp_path: Path) -> None:
    made = survey(tmp_path)
    made.decline("a", "[red]\x1b[2J\n" + "x" * 5000)
    made.finish()
    shown = (tmp_path / "statistics.txt").read_text()
    assert "\x1b" not in shown
    assert "[red]" in shown
    assert max(map(len, shown.splitlines())) <= 80


@fuzzed
def test_whatever_is_sent_is_taken_or_refused(cases: int, tmp_path: Path) -> None:
    paths = ["minimum", "splits", "splits/training", "splits/test", "areas", "sizes", "sizes/1", "sizes/1/names", "greys"]

    def body(path: str, value: Any, whole: bool) -> None:
        made = survey(tmp_path)
        try:
            made.accept("a", value if whole else changed(path, value))
        except RefusedError:
            assert not made.found

    attack(cases, body, path=st.sampled_from(paths), value=VALUES, whole=st.booleans())
