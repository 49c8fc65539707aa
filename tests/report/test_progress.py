"""How far a run is, by its log: as an uninterrupted run would tell it, and without waiting for the final evaluation."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from consilium.cli.jobs import progress_line
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


def eta(tmp_path: Path, ended: list[float], spent: float, waiting: dict[str, Any] | None = None) -> tuple[float | None, bool]:
    """Return ETA and `late` of a run of 5 rounds: those that `ended`, by their seconds, and one that goes on for `spent`."""
    now, lines = time.time() - spent, [started(len(ended), time.time() - spent)]
    for round in reversed(range(len(ended))):
        lines = [started(round, now - ended[round]), concluded(round, now), *lines]
        now -= ended[round]
    found = progress(folder(tmp_path, *lines), (lambda: waiting) if waiting else None)
    assert found["waiting"] == waiting
    return found["eta_seconds"], found["late"]


@pytest.mark.parametrize(
    ("ended", "spent", "left", "late"),
    [
        ([], 60, None, False),  # nothing is known
        ([10], 4, 3 * 10 + 6, False),
        ([10, 10], 12, 2 * 10, False),
        ([10, 10], 60, 2 * 10, True),
        ([10, 610], 4, 2 * 10 + 6, False),  # a wait of 600 s in one round is not one of each later round
        ([610, 10], 4, 2 * 10 + 6, False),
        ([10, 610, 610], 4, 610 + 606, False),  # each round waits
        ([10, 610, 12, 610], 4, 8, False),  # in the order of size: 10, 12, 610, 610
        ([10, 10, 10, 10], 60, None, True),  # the last one: nothing is known, and 0 would be wrong
    ],
)
@pytest.mark.parametrize("waiting", [None, {"sites": ["b"], "seconds": 540.0}, {"sites": ["a", "b"], "seconds": 3540.0}])
def test_eta_is_by_usual_rounds_and_the_wait_apart(
    ended: list[float], spent: float, left: float | None, late: bool, waiting: dict[str, Any] | None, tmp_path: Path
) -> None:
    found = eta(tmp_path, ended, spent, waiting)
    assert found == (left if left is None else pytest.approx(left, abs=1), late)


def test_eta_counts_no_pause_and_all_phases(tmp_path: Path) -> None:
    """By hand: round 1 has two phases of 10 and 20 s, an hour apart. Round 2 began before a pause of an hour, and 4 s ago."""
    now = time.time()
    lines = [started(0, now - 7300), concluded(0, now - 7290), started(0, now - 3690) | {"phase": 1}]
    lines += [
        concluded(0, now - 3670) | {"phase": 1},
        started(1, now - 3660),
        {"event": "resumed", "time": now - 5, "round": 1},
    ]
    found = progress(folder(tmp_path, *lines, started(1, now - 4)))
    assert (found["eta_seconds"], found["late"]) == (pytest.approx(3 * 30 + 26, abs=1), False)


def test_line_of_a_late_round_says_what_the_eta_counts() -> None:
    told = {"round": 2, "rounds": 5, "phase": 0, "asked": ["a", "b"], "answered": ["a"], "epsilon": None, "finished": False}
    told |= {"waiting": {"sites": ["b"], "seconds": 540.0}, "eta_seconds": 20.0}
    line = "round 3/5: 1 of 2 sites have answered; waits for b, at most 540 s; ETA 20 s"
    assert progress_line(told) == line  # a server of an older version sends no "late"
    assert progress_line(told | {"late": False}) == line
    scores = told | {"waiting": {"sites": ["a", "b"], "seconds": 540.0, "kind": "evaluate"}}
    assert "1 of 2 sites have answered; waits for scores of a, b, at most 540 s" in progress_line(scores)
    assert progress_line(told | {"late": True}) == f"{line} after this round"
    assert progress_line(told | {"late": True, "eta_seconds": None}) == line.removesuffix("; ETA 20 s")


@pytest.mark.parametrize(
    ("round", "joining", "said"),
    [
        (0, True, "before the first round"),
        (1, True, "before round 2"),
        (1, False, "in round 2"),
        (2, False, "in the final evaluation"),
        (2, True, "before the final evaluation"),
    ],
)
def test_a_refusal_is_never_in_a_round_that_the_job_does_not_have(round: int, joining: bool, said: str) -> None:
    assert refusal_time_text({"round": round, "joining": joining}, 2) == said
