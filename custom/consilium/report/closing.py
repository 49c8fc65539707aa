"""The closing table of a run: every site's scores, their means, and what it does not tell."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from consilium.messages import SKIPPED, MetricKey, Stage
from consilium.report.clean import shown
from consilium.report.means import BY_N, INTERVAL, LEFT_OUT, MEAN, NOTE, Results, cell, mean_cell, number, optional
from consilium.report.tables import fit
from consilium.tasks.registry import COUNT, LOW, Scores

Headings = Callable[[str], dict[str, str]]
"""Return headings by metric, their words joined as told."""
Parts = tuple[Results, Results]
"""Sites that trained, and those that only test."""
FEW = 3
"""So many sites a title names, more it counts."""


def result_table(
    results: Results,
    title: str,
    scores: Scores,
    width: int = 120,
    losses: Mapping[str, float] = MappingProxyType({}),
    apart: frozenset[str] = frozenset(),
    refused: Collection[str] = (),
) -> Table:
    """Return the closing per-site table: the leading score of all three models, then the global one's other scores.

    Sites `apart`, which only test, stand below the means and are in none. The title names those that were `refused` and so have
    no scores.

    In fewer than the needed `width` cells headings become narrower, then names shorter, then every score gets a line of its
    own. Where nothing was scored it says so and shows the last training `losses` by site.
    """
    keys = [key for metrics in results.values() for name in metrics if (key := MetricKey.parse(name))]
    missing = f"; {_names(refused)} refused in the closing evaluation" if refused else ""
    if not keys:
        why = "nothing was scored" if refused else "no test or validation split: nothing was scored"
        found = fit([partial(_unscored, results, f"{shown(title)}: {why}{missing}", losses)] * 2, map(shown, results), width)
        found.min_width = min(width, len(str(found.title)))  # so that its title is one line
        found.caption = _caption("", results)
        return found
    split = "test" if any(key.split == "test" for key in keys) else "validation"
    columns = partial(_columns, split, scores, {key.metric for key in keys})
    inside, below = ({s: results[s] for s in sorted(results) if (s in apart) is only} for only in (False, True))
    parts = inside, below
    table = partial(_wide, parts, f"{shown(title)}: {split} split{scores.remark}{missing}", columns)
    layouts = [partial(table, " "), partial(table, "\n"), partial(table, "\n", lean=True), partial(_tall, *table.args)]
    found = fit(layouts, map(shown, [*results, *_means(columns(" "))]), width)
    notes = [str(one) for one in (_caption(split, results), found.caption) if one]
    notes += [NOTE] if BY_N in _means(columns(" ")) else []
    notes += [f"test only, in no mean: {', '.join(map(shown, below))}"] if below else []
    found.caption = Text("\n".join(notes)) if notes else None
    return found


def _caption(split: str, results: Results) -> Text | None:
    """Return what a table does not tell: who has no such split, and who left samples out; None for nothing."""
    without = sorted(site for site in results if split and not any(name.startswith(f"{split}/") for name in results[site]))
    skipped = [f"{shown(site)} {results[site][SKIPPED]:.0f}" for site in sorted(results) if results[site].get(SKIPPED)]
    lines = [f"no {split} split, so not scored here: {', '.join(map(shown, without))}"] if without else []
    lines += [f"samples left out because they cannot be read: {', '.join(skipped)}"] if skipped else []
    return Text("\n".join(lines)) if lines else None


def _names(sites: Collection[str]) -> str:
    return ", ".join(shown(site) for site in sorted(sites)) if len(sites) <= FEW else f"{len(sites)} sites"


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


def _wide(parts: Parts, title: str, headings: Headings, joint: str, names: Mapping[str, str], lean: bool = False) -> Table:
    """Return a row per site; a `lean` one leaves some columns out, and says so."""
    table, columns = _table(title), headings(joint)
    if lean and (wanted := {c: heading for c, heading in columns.items() if not optional(c)}) != columns:
        table.caption, columns = LEFT_OUT, wanted
    for heading in ("site", *columns.values()):
        table.add_column(heading, justify="left" if heading == "site" else "right", no_wrap=True)
    for results in parts:
        for site, metrics in results.items():
            table.add_row(Text(names[shown(site)]), *(cell(metrics, c) for c in columns))
        table.add_section()
        for which in _means(columns) if results is parts[0] else []:
            table.add_row(which, *(mean_cell(results, c, which == BY_N) for c in columns), style="bold")
        table.add_section()
    return table


def _tall(parts: Parts, title: str, headings: Headings, names: Mapping[str, str]) -> Table:
    """Return a row per site and score."""
    table, columns = _table(title), headings(" ")
    for heading in ("site", "score", ""):
        table.add_column(heading, justify="left" if heading else "right", no_wrap=True)
    for results in parts:
        for site, metrics in results.items():
            for place, (column, heading) in enumerate(columns.items()):
                table.add_row(Text("" if place else names[shown(site)]), heading, cell(metrics, column))
            table.add_section()
        for which in _means(columns) if results is parts[0] else []:
            told = {heading: mean_cell(results, column, which == BY_N) for column, heading in columns.items()}
            for place, (heading, value) in enumerate(one for one in told.items() if one[1]):
                table.add_row("" if place else which, heading, value, style="bold")
            table.add_section()
    return table


def _unscored(results: Results, title: str, losses: Mapping[str, float], names: Mapping[str, str]) -> Table:
    """Return a row per site with the only number there is."""
    table = _table(title)
    table.add_column("site", no_wrap=True)
    table.add_column("training loss", justify="right", no_wrap=True)
    for site in sorted(results):
        table.add_row(Text(names[shown(site)]), number(losses.get(shown(site))))
    return table


def _table(title: str) -> Table:
    return Table(title=Text(title, "italic"), title_justify="left", box=SIMPLE, pad_edge=False)
