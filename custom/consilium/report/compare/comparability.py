"""Group the runs that are comparable (same task, data, sites and test samples), and name their methods."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from consilium.core.errors import ConfigError
from consilium.core.messages import Stage
from consilium.core.sanitize import first_names_text
from consilium.report.run_record import MACHINE, RunRecord
from consilium.tasks.language import PER_TOKEN
from consilium.tasks.registry import COUNT

CHECKPOINT = "model.checkpoint"
LEARNING = ("task.augment", "task.balance", "task.learn", "data.most_training", "data.phantoms.training",
            "data.phantoms.validation", "data.phantoms.classes")  # fmt: skip
"""Fields of task and data that change the training, but not the samples that are scored."""
READ = ("task.", "data.", CHECKPOINT, "privacy.unit", "privacy.per_patient")
"""Fields that decide which files and which samples a site reads."""
KINDS = ("strategy.name", "model.name", "adapter.kind", "task.name", "privacy.unit")
"""Fields on which it depends which other fields their section has. Their value names a method without the field's name."""
UNNAMED = ("name", "experiment", "training.seed", "training.validate.every", "training.validate.stages",
           "training.validate.full", CHECKPOINT, "statistics", "federation.min_sites", "federation.round_timeout",
           "federation.straggler_grace_seconds")  # fmt: skip
"""Fields that never distinguish methods."""
SAME = 0.01
"""Two machines' scores of one frozen model on the same images differ by less than this."""


@dataclass(frozen=True)
class MissingRun:
    """A cell of a study without scores: its labels, its seed, and the reason."""

    labels: Mapping[str, str]
    seed: int
    why: str


@dataclass(frozen=True)
class Group:
    """Comparable runs, by method and seed.

    `name`: "" if there is one group only. `left`: a line per run that was left out. `absent`: why a run is missing, by method
    and seed.
    """

    name: str
    runs: Mapping[tuple[str, str], RunRecord]
    left: tuple[str, ...] = ()
    absent: Mapping[tuple[str, str], str] = field(default_factory=dict)

    @property
    def first(self) -> RunRecord:
        """The group's first run."""
        return next(iter(self.runs.values()))

    @property
    def methods(self) -> list[str]:
        """The methods, in the order of the runs."""
        return list(dict.fromkeys(method for method, _ in [*self.runs, *self.absent]))

    @property
    def seeds(self) -> list[str]:
        """The seeds, in increasing order."""
        return sorted({seed for _, seed in [*self.runs, *self.absent]}, key=lambda seed: (len(seed), seed))

    def runs_of(self, method: str) -> list[RunRecord]:
        """Return a method's runs."""
        return [run for (name, _), run in self.runs.items() if name == method]

    def with_group_name(self, text: str) -> str:
        """Return a title with the group's name before it, if the group has a name."""
        return f"{self.name}: {text}" if self.name else text

    def heading(self, metric: str) -> str:
        """Return a metric's name in the titles and figures of this group's task."""
        base, _, rest = metric.partition("/")
        scores = self.first.scores
        return ", ".join(part for part in (scores.heading(base), rest, scores.pixel_grid(base)) if part)


def why_not_comparable(one: RunRecord, other: RunRecord) -> str | None:
    """Return why the scores of two runs are not comparable; None if they are."""
    mine, theirs = _score_settings(one), _score_settings(other)
    if mine != theirs:
        key = next(k for k in sorted({*mine, *theirs}) if mine.get(k, "none") != theirs.get(k, "none"))
        return f"{key} is {_text(theirs.get(key, 'none'))}, in {one.name} {_text(mine.get(key, 'none'))}"
    if one.split != other.split or one.metric != other.metric:
        return f"scored by {other.metric} on {other.split}, {one.name} by {one.metric} on {one.split}"
    if one.sites != other.sites:
        return f"other sites than in {one.name}: {', '.join(sorted(one.sites ^ other.sites)[:5])} in one of them only"
    whole = bool(one.whole and other.whole)
    digests = (one.whole, other.whole) if whole else (one.data[1], other.data[1])
    if all(digests) and digests[0] != digests[1] and _sample_settings(one, whole) == _sample_settings(other, whole):
        return f"its sites' data or settings are not those of {one.name}; `consilium study run` runs the older ones again"
    if not (one.labels and other.labels):  # cells of a study were compared by their axes and digests above
        both = sorted(one.content.keys() & other.content.keys())
        if site := next((site for site in both if one.content[site] != other.content[site]), None):
            return f"its data at {site} are not those of {one.name}"
    if one.settings.get("data.phantoms.kind") is not None and one.seed != other.seed:
        return None  # each seed draws its own pictures
    # different numbers of samples, or different scores of the same frozen model, are signs of different samples
    same_model = _section(one, "model") == _section(other, "model")
    for site in sorted(one.latest_scores.keys() & other.latest_scores.keys()):
        for stage, metric in ((Stage.GLOBAL, COUNT), (Stage.PRETRAINED, one.metric), (Stage.PRETRAINED, "loss")):
            a, b = one.score(site, stage, metric), other.score(site, stage, metric)
            if a is None or b is None or (stage is Stage.PRETRAINED and not same_model):
                continue
            if abs(a - b) > SAME * max(1.0, abs(a) if metric == "loss" else 1.0):
                what = "samples scored" if metric == COUNT else f"the pretrained model's {metric}"
                return f"another test split at {site}: {what} {b:g}, in {one.name} {a:g}"
    return None


def _score_settings(run: RunRecord) -> dict[str, Any]:
    """Return the settings that decide which samples are scored and how."""
    found = {k: v for k, v in run.settings.items() if k.startswith(("task.", "data.")) and not k.startswith(LEARNING)}
    if run.settings.get("task.scores.grid") == "resized":  # masks are compared at the model's own pixels
        found["model.image_size"] = run.settings.get("model.image_size")
    return found | (_token_settings(run) if run.metric == "loss" else {})


def _token_settings(run: RunRecord) -> dict[str, Any]:
    """Return the settings that decide into which tokens a text is cut; {} for a task without texts to learn."""
    if run.settings["task.name"] not in ("language", "report"):
        return {}
    found = {key: run.settings.get(key) for key in ("model.name", "model.variant", "model.max_length")}
    return found | {CHECKPOINT: PurePath(str(run.settings.get(CHECKPOINT))).name}


def check_one_tokenizer(groups: Sequence[Group], metric: str) -> None:
    """Raise ConfigError if `metric` is per token, and runs of a group cut texts into other tokens."""
    for group in groups if metric in ("loss", "token_accuracy", *PER_TOKEN) else ():
        first, *others = group.runs.values()
        if other := next((run for run in others if _token_settings(run) != _token_settings(first)), None):
            raise ConfigError(
                f"--metric: {metric!r} counts tokens, and {first.name} and {other.name} cut texts into other tokens; compare "
                "runs of one model and one model.max_length, or take another metric"
            )


def _sample_settings(run: RunRecord, whole: bool) -> list[Any]:
    """Return the settings that decide which samples a study's run reads.

    If two runs have equal settings but other digests of their data, files have changed.
    """
    most = None if whole else run.settings.get("data.most_training")  # which samples these are depends on the seed
    fields = {k: v for k, v in run.settings.items() if k.startswith(READ) and k not in LEARNING}
    return [run.data[0], fields, most, run.seed if most else None]


def _section(run: RunRecord, name: str) -> dict[str, Any]:
    """Return the settings of one section of the job."""
    return {key: value for key, value in run.settings.items() if key.startswith(f"{name}.")}


def frozen_model(run: RunRecord) -> str:
    """Return a text that identifies a run's frozen model."""
    return json.dumps([_section(run, "model"), run.base], sort_keys=True)


def _text(value: Any) -> str:
    """Return a setting as tables and messages show it."""
    if isinstance(value, float):
        return short if float(short := f"{value:g}") == value else repr(value)
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def group_comparable(runs: Sequence[RunRecord], absent: Sequence[MissingRun] = ()) -> tuple[list[Group], list[str]]:
    """Return the groups of comparable runs, in the order of the runs, and lines for the notes.

    The lines say why each further group is not comparable with the first one, and which cells in `absent` fit no group.
    """
    found: list[list[RunRecord]] = []
    for run in runs:
        home = next((group for group in found if all(why_not_comparable(other, run) is None for other in group)), None)
        found.append([run]) if home is None else home.append(run)
    axes = {axis for run in runs for axis in run.labels}
    values = {axis: [{run.labels.get(axis) for run in group} for group in found] for axis in axes}
    data_axes = {axis for axis, sets in values.items() if all(len(s) == 1 for s in sets) and len(set.union(*sets)) > 1}
    every = [*(run.labels for run in runs), *(one.labels for one in absent)]
    constant = {axis for one in every for axis in one if len({other.get(axis) for other in every}) == 1}
    unnamed = data_axes | (set() if constant == {axis for one in every for axis in one} else constant)
    here = [{axis: group[0].labels.get(axis) for axis in data_axes} for group in found]
    # a group's name: its values on the data axes, or its job's name, or a number; "" for a single group
    labelled = [", ".join(group[0].labels.get(axis, "") for axis in sorted(data_axes)) for group in found]
    jobs = [str(group[0].settings["name"]) for group in found]
    numbers = [f"group {i + 1}" if len(found) > 1 else "" for i in range(len(found))]
    apart = (names for names in (labelled, jobs) if len(found) > 1 and len(set(names)) == len(names) and all(names))
    made = []
    for name, group, place in zip(next(apart, numbers), found, here, strict=True):
        labels = method_labels(group, unnamed)
        named = {}
        for one in (one for one in absent if place.items() <= one.labels.items()):
            own = next((labels[run.name] for run in group if run.labels == one.labels), "")
            method = own or _join_labels(one.labels, unnamed) or _join_labels(one.labels)
            named[method, str(one.seed)] = one.why
        counted, left = dict[tuple[str, str], RunRecord](), list[str]()
        for run in group:
            if (first := counted.setdefault((labels[run.name], str(run.seed)), run)) is not run:
                left.append(f"{run.name}: repeats {first.name} (same settings and seed), so it is not counted")
        made.append(Group(name, counted, tuple(left), {key: why for key, why in named.items() if key not in counted}))
    why = []
    for group in found[1:]:
        reasons = (why_not_comparable(first, one) for one in group for first in found[0])
        why.append(f"{first_names_text([run.name for run in group])}: {next(reason for reason in reasons if reason)}")
    lost = [one for one in absent if not any(place.items() <= one.labels.items() for place in here)]
    why += [f"{_join_labels(one.labels)}, seed {one.seed}: {one.why}, nor any other run of its data" for one in lost]
    return made, why


def _join_labels(labels: Mapping[str, str], unnamed: Iterable[str] = ()) -> str:
    """Return a method's name: its values on all axes except `unnamed`."""
    gone = set(unnamed)
    return ", ".join(value for axis, value in labels.items() if axis not in gone)


def method_labels(runs: Sequence[RunRecord], unnamed: Iterable[str] = ()) -> dict[str, str]:
    """Return the method of each run, by the run's name.

    The method of a study's cell is named by its labels, except those on the axes `unnamed`. The method of any other run is
    named by its strategy and by the settings in which the runs differ. Frozen weights are named by their digest, in whichever
    folder the file is. If a run's server state is lost, the digest is taken from another run with the same checkpoint.
    """
    bases: dict[str, str] = {}
    for run in (run for run in runs if run.base):
        bases.setdefault(run.base, f"{PurePath(str(run.settings.get(CHECKPOINT))).name} {run.base[:8]}")
    fields: dict[str, dict[str, Any]] = {}
    for run in runs:
        path, compared = run.settings.get(CHECKPOINT), _score_settings(run)
        base = run.base or next((o.base for o in runs if o.base and path and o.settings.get(CHECKPOINT) == path), "")
        fields[run.name] = {k: v for k, v in run.settings.items() if not k.startswith(UNNAMED) and k not in compared}
        fields[run.name][CHECKPOINT] = bases.get(base)
    kinds = {run.name: {k.partition(".")[0]: run.settings.get(k) for k in KINDS} for run in runs}

    def varies(key: str, run: RunRecord) -> bool:
        """Tell whether a field differs among the runs with the same kind of section, or a kind among all runs."""
        section = key.partition(".")[0]
        alike = [o for o in runs if key in KINDS or kinds[o.name].get(section) == kinds[run.name].get(section)]
        return len({_text(fields[o.name].get(key)) for o in alike}) > 1  # a missing optional section counts as None

    found = {}
    for run in runs:
        shown = [key for key in fields[run.name] if varies(key, run)]
        last = [k.rpartition(".")[2] for k in shown]
        parts = [str(run.settings["strategy.name"])]
        for key, word in zip(shown, last, strict=True):
            value = _text(fields[run.name][key])
            if key in KINDS:
                parts += [] if key == "strategy.name" else [f"{'privacy ' if key == 'privacy.unit' else ''}{value}"]
            else:
                parts.append(f"{key if last.count(word) > 1 else word} {value}")
        found[run.name] = _join_labels(run.labels, unnamed) or ", ".join(parts)
    return found


def mixed_code_notes(group: Group) -> list[str]:
    """Return a line for each method whose runs differ in the strategy's code or in the versions of packages."""
    found = []
    for method in group.methods:
        every = sorted({pair for run in group.runs_of(method) for pair in run.versions.items()})
        counts = Counter(name for name, version in every if name not in MACHINE and version != "not installed")
        if names := [name for name, count in counts.items() if count > 1]:
            found.append(f"{method}: its runs have other {', '.join(names)} (versions.json); run the older ones again")
    return found


def with_short_names(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs with shorter names: the last parts of their paths, as few as make all names different."""
    parts = [run.name.rstrip("/").split("/") for run in runs]
    ends = (["/".join(one[-length:]) for one in parts] for length in range(1, max(map(len, parts)) + 1))
    names = next((names for names in ends if len(set(names)) == len(names)), ["/".join(one) for one in parts])
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
