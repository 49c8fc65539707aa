"""How far a run is, by its log: as an uninterrupted run would tell it, and without waiting for the closing evaluation."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from consilium.report.live_view import progress, refusal_time_text


def folder(tmp_path: Path, *lines: dict[str, Any]) -> Path:
    (tmp_path / "job.yaml").write_text(
        yaml.safe_dump({"name": "study", "task": {"classes": ["a"], "name": "segmentation"}, "training": {"rounds": 5}})
    )
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def started(round: int, at: float) -> dict[str, Any]:
    return {"event": "started", "time": at, "round": round, "phase": 0, "sites": ["a", "b"]}


def result(site: str, round: int, at: float) -> dict[str, Any]:
    metrics = {"train/loss": 0.5, "comm/bytes_up": 100.0, "comm/bytes_down": 200.0}
    weight = {"a": 30, "b": 10}[site]
    return {"event": "result", "time": at, "site": site, "round": round, "phase": 0, "weight": weight, "metrics": metrics}


def concluded(round: int, at: float) -> dict[str, Any]:
    return {"event": "concluded", "time": at, "round": round, "phase": 0, "sites": ["a", "b"], "privacy/epsilon": round + 1.0}


def test_a_run_before_its_first_round(tmp_path: Path) -> None:
    found = progress(folder(tmp_path))
    assert (found["job"], found["round"], found["rounds"]) == ("study", 0, 5)
    assert (found["asked"], found["eta_seconds"], found["epsilon"]) == ([], None, None)


def test_a_run_in_its_third_round(tmp_path: Path) -> None:
    now = time.time()
    lines = [x for r in (0, 1) for t in [now - 24 + 10 * r] for x in (started(r, t), result("a", r, t), concluded(r, t + 10))]
    refused = {"event": "refused", "time": now, "round": 1, "site": "b", "reason": "no answer"}
    found = progress(folder(tmp_path, *lines, refused, started(2, now - 4), result("a", 2, now - 1)))
    assert (found["round"], found["asked"], found["answered"], found["epsilon"]) == (2, ["a", "b"], ["a"], 2.0)
    assert found["eta_seconds"] == pytest.approx(3 * 10 - 4, abs=1)
    expected = {"round": 2, "metrics": {"train/loss": 0.5}, "bytes_up": 300, "bytes_down": 600, "weight": 30, "share": 1.0}
    assert found["sites"]["a"] == expected
    assert [(one["site"], one["reason"]) for one in found["refused"]] == [("b", "no answer")]
    assert not found["finished"]


def test_weights_and_shares_are_those_of_the_last_mean(tmp_path: Path) -> None:
    """A site that was not part of it has none, whatever it had before."""

    def shares(*lines: dict[str, Any]) -> dict[str, tuple[int | None, float | None]]:
        sites = progress(folder(tmp_path, *lines))["sites"]
        return {name: (site["weight"], site["share"]) for name, site in sites.items()}

    lines = [started(0, 0.0), result("a", 0, 1.0), result("b", 0, 1.0), concluded(0, 2.0), started(1, 2.0), result("a", 1, 3.0)]
    assert shares(*lines) == {"a": (30, 0.75), "b": (10, 0.25)}
    assert shares(*lines, concluded(1, 4.0)) == {"a": (30, 1.0), "b": (None, None)}


def test_a_round_that_takes_longer_leaves_the_time_of_later_ones(tmp_path: Path) -> None:
    """By hand: rounds of 10 s, and this one has gone on for 60."""
    now = time.time()

    def eta(rounds_done: int, waiting: dict[str, Any] | None = None) -> float | None:
        lines = [x for r in range(rounds_done) for x in (started(r, now - 200 + 10 * r), concluded(r, now - 190 + 10 * r))]
        found: float | None = progress(folder(tmp_path, *lines, started(rounds_done, now - 60)), waiting)["eta_seconds"]
        return found

    assert eta(2) == pytest.approx(2 * 10, abs=1)
    assert eta(4) is None  # the last one: nothing is known, and 0 would be wrong
    assert eta(4, {"sites": ["b"], "seconds": 14.0}) == pytest.approx(14, abs=1)
    assert eta(2, {"sites": ["b"], "seconds": 14.0}) == pytest.approx(34, abs=1)
    assert eta(2, {"sites": ["a", "b"], "seconds": 3540.0}) == pytest.approx(2 * 10, abs=1)  # no site has replied


@pytest.mark.parametrize(
    ("round", "joining", "said"),
    [
        (0, True, "before the first round"),
        (1, True, "before round 2"),
        (1, False, "in round 2"),
        (2, False, "in the closing evaluation"),
        (2, True, "before the closing evaluation"),
    ],
)
def test_a_refusal_is_never_in_a_round_that_the_job_does_not_have(round: int, joining: bool, said: str) -> None:
    assert refusal_time_text({"round": round, "joining": joining}, 2) == said
