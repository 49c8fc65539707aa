"""A comparison as tables of text, the same in every format: scores, costs, ranks, paired tests, what is missing."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from consilium.messages import Stage
from consilium.report.compare import Test
from consilium.report.compare.costs import cost_sheet
from consilium.report.compare.diagnosed import diagnosed_sheet
from consilium.report.compare.groups import Group
from consilium.report.compare.paired import FEWEST, Comparison, comparisons
from consilium.report.compare.published import Published, floor_rows, published_for, published_sheet
from consilium.report.compare.sheet import MARK, Column, Sheet, titled
from consilium.report.compare.site_columns import column_notes, scores_under, site_columns
from consilium.report.compare.table import (
    FEWEST_SEEDS,
    Interval,
    Table,
    interval,
    mean,
    patients_interval,
    ranks,
    spread,
    table_of,
)
from consilium.report.means import difference, number

MOST_TESTS = 30
"""Lines of a table of tests; the others are counted in its note, and JSON has all."""
MOST_LISTED = 20
MEANS = {
    Stage.PRETRAINED: "pretrained: the frozen model, not adapted",
    Stage.GLOBAL: "global: what the server sends in the end, with what a site keeps of its own",
    Stage.PERSONALIZED: "personalized: each site's model as its last training left it",
}
AT_SITES = 3
"""The rank of columns of single sites: a narrow terminal does without them first."""


def sheets(
    groups: Sequence[Group],
    stage: Stage,
    metric: str | None = None,
    test: Test = Test.WILCOXON,
    against: str | None = None,
    published: Sequence[Published] = (),
) -> list[Sheet]:
    """Return all tables of a comparison, group by group. `stage`: the model that ranks and tests are about."""
    found: list[Sheet] = []
    for group in groups:
        measured = metric or group.first.metric
        tables = {one: table_of(group, one, measured) for one in Stage}
        shown = [one for one in (Stage.GLOBAL, Stage.PERSONALIZED) if tables[one].cells or tables[one].missing]
        found += [score_sheet(tables[one], tables[Stage.PRETRAINED], published if one is stage else ()) for one in shown]
        found += published_sheet(tables[stage], published)
        found.append(cost_sheet(group))
        found += diagnosed_sheet(tables[stage])
        if len(group.methods) > 1:
            found.append(test_sheet(tables[stage], test, against))
        found += missing_sheet([tables[one] for one in shown])
    if len(groups) > 1:
        found += rank_sheet([table_of(group, stage, metric or group.first.metric) for group in groups])
    return found


def heading_of(group: Group, metric: str) -> str:
    """Return a metric as tables of its task call it."""
    base, _, rest = metric.partition("/")
    named = group.first.scores.heading(base)
    return f"{named}, {rest}" if rest else named


def score_sheet(table: Table, pretrained: Table, published: Sequence[Published] = ()) -> Sheet:
    """Return a row per method: seeds, sites, means, intervals, rank, and what was published."""
    group, (placed, blocks) = table.group, ranks(table)
    against = {method: published_for(published, group, method, table.metric) for method in group.methods}
    printed = any(value is not None for value in against.values())
    columns = _score_columns(site_columns(table), printed)
    above = [_score_row(pretrained, m, name, {}, None, columns) for m, name in _frozen(pretrained).items()]
    above += floor_rows(published, table.metric, columns)
    rows = [*above, *(_score_row(table, m, m, placed, against[m], columns) for m in group.methods)]
    title = titled(group, f"{heading_of(group, table.metric)}, {table.stage} model, {group.first.split} split")
    return Sheet(title, _headed(columns), rows, _score_notes(table, blocks, printed), _best(table, len(above), columns))


def _frozen(table: Table) -> dict[str, str]:
    """Return a method of each frozen model that there is, the one scored with most seeds, and what its row is called."""
    models: dict[str, list[str]] = {}
    for (method, _), run in table.group.runs.items():
        settings = {k: v for k, v in run.settings.items() if k.startswith("model.")}
        models.setdefault(json.dumps([settings, run.base], sort_keys=True), []).append(method)
    there = {method for method, *_ in table.cells}
    scored = [[m for m in dict.fromkeys(methods) if m in there] for methods in models.values()]
    found = {max(methods, key=lambda m: len(table.whole_seeds(m))): methods for methods in scored if methods}
    several = len(found) > 1
    return {m: f"pretrained: {_few(methods)}" if several else "pretrained (not adapted)" for m, methods in found.items()}


def _score_columns(sites: Sequence[str], printed: bool) -> list[Column]:
    found = [Column("method", right=False), Column("seeds", 1), *(Column(site, AT_SITES) for site in sites)]
    found += [Column("mean"), Column("95 % seeds", 2), Column("95 % patients", 2), Column("mean by n", 1), Column("rank", 1)]
    return found + ([Column("published", 0), Column("difference", 0)] if printed else [])


def _headed(columns: Sequence[Column]) -> list[Column]:
    """Return columns whose headings differ: that of a site called as another column is, "mean" or "rank", says "site mean"."""
    taken = {column.heading for column in columns if column.rank != AT_SITES}
    return [
        replace(one, heading=f"site {one.heading}") if one.rank == AT_SITES and one.heading in taken else one for one in columns
    ]


def _score_row(
    table: Table, method: str, name: str, placed: Mapping[str, float], printed: float | None, columns: Sequence[Column]
) -> list[str]:
    means, whole = table.means(method), table.whole_seeds(method)
    mark = MARK if means and not table.complete(method) else ""
    row = [
        name,
        f"{len(whole)}/{len(table.group.expected(method))}",
        *(_at_site(table, method, column.heading) for column in columns if column.rank == AT_SITES),
    ]
    row += [plus_minus(means) + mark, _between(interval(means)), _between(patients_interval(table, method) if means else None)]
    by_n = table.means(method, weighted=True)
    row += [plus_minus(by_n) + (mark if by_n else ""), _rank(placed.get(method))]
    if len(columns) > len(row):
        ours = mean(means)
        gap = None if ours is None or printed is None else ours - printed
        row += [number(printed), "-" if gap is None else difference(gap)]
    return row


def _at_site(table: Table, method: str, heading: str) -> str:
    values = scores_under(table, method, heading)
    return plus_minus(values) + (MARK if values and len(values) < len(table.group.expected(method)) else "")


def _rank(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def plus_minus(values: Sequence[float]) -> str:
    """Return a mean over seeds and its standard deviation, where there is one."""
    around = spread(values)
    return number(mean(values)) + ("" if around is None else f" ± {number(around)}")


def _between(ends: Interval | None) -> str:
    return "-" if ends is None else f"{number(ends[0])}–{number(ends[1])}"


def _best(table: Table, skip: int, columns: Sequence[Column]) -> frozenset[tuple[int, int]]:
    """Return the best cells of every column of scores, all that print the best number; what lacks a seed takes no part."""
    found: set[tuple[int, int]] = set()
    sites = {index: c.heading for index, c in enumerate(columns) if c.rank == AT_SITES}
    plain = next(i for i, c in enumerate(columns) if c.heading == "mean" and c.rank == 0)
    count = {m: len(table.group.expected(m)) for m in table.group.methods}
    at = {i: {m: scores_under(table, m, site) for m in count} for i, site in sites.items()}
    at[plain] = {m: table.means(m) for m in count}
    values = {i: {m: mean(scores) for m, scores in column.items() if len(scores) == count[m]} for i, column in at.items()}
    for index, column in values.items():
        there = [v for v in column.values() if v is not None]
        top = (min if table.lower else max)(there) if len(there) > 1 else None
        rows = enumerate(table.group.methods)
        found |= {(i + skip, index) for i, m in rows if top is not None and number(column.get(m)) == number(top)}
    return frozenset(found)


def _score_notes(table: Table, blocks: int, printed: bool) -> list[str]:
    seeds = len(table.group.seeds)
    notes = [
        f"{MEANS[table.stage]}; pretrained: the frozen model",
        f"mean over {len(table.inside)} sites{' ± standard deviation over seeds' if seeds > 1 else ''}",
    ]
    notes[1] += f"; seeds: those with all sites, of {seeds}; mean by n: sites weighted by the samples they scored"
    notes += [f"test only, in no mean, rank or test: {', '.join(sorted(table.apart))}"] if table.apart else []
    notes += [f"no score of this metric at: {_few(table.unscored)}"] if table.unscored else []
    if seeds < FEWEST_SEEDS:
        notes.append(f"95 % seeds needs {FEWEST_SEEDS} seeds: {seeds} here say nothing of how sure a mean is")
    else:
        notes.append("95 % seeds: percentile bootstrap over seeds; few seeds make it too narrow")
    notes.append(f"95 % patients: from each site's bootstrap over its patients, {_apart(table)}, by MOVER")
    notes += column_notes(site_columns(table))
    if blocks:
        notes.append(f"rank: 1 is best; averaged over {blocks} sites")
    if table.missing:
        notes.append(f"{MARK} seeds are missing, see below")
    if table.without:
        notes.append(f"no such model: {', '.join(table.without)}")
    return notes + (["published: the paper's own number, not measured here; difference: ours minus it"] if printed else [])


def _apart(table: Table) -> str:
    """Return how the patients of sites hang together."""
    if len(table.splits) == len(table.inside):
        return "sites independent (too narrow where they share patients)"
    return "all sites on one test split" if len(table.splits) == 1 else "sites on one test split as one, others independent"


def test_sheet(table: Table, test: Test, against: str | None) -> Sheet:
    """Return a row per pair of methods. Where pairs of scores are too few for a test, it says so."""
    found = comparisons(table, test, against)
    columns = [Column("method", right=False), Column("against", 0, False), Column("pairs", 1), Column("difference")]
    columns += [Column("better/worse", 2), Column("p", 1), Column("p Holm")]
    title = titled(table.group, f"Paired tests, {heading_of(table.group, table.metric)} ({table.stage})")
    return Sheet(title, columns, [_test_row(one) for one in found[:MOST_TESTS]], _test_notes(found, test, table))


def _test_row(one: Comparison) -> list[str]:
    return [one.one, one.other, str(one.pairs), difference(one.difference), f"{one.wins}/{one.losses}", _p(one.p), _p(one.holm)]


def _p(value: float | None) -> str:
    if value is None:
        return "too few"
    return "-" if math.isnan(value) else f"{value:.3f}" if value >= 0.001 else "<0.001"


def _test_notes(found: Sequence[Comparison], test: Test, table: Table) -> list[str]:
    name = {Test.WILCOXON: "Wilcoxon's signed-rank test", Test.PERMUTATION: "paired permutation test"}[test]
    tested = sum(one.p is not None for one in found)
    notes = [f"{name}, two-sided, over seeds x sites; p Holm: corrected for {tested} tests"]
    notes[0] += "; pairs of one site or seed are alike, so p is rather too small"
    notes = notes if tested else []
    if len(table.splits) < len(table.inside):
        notes.append("sites on one test split are one pair a seed, their mean; difference: over all sites, as of the scores")
    if tested < len(found):
        notes.append(f"too few: under {FEWEST} pairs no p can be under 0.05, so none is given")
    return notes + ([f"{len(found) - MOST_TESTS} more with larger p are left out here"] if len(found) > MOST_TESTS else [])


def missing_sheet(tables: Sequence[Table]) -> list[Sheet]:
    """Return what is missing, a row per method and seed; none where nothing is."""
    lines: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for table in tables:
        for (method, seed, site), why in table.missing.items():
            models = lines.setdefault((method, seed, why), {}).setdefault(site, [])
            models.append(str(table.stage))
    if not lines:
        return []
    rows = [[method, seed, _few(list(places)), why] for (method, seed, why), places in sorted(lines.items())]
    columns = [Column("method", right=False), Column("seed", 0), Column("sites", 1, False), Column("why", 0, False)]
    rest = [f"{len(rows) - MOST_LISTED} more lines are left out here"] if len(rows) > MOST_LISTED else []
    return [Sheet(titled(tables[0].group, "Missing, and in no mean"), columns, rows[:MOST_LISTED], rest)]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def rank_sheet(tables: Sequence[Table]) -> list[Sheet]:
    """Return each method's rank by data set, and their mean; none where no method is in two."""
    placed = [ranks(table)[0] for table in tables]
    methods = list(dict.fromkeys(method for one in placed for method in one))
    if not any(sum(method in one for one in placed) > 1 for method in methods):
        return []
    columns = [Column("method", right=False), *(Column(table.group.name, 2) for table in tables), Column("mean rank")]
    rows = [[m, *(_rank(one.get(m)) for one in placed), _rank(_mean_rank(m, placed, len(methods)))] for m in methods]
    notes = ["rank over sites in each group of runs that compare; mean rank: only for methods that all groups rank"]
    return [Sheet("Average ranks over data sets", columns, rows, notes)]


def _mean_rank(method: str, placed: Sequence[Mapping[str, float]], methods: int) -> float | None:
    """Return the mean rank, None unless every group ranks every method: ranks among fewer are no ranks among all."""
    if any(len(one) < methods for one in placed):
        return None
    return mean([one[method] for one in placed])
