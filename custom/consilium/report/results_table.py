"""Tables of a run: final scores, the score of each model on each site's data, and confusion tables of classes."""

import json
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from math import fsum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from consilium.core.messages import SKIPPED, MetricKey, Stage
from consilium.core.sanitize import count_with_noun, first_names_text
from consilium.core.storage import write_atomic
from consilium.report import figures
from consilium.report.run_record import Results, RunRecord, finite_score, split_of
from consilium.report.tables import Column, Table, columns, number_text, only_true
from consilium.tasks.registry import COUNT, HIGH, LOW, LOWER, Scores

MEAN, BY_N = "mean", "mean by n"
INTERVAL = "95 %"
LEVEL = 0.02
"""A score shows nothing about a method unless it exceeds the frozen model's by more than this."""
NO_SCORES = MappingProxyType[str, float]({})


def results_table(
    results: Results,
    scores: Scores,
    title: str,
    test_only: Set[str] = frozenset(),
    refused: Collection[str] = (),
    losses: Mapping[str, float] = NO_SCORES,
) -> Table:
    """Return a row per site: the leading score of each model with its interval, then the global model's other scores.

    `test_only` sites are below the means and in no mean. The title names the sites that were `refused` in the closing
    evaluation. If there is no score at all, the rows have the last training `losses`.
    """
    whose = first_names_text(sorted(refused)) if len(refused) < 4 else f"{len(refused)} sites"
    missing = f"; {whose} refused in the final evaluation" if refused else ""
    split = split_of(results) or ""
    names = {name for metrics in results.values() for name in metrics}
    leading = scores.leading_name(key.metric for name in names if (key := MetricKey.parse(name)))
    wanted = [(MetricKey(split, Stage.GLOBAL, COUNT), COUNT, 0)]
    for stage in Stage:
        key = MetricKey(split, stage, leading)
        wanted.append((key, f"{scores.heading(leading)} {stage}", 0))
        wanted.append((replace(key, metric=leading + LOW), INTERVAL, 1 if stage is Stage.GLOBAL else 2))
    beside = [MetricKey(split, Stage.GLOBAL, metric) for metric in scores.beside if metric != leading]
    for place, key in enumerate(key for key in beside if str(key) in names):
        rank = 1 if "assd" in key.metric else 2 * (place > 1)  # 80 columns hold two scores beside the leading one
        wanted.append((key, f"{scores.heading(key.metric)} global", rank))
    there = [one for one in wanted if str(one[0]) in names]
    if not there:
        why = "nothing was scored" if refused or split else "no test or validation split: nothing was scored"
        rows = [[site, number_text(losses.get(site))] for site in sorted(results)]
        return Table(f"{title}: {why}{missing}", columns("site", "training loss"), rows, _notes(results, split, scores))
    inside, below = ({site: results[site] for site in sorted(results) if (site in test_only) is only} for only in (False, True))
    means = [MEAN, BY_N] if there[0][1] == COUNT else [MEAN]
    rows = [
        *([site, *(_cell(one, key) for key, *_ in there)] for site, one in inside.items()),
        *([which, *(_mean_cell(inside, key, which == BY_N) for key, *_ in there)] for which in means),
        *([site, *(_cell(one, key) for key, *_ in there)] for site, one in below.items()),
    ]
    notes = dict.fromkeys(scores.meanings[key.metric] for key, *_ in there if key.metric in scores.meanings)
    about = {
        "n: how many a site scored, and its weight in the mean by n": BY_N in means,
        f"{INTERVAL}: bootstrap over a site's patients (volumes, images, records)": LOW in "".join(names),
        f"test only, in no mean: {', '.join(below)}": below,
    }
    heads = [Column("site", right=False), *(Column(heading, rank) for _, heading, rank in there)]
    sums = frozenset(range(len(inside), len(inside) + len(means)))
    notes_below = [*_notes(results, split, scores), *notes, *only_true(about)]
    return Table(f"{title}: {split} split{scores.remark}{missing}", heads, rows, notes_below, sums=sums)


def _notes(results: Results, split: str, scores: Scores) -> list[str]:
    """Return notes on sites without the split, on structures that vanish at the model's size, and on skipped samples."""
    without = [site for site in sorted(results) if split and not any(name.startswith(f"{split}/") for name in results[site])]
    skipped = [f"{site} {one[SKIPPED]:.0f}" for site, one in sorted(results.items()) if one.get(SKIPPED)]
    start, vanished = str(MetricKey(split, Stage.GLOBAL, f"{scores.too_small}/")), []
    for site, one in sorted(results.items()) if scores.too_small else ():
        counts = sorted(
            (name.removeprefix(start), finite_score(value)) for name, value in one.items() if name.startswith(start)
        )
        for name, count in counts:
            where, _, of = name.partition("/")
            vanished += [f"{site} {count:.0f} {where} of {of}"] if count else []
    what = "pictures in which nothing of a class is left at the model's size, so that single pixels stand for it"
    notes = {f"no {split} split, so not scored here": without, what: vanished}
    notes["samples left out because they cannot be read"] = skipped
    return [f"{note}: {', '.join(found)}" for note, found in notes.items() if found]


def _cell(metrics: Mapping[str, float], key: MetricKey) -> str:
    """Return a score, an interval or a count as a text; "-" without it."""
    text = number_text(metrics.get(str(key)))
    if key.metric.endswith(LOW) and text != "-":
        return f"{text}–{number_text(metrics.get(str(key).removesuffix(LOW) + HIGH))}"
    return f"{metrics[str(key)]:.0f}" if key.metric == COUNT and text != "-" else text


def _mean_cell(results: Results, key: MetricKey, weighted: bool) -> str:
    """Return one cell of a row of means.

    In column n, the row "mean by n" has the sum and the row "mean" is empty. Interval cells are empty.
    """
    if key.metric == COUNT:
        return f"{sum(one.get(str(key), 0) for one in results.values()):.0f}" if weighted else ""
    return "" if key.metric.endswith(LOW) else number_text(mean_of(results, str(key), weighted))


def mean_of(results: Results, metric: str, weighted: bool = False) -> float | None:
    """Return the mean over the sites that report a metric, `weighted` by the number of units each scored; None without any."""
    key = MetricKey.parse(metric)
    count = str(replace(key, metric=COUNT)) if weighted and key else ""
    found = [
        (value, weight)
        for one in results.values()
        if (value := finite_score(one.get(metric))) is not None and (weight := one.get(count, 0.0) if weighted else 1.0) > 0
    ]
    return (
        fsum(value * n for value, n in found) / fsum(n for _, n in found) if found else None
    )  # the order of sites is no matter


def no_improvement_warning(record: RunRecord) -> str:
    """Return a warning if the global model is not better than the frozen model by more than LEVEL; else ""."""
    sites = sorted(record.latest_scores.keys() - record.test_only) if record.results and record.config.trains else []
    both = [[record.score(site, stage, record.metric) for stage in (Stage.PRETRAINED, Stage.GLOBAL)] for site in sites]
    pairs = [(before, after) for before, after in both if finite_score(before) is not None and finite_score(after) is not None]
    if not pairs:
        return ""
    frozen, tuned = (fsum(side) / len(pairs) for side in zip(*pairs, strict=True))
    if (frozen - tuned if record.metric in LOWER else tuned - frozen) > LEVEL * max(1.0, abs(frozen)):
        return ""
    side, rounds = record.config.model.image_side, count_with_noun(record.rounds_before_final_evaluation, "round")
    where, more = (f" at {side} pixels", " and model.image_size") if side else ("", "")
    what = (
        f"{record.scores.label(record.metric)} of the global model, {number_text(tuned)}, is at the level of the frozen model"
    )
    shows = "this shows that the pipeline runs, and nothing about the method"
    return f"{what}, {number_text(frozen)}, after {rounds}{where}: {shows}; raise training.rounds{more}"


# matrices --------------------------------------------------------------------------------------------------------------
# Tables of numbers with named rows and columns: the score of each model on each site's data, and confusion tables.

PICTURE, VALUES = "cross_sites.png", "cross_sites.json"
SHARED = "(shared)"
"""Row name of the shared model, which each site runs with its own local factors. No site can have this name."""
WORDS = "rows: whose model; columns: whose data"
CONFUSION = "confusion/"
MOST_CLASSES = 24
"""The most classes, and sites, that have confusion tables."""


@dataclass(frozen=True)
class CrossSiteMatrix:
    """The score of each model on each site's data: `values` (models, sites), None for a missing score.

    `models`: the site whose model a row is, or SHARED. `stages`: global or personalized, per model. `grid`: the grid on which
    masks are scored, "" if the task has no masks.
    """

    metric: str
    split: str
    models: tuple[str, ...]
    stages: tuple[Stage, ...]
    sites: tuple[str, ...]
    values: Sequence[Sequence[float | None]]
    grid: str = ""

    @property
    def title(self) -> str:
        """The title of the table and of the picture."""
        of = " and ".join(dict.fromkeys(map(str, self.stages)))
        grid = f" ({self.grid})" if self.grid else ""
        return f"{self.metric}{grid} of the {of} models on every site's {self.split} data"

    def table(self) -> Table:
        """Return a row per model."""
        rows = [[name, *map(number_text, row)] for name, row in zip(self.models, self.values, strict=True)]
        notes = [WORDS, "(shared): the model that all sites share; each runs it with its own local factors"]
        return Table(self.title, columns("model of", *self.sites), rows, notes[: 1 + (SHARED in self.models)])

    def write(self, folder: Path) -> None:
        """Write the matrix as a picture and as JSON."""
        found = figures.Matrix(self.title, np.array(self.values, float), self.models, self.sites)
        figures.plot_matrices(folder / PICTURE, [found], "tested on", "model of", bar=True)
        write_atomic(folder / VALUES, json.dumps(asdict(self), indent=1).encode())


def cross_site_matrix(metric: str, split: str, rows: Sequence[tuple[str, Stage, Results]], grid: str = "") -> CrossSiteMatrix:
    """Return the matrix of one metric. Its columns are the sites in any row, sorted by name.

    `rows`: per model its name, its stage, and by site the metrics that it reached there. `metric`: a name in these metrics.
    """
    sites = sorted({site for _, _, found in rows for site in found})
    values = [[finite_score(found.get(site, {}).get(metric)) for site in sites] for _, _, found in rows]
    models, stages = tuple(model for model, _, _ in rows), tuple(stage for _, stage, _ in rows)
    return CrossSiteMatrix(metric, split, models, stages, tuple(sites), values, grid)


def read_cross_site_matrix(raw: Any) -> CrossSiteMatrix | None:
    """Return the cross-site matrix in the contents of a cross_sites.json, which anybody may have written; None if invalid."""
    try:
        found = TypeAdapter(CrossSiteMatrix).validate_python(raw)
    except ValidationError:
        return None
    shape = (len(found.models), len(found.sites))
    whole = len(found.stages) == shape[0] > 0 and [len(row) for row in found.values] == [shape[1]] * shape[0]
    return found if whole else None


def confusions(results: Results, classes: Sequence[str]) -> dict[str, np.ndarray]:
    """Return confusion counts (C, C) by stage, summed over sites. Rows are true classes and columns predicted ones.

    {} if no site reports such counts.
    """
    pairs = {f"{CONFUSION}{true}/{said}": (i, j) for i, true in enumerate(classes) for j, said in enumerate(classes)}
    found: dict[str, np.ndarray] = {}
    for name, count in ((n, c) for metrics in results.values() for n, c in metrics.items()):
        key = MetricKey.parse(name)
        if key is not None and key.metric in pairs and key.split == split_of(results):
            found.setdefault(str(key.stage), np.zeros((len(classes), len(classes))))[pairs[key.metric]] += count
    return {str(stage): found[stage] for stage in Stage if stage in found}


def plot_confusions(path: Path, results: Results, classes: Sequence[str]) -> None:
    """Draw the share of each true class that was predicted as each class, by model, if there are confusion counts."""
    shown = []
    for stage, counts in confusions(results, classes).items():
        shares, texts = counts / np.maximum(counts.sum(1, keepdims=True), 1), [[f"{n:.0f}" for n in row] for row in counts]
        shown.append(figures.Matrix(stage, shares, classes, classes, texts))
    if shown:
        figures.plot_matrices(path, shown, "predicted", "true", cmap="Blues", vmin=0, vmax=1)


def confusion_tables(results: Results, classes: Sequence[str]) -> dict[str, list[Table]]:
    """Return confusion tables, one per model: of all sites together if there are several, then of each site.

    A row is a true class; recall is the share of its samples that were predicted as this class. {} for a task without classes,
    and for more than MOST_CLASSES classes.
    """
    if not 1 < len(classes) <= MOST_CLASSES:
        return {}
    there = {site: {site: found} for site, found in sorted(results.items()) if confusions({site: found}, classes)}
    parts: dict[str, Results] = {"all sites": results} if len(there) > 1 else {}
    made: dict[str, list[Table]] = {}
    for name, part in [*parts.items(), *list(there.items())[:MOST_CLASSES]]:
        for stage, counts in confusions(part, classes).items():
            recalls = [number_text(counts[i, i] / whole if whole else None) for i, whole in enumerate(counts.sum(1).tolist())]
            rows = [[one, *(f"{n:.0f}" for n in counts[i]), recalls[i]] for i, one in enumerate(classes)]
            made.setdefault(name, []).append(Table(f"{name}, {stage} model", columns("true class", *classes, "recall"), rows))
    return made
