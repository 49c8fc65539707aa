"""Progress of a run: as JSON for admins, and in a terminal as a bar with a live table or as plain lines.

`RunFraction` counts a run's steps, for this view and that of studies.
"""

import math
import statistics
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from consilium.core.messages import BYTES_DOWN, BYTES_UP, SPLITS, TRAIN_LOSS, MetricKey, Stage
from consilium.core.sanitize import LIMIT, count_with_noun, rich_line, shown
from consilium.report.tables import Column, Table, duration_text, only_true, shorten_names, terminal_table
from consilium.report.untrusted_files import Line, as_finite_float, place_of, read_events
from consilium.tasks.registry import Scores, task_scores

# progress --------------------------------------------------------------------------------------------------------------
# Read the progress of a run from its folder. It also works for a job whose code is not installed on this machine.

ENDING = ("round", "rounds", "validations", "best_round")
"""Fields of the event that records an early end; see server/coordinator.py."""
LATE = 1.5
"""A round is late once it has taken this many times the usual time. Rounds differ a little without a wait."""
REFUSAL = ("time", "round", "joining", "site", "reason")


def progress(folder: Path, waiting: Callable[[], Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Return the progress of the run in `folder` (see RunLog) as plain JSON values: round, ETA, epsilon, sites, refusals.

    `waiting`: a function that returns, if the server waits for replies, the "sites" that it waits for, the "seconds" that they
    have left, and the "kind" of message. It is called after the log is read, so it names no site whose result is in the log.

    Of the fields returned, `round` is the current round, from 0. `eta_seconds` counts the rounds, without the final
    evaluation. If `late`, the current round takes much longer than usual, and `eta_seconds` counts the rounds after it.
    `ended` says where and why the rounds ended early; it is None if they did not. `sites` has per site the round of its last
    result, its last metrics (as far as the site shares them), the bytes of tensors up and down so far, its weight in the last
    mean, and its share of that mean's total weight (None if its result was not in the mean).
    """
    config = yaml.safe_load((folder / "job.yaml").read_text(encoding="utf-8"))
    rounds, lines = config["training"]["rounds"], read_events(folder / "metrics.jsonl")[0]
    of = {event: [one for one in lines if one["event"] == event] for event in ("started", "concluded", "ended", "refused")}
    here: Line = of["started"][-1] if of["started"] else {"round": 0, "phase": 0, "sites": []}
    scores = task_scores(config["task"]) or Scores(("loss",), (), {})
    early = {name: of["ended"][-1][name] for name in ENDING} if of["ended"] else None
    eta, late = (None, False) if early else _eta(lines, place_of(here), rounds)
    return {
        "experiment": folder.name,
        "job": config["name"],
        "round": here["round"],
        "rounds": rounds,
        "phase": here["phase"],
        "asked": here["sites"],
        "answered": sorted(x["site"] for x in lines if x["event"] == "result" and place_of(x) == place_of(here)),
        "epsilon": of["concluded"][-1].get("privacy/epsilon") if of["concluded"] else None,
        "waiting": dict(waiting()) or None if waiting else None,
        "eta_seconds": eta,
        "late": late,
        "ended": early,
        "sites": _progress_by_site(lines),
        "refused": [{k: x.get(k) for k in REFUSAL} for x in of["refused"]][-20:],
        "scores": {"leading": list(scores.leading), "headings": dict(scores.headings), "grid": scores.grid},
        "finished": (folder / "results.json").is_file(),
    }


def early_stop_text(line: Mapping[str, Any]) -> str:
    """Return in words where and why a run's rounds ended early. `line`: the event "ended" of metrics.jsonl."""
    no_better = f"no better for {count_with_noun(line['validations'], 'validation')} (best round {line['best_round']})"
    return f"ended after round {line['round']} of {line['rounds']}: {no_better}"


def rounds_before_final_evaluation(progress: Mapping[str, Any]) -> int:
    """Return the number of rounds before the final evaluation of a run."""
    early = progress.get("ended")
    return int(early["round"] if early else progress["rounds"])


def refusal_time_text(refusal: Mapping[str, Any], rounds: int) -> str:
    """Return in words when a site was refused, in a run of `rounds` rounds."""
    place = "the final evaluation" if refusal["round"] >= rounds else f"round {refusal['round'] + 1}"
    before = f"before {place}" if refusal["round"] else "before the first round"
    return before if refusal.get("joining") else f"in {place}"


def _eta(lines: list[Line], current: tuple[int, int], rounds: int) -> tuple[float | None, bool]:
    """Return the estimated seconds until the last round ends, and whether the current round is late.

    A round usually takes the median time of the last five rounds that ended, and of two middle values the lower one. So a
    single wait for a site does not count for later rounds. The time that the server may still wait in the current round is not
    in the estimate: it is at most that long, and `progress` has it apart. The estimate is None until the first round has
    ended, and when it would be 0. A pause before a run was resumed is in no round's time.
    """
    timed = [one for one in lines if one["time"] is not None]
    began = {place_of(one): one["time"] for one in timed if one["event"] == "started"}
    ends = {place_of(one): one["time"] for one in timed if one["event"] == "concluded"}
    took = {place: max(time - began[place], 0.0) for place, time in ends.items() if place in began}  # a clock may be set back
    by_round: dict[int, float] = defaultdict(float)
    for (number, _), seconds in took.items():
        by_round[number] += seconds
    ended = [by_round[number] for number in sorted(by_round) if number < current[0]][-5:]
    if not ended or current not in began:
        return None, False
    usual = statistics.median_low(ended)
    spent = by_round[current[0]] + (0.0 if current in took else max(time.time() - began[current], 0.0))
    return round(usual * (rounds - current[0] - 1) + max(usual - spent, 0.0), 1) or None, spent > LATE * usual


def _progress_by_site(lines: list[Line]) -> dict[str, Any]:
    """Return each site's last round, metrics, bytes and weight; see `progress`."""
    found: dict[str, Any] = {}
    weights: dict[tuple[int, int], dict[str, float]] = {}
    for one in (x for x in lines if x["event"] in ("result", "final")):
        empty = {"round": 0, "metrics": {}, "bytes_up": 0, "bytes_down": 0, "weight": None, "share": None}
        site, metrics = found.setdefault(one["site"], empty), dict(one["metrics"])
        for way, name in (("up", BYTES_UP), ("down", BYTES_DOWN)):
            site[f"bytes_{way}"] += int(as_finite_float(metrics.pop(name, 0)) or 0)
        before = (
            site["metrics"] if one["event"] == "result" else {}
        )  # after a round without validation, the earlier scores stay
        site |= {"round": one["round"], "metrics": before | metrics}
        if one["event"] == "result":
            weights.setdefault(place_of(one), {})[one["site"]] = one.get("weight", 1)
    last = next((place_of(x) for x in reversed(lines) if x["event"] == "concluded"), None)
    mean = weights.get(last, {}) if last else {}
    for name, weight in mean.items():
        found[name] |= {"weight": weight, "share": weight / sum(mean.values())}
    return found


# live view -------------------------------------------------------------------------------------------------------------


class RunFraction:
    """An observer that counts the steps of a run of `rounds` rounds.

    Each site is weighted by its number of steps in the round. Before a site's first step in the run, the mean of the other
    sites' numbers is used.
    """

    def __init__(self, rounds: int) -> None:
        self.rounds, self.round, self.phase, self.phases = rounds, 0, 0, 1
        self._asked: set[str] = set()
        self._done: dict[str, int] = {}
        self._finished: set[str] = set()
        self._steps: dict[str, int] = {}

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take one event of a Coordinator or a Site."""
        match event["event"]:
            case "round":
                self.round, self.phase, self.phases = event["round"], event["phase"], event["phases"]
                self._asked, self._done, self._finished = set(event["sites"]), {}, set()
            case "step":
                self._steps[event["site"]], self._done[event["site"]] = event["steps"], event["step"]
            case "metrics" if TRAIN_LOSS in event["metrics"]:  # without it, they are of the final evaluation
                self._finished.add(event["site"])
            case "refused":
                self._finished.add(event["site"])
            case "ended":
                self.rounds = event["round"]

    @property
    def fraction(self) -> float:
        """The fraction of the rounds that is done, from 0 to 1."""
        known = [self._steps[name] for name in self._asked if name in self._steps]
        mean = statistics.fmean(known) if known else 1.0
        steps = {name: self._steps.get(name, mean) for name in self._asked}
        done = sum(n if name in self._finished else min(self._done.get(name, 0), n) for name, n in steps.items())
        part = done / total if (total := sum(steps.values())) else 0.0
        return min((self.round + (self.phase + part) / self.phases) / self.rounds, 1.0)


LINE = 2000
"""Characters of a line, at most. Names and reasons in it have limits of their own."""
AROUND = 10
"""Lines of a terminal that are not rows of sites: the bar, headings, rules and notes."""
READY, WAITING, DONE = "ready", "waiting", "done"
SAID = {
    "warning": ("warning: {}", "text", "yellow"),
    "undrawn": ("{site}: no picture: {}", "reason", "yellow"),
    "chosen": ("{site}: {}", "text", ""),
}
"""Events that are printed as one line: the line's format, the field with its text, the style."""
IDLE = {"": "not asked", READY: READY, WAITING: WAITING, DONE: DONE}
"""Words for sites that are not at work, by state. They also label the counts of sites that have no row."""


class LiveScreen(ABC):
    """Shows a bar and the output of `render` while work goes on, or plain lines without a terminal. A context manager."""

    def __init__(self, console: Console, title: str, total: int) -> None:
        self.console = console
        text = TextColumn("{task.description}", markup=False)
        times = (TextColumn("ETA"), TimeRemainingColumn(), TimeElapsedColumn())
        self._bar = Progress(text, BarColumn(None), *times, expand=True, speed_estimate_period=math.inf)
        self._task = self._bar.add_task(shown(title, 40), total=total)
        live = Live(console=console, refresh_per_second=4, transient=True, get_renderable=self.render)
        self._live = live if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    @abstractmethod
    def render(self) -> Group:
        """Return the bar and the lines below it."""

    def update_bar(self, done: float, now: str) -> Progress:
        """Set the bar to `done` units of work, with the text `now`, and return it."""
        self._bar.update(self._task, completed=done, description=now)
        return self._bar

    @property
    def eta(self) -> str:
        """The estimated time until all work is done, as "ETA 12.0 s"; "" if it is unknown, and at the end."""
        left = self._bar.tasks[0].time_remaining
        return f"ETA {duration_text(left)}" if left else ""

    def say(self, text: str, style: str = "") -> None:
        """Print a whole line. A terminal wraps it; in a file it stays one line."""
        self.console.print(rich_line(text, style, limit=LINE), soft_wrap=True)


class LiveView(LiveScreen):
    """An observer that shows a run's round, ETA, and each site's step, loss and leading score.

    `losses`: the last training loss of each site. If a terminal has too few lines, a note counts the other sites.
    """

    def __init__(self, console: Console, rounds: int, title: str, scores: Scores) -> None:
        self.run, self.scores = RunFraction(rounds), scores
        self.sites: dict[str, dict[str, Any]] = {}
        self.losses: dict[str, float] = {}
        self.score, self.loading, self._said = scores.leading[0], "", set[str]()
        super().__init__(console, title, 1)  # calls render, so it comes last

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take one event of a Coordinator or a Site."""
        self.run(event)
        self.update_bar(self.run.fraction, "")
        row = self.sites.setdefault(shown(event["site"]), {"state": ""}) if event.get("site") else {}
        match event["event"]:
            case "site":
                row["state"] = READY
            case "loading":  # of one site, or for all sites; without a terminal it is printed once
                row["state"] = what = f"loading {shown(event['what'])}"
                self.loading = self.loading if event["site"] else f"{what} ..."
                if not self._live and what not in self._said:
                    self._said.add(what)
                    self.say(f"{what} ...")
            case "round":
                self.loading = ""
                states = dict.fromkeys(self.sites, "") | {shown(name): WAITING for name in event["sites"]}
                for name, state in states.items():
                    self.sites.setdefault(name, {})["state"] = state
            case "privacy":
                self.say(f"privacy: {event['claim']}")
                for warning in event["warnings"]:
                    self.say(f"privacy: {warning}", "yellow")
            case "ended":
                self.say(early_stop_text(event))
            case "step":
                row |= {"state": f"step {event['step']}/{event['steps']}", "loss": event["loss"]}
            case "evaluate":
                row["state"] = f"scoring {event['stage'].rpartition('/')[2]}"
            case "refused":
                row["state"] = "refused"
                when = refusal_time_text(event, self.run.rounds)
                self.say(f"{shown(event['site'])}: refused {when}: {shown(event['reason'])}", "red")
            case "metrics":
                self._take_metrics(event, row)
        if event["event"] in SAID:
            words, field, style = SAID[event["event"]]
            text = shown(event[field], LIMIT if "site" in event else LINE)
            self.say(words.format(text, site=shown(event.get("site", ""))), style)

    def _take_metrics(self, event: Mapping[str, Any], row: dict[str, Any]) -> None:
        """Take a site's scores. Without a terminal, print its training loss and leading score, if there are any."""
        metrics, closing = event["metrics"], TRAIN_LOSS not in event["metrics"]
        if found := reported_scores(metrics):  # a round may go without validation
            self.score = self.scores.leading_name(found)
        scored = {stage: value for stage in Stage if (value := score_of(metrics, stage, self.score)) is not None}
        row |= scored | {"state": DONE}
        if not closing:
            self.losses[shown(event["site"])] = row["loss"] = metrics[TRAIN_LOSS]
        if self._live:
            return
        values = "  ".join(f"{stage} {value:.3f}" for stage, value in scored.items())
        told = f"{self.scores.heading(self.score)} {values}" if values else ""
        when = "final evaluation"
        if closing:
            told = told or "nothing to score"
        else:
            phase = f" phase {self.run.phase + 1}/{self.run.phases}" if self.run.phases > 1 else ""
            when = f"round {event['round'] + 1}/{self.run.rounds}{phase}"
            told = "  ".join(part for part in (f"loss {row['loss']:.3f}", told, self.eta) if part)
        self.say(f"{when}  {shown(event['site'])}: {told}")

    def render(self) -> Group:
        """Return the bar and a row per site."""
        rounds = self.run.rounds
        bar = self.update_bar(self.run.fraction, self.loading or f"round {min(self.run.round + 1, rounds)}/{rounds}")
        return Group(
            bar, *([terminal_table(self._table(), self.console.width, "a wider terminal has them")] if self.sites else [])
        )

    def _table(self) -> Table:
        """Return a table with a row per site. If the terminal has too few lines, sites at work have precedence."""
        heading = self.scores.heading(self.score)
        headings = {"loss": "loss"} | {k: f"{heading} {k}" for k in (Stage.GLOBAL, Stage.PERSONALIZED)}
        first = sorted(self.sites, key=lambda name: (self.sites[name]["state"] in IDLE, name))
        room = max(self.console.height - AROUND, 1)
        left = Counter(IDLE.get(self.sites[name]["state"], "at work") for name in first[room:])
        others = ", ".join(f"{count} {state}" for state, count in left.items())
        said = {self.scores.label(self.score): self.scores.pixel_grid(self.score), f"and {left.total()} more: {others}": left}
        short = shorten_names(first[:room], max(16, self.console.width - 54))
        rows = [
            [short[name], row["state"].ljust(16), *(f"{row[key]:.3f}" if key in row else "" for key in headings)]
            for name, row in ((name, self.sites[name]) for name in sorted(first[:room]))
        ]
        heads = [
            Column("site", right=False),
            Column("now", right=False),
            *(Column(text, rank) for rank, text in enumerate(headings.values(), 1)),
        ]
        return Table("", heads, rows, ["; ".join(only_true(said))] if any(said.values()) else [])


def reported_scores(metrics: Iterable[str]) -> set[str]:
    """Return the scores in metric names such as "test/global/dice"; the training loss is not among them."""
    return {key.metric for name in metrics if (key := MetricKey.parse(name))}


def score_of(metrics: Mapping[str, float], stage: Stage, score: str) -> float | None:
    """Return a model's score on the test split if it has one, else on the validation split; None for neither."""
    return next((v for split in reversed(SPLITS) if (v := metrics.get(str(MetricKey(split, stage, score)))) is not None), None)
