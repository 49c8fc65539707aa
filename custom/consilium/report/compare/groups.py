"""Which runs compare: the same task, data, sites and test images. What each is called: the settings in which they differ."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from consilium.messages import Stage
from consilium.report.compare.runs import Run
from consilium.tasks.registry import COUNT

KINDS = ("strategy.name", "model.name", "adapter.kind", "task.name", "privacy.unit")
"""Fields that say which others their section has."""
LEARNING = ("task.augment", "task.balance", "task.learn", "data.most_training", "data.phantoms.training",
            "data.phantoms.validation", "data.phantoms.classes")  # fmt: skip
"""Fields of task and data that change the training and not what is scored."""
AGAIN = " again"
"""Stands behind the seed of a private run that repeats another: another draw of noise."""
UNNAMED = ("name", "experiment", "training.seed", "training.validate.every", "training.validate.stages",
           "training.validate.full", "model.checkpoint", "statistics", "federation.min_sites", "federation.round_timeout",
           "federation.straggler_grace_seconds")  # fmt: skip
"""Fields that do not tell one method from another."""
READ = ("task.", "data.", "model.checkpoint", "privacy.unit", "privacy.per_patient")
"""Fields by which a site reads other files, or others of its samples."""
SAME = 0.01
"""The frozen model's scores of the same images differ by less, on whatever machine."""


@dataclass(frozen=True)
class Absent:
    """A run that a study has no scores of: its labels, its seed, and why."""

    labels: Mapping[str, str]
    seed: int
    why: str


@dataclass(frozen=True)
class Group:
    """Runs that compare, by method and seed. `name` is "" where there is one group only; `left`: runs left out, and why.

    `absent`: why a run is missing, by method and seed; `data_axes`: axes of the study that choose data, one value a group.
    """

    name: str
    runs: Mapping[tuple[str, str], Run]
    left: tuple[str, ...] = ()
    absent: Mapping[tuple[str, str], str] = field(default_factory=dict)
    data_axes: frozenset[str] = frozenset()

    @property
    def first(self) -> Run:
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

    def expected(self, method: str) -> list[str]:
        """Return the seeds that a method should have: another draw of noise only where it has one."""
        return [seed for seed in self.seeds if AGAIN not in seed or (method, seed) in self.runs]


def grouped(runs: Sequence[Run], absent: Sequence[Absent] = ()) -> tuple[list[Group], list[str]]:
    """Return the groups of runs that compare, in the order of the runs, and why each group is not part of the first one."""
    found: list[list[Run]] = []
    for run in runs:
        home = next((group for group in found if all(differs(other, run) is None for other in group)), None)
        found.append([run]) if home is None else home.append(run)
    names, axes = [""] if len(found) == 1 else _group_names(found), _data_axes(found)
    why = [f"{_listed(group)}: {differs(found[0][0], group[0]) or _first(found[0], group[0])}" for group in found[1:]]
    why += [
        f"{_labelled(one.labels, ())}, seed {one.seed}: {one.why}, nor any other run of its data"
        for one in _lost(absent, found, axes)
    ]
    unnamed = axes | _constant([*(run.labels for run in runs), *(one.labels for one in absent)])
    made = []
    for name, group in zip(names, found, strict=True):
        labels = method_labels(group, unnamed)
        one = replace(_group(name, group, labels), data_axes=frozenset(axes))
        made.append(_with_absent(one, group, labels, absent, axes, unnamed))
    return made, why


def _lost(absent: Sequence[Absent], groups: Sequence[Sequence[Run]], axes: Iterable[str]) -> list[Absent]:
    """Return the absent runs of data of which no run is there."""
    here = [{axis: group[0].labels.get(axis) for axis in axes} for group in groups]
    return [one for one in absent if not any(place.items() <= one.labels.items() for place in here)]


def _constant(labels: Sequence[Mapping[str, str]]) -> set[str]:
    """Return the axes on which all have one value; none where these are all axes."""
    axes = {axis for one in labels for axis in one}
    found = {axis for axis in axes if len({one.get(axis) for one in labels}) == 1}
    return set() if found == axes else found


def _with_absent(
    group: Group,
    runs: Sequence[Run],
    names: Mapping[str, str],
    absent: Sequence[Absent],
    axes: Iterable[str],
    unnamed: Iterable[str],
) -> Group:
    """Return a group with the absent runs that belong to it: those of its data, called as its runs of these labels are."""
    here = {axis: runs[0].labels.get(axis) for axis in axes}

    def method(labels: Mapping[str, str]) -> str:
        own = next((names[run.name] for run in runs if run.labels == labels), "")
        return own or _labelled(labels, unnamed) or _labelled(labels, ())

    named = {(method(one.labels), str(one.seed)): one.why for one in absent if here.items() <= one.labels.items()}
    return replace(group, absent={key: why for key, why in named.items() if key not in group.runs})


def _labelled(labels: Mapping[str, str], unnamed: Iterable[str]) -> str:
    """Return what a study's labels call a method."""
    gone = set(unnamed)
    return ", ".join(value for axis, value in labels.items() if axis not in gone)


def differs(one: Run, other: Run) -> str | None:
    """Return why two runs' scores do not compare, None where they do."""
    mine, theirs = _compared(one), _compared(other)
    if mine != theirs:
        key = next(k for k in sorted({*mine, *theirs}) if mine.get(k, "none") != theirs.get(k, "none"))
        return f"{key} is {_text(theirs.get(key, 'none'))}, in {one.name} {_text(mine.get(key, 'none'))}"
    if one.split != other.split or one.metric != other.metric:
        return f"scored by {other.metric} on {other.split}, {one.name} by {one.metric} on {one.split}"
    if one.sites != other.sites:
        return f"other sites than in {one.name}: {', '.join(sorted(one.sites ^ other.sites)[:5])} in one of them only"
    if _changed(one, other):
        return f"its sites' data or settings are not those of {one.name}; `consilium study run` runs the older ones again"
    return _other_images(one, other)


def _changed(one: Run, other: Run) -> bool:
    """Tell whether two cells of a study that read the same files found other content there."""
    whole = bool(one.whole and other.whole)
    content = (one.whole, other.whole) if whole else (one.data[1], other.data[1])
    return all(content) and content[0] != content[1] and _read(one, whole) == _read(other, whole)


def _read(run: Run, whole: bool) -> list[Any]:
    """Return what decides which content a run of a study reads: where it is equal, other content has been changed since."""
    most = None if whole else run.settings.get("data.most_training")  # which samples these are depends on the seed
    fields = {k: v for k, v in run.settings.items() if k.startswith(READ) and k not in LEARNING}
    return [run.data[0], fields, most, run.seed if most else None]


def _compared(run: Run) -> dict[str, Any]:
    """Return the settings that decide what a score is taken of."""
    found = {k: v for k, v in run.settings.items() if k.startswith(("task.", "data.")) and not k.startswith(LEARNING)}
    if run.settings.get("task.scores.grid") == "resized":  # masks are compared at the model's own pixels
        found["model.image_size"] = run.settings.get("model.image_size")
    return found


def _other_images(one: Run, other: Run) -> str | None:
    """Return where two runs were scored on other samples: their number, or what the same frozen model scores, tells."""
    if _generated(one) and one.seed != other.seed:
        return None  # each seed draws its own pictures
    models = [[(k, v) for k, v in run.settings.items() if k.startswith("model.")] for run in (one, other)]
    for site in sorted(one.results.keys() & other.results.keys()):
        for stage, metric in ((Stage.GLOBAL, COUNT), (Stage.PRETRAINED, one.metric), (Stage.PRETRAINED, "loss")):
            a, b = one.score(site, stage, metric), other.score(site, stage, metric)
            if a is None or b is None or (stage is Stage.PRETRAINED and models[0] != models[1]):
                continue
            if abs(a - b) > SAME * max(1.0, abs(a) if metric == "loss" else 1.0):
                what = "samples scored" if metric == COUNT else f"the pretrained model's {metric}"
                return f"another test split at {site}: {what} {b:g}, in {one.name} {a:g}"
    return None


def _generated(run: Run) -> bool:
    return run.settings.get("data.phantoms.kind") is not None


def method_labels(runs: Sequence[Run], unnamed: Iterable[str] = ()) -> dict[str, str]:
    """Return each run's method by the run's name: of a study's cell its labels, else the strategy and what else differs.

    `unnamed`: axes that name no method.
    """
    own = {run.name: _labelled(run.labels, unnamed) for run in runs}
    fields = {run.name: _fields(run) for run in runs}
    kinds = {run.name: {k.partition(".")[0]: run.settings.get(k) for k in KINDS} for run in runs}
    found = {}
    for run in runs:
        shown = [k for k in fields[run.name] if _varies(k, run, runs, fields, kinds)]
        rest = [_named(k, fields[run.name][k], shown) for k in shown if k != "strategy.name"]
        found[run.name] = own[run.name] or ", ".join([str(run.settings["strategy.name"]), *rest])
    return found


def _fields(run: Run) -> dict[str, Any]:
    kept = {k: v for k, v in run.settings.items() if not k.startswith(UNNAMED) and k not in _compared(run)}
    return {k: v for k, v in kept.items() if k != "model.checkpoint_sha256"}


def _varies(key: str, run: Run, runs: Sequence[Run], fields: Mapping[str, Any], kinds: Mapping[str, Any]) -> bool:
    """Tell whether a field differs among the runs of the same kind of its section; the kind itself, among all."""
    section = key.partition(".")[0]
    alike = [o for o in runs if key in KINDS or kinds[o.name].get(section) == kinds[run.name].get(section)]
    return len({_text(fields[o.name].get(key)) for o in alike}) > 1


def _named(key: str, value: Any, shown: Sequence[str]) -> str:
    """Return a setting as part of a method's name: by its last word, or whole where that names two."""
    if key in KINDS:
        return f"{'privacy ' if key == 'privacy.unit' else ''}{_text(value)}"
    last = key.rpartition(".")[2]
    twins = [k for k in shown if k.rpartition(".")[2] == last]
    return f"{key if len(twins) > 1 else last} {_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _data_axes(groups: Sequence[Sequence[Run]]) -> set[str]:
    """Return the axes of a study that choose data: runs with different values on one never compare."""
    axes = {axis for group in groups for run in group for axis in run.labels}
    values = {axis: [{run.labels.get(axis) for run in group} for group in groups] for axis in axes}
    return {axis for axis, sets in values.items() if all(len(s) == 1 for s in sets) and len(set.union(*sets)) > 1}


def _group_names(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Return a name for each group: what its data axes say, or its job's name, or a number."""
    axes = sorted(_data_axes(groups))
    labelled = [", ".join(group[0].labels.get(axis, "") for axis in axes) for group in groups]
    jobs = [str(group[0].settings["name"]) for group in groups]
    apart = [names for names in (labelled, jobs) if len(set(names)) == len(names) and all(names)]
    return apart[0] if apart else [f"group {i + 1}" for i in range(len(groups))]


def _group(name: str, runs: Sequence[Run], labels: Mapping[str, str]) -> Group:
    """Return a group by method and seed. A private run that repeats another is another draw of noise; any other is left out."""
    found: dict[tuple[str, str], Run] = {}
    left = []
    for run in runs:
        method, seed = labels[run.name], str(run.seed)
        twin = found.get((method, seed))
        if twin is not None and run.epsilon is None:
            left.append(f"{run.name}: repeats {twin.name} (same settings and seed), so it is not counted")
            continue
        draw = next(i for i in range(1, len(runs) + 1) if (method, _draw(seed, i)) not in found)
        found[method, _draw(seed, draw)] = run
    return Group(name, found, tuple(left))


def _draw(seed: str, number: int) -> str:
    return seed if number == 1 else f"{seed}{AGAIN} {number}" if number > 2 else f"{seed}{AGAIN}"


def _listed(runs: Sequence[Run]) -> str:
    names = [run.name for run in runs]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _first(group: Sequence[Run], run: Run) -> str:
    """Return why a run is not part of a group whose first run it does compare with."""
    return next(why for other in group if (why := differs(other, run)) is not None)


def renamed(runs: Sequence[Run]) -> list[Run]:
    """Return the runs under the shortest ends of their paths that tell them apart."""
    parts = [run.name.rstrip("/").split("/") for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-length:]) for one in parts]
        if len(set(names)) == len(names):
            break
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def known(value: float | None) -> float | None:
    """Return a score, None for one that is not finite."""
    return None if value is None or not math.isfinite(value) else value
