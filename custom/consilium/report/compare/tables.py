"""Tables of a comparison: scores, costs, ranks, paired tests, missing runs; and all numbers as records, CSV and JSON."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any

from consilium.core.messages import Stage
from consilium.core.sanitize import number_of
from consilium.report.compare import Test
from consilium.report.compare.comparability import Group, frozen_model
from consilium.report.compare.published import Published, published_for, published_table
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
from consilium.report.live_view import early_stop_text
from consilium.report.run_record import RunRecord, known, unit_of
from consilium.report.tables import Column, Table, csv_text, difference, few, number, only_true, sentence
from consilium.strategies.strategy import Role
from consilium.tasks.registry import COUNT, HIGH, LOW

# diagnostics ----------------------------------------------------------------------------------------------------------- Tables
# of diagnostics, which are numbers other than scores that runs measure, such as drift; and their correlation with scores.

FEWEST_PAIRS = 4
"""Fewest pairs for a rank correlation. With three pairs, one in three orders correlates perfectly by chance."""
MOST = 8
"""Diagnostics of one group in the table, at most. Larger groups, such as one per layer, are only in a run's own picture."""


def diagnostics_table(scores: GroupScores) -> list[Table]:
    """Return a table with a row per method and diagnostic: first, last and mean value over the rounds. [] for none."""
    rows = []
    for method in scores.methods:
        runs = scores.group.of(method)
        for what in _diagnostic_names(runs):
            values = diagnostic_series(runs, what)
            cells = [
                *(mean([one[place] for one in values]) for place in (0, -1)),
                mean([math.fsum(one) / len(one) for one in values]),
            ]
            rows.append([method, what, *map(number, cells)])
    columns = [
        Column("method", right=False),
        Column("diagnostic", right=False),
        Column("first", 1),
        Column("last", 1),
        Column("mean"),
    ]
    title = scores.group.with_group_name("Measured by the runs themselves")
    notes = ["means over seeds", *correlations_over_runs(scores)]
    return [Table(title, columns, rows, notes)] if rows else []


def correlations_over_runs(scores: GroupScores) -> list[str]:
    """Return a line per diagnostic with Spearman's rho between its mean and the closing score, over methods and seeds.

    There is no line for fewer than FEWEST_PAIRS runs, or if the diagnostic or the score does not vary.
    """
    pairs: dict[str, list[tuple[float, float]]] = {}
    for (method, seed), run in scores.group.runs.items():
        found = [scores.cells[method, seed, site] for site in scores.inside if (method, seed, site) in scores.cells]
        for what in _diagnostic_names([run]) if len(found) == len(scores.inside) > 0 else []:
            (values,) = diagnostic_series([run], what)
            pairs.setdefault(what, []).append((math.fsum(values) / len(values), math.fsum(found) / len(found)))
    lines = []
    for what, one in sorted(pairs.items()):
        sides = list(zip(*one, strict=True))
        if len(one) >= FEWEST_PAIRS and all(len(set(side)) > 1 for side in sides):
            from scipy.stats import spearmanr

            rho = float(spearmanr(*sides).statistic)
            lines.append(f"over runs, {what} and the closing score: Spearman's rho {rho:+.2f}, n {len(one)}")
    return lines


def _diagnostic_names(runs: Sequence[RunRecord]) -> list[str]:
    """Return the names of the runs' diagnostics, without groups of more than MOST."""
    names = {name for run in runs for values in run.diagnostics.values() for name in values}
    groups = Counter(name.rpartition("/")[0] for name in names)
    return sorted(name for name in names if groups[name.rpartition("/")[0]] <= MOST)


# tables ----------------------------------------------------------------------------------------------------------------

MOST_TESTS, MOST_LISTED = 30, 20
"""Rows of a table of tests, and of a table of missing runs, at most. A note counts the others."""
MOST_SIZES = 8
"""Sites whose numbers of test samples are named one by one, at most."""
MARK = "*"
"""Suffix of a mean from which seeds are missing."""
MEANT = {
    Stage.PRETRAINED: "the frozen model, not adapted",
    Stage.GLOBAL: "what the server sends in the end, with what a site keeps of its own",
    Stage.PERSONALIZED: "each site's model as its last training left it",
}
"""An explanation of each model."""
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
        if len(scores.scored) > 1:
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

    def spread(of: GroupScores, values: Sequence[float]) -> str:
        """Return the mean ± deviation over seeds. A frozen model on the same data has one score, not one per seed."""
        return _plus_minus(values[:1] if of is pretrained and len(set(map(number, values))) == 1 else values)

    def row(of: GroupScores, method: str, name: str, rank: float | None = None, beside: float | None = None) -> list[str]:
        means, whole, expected = of.means(method), of.complete_seeds(method), of.group.expected(method)
        mark = MARK if means and not of.complete(method) else ""
        found = [name, f"{len(whole)}/{len(expected)}"]
        for values in (of.under(method, site) for site in sites):
            found.append(spread(of, values) + (MARK if values and len(values) < len(expected) else ""))
        found += [
            spread(of, means) + mark,
            "-" if of is pretrained and "±" not in spread(of, means) else _interval_text(interval(means)),
            _interval_text(patients_interval(of, method) if means else None),
        ]
        by_n = of.means(method, weighted=True)
        found += [spread(of, by_n) + (mark if by_n else ""), "-" if rank is None else f"{rank:.2f}"]
        ours = mean(means)
        gap = "-" if ours is None or beside is None else difference(ours - beside)
        return found + ([number(beside), gap] if printed else [])

    models: dict[str, list[str]] = {}
    for (method, _), run in pretrained.group.runs.items():
        if method in pretrained.scored:
            models.setdefault(frozen_model(run), []).append(method)
    frozen = {max(m, key=lambda one: len(pretrained.complete_seeds(one))): list(dict.fromkeys(m)) for m in models.values()}
    several = len(frozen) > 1
    rows = [row(pretrained, m, f"pretrained: {few(of)}" if several else "pretrained (not adapted)") for m, of in frozen.items()]
    for floor in (one for one in published if one.floor and one.metric == scores.metric):
        cells = [number(floor.value) if one is rest[0] else "-" for one in columns[1:]]
        rows.append([f"floor: {floor.floor}", *cells])
    above = len(rows)
    rows += [row(scores, method, method, placed.get(method), against[method]) for method in group.methods]

    best: set[tuple[int, int]] = set()
    of_rows = dict(enumerate((pretrained, m) for m in frozen)) | {above + i: (scores, m) for i, m in enumerate(group.methods)}
    for index, column in enumerate(columns):
        if index < 2 or (column in rest and column.heading not in ("mean", "mean by n")):
            continue
        whole: dict[int, float] = {}
        for i, (of, m) in of_rows.items():
            values = of.under(m, sites[index - 2]) if column.detail else of.means(m, weighted=column.heading != "mean")
            if values and len(values) == len(of.group.expected(m)):
                whole[i] = math.fsum(values) / len(values)
        if sum(i >= above for i in whole) > 1:
            top = number((min if scores.lower else max)(whole.values()))
            best |= {(i, index) for i, value in whole.items() if number(value) == top}
    ranked = [i for i, m in enumerate(group.methods, above) if placed and placed.get(m) == min(placed.values())]
    best |= {(i, columns.index(rest[4])) for i in ranked}
    beaten = [one for c, one in enumerate(columns) if (rows_ := {r for r, at in best if at == c}) and max(rows_) < above]
    title = group.with_group_name(f"{group.heading(scores.metric)}, {scores.stage} model, {group.first.split} split")
    valued = {column.heading for i, column in enumerate(columns) if any(row[i] not in ("-", "") for row in rows)}
    steps, shared = _unequal_steps(group)[:1], list[list[str]]()
    for of_sites in (False, True):
        names = [one.heading for one in beaten if one.detail is of_sites]
        worse = [f"the pretrained model is the best in: {few(names)}"] * bool(names)
        shared.append([*worse, *_sizes(scores, of_sites), *steps])
    captions = [" ".join([_caption(scores, blocks, valued, i > 0), *map(sentence, one)]) for i, one in enumerate(shared)]
    marked = any(MARK in cell for row in rows for cell in row[1:])
    lines = [one for one in dict.fromkeys([*shared[1], *shared[0]]) if one not in _sizes(scores, False)]
    notes = [*_score_notes(scores, blocks, printed, marked), *lines]
    return Table(title, columns, rows, notes, best, caption=captions[0], detail_caption=captions[1])


def _sizes(scores: GroupScores, of_sites: bool) -> list[str]:
    """Return a line with the images, volumes, patients or records scored, by site or in all; [] if they are not on record."""
    found = dict[str, int]()
    for run, site in ((run, site) for run in scores.group.runs.values() for site in scores.sites):
        found[site] = max(found.get(site, 0), int(known(run.score(site, scores.stage, COUNT)) or 0))
    if not any(found.values()):
        return []
    counts = few([f"{site} {count}" for site, count in found.items()], MOST_SIZES)
    total = sum(found.values())
    by_site = counts if len(found) == 1 else f"{counts}; {total} in all"
    text = by_site if of_sites else f"{total} at {number_of(len(found), 'site')}"
    return [f"{unit_of(scores.group.first.config.task.model_dump())}s scored: {text}"]


def _caption(scores: GroupScores, blocks: int, there: Set[str], of_sites: bool) -> str:
    """Return a table's caption for a paper, in whole sentences.

    `there`: headings of the columns that have values. `of_sites`: the caption of the table of sites.
    """
    group, count, sites = scores.group, len(scores.group.seeds), number_of(len(scores.inside), "site")
    title = f"{group.heading(scores.metric)}, of the {scores.stage} model on the {group.first.split} split"
    each = "site" if scores.columns == scores.sites else f"at the worst, the median and the best of {sites}"
    spread = f"the mean over {count} seeds ± their standard deviation" if count > 1 else "of one seed"
    over = f"{sites} and {count} seeds, ± the standard deviation over seeds" if count > 1 else f"{sites}, of one seed"
    of_means = {
        f"{title}.": True,
        f"Means are over {over}.": True,
        "The 95 % intervals over seeds are percentile bootstraps of the mean; few seeds make them too narrow.": "95 % seeds"
        in there,
        f"The 95 % intervals of the test set join {_drawn(scores)} by MOVER.": "95 % test set" in there,
        "The mean by n weighs sites by the samples that they scored.": "mean by n" in there,
        f"The rank, 1 for the best, is averaged over {number_of(blocks, 'site')}.": "rank" in there,
        "The published numbers are the paper's own; the difference is ours minus them.": "published" in there,
    }
    by_site = {f"{title}, {'by ' * (each == 'site')}{each}.": True, f"Each number is {spread}.": True}
    always = {
        f"Sites that only test are in no mean: {', '.join(sorted(scores.test_only))}.": scores.test_only,
        "The best of a column is bold, the pretrained model included.": len(scores.scored) > 1,
        f"Of numbers marked {MARK} seeds are missing.": scores.missing,
    }
    return " ".join(only_true((by_site if of_sites else of_means) | always))


def _drawn(scores: GroupScores) -> str:
    """Return in words what each site's bootstrap draws. No run records if a site's list names its patients."""
    unit = unit_of(scores.group.first.config.task.model_dump()).replace("patient", "image")
    return f"each site's bootstrap over its patients, or over its {unit}s if its list names none,"


def _plus_minus(values: Sequence[float]) -> str:
    """Return a mean over seeds as a text, with the standard deviation (n - 1 in the denominator) for two seeds or more."""
    middle = mean(values)
    if middle is None or len(values) < 2:
        return number(middle)
    return f"{number(middle)} ± {number(math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1)))}"


def _interval_text(ends: Interval | None) -> str:
    """Return an interval as tables show it; "-" for None."""
    return "-" if ends is None else f"{number(ends[0])}–{number(ends[1])}"


def _score_notes(scores: GroupScores, blocks: int, printed: bool, marked: bool) -> list[str]:
    """Return the notes of a table of scores.

    `blocks`: sites in the mean rank; `printed`: the table has published numbers; `marked`: a cell has MARK.
    """
    seeds, apart = len(scores.group.seeds), "sites on one test split as one, others independent"
    if len(scores.sites_by_test_split) == len(scores.inside):
        apart = "sites independent (too narrow where they share patients)"
    elif len(scores.sites_by_test_split) == 1:
        apart = "all sites on one test split"
    bootstrap = "percentile bootstrap over seeds; few seeds make it too narrow"
    too_few = f"95 % seeds needs {FEWEST_SEEDS} seeds: {seeds} here say nothing of how sure a mean is"
    meaning = scores.group.first.scores.meanings.get(scores.metric.partition("/")[0], "")
    found = {
        meaning: meaning,
        f"{scores.stage}: {MEANT[scores.stage]}; pretrained: {MEANT[Stage.PRETRAINED]}": True,
        f"mean over {len(scores.inside)} sites{' ± standard deviation over seeds' if seeds > 1 else ''}; seeds: those with all "
        f"sites, of {seeds}; mean by n: sites weighted by the samples they scored": True,
        f"test only, in no mean, rank or test: {', '.join(sorted(scores.test_only))}": scores.test_only,
        f"no score of this metric at: {few(scores.unscored)}": scores.unscored,
        too_few if seeds < FEWEST_SEEDS else f"95 % seeds: {bootstrap}": True,
        f"95 % test set: from {_drawn(scores)} {apart}, by MOVER": True,
        "too many sites for a column each: .csv and .json have them": scores.columns != scores.sites,
        f"rank: 1 is best; averaged over {blocks} sites": blocks,
        f"{MARK} seeds are missing, see below": marked,
        f"no such model: {', '.join(scores.without)}": scores.without,
        "published: the paper's own number, not measured here; difference: ours minus it": printed,
    }
    return only_true(found)


def cost_table(group: Group) -> Table:
    """Return the table of costs, with a row per method: trained set, rounds, bytes, seconds and epsilon.

    Bytes and seconds are means over seeds, the epsilon is the largest.
    """
    columns = [
        METHOD,
        Column("trained set", 1, False),
        Column("parameters", 2),
        Column("shared", 2),
        Column("rounds", 3),
        Column("steps"),
        Column("MiB"),
        Column("seconds", 1),
        Column("epsilon"),
    ]
    rows, sets = [], set()
    for method in (method for method in group.methods if group.of(method)):
        runs = group.of(method)
        first, counts, most = runs[0], runs[0].trained, runs[0].settings["training.rounds"]
        every = "-" if counts is None else f"{counts[Role.SHARED] + counts[Role.LOCAL]:,}"
        shared = "-" if counts is None or first.pooled else f"{counts[Role.SHARED]:,}"
        had = sorted({run.last_round for run in runs})
        rounds = f"{'–'.join(map(str, dict.fromkeys((had[0], had[-1]))))} of {most}" if any(run.ended for run in runs) else most
        sent = _mean_of_known([None if run.bytes is None else run.bytes / 2**20 for run in runs], 2)
        epsilons = [run.epsilon for run in runs if run.epsilon is not None]
        epsilon = "none" if not first.private else "not known"  # a private run may not tell it, which is not "none"
        if first.private and len(epsilons) == len(runs):
            epsilon = f"{max(epsilons):.4g} ({first.settings['privacy.unit']})"
        adapted = trained_set(first)
        sets.add((adapted, every))
        cells = [
            adapted + (", pooled data" if first.pooled else ""),
            every,
            shared,
            str(rounds),
            _mean_of_known(_steps(runs), 0),
            "the data" if first.pooled else sent,
            _mean_of_known([run.seconds for run in runs], 1),
            epsilon,
        ]
        rows.append([method, *cells])
    notes = ["parameters: how many train at a site; shared: how many of them are sent; steps: a site's optimizer steps, "
             "mean over sites; MiB: tensors up and down in training, "
             "all sites; seconds: the sites' training, summed; epsilon: none is not private"]  # fmt: skip
    marked = any(cell.endswith(MARK) for row in rows for cell in row[1:])
    early = [f"{method}, seed {seed}: {early_stop_text(run.ended)}" for (method, seed), run in group.runs.items() if run.ended]
    notes += only_true(
        {"the methods do not all train the same set of parameters": len(sets) > 1}
        | dict.fromkeys(_unequal_steps(group), True)
        | dict.fromkeys(_fewer_steps(group), True)
        | {f"{MARK} without runs that have not all of it on record": marked}
        | dict.fromkeys(early[:MOST_LISTED], True)
        | {f"and {len(early) - MOST_LISTED} more that ended early": len(early) > MOST_LISTED}
    )
    return Table(group.with_group_name("Costs"), columns, rows, notes)


def _steps(runs: Sequence[RunRecord]) -> list[float | None]:
    """Return a site's optimizer steps over each run; None if they are not on record."""
    return [run.steps[-1] if run.steps else None for run in runs]


def _unequal_steps(group: Group) -> list[str]:
    """Return [] if all methods make equally many steps at a site, else a line with their steps, and one with the remedy.

    Runs on pooled data are left out, because `_fewer_steps` compares them. There is no remedy for runs that ended early.
    """
    runs = {m: group.of(m) for m in group.methods if group.of(m) and not group.of(m)[0].pooled}
    made = {m: n for m, some in runs.items() if (n := mean([one for one in _steps(some) if one is not None]))}
    if len(set(made.values())) < 2:
        return []
    most, early = max(made.values()), {m for m, some in runs.items() if any(run.ended for run in some)}
    rounds = {m: runs[m][0].last_round * most / n for m, n in made.items() if n < most and m not in early}
    remedy = few([f"{m}: {count:.0f}" for m, count in rounds.items() if count.is_integer()], 8)
    said = few([f"{m} {n:,.0f}" for m, n in made.items()], 8)
    return [f"the methods do not make the same number of steps at a site: {said}"] + (
        [f"for equal steps set training.rounds: {remedy}"] if remedy else []
    )


def _fewer_steps(group: Group) -> list[str]:
    """Return a line per method on pooled data that sees fewer samples per round than all sites of another method together."""

    def work(run: RunRecord, times: float) -> tuple[float, str]:
        steps, batch = run.config.training.local_steps, run.config.training.batch_size
        return (times * steps * batch, f"{times * steps:.0f} steps of batch {batch}") if steps else (0.0, "")

    firsts = {method: group.of(method)[0] for method in group.methods if group.of(method)}
    sites = {method: len(one.sites) * one.config.federation.fraction_train for method, one in firsts.items()}
    most, said = max((work(one, sites[method]) for method, one in firsts.items() if not one.pooled), default=(0.0, ""))
    found = {method: work(one, 1) for method, one in firsts.items() if one.pooled}
    less = {method: own for method, (seen, own) in found.items() if 0 < seen < most}
    what = "no upper bound; set training.local_steps to the sites' sum"
    return [f"{method}: pooled data train {own} a round, the sites together {said}: {what}" for method, own in less.items()]


def _mean_of_known(values: Sequence[float | None], digits: int) -> str:
    """Return the mean of the known values as a text, with MARK if some are unknown; "-" if all are."""
    there = [value for value in values if value is not None]
    return f"{mean(there):,.{digits}f}{MARK if len(there) < len(values) else ''}" if there else "-"


def trained_set(run: RunRecord) -> str:
    """Return the kind and settings of the adapter, and of the decoder if it trains."""
    found = {k.partition(".")[2]: v for k, v in run.settings.items() if k.startswith("adapter.")}
    parts = [
        str(found["kind"]),
        *(f"{name} {found[name]}" for name in ("rank", "width", "targets") if found.get(name) is not None),
    ]
    decoder = found.get("decoder")
    if isinstance(decoder, str) and decoder != "freeze":
        parts.append(f"decoder {decoder}")
    return ", ".join([*parts, *["decoder"] * (decoder is True)])


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
        [c.one, c.other, str(c.pairs), difference(c.difference), f"{c.wins}/{c.losses}", p_text(c.p), p_text(c.holm)]
        for c in found[:MOST_TESTS]
    ]
    name = {"wilcoxon": "Wilcoxon's signed-rank test", "permutation": "paired permutation test"}[test]
    tested, joined = sum(one.p is not None for one in found), len(scores.sites_by_test_split) < len(scores.inside)
    notes = {
        "pairs are seeds × sites; pairs of one site or seed are alike, so p is too small, and it says nothing of other "
        "patients or sites": tested,
        f"{name}, two-sided; p Holm: corrected for {number_of(tested, 'test')}": tested,
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
    means = {method: value for method in scores.scored if (value := mean(scores.means(method))) is not None}
    return (min if scores.lower else max)(means, key=lambda method: means[method], default="")


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
    rows = [[method, seed, few(list(places)), why] for (method, seed, why), places in sorted(lines.items())]
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
            "steps": _int_if_whole(_steps([run])[0]),
        }
        whole |= {"seconds": run.seconds, "epsilon": run.epsilon, "run": run.name}
        metrics = dict.fromkeys([run.metric, *run.scores.leading, *run.scores.beside])
        for site, stage, metric in ((site, stage, m) for site in sorted(run.sites) for stage in Stage for m in metrics):
            if (value := run.score(site, stage, metric)) is not None:
                ends = {end.strip("_"): known(run.score(site, stage, f"{metric}{end}")) for end in (LOW, HIGH)}
                one: dict[str, Any] = {
                    "group": group.name,
                    "method": method,
                    "seed": seed,
                    "site": site,
                    "model": str(stage),
                    "split": run.split,
                    "metric": metric,
                    "value": known(value),
                }
                found.append(one | {"n": _int_if_whole(run.score(site, stage, COUNT))} | ends | whole)
    return found


def _int_if_whole(value: float | None) -> float | None:
    """Return a value as an int if it is a whole number."""
    return value if known(value) is None or not float(value or 0).is_integer() else int(value or 0)


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
