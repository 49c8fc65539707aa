"""How far a run is, for admins who watch a running job and for its result: also of a job that this machine cannot load."""

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from consilium.core.messages import BYTES_DOWN, BYTES_UP
from consilium.core.sanitize import number_of
from consilium.report.plain_files import Line, finite, place_of, read_events, round_times
from consilium.tasks.registry import TASKS

ENDING = ("round", "rounds", "validations", "best_round")
"""What a run's record says of an early end; see server/coordinator.py."""
REFUSAL = ("time", "round", "joining", "site", "reason")


def progress(folder: Path) -> dict[str, Any]:
    """Return plain JSON values on the run in `folder` (see RunLog): place, ETA in seconds, epsilon, sites, refusals.

    `round` is the one going on, counted from 0; the ETA is of the rounds, without the closing evaluation. `ended`: where and
    why the rounds have ended early, None where they have not. Per site: the round of its last result, its last metrics (as
    far as the site shares them), bytes of tensors up and down so far, its weight in the last mean it was part of and its share
    of that mean's whole weight (None before there is one).
    """
    config = yaml.safe_load((folder / "job.yaml").read_text(encoding="utf-8"))
    rounds, lines = config["training"]["rounds"], read_events(folder / "metrics.jsonl")[0]
    of = {event: [one for one in lines if one["event"] == event] for event in ("started", "concluded", "ended", "refused")}
    here: Line = of["started"][-1] if of["started"] else {"round": 0, "phase": 0, "sites": []}
    early = {name: of["ended"][-1][name] for name in ENDING} if of["ended"] else None
    return {
        "experiment": folder.name,
        "job": config["name"],
        "round": here["round"],
        "rounds": rounds,
        "phase": here["phase"],
        "asked": here["sites"],
        "answered": sorted(x["site"] for x in lines if x["event"] == "result" and place_of(x) == place_of(here)),
        "epsilon": of["concluded"][-1].get("privacy/epsilon") if of["concluded"] else None,
        "eta_seconds": None if early else _eta(lines, here["round"], rounds),
        "ended": early,
        "sites": _sites(lines),
        "refused": [{k: x.get(k) for k in REFUSAL} for x in of["refused"]][-20:],
        "scores": _scores(config["task"]),
        "finished": (folder / "results.json").is_file(),
    }


def _scores(task: dict[str, Any]) -> Line:
    """Return leading scores, headings and grid, see tasks.registry.Scores; the loss of a task that is not known here."""
    try:
        kind = TASKS[task["name"]]
    except KeyError:
        return {"leading": ["loss"], "headings": {}, "grid": ""}
    found = kind.scores(kind.config.model_validate(kind.completed(task)))
    return {"leading": list(found.leading), "headings": dict(found.headings), "grid": found.grid}


def ending(line: Mapping[str, Any]) -> str:
    """Return in words where and why a run's rounds have ended early, given its line of metrics.jsonl."""
    no_better = f"no better for {number_of(line['validations'], 'validation')} (best round {line['best_round']})"
    return f"ended after round {line['round']} of {line['rounds']}: {no_better}"


def last_round(progress: Mapping[str, Any]) -> int:
    """Return after how many rounds the closing evaluation of a run comes, or came."""
    early = progress.get("ended")
    return int(early["round"] if early else progress["rounds"])


def when(refusal: Mapping[str, Any], rounds: int) -> str:
    """Return in words when a site was refused in a run of so many rounds."""
    place = "the closing evaluation" if refusal["round"] >= rounds else f"round {refusal['round'] + 1}"
    if not refusal.get("joining"):
        return f"in {place}"
    return f"before {place}" if refusal["round"] else "before the first round"


def _eta(lines: list[Line], current: int, rounds: int) -> float | None:
    """Return the seconds until the last round ends, by the median of the last rounds; None before the first has ended."""
    began, ended = round_times(lines)
    took = [ended[round] - began[round] for round in sorted(ended) if round in began and round < current][-5:]
    if not took or current not in began:
        return None
    left = statistics.median(took) * (rounds - current) - (time.time() - began[current])
    return round(max(left, 0.0), 1)


def _sites(lines: list[Line]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    weights: dict[tuple[int, int], dict[str, float]] = {}
    for line in (x for x in lines if x["event"] in ("result", "final")):
        empty = {"round": 0, "metrics": {}, "bytes_up": 0, "bytes_down": 0, "weight": None, "share": None}
        site, metrics = found.setdefault(line["site"], empty), dict(line["metrics"])
        for way, name in (("up", BYTES_UP), ("down", BYTES_DOWN)):
            site[f"bytes_{way}"] += int(finite(metrics.pop(name, 0)) or 0)
        before = site["metrics"] if line["event"] == "result" else {}  # a round without validation keeps the scores of the last
        site |= {"round": line["round"], "metrics": before | metrics}
        if line["event"] == "result":
            weights.setdefault(place_of(line), {})[line["site"]] = line.get("weight", 1)
    for mean in (weights.get(place_of(x), {}) for x in lines if x["event"] == "concluded"):
        for name, weight in mean.items():
            found[name] |= {"weight": weight, "share": weight / sum(mean.values())}
    return found
