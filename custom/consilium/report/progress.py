"""How far a run is, read from what its log says: for admins who watch a running job, and for its files afterwards."""

import json
import statistics
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from consilium.messages import BYTES_DOWN, BYTES_UP
from consilium.report.clean import number_of
from consilium.tasks.registry import TASKS

Line = dict[str, Any]
ENDING = ("round", "rounds", "validations", "best_round")
"""What a run's record says of an early end; see federation/early_stopping.py."""
REFUSAL = ("time", "round", "joining", "site", "reason")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl, without one that a crash has torn or that is being written."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict) and isinstance(line.get("event"), str)]


def progress(folder: Path) -> dict[str, Any]:
    """Return plain JSON values on the run in `folder` (see RunLog): place, ETA in seconds, epsilon, sites, refusals.

    `round` is the one going on, counted from 0; the ETA is of the rounds, without the closing evaluation.
    `ended`: where and why the rounds have ended early, None where they have not. Per site: the
    round of its last result, its last metrics (as far as the site shares them), bytes of tensors up and down so far, its
    weight in the last mean it was part of and its share of that mean's whole weight (None before there is one).
    """
    config = yaml.safe_load((folder / "job.yaml").read_text(encoding="utf-8"))
    lines = without_repeats(read_lines(folder / "metrics.jsonl"))
    started = [x for x in lines if x["event"] == "started"]
    here = started[-1] if started else {"round": 0, "phase": 0, "sites": []}
    done = [x for x in lines if x["event"] == "concluded"]
    early = _ended(lines)
    answers = [x["site"] for x in lines if x["event"] == "result" and _place(x) == _place(here)]
    return {
        "experiment": folder.name,
        "job": config["name"],
        "round": here["round"],
        "rounds": config["training"]["rounds"],
        "phase": here["phase"],
        "asked": here["sites"],
        "answered": sorted(answers),
        "epsilon": done[-1].get("privacy/epsilon") if done else None,
        "eta_seconds": None if early else _eta(started, done, config["training"]["rounds"]),
        "ended": early,
        "sites": _sites(lines),
        "refused": [{k: x.get(k) for k in REFUSAL} for x in lines if x["event"] == "refused"][-20:],
        "scores": _scores(config["task"]),
        "finished": (folder / "results.json").is_file(),
    }


def _scores(task: dict[str, Any]) -> Line:
    """Return which scores lead and how they are called, see tasks.registry.Scores; nothing of a task that is not known here."""
    try:
        kind = TASKS[task["name"]]
    except KeyError:
        return {"leading": ["loss"], "headings": {}}
    found = kind.scores(kind.config.model_validate(task))
    return {"leading": list(found.leading), "headings": dict(found.headings)}


def ending(line: Mapping[str, Any]) -> str:
    """Return in words where and why a run's rounds have ended early, given its line of metrics.jsonl."""
    validations = number_of(line["validations"], "validation")
    return (
        f"ended after round {line['round']} of {line['rounds']}: no better for {validations} (best round {line['best_round']})"
    )


def ended(folder: Path) -> Line | None:
    """Return what the run in `folder` says of its early end; None for one that has not ended early."""
    path = folder / "metrics.jsonl"
    return _ended(read_lines(path)) if path.is_file() else None


def unscored(folder: Path, rounds: int) -> dict[str, str]:
    """Return why sites have no closing scores, by site: they were refused in the closing evaluation of so many rounds."""
    path = folder / "metrics.jsonl"
    lines = read_lines(path) if path.is_file() else []
    last = (_ended(lines) or {"round": rounds})["round"]
    scored = {x["site"] for x in lines if x["event"] == "final" and x["round"] >= last}
    refused = [x for x in lines if x["event"] == "refused" and x["round"] >= last and not x.get("joining")]
    return {x["site"]: x["reason"] for x in refused if x["site"] not in scored}


def _ended(lines: list[Line]) -> Line | None:
    found = [x for x in lines if x["event"] == "ended"]
    return {name: found[-1][name] for name in ENDING} if found else None


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


def _place(line: Line) -> tuple[int, int]:
    return line["round"], line.get("phase", 0)


def without_repeats(lines: list[Line]) -> list[Line]:
    """Return the lines as an uninterrupted run would have written them: what a resumption repeats counts once."""
    found: list[Line] = []
    for line in lines:
        if line["event"] == "resumed":
            found = [x for x in found if _place(x) < _place(line) or x["event"] == "refused"]
        else:
            found.append(line)
    return found


def _eta(started: list[Line], done: list[Line], rounds: int) -> float | None:
    """Return the seconds until the last round ends, by the median of the last rounds; None before the first has ended."""
    begin = {x["round"]: x["time"] for x in reversed(started)}
    end = {x["round"]: x["time"] for x in done if x["round"] < started[-1]["round"]}
    took = [end[round] - begin[round] for round in sorted(end) if round in begin][-5:]
    if not took:
        return None
    current = started[-1]["round"]
    left = statistics.median(took) * (rounds - current) - (time.time() - begin[current])
    return round(max(left, 0.0), 1)


def _sites(lines: list[Line]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    weights = _weights(lines)
    for line in (x for x in lines if x["event"] in ("result", "final")):
        site = found.setdefault(line["site"], {"round": 0, "metrics": {}, "bytes_up": 0, "bytes_down": 0})
        metrics = dict(line["metrics"])
        for way, name in (("up", BYTES_UP), ("down", BYTES_DOWN)):
            site[f"bytes_{way}"] += int(metrics.pop(name, 0))
        before = site["metrics"] if line["event"] == "result" else {}  # a round without validation keeps the scores of the last
        site |= {"round": line["round"], "metrics": before | metrics}
    return {name: values | weights.get(name, {"weight": None, "share": None}) for name, values in found.items()}


def _weights(lines: list[Line]) -> dict[str, Line]:
    """Return, by site, its weight and its share of the whole in the last mean it was part of."""
    found: dict[str, Line] = {}
    by_place: dict[tuple[int, int], dict[str, int]] = {}
    for line in (x for x in lines if x["event"] == "result"):
        by_place.setdefault(_place(line), {})[line["site"]] = line.get("weight", 1)
    for weights in [by_place.get(_place(x), {}) for x in lines if x["event"] == "concluded"]:
        found |= {site: {"weight": weight, "share": weight / sum(weights.values())} for site, weight in weights.items()}
    return found
