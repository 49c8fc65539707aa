"""What runs have measured of themselves, beside their scores: drift and the like, and whether scores follow it."""

import math
from collections.abc import Mapping, Sequence

from consilium.report.compare.groups import Group
from consilium.report.compare.runs import Run, known
from consilium.report.compare.sheet import Column, Sheet, titled
from consilium.report.compare.table import Table, mean
from consilium.report.means import number

FEWEST = 4
"""Pairs without which a rank correlation says nothing: of three, one in three orders is perfect."""
MOST = 8
"""Numbers of one group, such as a layer's each, beyond which they are left to a run's own picture."""
Pairs = list[tuple[float, float]]


def diagnosed_sheet(table: Table) -> list[Sheet]:
    """Return a row per method and diagnostic: first, last and mean value, and Spearman's rho with the score; [] for none."""
    if not (rows := _rows(table)):
        return []
    columns = [Column("method", right=False), Column("diagnostic", right=False), Column("first", 1), Column("last", 1)]
    columns += [Column("mean"), Column("rho"), Column("n")]
    notes = [
        "means over seeds; rho: Spearman's, over rounds and seeds, of a round's value and the mean validation score after it"
    ]
    notes[0] += f"; n: pairs, under {FEWEST} none is given. Rounds of a run are alike and both drift in time: no test"
    return [Sheet(titled(table.group, "What runs measured of themselves"), columns, rows, notes + over_runs(table))]


def _rows(table: Table) -> list[list[str]]:
    found = []
    for method in table.methods:
        runs = [run for (name, _), run in table.group.runs.items() if name == method]
        for what in _names(runs):
            series = _series(runs, what)
            cells = [mean([one[place] for one in series]) for place in (0, -1)]
            cells.append(mean([math.fsum(one) / len(one) for one in series]))
            pairs = [pair for run in runs for pair in _by_round(run, table, what)]
            found.append([method, what, *map(number, cells), *correlated(pairs)])
    return found


def _series(runs: Sequence[Run], what: str) -> list[list[float]]:
    """Return a diagnostic's values in the order of rounds, of each run that has any."""
    found = [[values[what] for _, values in sorted(run.noted.items()) if what in values] for run in runs]
    return [one for one in found if one]


def last_values(group: Group, method: str, what: str) -> list[float]:
    """Return a diagnostic of the last round that has it, of each of a method's runs."""
    return [one[-1] for one in _series([run for (name, _), run in group.runs.items() if name == method], what)]


def over_runs(table: Table) -> list[str]:
    """Return a line per diagnostic: Spearman's rho of its mean with the closing score, over methods and seeds."""
    pairs: dict[str, Pairs] = {}
    for (method, seed), run in table.group.runs.items():
        scores = [table.cells[method, seed, site] for site in table.inside if (method, seed, site) in table.cells]
        for what in _names([run]) if len(scores) == len(table.inside) > 0 else []:
            values = [one[what] for one in run.noted.values() if what in one]
            pairs.setdefault(what, []).append((math.fsum(values) / len(values), math.fsum(scores) / len(scores)))
    told = {what: correlated(one) for what, one in sorted(pairs.items())}
    return [f"over runs, {what} and the closing score: rho {rho}, n {n}" for what, (rho, n) in told.items() if rho != "-"]


def correlated(pairs: Pairs) -> list[str]:
    """Return Spearman's rho and n; "-" for fewer than FEWEST pairs, or where one side does not vary."""
    if len(pairs) < FEWEST or any(len(set(side)) < 2 for side in zip(*pairs, strict=True)):
        return ["-", str(len(pairs))]
    from scipy.stats import spearmanr

    return [f"{float(spearmanr(*zip(*pairs, strict=True)).statistic):+.2f}", str(len(pairs))]


def _names(runs: Sequence[Run]) -> list[str]:
    """Return the diagnostics that some run has, without those that are a number a layer."""
    names = dict.fromkeys(name for run in runs for values in run.noted.values() for name in values)
    groups: dict[str, int] = {}
    for name in names:
        groups[name.rpartition("/")[0]] = groups.get(name.rpartition("/")[0], 0) + 1
    return sorted(name for name in names if groups[name.rpartition("/")[0]] <= MOST)


def _by_round(run: Run, table: Table, what: str) -> Pairs:
    """Return a round's value beside the mean validation score after the round, where both are known."""
    after: dict[int, list[float]] = {}
    curve = run.curve(table.stage, table.metric)
    for (done, _), score in curve.items():
        if (value := known(score)) is not None:
            after.setdefault(done, []).append(value)
    sites = len({site for _, site in curve})
    after = {done: scores for done, scores in after.items() if len(scores) == sites}  # as of a curve: always the same sites
    values = _last_phase(run, what)
    return [(values[r], math.fsum(after[r + 1]) / len(after[r + 1])) for r in sorted(values) if r + 1 in after]


def _last_phase(run: Run, what: str) -> Mapping[int, float]:
    return {round: values[what] for (round, _), values in sorted(run.noted.items()) if what in values}
