"""What a person sees of a run: a live table while it goes on, plain lines where there is no terminal, and the result."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from consilium.clean import line
from consilium.progress import when

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


class LiveView:
    """An observer that shows round, site, step, ETA and the leading score so far. Use as a context manager."""

    def __init__(self, console: Console, rounds: int, title: str) -> None:
        self.console, self.rounds, self.title = console, rounds, title
        self.sites: dict[str, dict[str, Any]] = {}
        self.round, self.phase, self.phases, self.asked, self.began = 0, 0, 1, 1, time.monotonic()
        self.score = LEADING[0]
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[eta]}"), TimeElapsedColumn()
        )
        self._task = self._bar.add_task(title, total=rounds, eta="")
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None

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
        if self._live:
            self._live.update(self._render())

    def _row(self, event: Mapping[str, Any]) -> dict[str, Any]:
        return self.sites.setdefault(event["site"], {"state": "", "part": 0.0})

    def _on_round(self, event: Mapping[str, Any]) -> None:
        self.round, self.asked = event["round"], len(event["sites"])
        self.phase, self.phases = event["phase"], event["phases"]
        for row in self.sites.values():
            row["part"] = 0.0

    def _on_privacy(self, event: Mapping[str, Any]) -> None:
        self.console.print(line(f"privacy: {event['claim']}", limit=1000))
        for warning in event["warnings"]:
            self.console.print(line(f"privacy: {warning}", "yellow", 1000))

    def _on_step(self, event: Mapping[str, Any]) -> None:
        row = self._row(event)
        row |= {
            "state": f"step {event['step']}/{event['steps']}",
            "loss": event["loss"],
            "part": event["step"] / event["steps"],
        }

    def _on_evaluate(self, event: Mapping[str, Any]) -> None:
        self._row(event)["state"] = f"evaluating {event['stage']}"

    def _on_refused(self, event: Mapping[str, Any]) -> None:
        self._row(event)["state"] = f"refused: {event['reason']}"
        self.console.print(line(f"{event['site']}: refused {when(event, self.rounds)}: {event['reason']}", "red", 1000))

    def _on_metrics(self, event: Mapping[str, Any]) -> None:
        metrics = event["metrics"]
        self.score = leading(metrics, self.score)
        found = {k: metrics.get(f"validation/{k}/{self.score}") for k in ("received", "personal")}
        row = self._row(event)
        row |= {k: v for k, v in found.items() if v is not None} | {"state": "done", "part": 1.0}
        if not self._live and found["received"] is not None:
            values = "  ".join(f"{k} {v:.3f}" for k, v in found.items() if v is not None)
            scores = f"loss {metrics['train/loss']:.3f}  {HEADINGS[self.score]} {values}"
            part = f" phase {self.phase + 1}/{self.phases}" if self.phases > 1 else ""
            place = f"round {event['round'] + 1}/{self.rounds}{part}  {event['site']}"
            self.console.print(line(f"{place}: {scores}  {self._eta()}"))

    def _fraction(self) -> float:
        done = sum(row["part"] for row in self.sites.values()) / max(self.asked, 1)
        return (self.round + (self.phase + done) / self.phases) / self.rounds

    def _eta(self) -> str:
        done, spent = min(self._fraction(), 1.0), time.monotonic() - self.began
        return f"ETA {spent * (1 - done) / done:.0f} s" if done > 0 else ""

    def _render(self) -> Group:
        score = HEADINGS[self.score]
        table = Table("site", Column("now", min_width=30), "loss", f"{score} received", f"{score} personal")
        for name in sorted(self.sites):
            row = self.sites[name]
            numbers = [f"{row[k]:.3f}" if k in row else "" for k in ("loss", "received", "personal")]
            table.add_row(line(name), line(row["state"]), *numbers)
        done = self._fraction() * self.rounds
        self._bar.update(
            self._task, completed=done, description=f"round {min(self.round + 1, self.rounds)}/{self.rounds}", eta=self._eta()
        )
        return Group(self._bar, table)


def result_table(results: Mapping[str, Mapping[str, float]], title: str) -> Table:
    """Return the closing per-site table: the leading score of base, received and personal model, then the received one's rest.

    Segmentation: Dice, then IoU and HD95; classification: accuracy, then macro F1; language: see LEADING and BESIDE.
    """
    names = {name for metrics in results.values() for name in metrics}
    split = "test" if any(name.startswith("test/") for name in names) else "validation"
    score = leading(names, LEADING[0])
    rest = _beside(score, names)
    remark = ", resized grid; HD95 in pixels of it" if score == "dice" else ""
    table = Table(title=line(f"{title}: {split} split{remark}"), title_justify="left", box=SIMPLE)
    shown = [(stage, score) for stage in STAGES] + [("received", metric) for metric in rest]
    columns = [f"{split}/{stage}/{metric}" for stage, metric in shown]
    for heading in ("site", *(f"{HEADINGS[metric]} {stage}" for stage, metric in shown)):
        table.add_column(heading, justify="left" if heading == "site" else "right")
    for site in sorted(results):
        table.add_row(line(site), *(number(results[site].get(c)) for c in columns))
    table.add_section()
    table.add_row("mean", *(number(mean_of(results, c)) for c in columns), style="bold")
    return table


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


def number(value: float | None) -> str:
    """Return a score as tables show it."""
    return "-" if value is None else f"{value:.3f}" if abs(value) < 1e6 else f"{value:.3g}"
