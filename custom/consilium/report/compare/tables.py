"""Tables of a comparison: scores, costs, ranks, paired tests, missing runs; and all numbers as records, CSV and JSON."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any

from consilium.core.grouping import group_by_key
from consilium.core.messages import Stage
from consilium.core.sanitize import count_with_noun, first_names_text
from consilium.report.compare import DIAGNOSED, HELD_OUT, MARK, MOST_LISTED
from consilium.report.compare.comparability import Group, frozen_model
from consilium.report.compare.run_tables import compare_steps, cost_table, diagnostics_table, steps_of
from consilium.report.compare.score_statistics import (
    FEWEST,
    FEWEST_SEEDS,
    GroupScores,
    Interval,
    comparisons,
    diagnostic_series,
    interval,
    mean,
    patients_interval,
    ranks,
    scores_of,
)
from consilium.report.run_record import finite_score, unit_of
from consilium.report.tables import Column, Table, difference_text, number_text, only_true
from consilium.strategies.strategy import Role
from consilium.tasks.registry import COUNT, HIGH, LOW

MOST_TESTS = 30
"""Rows of a table of tests, at most. A note counts the others."""
MOST_SIZES = 8
"""Sites whose numbers of test samples are named one by one, at most."""
MEANT = {
    Stage.PRETRAINED: "the frozen model, not adapted",
    Stage.GLOBAL: "the aggregate that the server sends at the end, with each site's own local parameters",
    Stage.PERSONALIZED: "each site's own model after its last training",
}
"""An explanation of each model."""
ROW = ("group", "method", "seed", "site", "model", "split", "metric", "value", "low", "high", "n",
       "bytes", "steps", "seconds", "epsilon", "run")  # fmt: skip
BOLD = "bold: the best of a column, the pretrained model included"
METHOD = Column("method", right=False)
Cell = tuple[str, float | None]
"""A cell's text, and its score if it may be the best of its column."""


# published numbers ------------------------------------------------------------------------------------------------------

SITE = "site"
"""Name in a row of `published` that says for which site its numbers were printed."""


@dataclass(frozen=True)
class Published:
    """One number that a paper printed for the cells with these labels: of one `site`, or "" for the mean over sites.

    `floor`: if not "", the number belongs to no method. It is the score that is reached without learning the task, and this
    text says how.
    """

    labels: Mapping[str, str]
    metric: str
    value: float
    site: str = ""
    floor: str = ""


def read_published(
    rows: Sequence[Mapping[str, str | float]], axes: Sequence[str], floor: Mapping[str, str | float] | None = None
) -> list[Published]:
    """Return the published numbers of a study. `rows`: each has labels and metrics. `floor`: the study's floor, if any."""
    found = []
    for row in rows:
        labels = {axis: str(row[axis]) for axis in axes if axis in row}
        numbers = {k: v for k, v in row.items() if k not in labels and isinstance(v, int | float)}
        found += [Published(labels, metric, float(value), str(row.get(SITE, ""))) for metric, value in numbers.items()]
    values = {name: float(value) for name, value in (floor or {}).items() if not isinstance(value, str)}
    return found + [Published({}, metric, value, floor=str((floor or {})["about"])) for metric, value in values.items()]


def method_of(number: Published, group: Group) -> str | None:
    """Return the only method of a group whose cells have a number's labels; None if there is none or several."""
    wanted = number.labels.items()
    methods = {method for (method, _), run in group.runs.items() if not number.floor and wanted <= dict(run.labels).items()}
    return methods.pop() if len(methods) == 1 else None


def published_for(numbers: Sequence[Published], group: Group, method: str, metric: str) -> float | None:
    """Return the published mean over sites of a method; None without one."""
    fitting = [one for one in numbers if one.metric == metric and not one.site and method_of(one, group) == method]
    return fitting[-1].value if fitting else None


def published_table(scores: GroupScores, numbers: Sequence[Published]) -> list[Table]:
    """Return a table of the published numbers that the table of scores lacks: of one site or of another metric. [] for none."""
    rows = []
    for one in numbers:
        method = method_of(one, scores.group)
        if method is None or (one.metric == scores.metric and not one.site):
            continue
        runs = scores.group.runs_of(method)
        if one.metric in DIAGNOSED:
            values = [] if one.site else [values[-1] for values in diagnostic_series(runs, DIAGNOSED[one.metric])]
        elif one.metric.startswith(HELD_OUT):
            held_out = (run.held_out_score(one.metric.removeprefix(HELD_OUT)) for run in runs)
            values = [value for value in held_out if value is not None]
        else:
            other = scores_of(scores.group, scores.stage, one.metric)
            values = other.scores_at_site(method, one.site) if one.site else other.means(method)
        ours = mean(values)
        gap = "-" if ours is None else difference_text(ours - one.value)
        rows.append([method, one.site or "mean", one.metric, number_text(ours), number_text(one.value), gap])
    columns = [
        Column("method", right=False),
        Column("site", 1, False),
        Column("metric", 1, False),
        Column("measured here"),
        Column("published"),
        Column("difference"),
    ]
    told, grid = [row[2] for row in rows], scores.group.first.scores.grid
    last = [name for name in DIAGNOSED if name in told]
    notes = {
        "published: the paper's own number, not measured here": True,
        f"{', '.join(last)}: ours is the last round's": last,
        f"{HELD_OUT}: sites not asked to train, before the last round": any(one.startswith(HELD_OUT) for one in told),
        f"measured here on the {grid}": grid,
    }
    title = scores.group.with_group_name(f"Other published numbers beside ours, {scores.stage} model")
    return [Table(title, columns, rows, only_true(notes))] if rows else []


# tables -----------------------------------------------------------------------------------------------------------------


def comparison_tables(
    groups: Sequence[Group],
    stage: Stage,
    metric: str | None = None,
    against: str | None = None,
    published: Sequence[Published] = (),
) -> list[Table]:
    """Return all tables of a comparison, group by group. `stage`: the model for which ranks and tests are made."""
    found: list[Table] = []
    for group in groups:
        scores = scores_of(group, stage, metric or group.first.metric)
        tables = {one: scores if one is stage else scores_of(scores.group, one, scores.metric) for one in Stage}
        shown = [one for one in (Stage.GLOBAL, Stage.PERSONALIZED) if tables[one].cells or tables[one].missing]
        found += [scores_table(tables[one], tables[Stage.PRETRAINED], published if one is stage else ()) for one in shown]
        found += published_table(scores, published)
        found.append(cost_table(scores.group))
        found += diagnostics_table(scores)
        if len(scores.scored_methods) > 1:
            found.append(_significance_table(scores, against, tables))
        found += _missing_table([tables[one] for one in shown])
    return found


def scores_table(scores: GroupScores, pretrained: GroupScores, published: Sequence[Published] = ()) -> Table:
    """Return the table of scores, with a row per method: seeds, sites, means, intervals, rank, and published numbers."""
    group, (placed, blocks), sites = scores.group, ranks(scores), scores.columns
    against = {method: published_for(published, group, method, scores.metric) for method in group.methods}
    printed = any(value is not None for value in against.values())
    rest = [
        Column("mean"),
        Column("95 % seeds", 2),
        Column("95 % test set", 2),
        Column("mean by n", 1),
        Column("rank", 1),
        *([Column("published"), Column("difference")] if printed else []),
    ]
    taken = {"seeds", *(one.heading for one in rest)}
    of_sites = [Column(f"site {one}" if one in taken else one, 3, detail=True) for one in sites]
    columns = [METHOD, Column("seeds", 1), *of_sites, *rest]

    def row(of: GroupScores, method: str, name: str) -> list[Cell]:
        means, expected = of.means(method), of.group.seeds

        def scored(values: Sequence[float]) -> Cell:
            """Return the mean over seeds ± the standard deviation (n - 1 in the denominator) for two seeds or more."""
            # a frozen model on the same data has one score, not one per seed
            different = values[:1] if of is pretrained and len(set(map(number_text, values))) == 1 else values
            text = number_text(mean(values)) + (f" ± {number_text(stdev(values))}" if len(different) > 1 else "")
            whole = len(values) == len(expected)
            return text + (MARK if values and not whole else ""), mean(values) if whole else None

        middle, rank = scored(means), None if of is pretrained else placed.get(method)
        of_seeds = "-" if of is pretrained and "±" not in middle[0] else _interval_text(interval(means))
        cells = [
            (name, None),
            (f"{len(of.complete_seeds(method))}/{len(expected)}", None),
            *(scored(of.scores_in_column(method, site)) for site in sites),
            middle,
            (of_seeds, None),
            (_interval_text(patients_interval(of, method) if means else None), None),
            scored(of.means(method, weighted=True)),
            ("-", None) if rank is None else (f"{rank:.2f}", rank if scores.lower_is_better else -rank),
        ]
        if printed:
            ours, theirs = mean(means), None if of is pretrained else against[method]
            gap = "-" if ours is None or theirs is None else difference_text(ours - theirs)
            cells += [(number_text(theirs), None), (gap, None)]
        return cells

    models = group_by_key(
        (frozen_model(run), method) for (method, _), run in pretrained.group.runs.items() if method in pretrained.scored_methods
    )
    rows = []
    for of in models.values():
        name = f"pretrained: {first_names_text(list(dict.fromkeys(of)))}" if len(models) > 1 else "pretrained (not adapted)"
        rows.append(row(pretrained, max(of, key=lambda one: len(pretrained.complete_seeds(one))), name))
    for floor in (one for one in published if one.floor and one.metric == scores.metric):
        cells = [(number_text(floor.value) if one is rest[0] else "-", None) for one in columns[1:]]
        rows.append([(f"floor: {floor.floor}", None), *cells])
    above = len(rows)
    rows += [row(scores, method, method) for method in group.methods]

    best, beaten = set[tuple[int, int]](), []
    for place, column in enumerate(columns):
        found = {i: score for i, cells in enumerate(rows) if (score := cells[place][1]) is not None}
        if sum(i >= above for i in found) > 1:
            top = number_text((min if scores.lower_is_better else max)(found.values()))
            equal = [i for i, score in found.items() if number_text(score) == top]
            best |= {(i, place) for i in equal}
            beaten += [column.heading] * (max(equal) < above)
    texts = [[text for text, _ in cells] for cells in rows]
    marked = any(MARK in text for cells in texts for text in cells[1:])
    title = group.with_group_name(f"{group.heading(scores.metric)}, {scores.stage} model, {group.first.split} split")
    frozen_best = only_true({f"the pretrained model is the best in: {first_names_text(beaten)}": beaten})
    notes = [*_score_notes(scores, blocks, printed, marked), *frozen_best, *_scored_sample_lines(scores)]
    count = len({seed for _, seed in group.runs})
    each = f"each number is the mean over {count} seeds ± the standard deviation" if count > 1 else "each number is of one seed"
    by_site = [each, *only_true({BOLD: best}), *frozen_best, *_scored_sample_lines(scores)]
    steps, _ = compare_steps(group)
    more = ["too many sites for a column each: .csv and .json have them"] if scores.columns != scores.sites else []
    return Table(title, columns, texts, [*notes, *steps], best, detail_notes=[*by_site, *steps], advice=more)


def _scored_sample_lines(scores: GroupScores) -> list[str]:
    """Return a line with the images, volumes, patients or records that each site scored; [] if not on record."""
    runs = scores.group.runs.values()
    found = {site: max(int(finite_score(run.score(site, scores.stage, COUNT)) or 0) for run in runs) for site in scores.sites}
    counts = first_names_text([f"{site} {count}" for site, count in found.items()], MOST_SIZES)
    more = f"; {sum(found.values())} in all" if len(found) > 1 else ""
    return [f"{unit_of(scores.group.first.config.task.model_dump())}s scored: {counts}{more}"] if any(found.values()) else []


def _interval_text(ends: Interval | None) -> str:
    """Return an interval as tables show it; "-" for None."""
    return "-" if ends is None else f"{number_text(ends[0])}–{number_text(ends[1])}"


def _score_notes(scores: GroupScores, blocks: int, printed: bool, marked: bool) -> list[str]:
    """Return the notes of a table of scores, which are the sentences of its caption in a paper.

    `blocks`: sites in the mean rank; `printed`: the table has published numbers; `marked`: a cell has MARK.
    """
    group, sites = scores.group, count_with_noun(len(scores.averaged_sites), "site")
    count, planned = len({seed for _, seed in group.runs}), len(group.seeds)
    seeds = f"{count} of {planned} seeds" if count < planned else f"{count} seeds" if count > 1 else "one seed"
    over = f"{sites} and {seeds}, ± the standard deviation over seeds" if count > 1 else f"{sites}, of {seeds}"
    if len(scores.sites_by_test_split) == len(scores.averaged_sites):
        apart = "sites independent (too narrow where they share patients)"
    elif len(scores.sites_by_test_split) == 1:
        apart = "all sites on one test split"
    else:
        apart = "sites on one test split as one, others independent"
    # runs do not record whether a site's list names its patients
    unit = unit_of(group.first.config.task.model_dump()).replace("patient", "image")
    alone = [
        method
        for method in scores.methods
        for run in group.runs_of(method)[:1]
        if run.parameter_counts is not None and not run.parameter_counts[Role.SHARED] and not run.is_pooled
    ]
    pooled = [method for method in scores.methods for run in group.runs_of(method)[:1] if run.is_pooled]
    meaning = group.first.scores.meanings.get(scores.metric.partition("/")[0], "")
    found = {
        meaning: meaning,
        f"{scores.stage}: {MEANT[scores.stage]}; pretrained: {MEANT[Stage.PRETRAINED]}": True,
        f"{first_names_text(alone)}: nothing is shared, so the global model is each site's own": (
            alone and scores.stage is Stage.GLOBAL
        ),
        f"{first_names_text(pooled)}: one model, trained on the data of all sites in one place": (
            pooled and scores.stage is Stage.GLOBAL
        ),
        f"means are over {over}; the column seeds counts those that have all sites; mean by n: sites weighted by the samples "
        "they scored": True,
        f"test only, in no mean, rank or test: {', '.join(sorted(scores.test_only))}": scores.test_only,
        f"no score of this metric at: {first_names_text(scores.unscored_sites)}": scores.unscored_sites,
        "the 95 % intervals over seeds are percentile bootstraps of the mean; few seeds make them too narrow": (
            planned >= FEWEST_SEEDS
        ),
        f"95 % seeds: none, because an interval over seeds needs at least {FEWEST_SEEDS}": planned < FEWEST_SEEDS,
        f"95 % test set: each site's bootstrap over its patients, or over its {unit}s if its list names none; joined by MOVER "
        f"(Zou and Donner 2008), with {apart}; the width is the mean over seeds": any(
            patients_interval(scores, method) for method in scores.scored_methods
        ),
        f"rank: 1 is best; averaged over {count_with_noun(blocks, 'site')}; the pretrained model is not ranked": blocks,
        f"numbers marked {MARK} lack seeds": marked,
        f"without this model: {', '.join(scores.without)}": scores.without,
        "published: the paper's own number, not measured here; difference: ours minus it": printed,
        BOLD: len(scores.scored_methods) > 1,
    }
    return only_true(found)


def _significance_table(scores: GroupScores, against: str | None, tables: Mapping[Stage, GroupScores]) -> Table:
    """Return the table of paired tests. Pairs of methods with too few scores for a test have a row too.

    `tables`: the scores of all models. A note says if another model has another best method.
    """
    found = comparisons(scores, against)
    columns = [
        METHOD,
        Column("against", 0, False),
        Column("pairs", 1),
        Column("difference"),
        Column("better/worse", 2),
        Column("p", 1),
        Column("p Holm"),
    ]
    rows = [
        [c.one, c.other, str(c.pairs), difference_text(c.difference), f"{c.wins}/{c.losses}", p_text(c.p), p_text(c.holm)]
        for c in found[:MOST_TESTS]
    ]
    tested, joined = sum(one.p is not None for one in found), len(scores.sites_by_test_split) < len(scores.averaged_sites)
    winners = {
        one: other
        for one, table in tables.items()
        if one not in (Stage.PRETRAINED, scores.stage) and (other := _winner(table)) not in ("", _winner(scores))
    }
    advice = ["choose before the runs which model you report (--model)"] if winners else []
    notes = {
        "pairs are seeds × sites; pairs of one site or seed are alike, so p is too small, and it says nothing of other "
        "patients or sites": tested,
        f"Wilcoxon's signed-rank test, two-sided; p Holm: corrected for {count_with_noun(tested, 'test')}": tested,
        "sites on one test split are one pair a seed, their mean; difference: over all sites, as of the scores": joined,
        f"too few: under {FEWEST} pairs no p can be under 0.05, so none is given": tested < len(found),
        f"{len(found) - MOST_TESTS} more with larger p are left out here": len(found) > MOST_TESTS,
    } | {
        f"the {one} models have another best method, {other}; only the {scores.stage} ones are tested here": True
        for one, other in winners.items()
    }
    title = scores.group.with_group_name(
        f"Paired tests over seeds and sites, {scores.group.heading(scores.metric)} ({scores.stage})"
    )
    return Table(title, columns, rows, only_true(notes), advice=advice)


def _winner(scores: GroupScores) -> str:
    """Return the method with the best mean over sites and seeds; "" without any."""
    means = {method: value for method in scores.scored_methods if (value := mean(scores.means(method))) is not None}
    return (min if scores.lower_is_better else max)(means, key=lambda method: means[method], default="")


def p_text(value: float | None) -> str:
    """Return a p-value as tables show it."""
    return "too few" if value is None else "-" if math.isnan(value) else f"{value:.3f}" if value >= 0.001 else "<0.001"


def _missing_table(tables: Sequence[GroupScores]) -> list[Table]:
    """Return the table of missing scores, with a row per method, seed and reason. [] if nothing is missing."""
    lines: dict[tuple[str, str, str], dict[str, None]] = {}
    for (method, seed, site), why in (one for scores in tables for one in scores.missing.items()):
        lines.setdefault((method, seed, why), {})[site] = None
    rows = [[method, seed, first_names_text(list(places)), why] for (method, seed, why), places in sorted(lines.items())]
    columns = [METHOD, Column("seed"), Column("sites", 1, False), Column("why", 0, False)]
    if not rows:
        return []
    notes = only_true({f"{len(rows) - MOST_LISTED} more lines are left out here": len(rows) > MOST_LISTED})
    return [Table(tables[0].group.with_group_name("Missing, and in no mean"), columns, rows[:MOST_LISTED], notes)]


def records(groups: Sequence[Group], metric: str = "") -> list[dict[str, Any]]:
    """Return a row per run, site, model and metric, with all numbers that tables and tests use. A missing value is None.

    `metric`: the compared one, "" for the leading score.
    """
    found = []
    for group, (method, seed), run in ((one, key, run) for one in groups for key, run in one.runs.items()):
        whole: dict[str, Any] = {
            "bytes": _int_if_whole(run.bytes),
            "steps": _int_if_whole(steps_of([run])[0]),
            "seconds": run.training_seconds,
            "epsilon": run.epsilon,
            "run": run.name,
        }
        metrics = dict.fromkeys([metric or run.metric, run.metric, *run.scores.leading, *run.scores.beside])
        for site, stage, name in itertools.product(sorted(run.sites), Stage, metrics):
            if (value := run.score(site, stage, name)) is not None:
                ends = {end.strip("_"): finite_score(run.score(site, stage, f"{name}{end}")) for end in (LOW, HIGH)}
                one: dict[str, Any] = {
                    "group": group.name,
                    "method": method,
                    "seed": seed,
                    "site": site,
                    "model": str(stage),
                    "split": run.split,
                    "metric": name,
                    "value": finite_score(value),
                }
                found.append(one | {"n": _int_if_whole(run.score(site, stage, COUNT))} | ends | whole)
    return found


def _int_if_whole(value: float | None) -> float | None:
    """Return a value as an int if it is a whole number."""
    return int(value) if value is not None and float(value).is_integer() else value


def as_json(groups: Sequence[Group], tables: Sequence[Table], notes: Sequence[str], metric: str = "") -> str:
    """Return records, tables and notes as JSON."""
    told: list[Mapping[str, Any]] = [
        {"title": one.title, "columns": [c.heading for c in one.columns], "rows": one.rows, "notes": one.notes}
        | {"advice": one.advice, "best": sorted(one.best)}
        for one in tables
    ]
    return json.dumps({"records": records(groups, metric), "tables": told, "notes": list(notes)}, indent=1)
