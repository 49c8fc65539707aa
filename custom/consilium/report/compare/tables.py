"""Tables of a comparison: scores, costs, ranks, paired tests, missing runs; and all numbers as records, CSV and JSON."""

import json
import math
from collections.abc import Mapping, Sequence, Set
from statistics import stdev
from typing import Any

from consilium.core.messages import Stage
from consilium.core.sanitize import count_with_noun, first_names_text
from consilium.report.compare import MARK, MOST_LISTED, Test
from consilium.report.compare.comparability import Group, frozen_model
from consilium.report.compare.costs import cost_table, steps_of, unequal_steps
from consilium.report.compare.diagnostics import diagnostics_table
from consilium.report.compare.published import Published, published_for, published_table
from consilium.report.compare.score_statistics import (
    FEWEST,
    FEWEST_SEEDS,
    GroupScores,
    Interval,
    comparisons,
    interval,
    mean,
    patients_interval,
    ranks,
    scores_of,
)
from consilium.report.run_record import finite_score, unit_of
from consilium.report.tables import Column, Table, csv_text, difference_text, number_text, only_true, sentence
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
SEEDS_JOINED = "its width is the mean over seeds"
"""How the interval of the test set joins the seeds."""
ROW = ("group", "method", "seed", "site", "model", "split", "metric", "value", "low", "high", "n",
       "bytes", "steps", "seconds", "epsilon", "run")  # fmt: skip
METHOD = Column("method", right=False)


def comparison_tables(
    groups: Sequence[Group],
    stage: Stage,
    metric: str | None = None,
    test: Test = "wilcoxon",
    against: str | None = None,
    published: Sequence[Published] = (),
) -> list[Table]:
    """Return all tables of a comparison, group by group. `stage`: the model for which ranks and tests are made."""
    found: list[Table] = []
    ranked = [scores_of(group, stage, metric or group.first.metric) for group in groups]
    for scores in ranked:
        tables = {one: scores if one is stage else scores_of(scores.group, one, scores.metric) for one in Stage}
        shown = [one for one in (Stage.GLOBAL, Stage.PERSONALIZED) if tables[one].cells or tables[one].missing]
        found += [scores_table(tables[one], tables[Stage.PRETRAINED], published if one is stage else ()) for one in shown]
        found += published_table(scores, published)
        found.append(cost_table(scores.group))
        found += diagnostics_table(scores)
        if len(scores.scored_methods) > 1:
            found.append(_significance_table(scores, test, against, tables))
        found += _missing_table([tables[one] for one in shown])
    return found + (_rank_table(ranked) if len(groups) > 1 else [])


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
    columns = [
        METHOD,
        Column("seeds", 1),
        *(Column(f"site {one}" if one in taken else one, 3, detail=True) for one in sites),
        *rest,
    ]

    def mean_and_spread_text(of: GroupScores, values: Sequence[float]) -> str:
        """Return the mean over seeds ± the standard deviation (n - 1 in the denominator) for two seeds or more.

        A frozen model on the same data has one score, not one per seed.
        """
        values = values[:1] if of is pretrained and len(set(map(number_text, values))) == 1 else values
        return number_text(mean(values)) + (f" ± {number_text(stdev(values))}" if len(values) > 1 else "")

    def row(of: GroupScores, method: str, name: str, rank: float | None = None, beside: float | None = None) -> list[str]:
        means, whole, expected = of.means(method), of.complete_seeds(method), of.group.expected_seeds(method)
        mark = MARK if means and not of.is_complete(method) else ""
        found = [name, f"{len(whole)}/{len(expected)}"]
        for values in (of.scores_in_column(method, site) for site in sites):
            found.append(mean_and_spread_text(of, values) + (MARK if values and len(values) < len(expected) else ""))
        found += [
            mean_and_spread_text(of, means) + mark,
            "-" if of is pretrained and "±" not in mean_and_spread_text(of, means) else _interval_text(interval(means)),
            _interval_text(patients_interval(of, method) if means else None),
        ]
        by_n = of.means(method, weighted=True)
        found += [mean_and_spread_text(of, by_n) + (mark if by_n else ""), "-" if rank is None else f"{rank:.2f}"]
        ours = mean(means)
        gap = "-" if ours is None or beside is None else difference_text(ours - beside)
        return found + ([number_text(beside), gap] if printed else [])

    models: dict[str, list[str]] = {}
    for (method, _), run in pretrained.group.runs.items():
        if method in pretrained.scored_methods:
            models.setdefault(frozen_model(run), []).append(method)
    frozen = {max(m, key=lambda one: len(pretrained.complete_seeds(one))): list(dict.fromkeys(m)) for m in models.values()}
    several = len(frozen) > 1
    rows = [
        row(pretrained, m, f"pretrained: {first_names_text(of)}" if several else "pretrained (not adapted)")
        for m, of in frozen.items()
    ]
    for floor in (one for one in published if one.floor and one.metric == scores.metric):
        cells = [number_text(floor.value) if one is rest[0] else "-" for one in columns[1:]]
        rows.append([f"floor: {floor.floor}", *cells])
    above = len(rows)
    rows += [row(scores, method, method, placed.get(method), against[method]) for method in group.methods]

    of_rows = [*((pretrained, m) for m in frozen), *[None] * (above - len(frozen)), *((scores, m) for m in group.methods)]
    best = _best_cells(columns, sites, of_rows, above)
    least = min(placed.values(), default=None)
    place = next(i for i, column in enumerate(columns) if column in rest and column.heading == "rank")
    best |= {(i, place) for i, m in enumerate(group.methods, above) if placed.get(m, math.nan) == least}
    beaten = [one for c, one in enumerate(columns) if (top := [r for r, at in best if at == c]) and max(top) < above]
    valued = {column.heading for i, column in enumerate(columns) if any(row[i] not in ("-", "") for row in rows)}
    marked = any(MARK in cell for row in rows for cell in row[1:])
    in_all, by_site = _scored_sample_lines(scores)
    of_sites, of_means = (
        [f"the pretrained model is the best in: {first_names_text(names)}"]
        if (names := [one.heading for one in beaten if one.detail is detail])
        else []
        for detail in (True, False)
    )
    steps = unequal_steps(group)[:1]
    return Table(
        group.with_group_name(f"{group.heading(scores.metric)}, {scores.stage} model, {group.first.split} split"),
        columns,
        rows,
        [*_score_notes(scores, blocks, printed, marked), *of_sites, *of_means, *by_site, *steps],
        best,
        caption=" ".join([_caption(scores, blocks, valued, False), *map(sentence, [*of_means, *in_all, *steps])]),
        detail_caption=" ".join([_caption(scores, blocks, valued, True), *map(sentence, [*of_sites, *by_site, *steps])]),
    )


def _best_cells(
    columns: Sequence[Column], sites: Sequence[str], rows: Sequence[tuple[GroupScores, str] | None], above: int
) -> set[tuple[int, int]]:
    """Return the cells (row, column) with the best score of their column, among rows that have all seeds.

    `rows`: the scores and the method of each row; None for a row without scores. `above`: number of rows before the first
    method's row. A column has no best cell if fewer than two methods have all seeds.
    """
    found = set[tuple[int, int]]()
    for index, column in enumerate(columns):
        if not column.detail and column.heading not in ("mean", "mean by n"):
            continue
        whole: dict[int, float] = {}
        for i, (of, m) in ((i, row) for i, row in enumerate(rows) if row is not None):
            values = (
                of.scores_in_column(m, sites[index - 2]) if column.detail else of.means(m, weighted=column.heading != "mean")
            )
            if values and len(values) == len(of.group.expected_seeds(m)):
                whole[i] = math.fsum(values) / len(values)
        if sum(i >= above for i in whole) > 1:
            lower = next(row[0].lower_is_better for row in rows if row is not None)
            top = number_text((min if lower else max)(whole.values()))
            found |= {(i, index) for i, value in whole.items() if number_text(value) == top}
    return found


def _scored_sample_lines(scores: GroupScores) -> tuple[list[str], list[str]]:
    """Return a line with the images, volumes, patients or records scored in all, and one by site; [] if not on record."""
    found = {
        site: max(int(finite_score(run.score(site, scores.stage, COUNT)) or 0) for run in scores.group.runs.values())
        for site in scores.sites
    }
    if not any(found.values()):
        return [], []
    what, total = f"{unit_of(scores.group.first.config.task.model_dump())}s scored: ", sum(found.values())
    counts = first_names_text([f"{site} {count}" for site, count in found.items()], MOST_SIZES)
    in_all = f"{what}{total} at {count_with_noun(len(found), 'site')}"
    return [in_all], [f"{what}{counts}" + (f"; {total} in all" if len(found) > 1 else "")]


def _caption(scores: GroupScores, blocks: int, headings_with_values: Set[str], of_sites: bool) -> str:
    """Return a table's caption for a paper, in whole sentences.

    `headings_with_values`: headings of the columns that have values. `of_sites`: the caption of the table of sites.
    """
    group, sites = scores.group, count_with_noun(len(scores.averaged_sites), "site")
    count, planned = len({seed for _, seed in group.runs}), len(group.seeds)
    seeds = f"{count} of {planned} seeds" if count < planned else f"{count} seeds" if count > 1 else "one seed"
    title = group.with_group_name(
        f"{group.heading(scores.metric)}, of the {scores.stage} model on the {group.first.split} split"
    )
    each = "site" if scores.columns == scores.sites else f"at the worst, the median and the best of {sites}"
    spread = f"the mean over {seeds} ± their standard deviation" if count > 1 else f"of {seeds}"
    over = f"{sites} and {seeds}, ± the standard deviation over seeds" if count > 1 else f"{sites}, of {seeds}"
    of_means = {
        f"{title}.": True,
        **dict.fromkeys(map(sentence, _model_notes(scores)), True),
        f"Means are over {over}.": True,
        "The 95 % intervals over seeds are percentile bootstraps of the mean; few seeds make them too narrow.": "95 % seeds"
        in headings_with_values,
        f"The 95 % intervals of the test set join {_describe_bootstrap_unit(scores)} by MOVER; {SEEDS_JOINED}.": "95 % test set"
        in headings_with_values,
        "The mean by n weighs sites by the samples that they scored.": "mean by n" in headings_with_values,
        f"The rank, 1 for the best, is averaged over {count_with_noun(blocks, 'site')}; "
        "the pretrained model is not ranked.": "rank" in headings_with_values,
        "The published numbers are the paper's own; the difference is ours minus them.": "published" in headings_with_values,
    }
    by_site = {f"{title}, {'by ' * (each == 'site')}{each}.": True, f"Each number is {spread}.": True}
    always = {
        f"Sites that only test are in no mean: {', '.join(sorted(scores.test_only))}.": scores.test_only,
        "The best of a column is bold, the pretrained model included.": len(scores.scored_methods) > 1,
        f"Of numbers marked {MARK} seeds are missing.": scores.missing,
    }
    return " ".join(only_true((by_site if of_sites else of_means) | always))


def _model_notes(scores: GroupScores) -> list[str]:
    """Return a line that defines the table's models, and one with the methods whose global model is each site's own."""
    alone = [
        method
        for method in scores.methods
        for run in scores.group.runs_of(method)[:1]
        if run.parameter_counts is not None and not run.parameter_counts[Role.SHARED] and not run.is_pooled
    ]
    own = f"{first_names_text(alone)}: nothing is shared, so the global model is each site's own"
    models = f"{scores.stage}: {MEANT[scores.stage]}; pretrained: {MEANT[Stage.PRETRAINED]}"
    return [models, *([own] if alone and scores.stage is Stage.GLOBAL else [])]


def _describe_bootstrap_unit(scores: GroupScores) -> str:
    """Return a phrase for the unit that each site's bootstrap resamples.

    Runs do not record whether a site's list names its patients.
    """
    unit = unit_of(scores.group.first.config.task.model_dump()).replace("patient", "image")
    return f"each site's bootstrap over its patients, or over its {unit}s if its list names none,"


def _interval_text(ends: Interval | None) -> str:
    """Return an interval as tables show it; "-" for None."""
    return "-" if ends is None else f"{number_text(ends[0])}–{number_text(ends[1])}"


def _score_notes(scores: GroupScores, blocks: int, printed: bool, marked: bool) -> list[str]:
    """Return the notes of a table of scores.

    `blocks`: sites in the mean rank; `printed`: the table has published numbers; `marked`: a cell has MARK.
    """
    seeds, apart = len(scores.group.seeds), "sites on one test split as one, others independent"
    if len(scores.sites_by_test_split) == len(scores.averaged_sites):
        apart = "sites independent (too narrow where they share patients)"
    elif len(scores.sites_by_test_split) == 1:
        apart = "all sites on one test split"
    bootstrap = "percentile bootstrap over seeds; few seeds make it too narrow"
    too_few = f"95 % seeds needs {FEWEST_SEEDS} seeds: {seeds} here say nothing of how sure a mean is"
    meaning = scores.group.first.scores.meanings.get(scores.metric.partition("/")[0], "")
    averaged = count_with_noun(len(scores.averaged_sites), "site")
    found = {
        meaning: meaning,
        **dict.fromkeys(_model_notes(scores), True),
        f"mean over {averaged}{' ± standard deviation over seeds' if seeds > 1 else ''}; "
        f"seeds: those with all sites, of {seeds}; mean by n: sites weighted by the samples they scored": True,
        f"test only, in no mean, rank or test: {', '.join(sorted(scores.test_only))}": scores.test_only,
        f"no score of this metric at: {first_names_text(scores.unscored_sites)}": scores.unscored_sites,
        too_few if seeds < FEWEST_SEEDS else f"95 % seeds: {bootstrap}": True,
        f"95 % test set: from {_describe_bootstrap_unit(scores)} {apart}, by MOVER; {SEEDS_JOINED}": True,
        "too many sites for a column each: .csv and .json have them": scores.columns != scores.sites,
        f"rank: 1 is best; averaged over {count_with_noun(blocks, 'site')}; the pretrained model is not ranked": blocks,
        f"{MARK} seeds are missing, see below": marked,
        f"no such model: {', '.join(scores.without)}": scores.without,
        "published: the paper's own number, not measured here; difference: ours minus it": printed,
    }
    return only_true(found)


def _significance_table(scores: GroupScores, test: Test, against: str | None, tables: Mapping[Stage, GroupScores]) -> Table:
    """Return the table of paired tests. Pairs of methods with too few scores for a test have a row too.

    `tables`: the scores of all models. A note says if another model has another best method.
    """
    found = comparisons(scores, test, against)
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
    name = {"wilcoxon": "Wilcoxon's signed-rank test", "permutation": "paired permutation test"}[test]
    tested, joined = sum(one.p is not None for one in found), len(scores.sites_by_test_split) < len(scores.averaged_sites)
    notes = {
        "pairs are seeds × sites; pairs of one site or seed are alike, so p is too small, and it says nothing of other "
        "patients or sites": tested,
        f"{name}, two-sided; p Holm: corrected for {count_with_noun(tested, 'test')}": tested,
        "sites on one test split are one pair a seed, their mean; difference: over all sites, as of the scores": joined,
        f"too few: under {FEWEST} pairs no p can be under 0.05, so none is given": tested < len(found),
        f"{len(found) - MOST_TESTS} more with larger p are left out here": len(found) > MOST_TESTS,
    } | {
        f"the {one} models have another best method, {other}; choose before the runs which model you report (--model); "
        f"only the {scores.stage} ones are tested here": other != _winner(scores)
        for one, table in tables.items()
        if one not in (Stage.PRETRAINED, scores.stage) and (other := _winner(table))
    }
    title = scores.group.with_group_name(
        f"Paired tests over seeds and sites, {scores.group.heading(scores.metric)} ({scores.stage})"
    )
    return Table(title, columns, rows, only_true(notes))


def _winner(scores: GroupScores) -> str:
    """Return the method with the best mean over sites and seeds; "" without any."""
    means = {method: value for method in scores.scored_methods if (value := mean(scores.means(method))) is not None}
    return (min if scores.lower_is_better else max)(means, key=lambda method: means[method], default="")


def p_text(value: float | None) -> str:
    """Return a p-value as tables show it."""
    if value is None:
        return "too few"
    return "-" if math.isnan(value) else f"{value:.3f}" if value >= 0.001 else "<0.001"


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


def _rank_table(tables: Sequence[GroupScores]) -> list[Table]:
    """Return the table of each method's rank per group. The mean rank is there only if all groups rank all methods.

    [] if no method is in two groups.
    """
    placed = [ranks(scores)[0] for scores in tables]
    methods = list(dict.fromkeys(method for one in placed for method in one))
    if not any(sum(method in one for one in placed) > 1 for method in methods):
        return []
    complete = all(
        len(one) == len(methods) for one in placed
    )  # a rank among fewer methods cannot be averaged with one among all
    rows = []
    for method in methods:
        cells = [*(one.get(method) for one in placed), mean([one[method] for one in placed]) if complete else None]
        rows.append([method, *("-" if cell is None else f"{cell:.2f}" for cell in cells)])
    columns = [METHOD, *(Column(scores.group.name, 2) for scores in tables), Column("mean rank")]
    notes = ["rank over sites in each group of runs that compare; mean rank: only where all groups rank all methods"]
    return [Table("Average ranks over data sets", columns, rows, notes)]


def records(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return a row per run, site, model and metric, with all numbers that tables and tests use. A missing value is None."""
    found = []
    for group, (method, seed), run in ((one, key, run) for one in groups for key, run in one.runs.items()):
        whole: dict[str, Any] = {
            "bytes": _int_if_whole(run.bytes),
            "steps": _int_if_whole(steps_of([run])[0]),
        }
        whole |= {"seconds": run.seconds, "epsilon": run.epsilon, "run": run.name}
        metrics = dict.fromkeys([run.metric, *run.scores.leading, *run.scores.beside])
        for site, stage, metric in ((site, stage, m) for site in sorted(run.sites) for stage in Stage for m in metrics):
            if (value := run.score(site, stage, metric)) is not None:
                ends = {end.strip("_"): finite_score(run.score(site, stage, f"{metric}{end}")) for end in (LOW, HIGH)}
                one: dict[str, Any] = {
                    "group": group.name,
                    "method": method,
                    "seed": seed,
                    "site": site,
                    "model": str(stage),
                    "split": run.split,
                    "metric": metric,
                    "value": finite_score(value),
                }
                found.append(one | {"n": _int_if_whole(run.score(site, stage, COUNT))} | ends | whole)
    return found


def _int_if_whole(value: float | None) -> float | None:
    """Return a value as an int if it is a whole number."""
    return value if finite_score(value) is None or not float(value or 0).is_integer() else int(value or 0)


def as_csv(groups: Sequence[Group]) -> str:
    """Return the records as CSV. A text that a spreadsheet would take for a formula begins with an apostrophe."""
    return csv_text(records(groups), ROW)


def as_json(groups: Sequence[Group], tables: Sequence[Table], notes: Sequence[str]) -> str:
    """Return records, tables and notes as JSON."""
    told: list[Mapping[str, Any]] = [
        {"title": one.title, "columns": [c.heading for c in one.columns], "rows": one.rows, "notes": one.notes}
        | {"best": sorted(one.best)}
        for one in tables
    ]
    return json.dumps({"records": records(groups), "tables": told, "notes": list(notes)}, indent=1)
