"""Paired tests between methods over the seeds and sites that both have, corrected for how many there are.

Sites that were scored on one test split are one pair a seed, their mean.

Wilcoxon's signed-rank test (F. Wilcoxon, "Individual Comparisons by Ranking Methods", Biometrics Bulletin 1945), or the paired
permutation test (R. Fisher, "The Design of Experiments", 1935: signs of differences are exchanged); two-sided, by scipy. Holm's
correction (S. Holm, "A Simple Sequentially Rejective Multiple Test Procedure", Scandinavian Journal of Statistics 1979).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from consilium.report.compare import Test
from consilium.report.compare.scores import GroupScores

FEWEST = 6
"""Of fewer pairs no two-sided sign-based p is under 0.05: the smallest is 2 / 2^n."""


@dataclass(frozen=True)
class Comparison:
    """Two methods over `pairs` of scores. `difference`: mean over seeds and sites of one - other.

    `wins`: pairs in which `one` is better. `p` and `holm` (corrected) are None for fewer than FEWEST pairs.
    """

    one: str
    other: str
    pairs: int
    difference: float
    wins: int
    losses: int
    p: float | None
    holm: float | None = None


def comparisons(scores: GroupScores, test: Test, against: str | None = None) -> list[Comparison]:
    """Return all pairs of methods, or those with `against`, the smallest p first; Holm's family is the tests made here."""
    methods = scores.scored
    couples = list(itertools.combinations(methods, 2)) if against is None else [(m, against) for m in methods if m != against]
    found = [one for a, b in couples if (one := _compare(scores, a, b, test)) is not None]
    corrected = iter(holm([one.p for one in found if one.p is not None]))
    done = [one if one.p is None else replace(one, holm=next(corrected)) for one in found]
    return sorted(done, key=lambda one: (2.0 if one.p is None else one.p, -abs(one.difference)))


def _compare(scores: GroupScores, one: str, other: str, test: Test) -> Comparison | None:
    cells, found = scores.cells, list[list[float]]()
    for seed, sites in itertools.product(scores.group.seeds, scores.splits):
        both = [site for site in sites if (one, seed, site) in cells and (other, seed, site) in cells]
        found += [[cells[one, seed, site] - cells[other, seed, site] for site in both]] if both else []
    if not found:
        return None
    differences = np.round([math.fsum(some) / len(some) for some in found], 12)  # a difference of rounding alone is none
    better = -differences if scores.lower else differences
    p = p_value(differences, test) if len(found) >= FEWEST else None
    middle = float(np.mean([value for some in found for value in some]))
    return Comparison(one, other, len(found), middle, int((better > 0).sum()), int((better < 0).sum()), p)


def p_value(differences: np.ndarray, test: Test) -> float:
    """Return the two-sided p of paired differences (N,): 1 where all are zero. Wilcoxon's test leaves zeros out, as he did."""
    from scipy import stats

    if not differences.any():
        return 1.0
    if test is Test.WILCOXON:
        return float(stats.wilcoxon(differences[differences != 0]).pvalue)  # with a zero in it scipy's p is the normal's
    draws = stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=9999, rng=0)
    return float(draws.pvalue)


def holm(ps: Sequence[float]) -> list[float]:
    """Return Holm's corrected p: the i-th smallest of m times m - i + 1, never under a smaller one's, at most 1."""
    found, highest = [math.nan] * len(ps), 0.0
    for place, index in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        highest = max(highest, min(1.0, ps[index] * (len(ps) - place)))
        found[index] = highest
    return found
