"""Numbers that runs measured of themselves, beside their scores: drift and the like, and whether scores follow them."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from consilium.report.compare.scores import GroupScores, mean
from consilium.report.run_record import RunRecord
from consilium.report.tables import Column, Table, number

FEWEST = 4
"""Pairs without which a rank correlation says nothing: of three, one in three orders is perfect."""
MOST = 8
"""Numbers of one group, such as a layer's each, beyond which they are left to a run's own picture."""
Pairs = Sequence[tuple[float, float]]


def diagnostics_table(scores: GroupScores) -> list[Table]:
    """Return a row per method and diagnostic: first, last and mean value, and Spearman's rho with the score; [] for none."""
    rows = []
    for method in scores.methods:
        runs = scores.group.of(method)
        for what in _names(runs):
            values = series(runs, what)
            cells = [mean([one[place] for one in values]) for place in (0, -1)]
            cells.append(mean([math.fsum(one) / len(one) for one in values]))
            pairs = [pair for run in runs for pair in _by_round(run, scores, what)]
            rows.append([method, what, *map(number, cells), *_correlated(pairs)])
    columns = [Column("method", right=False), Column("diagnostic", right=False), Column("first", 1), Column("last", 1)]
    columns += [Column("mean"), Column("rho"), Column("n")]
    notes = [
        "means over seeds; rho: Spearman's, over rounds and seeds, of a round's value and the mean validation score after it; "
        f"n: pairs, under {FEWEST} none is given. Rounds of a run are alike and both drift in time: no test"
    ]
    title = scores.group.titled("Measured by the runs themselves")
    return [Table(title, columns, rows, notes + correlations_over_runs(scores))] if rows else []


def series(runs: Sequence[RunRecord], what: str) -> list[list[float]]:
    """Return a diagnostic's values in the order of rounds, of each run that has any."""
    found = [[values[what] for _, values in sorted(run.diagnostics.items()) if what in values] for run in runs]
    return [one for one in found if one]


def correlations_over_runs(scores: GroupScores) -> list[str]:
    """Return a line per diagnostic: Spearman's rho of its mean with the closing score, over methods and seeds."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for (method, seed), run in scores.group.runs.items():
        found = [scores.cells[method, seed, site] for site in scores.inside if (method, seed, site) in scores.cells]
        for what in _names([run]) if len(found) == len(scores.inside) > 0 else []:
            (values,) = series([run], what)
            pairs.setdefault(what, []).append((math.fsum(values) / len(values), math.fsum(found) / len(found)))
    told = {what: _correlated(one) for what, one in sorted(pairs.items())}
    return [f"over runs, {what} and the closing score: rho {rho}, n {n}" for what, (rho, n) in told.items() if rho != "-"]


def _correlated(pairs: Pairs) -> list[str]:
    """Return Spearman's rho and n; "-" for fewer than FEWEST pairs, or where one side does not vary."""
    if len(pairs) < FEWEST or any(len(set(side)) < 2 for side in zip(*pairs, strict=True)):
        return ["-", str(len(pairs))]
    from scipy.stats import spearmanr

    return [f"{float(spearmanr(*zip(*pairs, strict=True)).statistic):+.2f}", str(len(pairs))]


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """Return the diagnostics that some run has, without those that have a number per layer."""
    names = {name for run in runs for values in run.diagnostics.values() for name in values}
    groups = Counter(name.rpartition("/")[0] for name in names)
    return sorted(name for name in names if groups[name.rpartition("/")[0]] <= MOST)


def _by_round(run: RunRecord, scores: GroupScores, what: str) -> Iterator[tuple[float, float]]:
    """Yield a round's value beside the mean validation score after the round, where all sites that validate have one."""
    curves = run.validation(scores.stage, scores.metric)
    last = {round: values[what] for (round, _), values in sorted(run.diagnostics.items()) if what in values}
    for round, value in last.items():
        after = [curve[round + 1] for curve in curves.values() if round + 1 in curve]
        if after and len(after) == len(curves):
            yield value, math.fsum(after) / len(after)
