"""Means over sites and seeds, how sure they are, and ranks. Nothing that is missing is averaged away.

A cell is one method, seed and site. A seed counts in a method's mean only if no site is missing; missing cells are listed.
Intervals over seeds: the percentile bootstrap (B. Efron, R. Tibshirani, "An Introduction to the Bootstrap", Chapman & Hall
1993, chapter 13), over all resamples where these are few.
Intervals over patients: MOVER (G. Zou, A. Donner, "Construction of confidence limits about effect measures: a general
approach", Statistics in Medicine 27 (2008) 1693-1702).
"""

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import PurePath
from typing import Any

import numpy as np

from consilium.core.messages import Stage
from consilium.report.compare import Test
from consilium.report.run_record import RunRecord, known
from consilium.report.tables import few
from consilium.tasks.registry import COUNT, HIGH, LOW, LOWER

# comparability ---------------------------------------------------------------------------------------------------------
# Which runs compare: groups of runs on the same task, data, sites and test samples, and what each method is called.

CHECKPOINT = "model.checkpoint"
LEARNING = ("task.augment", "task.balance", "task.learn", "data.most_training", "data.phantoms.training",
            "data.phantoms.validation", "data.phantoms.classes")  # fmt: skip
"""Fields of task and data that change the training and not the samples scored."""
READ = ("task.", "data.", CHECKPOINT, "privacy.unit", "privacy.per_patient")
"""Fields by which a site reads other files, or others of its samples."""
KINDS = ("strategy.name", "model.name", "adapter.kind", "task.name", "privacy.unit")
"""Fields that decide which others their section has."""
UNNAMED = ("name", "experiment", "training.seed", "training.validate.every", "training.validate.stages",
           "training.validate.full", CHECKPOINT, "statistics", "federation.min_sites", "federation.round_timeout",
           "federation.straggler_grace_seconds")  # fmt: skip
"""Fields that do not tell one method from another."""
SAME = 0.01
"""The frozen model's scores of the same images differ by less, on whatever machine."""
AGAIN = " again"
"""Stands behind the seed of a private run that repeats another: another draw of noise."""


@dataclass(frozen=True)
class MissingRun:
    """A run that a study has no scores of: its labels, its seed, and why."""

    labels: Mapping[str, str]
    seed: int
    why: str


@dataclass(frozen=True)
class Group:
    """Runs that compare, by method and seed. `name`: "" where there is one group only; `left`: runs left out, and why.

    `absent`: why a run is missing, by method and seed; `data_axes`: axes of the study that choose data, one value a group.
    """

    name: str
    runs: Mapping[tuple[str, str], RunRecord]
    left: tuple[str, ...] = ()
    absent: Mapping[tuple[str, str], str] = field(default_factory=dict)
    data_axes: frozenset[str] = frozenset()

    @property
    def first(self) -> RunRecord:
        """The run that the others were held against."""
        return next(iter(self.runs.values()))

    @property
    def methods(self) -> list[str]:
        """In the order of the runs."""
        return list(dict.fromkeys(method for method, _ in [*self.runs, *self.absent]))

    @property
    def seeds(self) -> list[str]:
        """In order."""
        return sorted({seed for _, seed in [*self.runs, *self.absent]}, key=lambda seed: (len(seed), seed))

    def of(self, method: str) -> list[RunRecord]:
        """Return a method's runs."""
        return [run for (name, _), run in self.runs.items() if name == method]

    def expected(self, method: str) -> list[str]:
        """Return the seeds that a method should have: another draw of noise only where it has one."""
        return [seed for seed in self.seeds if AGAIN not in seed or (method, seed) in self.runs]

    def titled(self, text: str) -> str:
        """Return a figure's or table's title, which begins with the group's name if there is one."""
        return f"{self.name}: {text}" if self.name else text

    def heading(self, metric: str) -> str:
        """Return how a metric is called in titles and figures of this group's task."""
        base, _, rest = metric.partition("/")
        scores = self.first.scores
        return ", ".join(part for part in (scores.heading(base), rest, scores.grid_of(base)) if part)


def differs(one: RunRecord, other: RunRecord) -> str | None:
    """Return why two runs' scores do not compare; None where they do."""
    mine, theirs = _compared(one), _compared(other)
    if mine != theirs:
        key = next(k for k in sorted({*mine, *theirs}) if mine.get(k, "none") != theirs.get(k, "none"))
        return f"{key} is {_text(theirs.get(key, 'none'))}, in {one.name} {_text(mine.get(key, 'none'))}"
    if one.split != other.split or one.metric != other.metric:
        return f"scored by {other.metric} on {other.split}, {one.name} by {one.metric} on {one.split}"
    if one.sites != other.sites:
        return f"other sites than in {one.name}: {', '.join(sorted(one.sites ^ other.sites)[:5])} in one of them only"
    whole = bool(one.whole and other.whole)
    digests = (one.whole, other.whole) if whole else (one.data[1], other.data[1])
    if all(digests) and digests[0] != digests[1] and _reads(one, whole) == _reads(other, whole):
        return f"its sites' data or settings are not those of {one.name}; `consilium study run` runs the older ones again"
    if not (one.labels and other.labels):  # cells of a study have their axes and digests for that
        both = sorted(one.content.keys() & other.content.keys())
        if site := next((site for site in both if one.content[site] != other.content[site]), None):
            return f"its data at {site} are not those of {one.name}"
    if one.settings.get("data.phantoms.kind") is not None and one.seed != other.seed:
        return None  # each seed draws its own pictures
    return _other_samples(one, other)


def _compared(run: RunRecord) -> dict[str, Any]:
    """Return the settings that decide what a score is taken of."""
    found = {k: v for k, v in run.settings.items() if k.startswith(("task.", "data.")) and not k.startswith(LEARNING)}
    if run.settings.get("task.scores.grid") == "resized":  # masks are compared at the model's own pixels
        found["model.image_size"] = run.settings.get("model.image_size")
    return found


def _reads(run: RunRecord, whole: bool) -> list[Any]:
    """Return what decides which samples a study's run reads: where it is equal, other digests mean changed files."""
    most = None if whole else run.settings.get("data.most_training")  # which samples these are depends on the seed
    fields = {k: v for k, v in run.settings.items() if k.startswith(READ) and k not in LEARNING}
    return [run.data[0], fields, most, run.seed if most else None]


def _other_samples(one: RunRecord, other: RunRecord) -> str | None:
    """Return where two runs were scored on other samples, by their number or the scores of the same frozen model."""
    models = [_section(run, "model") for run in (one, other)]
    for site in sorted(one.closing.keys() & other.closing.keys()):
        for stage, metric in ((Stage.GLOBAL, COUNT), (Stage.PRETRAINED, one.metric), (Stage.PRETRAINED, "loss")):
            a, b = one.score(site, stage, metric), other.score(site, stage, metric)
            if a is None or b is None or (stage is Stage.PRETRAINED and models[0] != models[1]):
                continue
            if abs(a - b) > SAME * max(1.0, abs(a) if metric == "loss" else 1.0):
                what = "samples scored" if metric == COUNT else f"the pretrained model's {metric}"
                return f"another test split at {site}: {what} {b:g}, in {one.name} {a:g}"
    return None


def _section(run: RunRecord, name: str) -> dict[str, Any]:
    return {key: value for key, value in run.settings.items() if key.startswith(f"{name}.")}


def frozen_model(run: RunRecord) -> str:
    """Return a text that tells a run's frozen model from others."""
    return json.dumps([_section(run, "model"), run.base], sort_keys=True)


def _text(value: Any) -> str:
    """Return a setting as tables and messages show it."""
    if isinstance(value, float):
        return short if float(short := f"{value:g}") == value else repr(value)
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def grouped(runs: Sequence[RunRecord], absent: Sequence[MissingRun] = ()) -> tuple[list[Group], list[str]]:
    """Return the groups of runs that compare, in the order of the runs, and why each group is not part of the first one."""
    found: list[list[RunRecord]] = []
    for run in runs:
        home = next((group for group in found if all(differs(other, run) is None for other in group)), None)
        found.append([run]) if home is None else home.append(run)
    axes = {axis for run in runs for axis in run.labels}
    values = {axis: [{run.labels.get(axis) for run in group} for group in found] for axis in axes}
    data_axes = {axis for axis, sets in values.items() if all(len(s) == 1 for s in sets) and len(set.union(*sets)) > 1}
    every = [*(run.labels for run in runs), *(one.labels for one in absent)]
    constant = {axis for one in every for axis in one if len({other.get(axis) for other in every}) == 1}
    unnamed = data_axes | (set() if constant == {axis for one in every for axis in one} else constant)
    here = [{axis: group[0].labels.get(axis) for axis in data_axes} for group in found]
    made = []
    for name, group, place in zip(_group_names(found, data_axes), found, here, strict=True):
        labels = method_labels(group, unnamed)
        named = {}
        for one in (one for one in absent if place.items() <= one.labels.items()):
            own = next((labels[run.name] for run in group if run.labels == one.labels), "")
            method = own or _labelled(one.labels, unnamed) or _labelled(one.labels)
            named[method, str(one.seed)] = one.why
        counted, left = _counted(group, labels)
        lacking = {key: why for key, why in named.items() if key not in counted}
        made.append(Group(name, counted, tuple(left), lacking, frozenset(data_axes)))
    why = []
    for group in found[1:]:
        reasons = (differs(first, one) for one in group for first in found[0])
        why.append(f"{few([run.name for run in group])}: {next(reason for reason in reasons if reason)}")
    lost = [one for one in absent if not any(place.items() <= one.labels.items() for place in here)]
    why += [f"{_labelled(one.labels)}, seed {one.seed}: {one.why}, nor any other run of its data" for one in lost]
    return made, why


def _group_names(groups: Sequence[Sequence[RunRecord]], axes: Iterable[str]) -> list[str]:
    """Return a name for each group: its values on the data axes, or its job's name, or a number; "" for an only one."""
    labelled = [", ".join(group[0].labels.get(axis, "") for axis in sorted(axes)) for group in groups]
    jobs = [str(group[0].settings["name"]) for group in groups]
    numbers = [f"group {i + 1}" if len(groups) > 1 else "" for i in range(len(groups))]
    apart = (names for names in (labelled, jobs) if len(groups) > 1 and len(set(names)) == len(names) and all(names))
    return next(apart, numbers)


def _labelled(labels: Mapping[str, str], unnamed: Iterable[str] = ()) -> str:
    """Return what a study's labels call a method."""
    gone = set(unnamed)
    return ", ".join(value for axis, value in labels.items() if axis not in gone)


def method_labels(runs: Sequence[RunRecord], unnamed: Iterable[str] = ()) -> dict[str, str]:
    """Return each run's method by the run's name: of a study's cell its labels, else the strategy and what else differs.

    `unnamed`: axes that name no method. Frozen weights are named by their digest, wherever the file lies; a run whose server
    has lost its state has those of another run with its checkpoint.
    """
    bases: dict[str, str] = {}
    for run in (run for run in runs if run.base):
        bases.setdefault(run.base, f"{PurePath(str(run.settings.get(CHECKPOINT))).name} {run.base[:8]}")
    fields: dict[str, dict[str, Any]] = {}
    for run in runs:
        path, compared = run.settings.get(CHECKPOINT), _compared(run)
        base = run.base or next((o.base for o in runs if o.base and path and o.settings.get(CHECKPOINT) == path), "")
        fields[run.name] = {k: v for k, v in run.settings.items() if not k.startswith(UNNAMED) and k not in compared}
        fields[run.name][CHECKPOINT] = bases.get(base)
    kinds = {run.name: {k.partition(".")[0]: run.settings.get(k) for k in KINDS} for run in runs}

    def varies(key: str, run: RunRecord) -> bool:
        """Tell whether a field differs among runs with the same kind of its section; the kind itself, among all."""
        section = key.partition(".")[0]
        alike = [o for o in runs if key in KINDS or kinds[o.name].get(section) == kinds[run.name].get(section)]
        return len({_text(fields[o.name].get(key)) for o in alike}) > 1

    found = {}
    for run in runs:
        shown = [k for k in fields[run.name] if varies(k, run)]
        last = [k.rpartition(".")[2] for k in shown]
        parts = [str(run.settings["strategy.name"])]
        for key, word in zip(shown, last, strict=True):
            value = _text(fields[run.name][key])
            if key in KINDS:
                parts += [] if key == "strategy.name" else [f"{'privacy ' if key == 'privacy.unit' else ''}{value}"]
            else:
                parts.append(f"{key if last.count(word) > 1 else word} {value}")
        found[run.name] = _labelled(run.labels, unnamed) or ", ".join(parts)
    return found


def _counted(runs: Sequence[RunRecord], labels: Mapping[str, str]) -> tuple[dict[tuple[str, str], RunRecord], list[str]]:
    """Return runs by method and seed, and a line per run that repeats another and so is left out.

    Of private runs only a copy, with all scores to the last digit, repeats another; else it is another draw of noise.
    """
    found: dict[tuple[str, str], RunRecord] = {}
    left = []

    def scores(run: RunRecord) -> str:
        return json.dumps(run.closing, sort_keys=True)  # in a text NaN is NaN

    for run in runs:
        method = labels[run.name]
        alike = {key: one for key, one in found.items() if key[0] == method and one.seed == run.seed}
        twin = next((key for key, one in alike.items() if not run.private or scores(one) == scores(run)), None)
        if twin is not None:
            kept, out = (run, found[twin]) if len(run.closing) > len(found[twin].closing) else (found[twin], run)
            found[twin] = kept
            left.append(f"{out.name}: repeats {kept.name} (same settings and seed), so it is not counted")
            continue
        draw = "" if not alike else AGAIN if len(alike) == 1 else f"{AGAIN} {len(alike) + 1}"
        found[method, f"{run.seed}{draw}"] = run
    return found, left


def mixed(group: Group) -> list[str]:
    """Return a line for each method whose runs are not all of one code and the same packages. The code is the strategy's."""
    found = []
    for method in group.methods:
        versions = [run.code_versions for run in group.of(method)]
        every = sorted({name for one in versions for name in one})
        if names := [name for name in every if len({one[name] for one in versions if name in one}) > 1]:
            found.append(f"{method}: its runs have other {', '.join(names)} (versions.json); run the older ones again")
    return found


def renamed(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs, each renamed to the shortest end of its path that is unique."""
    parts = [run.name.rstrip("/").split("/") for run in runs]
    ends = (["/".join(one[-length:]) for one in parts] for length in range(1, max(map(len, parts)) + 1))
    names = next((names for names in ends if len(set(names)) == len(names)), ["/".join(one) for one in parts])
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


# scores ----------------------------------------------------------------------------------------------------------------

FEWEST_SEEDS = 3
"""An interval over fewer seeds would be their lowest and highest score."""
WHOLE, RESAMPLES = 6, 10_000
"""Up to WHOLE seeds every resample is counted; above, RESAMPLES are drawn."""
MOST_SITES = 20
"""Over so many sites a page is too narrow for a column each."""
SPREAD = {"worst site": 0.0, "median site": 0.5, "best site": 1.0}
"""Columns where sites are many, and their quantiles of the sites' scores, from the worst to the best."""
Interval = tuple[float, float]


@dataclass(frozen=True)
class GroupScores:
    """The scores of one group by one metric of one model. `cells` by method, seed and site, without missing ones.

    `missing`: the cells that others of the group have, and why each is not there. `without`: methods that have no such model.
    """

    group: Group
    stage: Stage
    metric: str
    cells: Mapping[tuple[str, str, str], float]
    missing: Mapping[tuple[str, str, str], str]
    without: tuple[str, ...]

    @cached_property
    def sites(self) -> list[str]:
        """All sites that any method was scored at: those that train, then those that only test."""
        found = {site for *_, site in [*self.cells, *self.missing]}
        return sorted(found, key=lambda site: (site in self.test_only, site))

    @cached_property
    def test_only(self) -> frozenset[str]:
        """Sites that only test, as far as others train: they are in no mean, rank or test."""
        found = frozenset[str]().union(*(run.test_only for run in self.group.runs.values()))
        return found if {site for *_, site in self.cells} - found else frozenset()

    @property
    def unscored(self) -> list[str]:
        """Sites without a score of this metric in any run: no such split or class, or no training for a model of their own."""
        personal = self.stage is Stage.PERSONALIZED
        of_all = [run.sites - (run.test_only if personal else frozenset()) for run in self.group.runs.values()]
        return sorted(frozenset[str]().union(*of_all) - set(self.sites))

    @property
    def inside(self) -> list[str]:
        """The sites that means, ranks and tests are over."""
        return [site for site in self.sites if site not in self.test_only]

    @cached_property
    def methods(self) -> list[str]:
        """Those that have such a model."""
        return [method for method in self.group.methods if method not in self.without]

    @cached_property
    def scored(self) -> list[str]:
        """Methods with any score."""
        return [method for method in self.methods if any(key[0] == method for key in self.cells)]

    @property
    def lower(self) -> bool:
        """Whether less is better."""
        return self.metric.partition("/")[0] in LOWER

    @cached_property
    def splits(self) -> list[list[str]]:
        """The sites that means are over, together where they were scored on the same test split."""
        found = [{site} for site in self.inside]
        for run in self.group.runs.values():
            for together in _on_one_split(run, self.inside):
                apart = [one for one in found if not one & together]
                found = [*apart, together.union(*(one for one in found if one & together))]
        return sorted(sorted(one) for one in found)

    @property
    def columns(self) -> list[str]:
        """The columns of scores: each site, or of many sites worst, median and best; sites that only test have one each."""
        return self.sites if len(self.inside) <= MOST_SITES else [*SPREAD, *sorted(self.test_only)]

    def whole_seeds(self, method: str) -> list[str]:
        """Return a method's seeds of which no site is missing."""
        return [s for s in self.group.seeds if self.inside and all((method, s, site) in self.cells for site in self.inside)]

    def complete(self, method: str) -> bool:
        """Tell whether no seed of a method lacks a site."""
        return self.whole_seeds(method) == self.group.expected(method)

    def at(self, method: str, site: str) -> list[float]:
        """Return a method's scores at a site, by seed."""
        return [self.cells[method, s, site] for s in self.group.seeds if (method, s, site) in self.cells]

    def under(self, method: str, column: str) -> list[float]:
        """Return a method's scores in a column, by seed: at a site, or a quantile over all sites of whole seeds."""
        if column not in SPREAD or len(self.inside) <= MOST_SITES:
            return self.at(method, column)
        share = 1 - SPREAD[column] if self.lower else SPREAD[column]
        seeds = [[self.cells[method, seed, site] for site in self.inside] for seed in self.whole_seeds(method)]
        return [float(np.quantile(scores, share)) for scores in seeds]

    def means(self, method: str, weighted: bool = False) -> list[float]:
        """Return the mean over sites of each whole seed; `weighted` by the samples a site scored, [] where one is unknown."""
        found = []
        for seed in self.whole_seeds(method):
            run = self.group.runs[method, seed]
            weights = [1.0 if not weighted else known(run.score(site, self.stage, COUNT)) or 0.0 for site in self.inside]
            if not all(weights):
                return []
            values = [self.cells[method, seed, site] for site in self.inside]
            found.append(math.fsum(v * w for v, w in zip(values, weights, strict=True)) / math.fsum(weights))
        return found


def scores_of(group: Group, stage: Stage, metric: str) -> GroupScores:
    """Return the scores of a group, and which are missing: of every method, in every seed and site that any has."""
    values = {
        (method, seed, site): run.score(site, stage, metric) for (method, seed), run in group.runs.items() for site in run.sites
    }
    cells = {key: value for key, one in values.items() if (value := known(one)) is not None}
    scored = [key for key, value in values.items() if value is not None]
    without = tuple(m for m in group.methods if group.of(m) and not any(key[0] == m for key in scored))
    missing = {}
    for method in (method for method in group.methods if method not in without):
        for key in itertools.product([method], group.expected(method), sorted({site for *_, site in scored})):
            if key not in cells:
                there = "not scored there" if values.get(key) is None else "not finite"
                missing[key] = there if key[:2] in group.runs else group.absent.get(key[:2], "no run with this seed")
    return GroupScores(group, stage, metric, cells, missing, without)


def _on_one_split(run: RunRecord, sites: Sequence[str]) -> list[set[str]]:
    """Return sites that a run scored on the same samples: there one trained model has the same loss to the last digit.

    The frozen model's does not tell: with a head that starts at zero it is the same on all pictures.
    """
    found: dict[tuple[float | None, ...], set[str]] = {}
    for site in sites:
        scores = tuple(known(run.score(site, Stage.GLOBAL, name)) for name in (COUNT, run.metric, "loss"))
        if scores[-1] not in (None, 0.0, run.score(site, Stage.PRETRAINED, "loss")):
            found.setdefault(scores, set()).add(site)
    return [one for one in found.values() if len(one) > 1]


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
    """Return the 95 % interval of a method's mean over sites as far as other patients would change it.

    From each site's own bootstrap, which its run reports, by MOVER: the distances of the ends from the score add up over sites
    as standard errors do, lower and upper ones apart, so no end lies where no score can be. Sites are independent, except
    those on one test split, whose errors are the same patients' and add up. The same patients are scored with every seed, so
    seeds do not narrow it. None where a site of a seed has no interval.
    """
    seeds, means = scores.whole_seeds(method), scores.means(method)
    reaches: list[Interval] = []
    for sites in scores.splits:
        found = []
        for run, site in itertools.product((scores.group.runs[method, seed] for seed in seeds), sites):
            low, score, high = (known(run.score(site, scores.stage, f"{scores.metric}{end}")) for end in (LOW, "", HIGH))
            if low is None or score is None or high is None:
                return None
            found.append((max(score - low, 0.0), max(high - score, 0.0)))
        if not found:
            return None
        down, up = np.array(found, np.float64).sum(0) / len(seeds)
        reaches.append((down, up))
    down, up = np.sqrt(np.square(reaches).sum(0)) / len(scores.inside)
    middle = math.fsum(means) / len(means)
    return float(middle - down), float(middle + up)


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, None of nothing."""
    return math.fsum(values) / len(values) if values else None


def ranks(scores: GroupScores) -> tuple[dict[str, float], int]:
    """Return each method's rank, 1 the best, averaged over the sites at which all have one, and the number of these sites.

    At a site methods are ranked by their mean over the seeds that all of them have there; equal ones share their mean rank.
    """
    methods, blocks = scores.scored, []
    for site in scores.inside:
        shared = [s for s in scores.group.seeds if all((m, s, site) in scores.cells for m in methods)]
        if shared:
            blocks.append([math.fsum(scores.cells[m, s, site] for s in shared) / len(shared) for m in methods])
    if not blocks or len(methods) < 2:
        return {}, 0
    from scipy.stats import rankdata

    rounded = np.round(blocks, 12)  # a difference of rounding alone is none, as in `_compare`
    placed = rankdata(rounded * (1 if scores.lower else -1), axis=1).mean(0)
    return dict(zip(methods, map(float, placed), strict=True)), len(blocks)


# significance ----------------------------------------------------------------------------------------------------------
# Paired tests between methods over the seeds and sites that both have, corrected for how many there are.
#
# Sites that were scored on one test split are one pair a seed, their mean.
#
# Wilcoxon's signed-rank test (F. Wilcoxon, "Individual Comparisons by Ranking Methods", Biometrics Bulletin 1945), or the
# paired permutation test (R. Fisher, "The Design of Experiments", 1935: signs of differences are exchanged); two-sided, by
# scipy. Holm's correction (S. Holm, "A Simple Sequentially Rejective Multiple Test Procedure", Scandinavian Journal of
# Statistics 1979).

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
