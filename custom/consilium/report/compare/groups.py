"""Groups of runs that compare, see differs.py. What each is called: the settings in which they differ."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from consilium.report.compare.differs import CHECKPOINT, compared, differs, text_of
from consilium.report.compare.runs import Run

KINDS = ("strategy.name", "model.name", "adapter.kind", "task.name", "privacy.unit")
"""Fields that say which others their section has."""
AGAIN = " again"
"""Stands behind the seed of a private run that repeats another: another draw of noise."""
UNNAMED = ("name", "experiment", "training.seed", "training.validate.every", "training.validate.stages",
           "training.validate.full", CHECKPOINT, "statistics", "federation.min_sites", "federation.round_timeout",
           "federation.straggler_grace_seconds")  # fmt: skip
"""Fields that do not tell one method from another."""


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


def method_labels(runs: Sequence[Run], unnamed: Iterable[str] = ()) -> dict[str, str]:
    """Return each run's method by the run's name: of a study's cell its labels, else the strategy and what else differs.

    `unnamed`: axes that name no method.
    """
    own, bases = {run.name: _labelled(run.labels, unnamed) for run in runs}, _bases(runs)
    fields = {run.name: _fields(run) | {CHECKPOINT: bases.get(_base(run, runs))} for run in runs}
    kinds = {run.name: {k.partition(".")[0]: run.settings.get(k) for k in KINDS} for run in runs}
    found = {}
    for run in runs:
        shown = [k for k in fields[run.name] if _varies(k, run, runs, fields, kinds)]
        rest = [_named(k, fields[run.name][k], shown) for k in shown if k != "strategy.name"]
        found[run.name] = own[run.name] or ", ".join([str(run.settings["strategy.name"]), *rest])
    return found


def _bases(runs: Sequence[Run]) -> dict[str, str]:
    """Return what the frozen weights of runs are called, by their hash: the same file has one name wherever it lies."""
    found: dict[str, str] = {}
    for run in runs:
        if run.base:
            found.setdefault(run.base, f"{PurePath(str(run.settings.get(CHECKPOINT))).name} {run.base[:8]}")
    return found


def _base(run: Run, runs: Sequence[Run]) -> str:
    """Return the hash of a run's frozen weights; without its server's state, that of another run with its checkpoint."""
    path = run.settings.get(CHECKPOINT)
    same = (one.base for one in runs if one.base and path and one.settings.get(CHECKPOINT) == path)
    return run.base or next(same, "")


def _fields(run: Run) -> dict[str, Any]:
    return {k: v for k, v in run.settings.items() if not k.startswith(UNNAMED) and k not in compared(run)}


def _varies(key: str, run: Run, runs: Sequence[Run], fields: Mapping[str, Any], kinds: Mapping[str, Any]) -> bool:
    """Tell whether a field differs among the runs of the same kind of its section; the kind itself, among all."""
    section = key.partition(".")[0]
    alike = [o for o in runs if key in KINDS or kinds[o.name].get(section) == kinds[run.name].get(section)]
    return len({text_of(fields[o.name].get(key)) for o in alike}) > 1


def _named(key: str, value: Any, shown: Sequence[str]) -> str:
    """Return a setting as part of a method's name: by its last word, or whole where that names two."""
    if key in KINDS:
        return f"{'privacy ' if key == 'privacy.unit' else ''}{text_of(value)}"
    last = key.rpartition(".")[2]
    twins = [k for k in shown if k.rpartition(".")[2] == last]
    return f"{key if len(twins) > 1 else last} {text_of(value)}"


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
        if (twin := _twin(run, [one for (name, _), one in found.items() if name == method])) is not None:
            kept, out = (run, twin) if len(run.results) > len(twin.results) else (twin, run)
            found = {place: kept if one is twin else one for place, one in found.items()}
            left.append(f"{out.name}: repeats {kept.name} (same settings and seed), so it is not counted")
            continue
        draw = next(i for i in range(1, len(runs) + 1) if (method, _draw(seed, i)) not in found)
        found[method, _draw(seed, draw)] = run
    return Group(name, found, tuple(left))


def _twin(run: Run, others: Sequence[Run]) -> Run | None:
    """Return a run that this one repeats. Of private ones only a copy does, with all scores to the last digit."""
    alike = (one for one in others if one.seed == run.seed)
    return next((one for one in alike if not run.private or _text(one) == _text(run)), None)


def _text(run: Run) -> str:
    """Return a run's scores as text, in which NaN is NaN."""
    return json.dumps({site: dict(one) for site, one in run.results.items()}, sort_keys=True)


def mixed(group: Group) -> list[str]:
    """Return a line for each method whose runs are not all of one code and the same packages. The code is the strategy's."""
    return [
        f"{method}: its runs have other {', '.join(names)} (versions.json); run the older ones again"
        for method in group.methods
        if (names := _unlike([run.versions for (name, _), run in group.runs.items() if name == method]))
    ]


def _unlike(versions: Sequence[Mapping[str, str]]) -> list[str]:
    """Return what runs that note it have in more than one version."""
    names = sorted({name for one in versions for name in one})
    return [name for name in names if len({one[name] for one in versions if name in one}) > 1]


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
