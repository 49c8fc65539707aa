"""The table of a comparison's diagnostics, which are numbers other than scores, such as drift; and correlations with scores."""

import math
from collections import Counter
from collections.abc import Sequence

from consilium.report.compare.score_statistics import GroupScores, diagnostic_series, mean
from consilium.report.run_record import RunRecord
from consilium.report.tables import Column, Table, significant_text

FEWEST_PAIRS = 10
"""Fewest runs of a method for a rank correlation. Fewer runs say little."""
MOST = 8
"""Diagnostics of one group in the table, at most. Larger groups, such as one per layer, are only in a run's own picture."""


def diagnostics_table(scores: GroupScores) -> list[Table]:
    """Return a table with a row per method and diagnostic: first, last and mean value over the rounds. [] for none."""
    rows = []
    for method in scores.methods:
        runs = scores.group.runs_of(method)
        for what in _diagnostic_names(runs):
            values = diagnostic_series(runs, what)
            cells = [
                *(mean([one[place] for one in values]) for place in (0, -1)),
                mean([math.fsum(one) / len(one) for one in values]),
            ]
            rows.append([method, what, *map(significant_text, cells)])
    columns = [
        Column("method", right=False),
        Column("diagnostic", right=False),
        Column("first", 1),
        Column("last", 1),
        Column("mean"),
    ]
    title = scores.group.with_group_name("Measured by the runs themselves")
    notes = ["means over seeds", *correlate_diagnostics_with_score(scores)]
    return [Table(title, columns, rows, notes, appendix=True)] if rows else []


def correlate_diagnostics_with_score(scores: GroupScores) -> list[str]:
    """Return a line per diagnostic with Spearman's rho between its mean and the final score, over the runs of a method.

    The mean is over the rounds. Methods are never joined, because a difference between them is not one of the diagnostic.
    There is no line for fewer than FEWEST_PAIRS runs of a method, or if the diagnostic or the score does not vary.
    """
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for (method, seed), run in scores.group.runs.items():
        found = [scores.cells[method, seed, site] for site in scores.averaged_sites if (method, seed, site) in scores.cells]
        for what in _diagnostic_names([run]) if len(found) == len(scores.averaged_sites) > 0 else []:
            (values,) = diagnostic_series([run], what)
            pairs.setdefault((method, what), []).append((math.fsum(values) / len(values), math.fsum(found) / len(found)))
    lines = []
    for (method, what), one in sorted(pairs.items()):
        sides = list(zip(*one, strict=True))
        if len(one) >= FEWEST_PAIRS and all(len(set(side)) > 1 for side in sides):
            from scipy.stats import spearmanr

            rho = float(spearmanr(*sides).statistic)
            lines.append(f"over the {len(one)} runs of {method}, {what} and the final score: Spearman's rho {rho:+.2f}")
    return lines


def _diagnostic_names(runs: Sequence[RunRecord]) -> list[str]:
    """Return the names of the runs' diagnostics, without groups of more than MOST."""
    names = {name for run in runs for values in run.diagnostics.values() for name in values}
    groups = Counter(name.rpartition("/")[0] for name in names)
    return sorted(name for name in names if groups[name.rpartition("/")[0]] <= MOST)
