"""What a person sees of a run: a live table while it goes on, plain lines where there is no terminal, and the result."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from consilium.messages import SKIPPED, SPLITS, TRAIN_LOSS, MetricKey, Stage
from consilium.report.clean import line, shown
from consilium.report.means import BY_N, INTERVAL, LEFT_OUT, MEAN, NOTE, Results, cell, mean_cell, number, optional
from consilium.report.progress import when
from consilium.report.tables import fit
from consilium.tasks.registry import COUNT, LOW, Scores

Headings = Callable[[str], dict[str, str]]
"""Return headings by metric, their words joined as told."""
LINE = 2000
"""Characters of a line at most; names and reasons in it have their own bound."""
AROUND = 7
"""Lines of a terminal that the live table does not have for sites: bar, headings, rules, what is left out."""
READY, WAITING, DONE = "ready", "waiting", "done"
IDLE = {"": "not asked", READY: READY, WAITING: WAITING, DONE: DONE}
"""What a site that is not at work says, and how several of them are counted."""


class LiveView:
    """An observer that shows what goes on, round, site, step, ETA and the leading score so far. Use as a context manager.

    `losses`: the last training loss of every site. Sites that a terminal has no lines for are counted below the others.
    """

    def __init__(self, console: Console, rounds: int, title: str, scores: Scores) -> None:
        self.console, self.rounds, self.title, self.scores = console, rounds, title, scores
        self.sites: dict[str, dict[str, Any]] = {}
        self.losses: dict[str, float] = {}
        self.round, self.phase, self.phases, self.asked, self.began = 0, 0, 1, 1, time.monotonic()
        self.score, self.loading, self._said = scores.leading[0], "", set[str]()
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(None),
            TextColumn("{task.fields[eta]}"),
            TimeElapsedColumn(),
        )
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

    def _on_site(self, event: Mapping[str, Any]) -> None:
        self._row(event)["state"] = READY

    def _on_loading(self, event: Mapping[str, Any]) -> None:
        """Say what is loaded, by a site or (no "site") for all of them; without a terminal once, whoever loads it."""
        what = f"loading {shown(event['what'])}"
        if event["site"]:
            self._row(event)["state"] = what
        else:
            self.loading = f"{what} ..."
        if not self._live and what not in self._said:
            self._said.add(what)
            self._say(f"{what} ...")

    def _on_round(self, event: Mapping[str, Any]) -> None:
        self.round, self.asked, self.loading = event["round"], len(event["sites"]), ""
        self.phase, self.phases = event["phase"], event["phases"]
        for row in self.sites.values():
            row |= {"state": "", "part": 0.0}
        for name in event["sites"]:
            self._row({"site": name})["state"] = WAITING

    def _on_privacy(self, event: Mapping[str, Any]) -> None:
        self._say(f"privacy: {event['claim']}")
        for warning in event["warnings"]:
            self._say(f"privacy: {warning}", "yellow")

    def _on_warning(self, event: Mapping[str, Any]) -> None:
        self._say(f"warning: {shown(event['text'], LINE)}", "yellow")

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

    def _on_undrawn(self, event: Mapping[str, Any]) -> None:
        self._say(f"{shown(event['site'])}: no picture: {shown(event['reason'])}", "yellow")

    def _on_metrics(self, event: Mapping[str, Any]) -> None:
        metrics, row, closing = event["metrics"], self._row(event), TRAIN_LOSS not in event["metrics"]
        if found := reported(metrics):  # a round may go without validation
            self.score = self.scores.lead(found)
        scored = {stage: score_of(metrics, stage, self.score) for stage in Stage}
        row |= {k: v for k, v in scored.items() if v is not None} | {"state": DONE, "part": 1.0}
        if not closing:
            self.losses[shown(event["site"])] = row["loss"] = metrics[TRAIN_LOSS]
        if not self._live:
            self._say(f"{self._when(event, closing)}  {shown(event['site'])}: {self._scores(scored, row, closing)}")

    def _when(self, event: Mapping[str, Any], closing: bool) -> str:
        if closing:
            return "closing evaluation"
        part = f" phase {self.phase + 1}/{self.phases}" if self.phases > 1 else ""
        return f"round {event['round'] + 1}/{self.rounds}{part}"

    def _scores(self, found: Mapping[Stage, float | None], row: Mapping[str, Any], closing: bool) -> str:
        """Return what was measured: the loss of training and the leading score, as far as there are any."""
        values = "  ".join(f"{k} {v:.3f}" for k, v in found.items() if v is not None)
        scores = f"{self.scores.heading(self.score)} {values}" if values else ""
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
        now = self.loading or f"round {min(self.round + 1, self.rounds)}/{self.rounds}"
        self._bar.update(self._task, completed=done, description=now, eta=self._eta())
        if not self.sites:
            return Group(self._bar)
        layouts = [partial(self._table, count=n, joint=j) for n, j in ((3, " "), (3, "\n"), (2, "\n"), (1, "\n"), (0, ""))]
        return Group(self._bar, fit(layouts, self.sites, self.console.width))

    def _picked(self, names: Iterable[str]) -> tuple[list[str], str | None]:
        """Return the sites that are shown, those at work first where the terminal has no room, and what the others do."""
        first = sorted(names, key=lambda name: (self.sites[name]["state"] in IDLE, name))
        room = max(self.console.height - AROUND, 1)
        left = Counter(IDLE.get(self.sites[name]["state"], "at work") for name in first[room:])
        rest = f"and {left.total()} more: {', '.join(f'{count} {state}' for state, count in left.items())}"
        return sorted(first[:room]), rest if left else None

    def _table(self, names: Mapping[str, str], count: int, joint: str) -> Table:
        """Return a row per site with the first `count` numbers; names keep their width whichever sites are shown."""
        heading = self.scores.heading(self.score)
        headings = {"loss": "loss"} | {k: f"{heading}{joint}{k}" for k in (Stage.GLOBAL, Stage.PERSONALIZED)}
        site = Column("site", no_wrap=True, min_width=max(map(cell_len, names.values())))
        table = Table(site, Column("now", min_width=16, no_wrap=True), box=SIMPLE, pad_edge=False, caption_justify="left")
        numbers = list(headings)[:count]
        for key in numbers:
            table.add_column(headings[key], justify="right", no_wrap=True)
        picked, table.caption = self._picked(names)
        for name in picked:
            row = self.sites[name]
            table.add_row(Text(names[name]), Text(row["state"]), *(f"{row[k]:.3f}" if k in row else "" for k in numbers))
        return table


def result_table(
    results: Results, title: str, scores: Scores, width: int = 120, losses: Mapping[str, float] = MappingProxyType({})
) -> Table:
    """Return the closing per-site table: the leading score of all three models, then the global one's other scores.

    In fewer than the needed `width` cells headings become narrower, then names shorter, then every score gets a line of its
    own. Where nothing was scored it says so and shows the last training `losses` by site.
    """
    keys = [key for metrics in results.values() for name in metrics if (key := MetricKey.parse(name))]
    if not keys:
        found = fit([partial(_unscored, results, title, losses)] * 2, map(shown, results), width)
        found.min_width = min(width, len(str(found.title)))  # so that its title is one line
        found.caption = _caption("", results)
        return found
    split = "test" if any(key.split == "test" for key in keys) else "validation"
    columns = partial(_columns, split, scores, {key.metric for key in keys})
    table = partial(_wide, results, f"{shown(title)}: {split} split{scores.remark}", columns)
    layouts = [partial(table, " "), partial(table, "\n"), partial(table, "\n", lean=True), partial(_tall, *table.args)]
    found = fit(layouts, map(shown, [*results, *_means(columns(" "))]), width)
    notes = [str(one) for one in (_caption(split, results), found.caption) if one]
    notes += [NOTE] if BY_N in _means(columns(" ")) else []
    found.caption = Text("\n".join(notes)) if notes else None
    return found


def _caption(split: str, results: Results) -> Text | None:
    """Return what a table does not tell: who has no such split, and who left samples out; None for nothing."""
    without = sorted(site for site in results if split and not any(name.startswith(f"{split}/") for name in results[site]))
    skipped = [f"{shown(site)} {results[site][SKIPPED]:.0f}" for site in sorted(results) if results[site].get(SKIPPED)]
    lines = [f"no {split} split, so not scored here: {', '.join(map(shown, without))}"] if without else []
    lines += [f"samples left out because they cannot be read: {', '.join(skipped)}"] if skipped else []
    return Text("\n".join(lines)) if lines else None


def _columns(split: str, scores: Scores, reported: set[str], joint: str) -> dict[str, str]:
    """Return headings by column, of what was reported."""
    leading = scores.lead(reported)
    keys = [MetricKey(split, stage, leading) for stage in Stage]
    found = {str(MetricKey(split, Stage.GLOBAL, COUNT)): COUNT} if COUNT in reported else {}
    for key in keys + [MetricKey(split, Stage.GLOBAL, one) for one in scores.beside if one in reported - {leading}]:
        found[str(key)] = f"{scores.heading(key.metric)}{joint}{key.stage}"
        if key == MetricKey(split, Stage.GLOBAL, leading) and f"{leading}{LOW}" in reported:
            found[f"{key}{INTERVAL}"] = "95 %"
    return found


def _means(columns: Mapping[str, str]) -> list[str]:
    """Return which means over sites there are."""
    return [MEAN, BY_N] if COUNT in columns.values() else [MEAN]


def _wide(results: Results, title: str, headings: Headings, joint: str, names: Mapping[str, str], lean: bool = False) -> Table:
    """Return a row per site; a `lean` one leaves some columns out, and says so."""
    table, columns = _table(title), headings(joint)
    if lean and (wanted := {c: heading for c, heading in columns.items() if not optional(c)}) != columns:
        table.caption, columns = LEFT_OUT, wanted
    for heading in ("site", *columns.values()):
        table.add_column(heading, justify="left" if heading == "site" else "right", no_wrap=True)
    for site in sorted(results):
        table.add_row(Text(names[shown(site)]), *(cell(results[site], c) for c in columns))
    table.add_section()
    for which in _means(columns):
        table.add_row(which, *(mean_cell(results, c, which == BY_N) for c in columns), style="bold")
    return table


def _tall(results: Results, title: str, headings: Headings, names: Mapping[str, str]) -> Table:
    """Return a row per site and score."""
    table, columns = _table(title), headings(" ")
    for heading in ("site", "score", ""):
        table.add_column(heading, justify="left" if heading else "right", no_wrap=True)
    for site in sorted(results):
        for place, (column, heading) in enumerate(columns.items()):
            table.add_row(Text("" if place else names[shown(site)]), heading, cell(results[site], column))
        table.add_section()
    for which in _means(columns):
        told = {heading: mean_cell(results, column, which == BY_N) for column, heading in columns.items()}
        for place, (heading, value) in enumerate(one for one in told.items() if one[1]):
            table.add_row("" if place else which, heading, value, style="bold")
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


def reported(metrics: Iterable[str]) -> set[str]:
    """Return what scores metric names such as "test/global/dice" tell of; the training's own loss does not count."""
    return {key.metric for name in metrics if (key := MetricKey.parse(name))}


def score_of(metrics: Mapping[str, float], stage: Stage, score: str) -> float | None:
    """Return a score of whichever split there is: validation in training, test or validation in the end."""
    return next((v for split in SPLITS if (v := metrics.get(str(MetricKey(split, stage, score)))) is not None), None)
