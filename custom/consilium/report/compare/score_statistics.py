"""Means of scores over sites and seeds, their intervals, ranks and paired tests. Missing scores are never ignored.

A cell is one method, seed and site. A seed counts in a method's mean only if no site is missing. Missing cells are listed.
Intervals over seeds are percentile bootstraps (B. Efron, R. Tibshirani, "An Introduction to the Bootstrap", Chapman & Hall
1993, chapter 13). For few seeds, all resamples are enumerated.
Intervals over patients are by MOVER (G. Zou, A. Donner, "Construction of confidence limits about effect measures: a general
approach", Statistics in Medicine 27 (2008) 1693-1702).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from consilium.core.messages import Stage
from consilium.report.compare.comparability import Group
from consilium.report.run_record import RunRecord, finite_score
from consilium.tasks.registry import COUNT, HIGH, LOW, LOWER

FEWEST_SEEDS = 3
"""Fewer seeds have no interval, because it would be their lowest and highest score."""
WHOLE, RESAMPLES = 6, 10_000
"""Up to WHOLE seeds, all resamples are enumerated. For more seeds, RESAMPLES are drawn."""
MOST_SITES = 20
"""Sites that have a column each, at most. For more sites a page is too narrow."""
SPREAD = {"worst site": 0.0, "median site": 0.5, "best site": 1.0}
"""Columns in place of more than MOST_SITES sites, each with its quantile of the sites' scores, from worst to best."""
Interval = tuple[float, float]


@dataclass(frozen=True)
class GroupScores:
    """The scores of a group's runs for one model (`stage`) and one metric.

    `cells`: scores by method, seed and site, without missing ones. `missing`: why a cell is missing, of those that other
    methods or seeds have. `without`: methods that have no such model.
    """

    group: Group
    stage: Stage
    metric: str
    cells: Mapping[tuple[str, str, str], float]
    missing: Mapping[tuple[str, str, str], str]
    without: tuple[str, ...]

    @cached_property
    def sites(self) -> list[str]:
        """All sites with a score of any method, and those that only test last."""
        return sorted({site for *_, site in [*self.cells, *self.missing]}, key=lambda site: (site in self.test_only, site))

    @cached_property
    def test_only(self) -> frozenset[str]:
        """Sites that only test. They are in no mean, rank or test, unless all scored sites only test."""
        found = frozenset[str]().union(*(run.test_only for run in self.group.runs.values()))
        return found if {site for *_, site in self.cells} - found else frozenset()

    @property
    def unscored_sites(self) -> list[str]:
        """Sites without a score of this metric in any run, because they lack the split or the class."""
        personal = self.stage is Stage.PERSONALIZED
        of_all = [run.sites - (run.test_only if personal else frozenset()) for run in self.group.runs.values()]
        return sorted(frozenset[str]().union(*of_all) - set(self.sites))

    @property
    def averaged_sites(self) -> list[str]:
        """The sites that count in means, ranks and tests."""
        return [site for site in self.sites if site not in self.test_only]

    @cached_property
    def methods(self) -> list[str]:
        """Methods that have this model."""
        return [method for method in self.group.methods if method not in self.without]

    @cached_property
    def scored_methods(self) -> list[str]:
        """Methods that have a score."""
        return [method for method in self.methods if any(key[0] == method for key in self.cells)]

    @property
    def lower_is_better(self) -> bool:
        """Whether a lower score is better."""
        return self.metric.partition("/")[0] in LOWER

    @cached_property
    def sites_by_test_split(self) -> list[list[str]]:
        """The sites that count in means, as lists. Sites that were scored on the same test split are in one list."""
        found = [{site} for site in self.averaged_sites]
        for run in self.group.runs.values():
            # On the same samples the global model's losses are equal. A loss that equals the frozen model's proves nothing:
            # a head that starts at zero has the same loss on all pictures.
            alike: dict[tuple[float | None, ...], set[str]] = {}
            for site in self.averaged_sites:
                scores = tuple(finite_score(run.score(site, Stage.GLOBAL, name)) for name in (COUNT, run.metric, "loss"))
                if scores[-1] not in (None, 0.0, run.score(site, Stage.PRETRAINED, "loss")):
                    alike.setdefault(scores, set()).add(site)
            for together in alike.values():
                apart = [one for one in found if not one & together]
                found = [*apart, together.union(*(one for one in found if one & together))]
        return sorted(sorted(one) for one in found)

    @property
    def columns(self) -> list[str]:
        """The columns of scores: each site, or, for many sites, worst, median and best and each site that only tests."""
        return self.sites if len(self.averaged_sites) <= MOST_SITES else [*SPREAD, *sorted(self.test_only)]

    def complete_seeds(self, method: str) -> list[str]:
        """Return the seeds of a method in which no site is missing."""
        return [
            s
            for s in self.group.seeds
            if self.averaged_sites and all((method, s, site) in self.cells for site in self.averaged_sites)
        ]

    def scores_at_site(self, method: str, site: str) -> list[float]:
        """Return a method's scores at a site, in the order of seeds, without missing ones."""
        return [self.cells[method, s, site] for s in self.group.seeds if (method, s, site) in self.cells]

    def scores_in_column(self, method: str, column: str) -> list[float]:
        """Return a method's scores in a column, in the order of seeds: at a site, or a quantile over the sites."""
        if column not in SPREAD or len(self.averaged_sites) <= MOST_SITES:
            return self.scores_at_site(method, column)
        share = 1 - SPREAD[column] if self.lower_is_better else SPREAD[column]
        seeds = [[self.cells[method, seed, site] for site in self.averaged_sites] for seed in self.complete_seeds(method)]
        return [float(np.quantile(scores, share)) for scores in seeds]

    def means(self, method: str, weighted: bool = False) -> list[float]:
        """Return the mean over sites for each complete seed.

        `weighted`: by the number of samples that each site scored; then [] if a number is unknown.
        """
        found = []
        for seed in self.complete_seeds(method):
            run = self.group.runs[method, seed]
            weights = [
                1.0 if not weighted else finite_score(run.score(site, self.stage, COUNT)) or 0.0 for site in self.averaged_sites
            ]
            if not all(weights):
                return []
            values = [self.cells[method, seed, site] for site in self.averaged_sites]
            found.append(math.fsum(v * w for v, w in zip(values, weights, strict=True)) / math.fsum(weights))
        return found


def scores_of(group: Group, stage: Stage, metric: str) -> GroupScores:
    """Return the scores of a group for one model and metric, and the missing ones.

    A score is expected for each method, each seed, and each site that has a score in any run.
    """
    values = {
        (method, seed, site): run.score(site, stage, metric) for (method, seed), run in group.runs.items() for site in run.sites
    }
    cells = {key: value for key, one in values.items() if (value := finite_score(one)) is not None}
    scored = [key for key, value in values.items() if value is not None]
    without = tuple(m for m in group.methods if group.runs_of(m) and not any(key[0] == m for key in scored))
    missing = {}
    for method in (method for method in group.methods if method not in without):
        for key in itertools.product([method], group.seeds, sorted({site for *_, site in scored})):
            if key not in cells:
                there = "not scored there" if values.get(key) is None else "not finite"
                missing[key] = there if key[:2] in group.runs else group.absent.get(key[:2], "no run with this seed")
    return GroupScores(group, stage, metric, cells, missing, without)


def interval(values: Sequence[float]) -> Interval | None:
    """Return the 95 % percentile bootstrap interval of a mean over seeds; None for fewer than FEWEST_SEEDS."""
    count = len(values)
    if count < FEWEST_SEEDS:
        return None
    if count <= WHOLE:
        drawn = np.array(list(itertools.product(range(count), repeat=count)))
    else:
        drawn = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))
    low, high = np.quantile(np.asarray(values, np.float64)[drawn].mean(1), [0.025, 0.975])
    return float(low), float(high)


def patients_interval(scores: GroupScores, method: str) -> Interval | None:
    """Return the 95 % interval of a method's mean over sites that comes from the choice of patients.

    Each run reports a bootstrap interval per site. MOVER adds the squares of the distances between a site's score and the ends
    of its interval, as one adds variances. It does so separately for lower and upper ends, so that no end leaves the range of
    the score. Sites count as independent. Sites on one test split have the same patients, so their distances themselves are
    added. All seeds are scored on the same patients, so more seeds do not make the interval narrower. None if any site has no
    interval in any seed.
    """
    seeds, means = scores.complete_seeds(method), scores.means(method)
    reaches: list[Interval] = []
    for sites in scores.sites_by_test_split:
        found = []
        for run, site in itertools.product((scores.group.runs[method, seed] for seed in seeds), sites):
            low, score, high = (finite_score(run.score(site, scores.stage, f"{scores.metric}{end}")) for end in (LOW, "", HIGH))
            if low is None or score is None or high is None:
                return None
            found.append((max(score - low, 0.0), max(high - score, 0.0)))
        if not found:
            return None
        down, up = np.array(found, np.float64).sum(0) / len(seeds)
        reaches.append((down, up))
    down, up = np.sqrt(np.square(reaches).sum(0)) / len(scores.averaged_sites)
    middle = math.fsum(means) / len(means)
    return float(middle - down), float(middle + up)


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None for no values."""
    return math.fsum(values) / len(values) if values else None


def ranks(scores: GroupScores) -> tuple[dict[str, float], int]:
    """Return each method's rank, averaged over the sites where all methods have scores, and the number of these sites.

    Rank 1 is the best. At each site, methods are ranked by their mean over the seeds that all methods have there. Methods with
    equal means share their mean rank.
    """
    methods, blocks = scores.scored_methods, []
    for site in scores.averaged_sites:
        shared = [s for s in scores.group.seeds if all((m, s, site) in scores.cells for m in methods)]
        if shared:
            blocks.append([math.fsum(scores.cells[m, s, site] for s in shared) / len(shared) for m in methods])
    if not blocks or len(methods) < 2:
        return {}, 0
    from scipy.stats import rankdata

    rounded = np.round(blocks, 12)  # ignores differences due to rounding, as `comparisons` does
    placed = rankdata(rounded * (1 if scores.lower_is_better else -1), axis=1).mean(0)
    return dict(zip(methods, map(float, placed), strict=True)), len(blocks)


# significance ----------------------------------------------------------------------------------------------------------
# Paired tests between methods over the seeds and sites that both methods have, corrected for the number of tests.
#
# Sites that were scored on one test split make one pair per seed, by their mean.
#
# Wilcoxon's signed-rank test (F. Wilcoxon, "Individual Comparisons by Ranking Methods", Biometrics Bulletin 1945), two-sided,
# by scipy. Holm's correction (S. Holm, "A Simple Sequentially Rejective Multiple Test Procedure", Scandinavian Journal of
# Statistics 1979).

FEWEST = 6
"""Fewest pairs for a test. With n pairs the smallest two-sided p of a sign-based test is 2 / 2^n, under 0.05 from 6 on."""


@dataclass(frozen=True)
class Comparison:
    """The comparison of two methods over pairs of scores.

    `difference`: mean over seeds and sites of `one` minus `other`. `wins`, `losses`: number of pairs in which `one` is better
    or worse. `p`, and `holm`, the corrected p, are None for fewer than FEWEST pairs.
    """

    one: str
    other: str
    pairs: int
    difference: float
    wins: int
    losses: int
    p: float | None
    holm: float | None = None


def comparisons(scores: GroupScores, against: str | None = None) -> list[Comparison]:
    """Compare all pairs of methods, or `against` with all others. Return the smallest p first.

    Holm's correction counts the tests made here.
    """
    methods = scores.scored_methods
    couples = list(itertools.combinations(methods, 2)) if against is None else [(m, against) for m in methods if m != against]
    cells, found = scores.cells, list[Comparison]()
    for one, other in couples:
        pairs = list[list[float]]()
        for seed, sites in itertools.product(scores.group.seeds, scores.sites_by_test_split):
            both = [site for site in sites if (one, seed, site) in cells and (other, seed, site) in cells]
            pairs += [[cells[one, seed, site] - cells[other, seed, site] for site in both]] if both else []
        if not pairs:
            continue
        differences = np.round([math.fsum(some) / len(some) for some in pairs], 12)  # ignores differences due to rounding
        better = -differences if scores.lower_is_better else differences
        p = p_value(differences) if len(pairs) >= FEWEST else None
        middle = float(np.mean([value for some in pairs for value in some]))
        found.append(Comparison(one, other, len(pairs), middle, int((better > 0).sum()), int((better < 0).sum()), p))
    corrected = iter(holm([each.p for each in found if each.p is not None]))
    done = [each if each.p is None else replace(each, holm=next(corrected)) for each in found]
    return sorted(done, key=lambda each: (2.0 if each.p is None else each.p, -abs(each.difference)))


def p_value(differences: np.ndarray) -> float:
    """Return the two-sided p of paired differences (N,), 1 if all are zero. Zeros are left out, as Wilcoxon did."""
    from scipy.stats import wilcoxon

    there = differences[differences != 0]  # with zeros scipy would use the normal approximation
    return float(wilcoxon(there).pvalue) if len(there) else 1.0


def holm(ps: Sequence[float]) -> list[float]:
    """Return Holm's corrected p for each of m p-values.

    The i-th smallest is multiplied by m - i + 1. A corrected p is at most 1 and never under that of a smaller p.
    """
    found, highest = [math.nan] * len(ps), 0.0
    for place, index in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        highest = max(highest, min(1.0, ps[index] * (len(ps) - place)))
        found[index] = highest
    return found


def diagnostic_series(runs: Sequence[RunRecord], what: str) -> list[list[float]]:
    """Return, for each run that has a diagnostic, its values in the order of rounds."""
    found = [[values[what] for _, values in sorted(run.diagnostics.items()) if what in values] for run in runs]
    return [one for one in found if one]
