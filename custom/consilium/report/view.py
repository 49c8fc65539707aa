"""What a person sees of a run: a live table while it goes on, plain lines where there is no terminal, and the result."""

import time
from collections.abc import Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from consilium.report.clean import line, shown
from consilium.report.progress import when
from consilium.report.tables import fit

Results = Mapping[str, Mapping[str, float]]
"""Metrics of the closing evaluation by site."""
STAGES = ("base", "received", "personal")
HEADINGS = {
    "dice": "Dice", "iou": "IoU", "hd95": "HD95", "accuracy": "Accuracy", "f1": "Macro F1", "exact": "Exact", "loss": "Loss",
    "perplexity": "Perplexity", "rouge_l": "ROUGE-L", "bleu": "BLEU", "meteor": "METEOR", "nist": "NIST", "cider": "CIDEr",
}  # fmt: skip
LEADING = ("dice", "accuracy", "exact", "rouge_l", "loss")
"""The score a task is judged by: the first of these it reports."""
BESIDE = {
    "dice": ("iou", "hd95"),
    "accuracy": ("f1", "loss"),
    "exact": ("loss",),
    "rouge_l": ("bleu", "meteor", "nist", "cider", "loss"),
    "loss": ("perplexity",),
}
"""What the closing table shows beside the leading score, where it is reported."""


LINE = 2000
"""Characters of a line at most; names and reasons in it have their own bound."""


class LiveView:
    """An observer that shows round, site, step, ETA and the leading score so far. Use as a context manager.

    `losses`: the last training loss of every site.
    """

    def __init__(self, console: Console, rounds: int, title: str) -> None:
        self.console, self.rounds, self.title = console, rounds, title
        self.sites: dict[str, dict[str, Any]] = {}
        self.losses: dict[str, float] = {}
        self.round, self.phase, self.phases, self.asked, self.began = 0, 0, 1, 1, time.monotonic()
        self.score = LEADING[0]
        columns = TextColumn("{task.description}"), BarColumn(None), TextColumn("{task.fields[eta]}"), TimeElapsedColumn()
        self._bar = Progress(*columns, expand=True)
        self._task = self._bar.add_task(shown(title), total=rounds, eta="")
        live = Live(console=console, refresh_per_second=4, transient=True, get_renderable=self._render)
        self._live = live if console.is_terminal else None

    def __enter__(self) -> "LiveView":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take one event of a Coordinator or a Site."""
        handler = getattr(self, f"_on_{event['event']}", None)
        if handler:
            handler(event)

    def _say(self, text: str, style: str = "") -> None:
        """Print a line, whole: the terminal wraps it, a file keeps it as one."""
        self.console.print(line(text, style, limit=LINE), soft_wrap=True)

    def _row(self, event: Mapping[str, Any]) -> dict[str, Any]:
        return self.sites.setdefault(shown(event["site"]), {"state": "", "part": 0.0})

    def _on_round(self, event: Mapping[str, Any]) -> None:
        self.round, self.asked = event["round"], len(event["sites"])
        self.phase, self.phases = event["phase"], event["phases"]
        for row in self.sites.values():
            row["part"] = 0.0

    def _on_privacy(self, event: Mapping[str, Any]) -> None:
        self._say(f"privacy: {event['claim']}")
        for warning in event["warnings"]:
            self._say(f"privacy: {warning}", "yellow")

    def _on_step(self, event: Mapping[str, Any]) -> None:
        row = self._row(event)
        row |= {
            "state": f"step {event['step']}/{event['steps']}",
            "loss": event["loss"],
            "part": event["step"] / event["steps"],
        }

    def _on_evaluate(self, event: Mapping[str, Any]) -> None:
        self._row(event)["state"] = f"scoring {event['stage'].rpartition('/')[2]}"

    def _on_refused(self, event: Mapping[str, Any]) -> None:
        self._row(event)["state"] = "refused"
        self._say(f"{shown(event['site'])}: refused {when(event, self.rounds)}: {shown(event['reason'])}", "red")

    def _on_metrics(self, event: Mapping[str, Any]) -> None:
        metrics, row, closing = event["metrics"], self._row(event), "train/loss" not in event["metrics"]
        self.score = leading(metrics, self.score)
        found = {k: _score(metrics, k, self.score) for k in STAGES}
        row |= {k: v for k, v in found.items() if v is not None} | {"state": "done", "part": 1.0}
        if not closing:
            self.losses[shown(event["site"])] = row["loss"] = metrics["train/loss"]
        if not self._live:
            self._say(f"{self._when(event, closing)}  {shown(event['site'])}: {self._scores(found, row, closing)}")

    def _when(self, event: Mapping[str, Any], closing: bool) -> str:
        if closing:
            return "closing evaluation"
        part = f" phase {self.phase + 1}/{self.phases}" if self.phases > 1 else ""
        return f"round {event['round'] + 1}/{self.rounds}{part}"

    def _scores(self, found: Mapping[str, float | None], row: Mapping[str, Any], closing: bool) -> str:
        """Return what was measured: the loss of training and the leading score, as far as there are any."""
        values = "  ".join(f"{k} {v:.3f}" for k, v in found.items() if v is not None)
        scores = f"{HEADINGS[self.score]} {values}" if values else ""
        if closing:
            return scores or "nothing to score"
        return "  ".join(part for part in (f"loss {row['loss']:.3f}", scores, self._eta()) if part)

    def _fraction(self) -> float:
        done = sum(row["part"] for row in self.sites.values()) / max(self.asked, 1)
        return (self.round + (self.phase + done) / self.phases) / self.rounds

    def _eta(self) -> str:
        done, spent = min(self._fraction(), 1.0), time.monotonic() - self.began
        return f"ETA {spent * (1 - done) / done:.0f} s" if done > 0 else ""

    def _render(self) -> Group:
        done = self._fraction() * self.rounds
        self._bar.update(
            self._task, completed=done, description=f"round {min(self.round + 1, self.rounds)}/{self.rounds}", eta=self._eta()
        )
        layouts = [partial(self._table, count=n, joint=j) for n, j in ((3, " "), (3, "\n"), (2, "\n"), (1, "\n"), (0, ""))]
        return Group(self._bar, fit(layouts, self.sites, self.console.width))

    def _table(self, names: Mapping[str, str], count: int, joint: str) -> Table:
        """Return a row per site with the first `count` numbers."""
        headings = {"loss": "loss"} | {k: f"{HEADINGS[self.score]}{joint}{k}" for k in ("received", "personal")}
        table = Table(Column("site", no_wrap=True), Column("now", min_width=16, no_wrap=True), box=SIMPLE, pad_edge=False)
        numbers = list(headings)[:count]
        for key in numbers:
            table.add_column(headings[key], justify="right", no_wrap=True)
        for name in sorted(self.sites):
            row = self.sites[name]
            table.add_row(Text(names[name]), row["state"], *(f"{row[k]:.3f}" if k in row else "" for k in numbers))
        return table


def result_table(results: Results, title: str, width: int = 120, losses: Mapping[str, float] = MappingProxyType({})) -> Table:
    """Return the closing per-site table: the leading score of base, received and personal model, then the received one's rest.

    Segmentation: Dice, then IoU and HD95; classification: accuracy, then macro F1; language: see LEADING and BESIDE. In fewer
    than the needed `width` cells headings become narrower, then names shorter, then every score gets a line of its own.
    Where nothing was scored it says so and shows the last training `losses` by site.
    """
    names = {name for metrics in results.values() for name in metrics}
    if not names:
        found = fit([partial(_unscored, results, title, losses)] * 2, map(shown, results), width)
        found.min_width = min(width, len(str(found.title)))  # so that its title is one line
        return found
    split = "test" if any(name.startswith("test/") for name in names) else "validation"
    score = leading(names, LEADING[0])
    remark = ", resized grid; HD95 in pixels of it" if score == "dice" else ""
    table = partial(_wide, results, f"{shown(title)}: {split} split{remark}", split, score, _beside(score, names))
    layouts = [partial(table, " "), partial(table, "\n"), partial(_tall, *table.args)]
    found = fit(layouts, map(shown, [*results, "mean"]), width)
    if without := sorted(site for site in results if not any(name.startswith(f"{split}/") for name in results[site])):
        found.caption = Text(f"no {split} split, so not scored here: {', '.join(map(shown, without))}")
    return found


def _columns(split: str, score: str, rest: Iterable[str], joint: str) -> dict[str, str]:
    """Return headings by metric."""
    shown = [(stage, score) for stage in STAGES] + [("received", metric) for metric in rest]
    return {f"{split}/{stage}/{metric}": f"{HEADINGS[metric]}{joint}{stage}" for stage, metric in shown}


def _wide(
    results: Results, title: str, split: str, score: str, rest: Iterable[str], joint: str, names: Mapping[str, str]
) -> Table:
    """Return a row per site."""
    table, columns = _table(title), _columns(split, score, rest, joint)
    for heading in ("site", *columns.values()):
        table.add_column(heading, justify="left" if heading == "site" else "right", no_wrap=True)
    for site in sorted(results):
        table.add_row(Text(names[shown(site)]), *(number(results[site].get(c)) for c in columns))
    table.add_section()
    table.add_row("mean", *(number(mean_of(results, c)) for c in columns), style="bold")
    return table


def _tall(results: Results, title: str, split: str, score: str, rest: Iterable[str], names: Mapping[str, str]) -> Table:
    """Return a row per site and score."""
    table, columns = _table(title), _columns(split, score, rest, " ")
    for heading in ("site", "score", ""):
        table.add_column(heading, justify="left" if heading else "right", no_wrap=True)
    for site in [*sorted(results), None]:
        first = "mean" if site is None else names[shown(site)]
        for metric, heading in columns.items():
            value = mean_of(results, metric) if site is None else results[site].get(metric)
            table.add_row(Text(first), heading, number(value), style="bold" if site is None else None)
            first = ""
        table.add_section()
    return table


def _unscored(results: Results, title: str, losses: Mapping[str, float], names: Mapping[str, str]) -> Table:
    """Return a row per site with the only number there is."""
    table = _table(f"{shown(title)}: no test or validation split: nothing was scored")
    table.add_column("site", no_wrap=True)
    table.add_column("training loss", justify="right", no_wrap=True)
    for site in sorted(results):
        table.add_row(Text(names[shown(site)]), number(losses.get(shown(site))))
    return table


def _table(title: str) -> Table:
    return Table(title=Text(title, "italic"), title_justify="left", box=SIMPLE, pad_edge=False)


def mean_of(results: Mapping[str, Mapping[str, float]], metric: str) -> float | None:
    """Return the unweighted mean over the sites that report a metric."""
    found = [metrics[metric] for metrics in results.values() if metric in metrics]
    return sum(found) / len(found) if found else None


def leading(names: Iterable[str], otherwise: str) -> str:
    """Return which of LEADING is among metric names such as "test/base/dice"; the training's own loss does not count."""
    found = {name.rpartition("/")[2] for name in names if not name.startswith("train/")}
    return next((score for score in LEADING if score in found), otherwise)


def _beside(score: str, names: set[str]) -> tuple[str, ...]:
    """Return what is shown beside a leading score; images always have theirs, and classifiers' loss is left out."""
    found = {name.rpartition("/")[2] for name in names}
    if score == "dice" or "f1" in found:
        return tuple(one for one in BESIDE[score] if one != "loss")
    return tuple(one for one in BESIDE[score] if one in found)


def _score(metrics: Mapping[str, float], stage: str, score: str) -> float | None:
    """Return a score of whichever split there is: validation in training, test or validation in the end."""
    return next((v for split in ("validation", "test") if (v := metrics.get(f"{split}/{stage}/{score}")) is not None), None)


def number(value: float | None) -> str:
    """Return a score as tables show it."""
    return "-" if value is None else f"{value:.3f}" if abs(value) < 1e6 else f"{value:.3g}"
