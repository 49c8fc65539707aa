"""A study and its cells. A cell is one job of the grid. It has a value on each axis, and a folder named by its job's digest."""

import difflib
import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    model_validator,
)

from consilium.config.job import JobConfig, job_file, load_job, make_job, parse_override
from consilium.core.errors import ConfigError, ConsiliumError
from consilium.core.schema import Section, did_you_mean, read_yaml, validate
from consilium.report.compare import DIAGNOSED, HELD_OUT
from consilium.report.run_record import RUNS
from consilium.tasks.registry import TASKS

# config ----------------------------------------------------------------------------------------------------------------
# A study's file: a base job, axes of named overrides, excluded cells with reasons, and published numbers.

MOST_CELLS = 10_000


def _parse_axis(raw: Any) -> Any:
    """Return an axis as overrides by name. Names become texts, and {FIELD: [values]} becomes a name for each value."""
    if not isinstance(raw, Mapping):
        return raw
    if len(raw) == 1 and isinstance(values := next(iter(raw.values())), list):
        pairs = [(_name_as_text(value), {next(iter(raw)): value}) for value in values]
    else:
        pairs = [(_name_as_text(name), {} if value is None else value) for name, value in raw.items()]
    counts = Counter(name for name, _ in pairs)  # 1 and "1" are different keys with the same name
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"{twice[0]!r} is there twice; keep one, or give it another name")
    return dict(pairs)


def _name_as_text(name: Any) -> str:
    """Return a name as text. Raises ValueError for a value that is neither text nor a number."""
    if isinstance(name, bool) or not isinstance(name, str | int | float):
        raise ValueError(f"a name that is text or a number, not {name!r}; put it in quotes, or name the values one by one")
    return str(name)


def _check_label(label: str) -> str:
    """Return a name of a value. Raises ValueError if it does not fit into lists of AXIS=VALUE or into a path."""
    if not (label and len(label) <= 40 and label.isprintable() and label == label.strip() and not set("=,/") & set(label)):
        raise ValueError("a name of 1 to 40 printable characters without = and , and /, with no blank at an end")
    return label


def _check_axis_name(name: str) -> str:
    """Return a name of an axis. Raises ValueError if it could be no keyword."""
    if not re.fullmatch("[a-z][a-z0-9_]{0,39}", name):
        raise ValueError("a name of 1 to 40 small letters a to z, digits and _, with a letter first")
    return name


Label = Annotated[str, AfterValidator(_check_label)]
AxisName = Annotated[str, AfterValidator(_check_axis_name)]
Overrides = dict[str, Any]
Axis = Annotated[dict[Label, Overrides], Field(min_length=1, max_length=1000), BeforeValidator(_parse_axis)]
Labels = Annotated[
    list[Label], BeforeValidator(lambda raw: [_name_as_text(x) for x in (raw if isinstance(raw, list) else [raw])])
]
Choice = dict[AxisName, Labels]


def _check_value(value: Any) -> str | float:
    """Return a text or a finite number unchanged. Raises ValueError for other values, such as true."""
    if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e300):
        return value
    raise ValueError("a text or a finite number, such as 0.5")


Row = dict[str, Annotated[str | int | float, BeforeValidator(_check_value)]]
"""Texts and numbers of a published result by name: a value on an axis, a site, or a metric."""


def _check_floor(raw: dict[str, str | float]) -> dict[str, str | float]:
    """Return a floor unchanged. Raises ValueError unless it has a text `about` and numbers."""
    metrics = [value for name, value in raw.items() if name != "about"]
    if raw and (not isinstance(raw.get("about"), str) or not metrics or any(isinstance(one, str) for one in metrics)):
        raise ValueError("metrics with numbers and `about` with words, as in {accuracy: 0.31, about: the background}")
    return raw


class Exclusion(Section):
    """Cells that are excluded, by their values on some axes, and the reason."""

    when: Annotated[Choice, Field(min_length=1)]
    reason: str


class SizeConfig(Section):
    """A smaller size of a study. `set`: overrides after those of the axes. `only`: the values that stay on an axis."""

    set: Overrides = Field(default_factory=dict)
    only: Choice = Field(default_factory=dict)


class CountsConfig(Section):
    """The size of a study's data: the number of sites, and the samples of all sites together."""

    sites: Annotated[int, Field(ge=1, le=10_000)]
    training: Annotated[int, Field(ge=1)]
    validation: Annotated[int, Field(ge=0)] = 0
    test: Annotated[int, Field(ge=0)] = 0


class StudyConfig(Section):
    """A whole study. Overrides are dotted fields of a job, as `--set` takes them, and these three names.

    `sites`: the sites that take part, as in `simulate --sites`. `folder`: a folder in `--data` to use instead of `--data`.
    `counts`: the size of the data, for the estimate of FLOPs. It is needed in overrides only if the size differs by cell.
    """

    about: str
    table: str = ""
    needs: str = ""
    counts: CountsConfig | None = None
    base: Path
    set: Overrides = Field(default_factory=dict)
    axes: Annotated[dict[AxisName, Axis], Field(min_length=1, max_length=8)]
    exclude: list[Exclusion] = Field(default_factory=list)
    published: list[Row] = Field(default_factory=list)
    floor: Annotated[Row, AfterValidator(_check_floor)] = Field(default_factory=dict)
    smoke: SizeConfig | None = None
    small: SizeConfig | None = None

    @property
    def compared_axes(self) -> list[str]:
        """The axes that are compared. An axis that only sets `training.seed` is not, because scores are means over it."""
        return [axis for axis, values in self.axes.items() if any(set(one) != {"training.seed"} for one in values.values())]

    @model_validator(mode="after")
    def _check_axis_values(self) -> Self:
        for where, chosen in [
            *(("exclude", one.when) for one in self.exclude),
            *((name, size.only) for name, size in (("smoke", self.smoke), ("small", self.small)) if size),
        ]:
            self.check_choice(where, chosen)
        for row in self.published:
            self.check_choice("published", {k: [str(v)] for k, v in row.items() if k in self.axes})
        # a name in `published` must not be ambiguous, an axis of seeds, or unknown
        if "site" in self.axes:
            raise ValueError("axes: 'site' is reserved: in `published` it names a hospital; give the axis another name")
        seeds = self.axes.keys() - self.compared_axes
        if wrong := next((axis for row in self.published for axis in row if axis in seeds), None):
            raise ValueError(
                f"published: {wrong!r} is an axis of seeds, and published numbers are compared with means over seeds; "
                "leave it out"
            )
        if empty := next((row for row in self.published if not any(k not in self.axes and k != "site" for k in row)), None):
            raise ValueError(f"published: {empty}: has no number; give one, or take the row out")
        for name, value in (pair for row in self.published for pair in row.items()):
            if isinstance(value, str) and name not in {*self.axes, "site"}:
                raise ValueError(
                    f"published: {name}: {value!r}: no axis is called so{did_you_mean(name, self.axes)}, and a score is a "
                    "number; write one such as 0.5, without quotes"
                )
        return self

    def check_choice(self, where: str, chosen: Mapping[str, list[str]]) -> None:
        """Raise ValueError if the study lacks one of the axes or values in `chosen`. `where`: the beginning of the message."""
        for axis, values in chosen.items():
            if axis not in self.axes:
                raise ValueError(f"{where}: no axis {axis!r}; there are {', '.join(self.axes)}{did_you_mean(axis, self.axes)}")
            if wrong := [value for value in values if value not in self.axes[axis]]:
                raise ValueError(
                    f"{where}: no value {wrong[0]!r} on axis {axis!r}; it has "
                    f"{', '.join(self.axes[axis])}{did_you_mean(wrong[0], self.axes[axis])}"
                )


# study -----------------------------------------------------------------------------------------------------------------

STUDIES = Path("jobs/studies")
"""The folder of Consilium's own studies, relative to its repository."""
Size = Literal["", "smoke", "small"]


class GridErrors:
    """Collects the errors of a study's cells, so that each error is reported once, with the cells that have it."""

    def __init__(self, labels: list[dict[str, str]]) -> None:
        self._all = labels
        self._found: dict[str, list[Mapping[str, str]]] = {}

    @contextmanager
    def collect_errors(self, labels: Mapping[str, str]) -> Iterator[None]:
        """Collect a ConsiliumError of the block, line by line, as errors of the cell with these labels."""
        try:
            yield
        except ConsiliumError as error:
            for line in str(error).splitlines():
                self._found.setdefault(line, []).append(labels)

    def raise_if_any(self) -> None:
        """Raise ConfigError with a line per collected error, if there is any."""
        if self._found:
            raise ConfigError("\n".join(f"{describe_cells(having, self._all)}: {line}" for line, having in self._found.items()))


def describe_cells(having: list[Mapping[str, str]], everyone: list[dict[str, str]]) -> str:
    """Return a short description of the cells `having`, among `everyone`.

    The text has the values that only these cells share. If there are none, it has the first cell and the number of the others.
    """
    if len(having) == len(everyone) > 1:
        return "all cells"
    shared = {a: v for a, v in having[0].items() if all(one[a] == v for one in having)}
    told = {a: v for a, v in shared.items() if any(one[a] != v for one in everyone)}
    if sum(told.items() <= one.items() for one in everyone) == len(having):
        return " ".join(f"{axis}={value}" for axis, value in told.items()) or "the only cell"
    first = " ".join(f"{axis}={value}" for axis, value in having[0].items())
    return f"{first} and {len(having) - 1} more"


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    `id`: the digest of the job. `labels`: its value on each axis. `overrides`: texts as for `--set`. `sites`: as for `--sites`.
    `data`: its folder in `--data`. `counts`: the size of its data, if the study says so. `folder`: an ordinary run's folder,
    see RunLog, with the cell's state in `cell.json`. `place`: its number in the study's order, from 0. `metrics`: names of the
    metrics that its task can report.
    """

    id: str
    labels: dict[str, str]
    overrides: list[str]
    folder: Path
    base: Path
    sites: str = ""
    data: str = ""
    counts: CountsConfig | None = None
    place: int = 0
    metrics: frozenset[str] = frozenset()

    @property
    def display_name(self) -> str:
        """The cell's value on each axis, as a text."""
        return labels_text(self.labels)

    def load(self) -> JobConfig:
        """Return the cell's job. Raises ConfigError, also if the base job has changed since the study was read."""
        config = load_job(self.base, dict(map(parse_override, self.overrides)), plugins=None, author=True)
        if cell_digest(config, self.sites, self.data) != self.id:
            raise ConfigError(f"{self.base}: has changed since the study was read; run its command again")
        return config


def labels_text(labels: Mapping[str, Any]) -> str:
    """Return labels as a text, such as "method=FedIT rank=8"."""
    return " ".join(f"{axis}={value}" for axis, value in labels.items())


@dataclass(frozen=True)
class Study:
    """A study: its file, its size ("" for the full one), and the folder of its runs, `workspace`."""

    path: Path
    config: StudyConfig
    workspace: Path
    size: Size = ""

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.stem

    @property
    def heading(self) -> str:
        """The study's name, with the option of its size (--smoke, --small) if it is not the full one."""
        return f"{self.name} (--{self.size})" if self.size else self.name

    @property
    def size_changes(self) -> SizeConfig:
        """The study's changes for its size; empty for the full one."""
        return getattr(self.config, self.size) if self.size else SizeConfig()

    @property
    def axes(self) -> dict[str, list[str]]:
        """The values of each axis at this size."""
        return {axis: self.size_changes.only.get(axis, list(values)) for axis, values in self.config.axes.items()}

    def unfiltered_grid(self) -> list[dict[str, str]]:
        """Return the labels of all cells at this size, including excluded cells."""
        return [dict(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values())]

    def excluded(self) -> list[tuple[dict[str, str], str]]:
        """Return (labels, reason) for each excluded cell, with its first reason."""
        reasons = (
            (labels, (one.reason for one in self.config.exclude if fits_choice(labels, one.when)))
            for labels in self.unfiltered_grid()
        )
        return [(labels, why) for labels, found in reasons if (why := next(found, ""))]

    def cells(self) -> list[Cell]:
        """Return all cells that are not excluded. Raises ConfigError with the errors of all cells' jobs."""
        return self._cells

    @cached_property
    def _cells(self) -> list[Cell]:
        left_out = {tuple(labels.values()) for labels, _ in self.excluded()}
        wanted = [labels for labels in self.unfiltered_grid() if tuple(labels.values()) not in left_out]
        if not wanted:
            raise ConfigError(f"{self.path}: axes and exclude leave no cell; leave some values in")
        errors, found = GridErrors(wanted), list[Cell]()
        for place, labels in enumerate(wanted):
            with errors.collect_errors(labels):
                found.append(self._cell(labels, place))
        errors.raise_if_any()
        seen: dict[str, Cell] = {}
        for cell in found:
            if (other := seen.setdefault(cell.id, cell)) is not cell:  # one run cannot be two results
                raise ConfigError(
                    f"{self.path}: {other.display_name} and {cell.display_name} are the same job; take one of them out"
                )
        if not self.size:  # a smaller size may have another task
            _check_published(self, found)
        return found

    @cached_property
    def _base(self) -> tuple[Path, Any]:
        """The base job's file and its contents."""
        base = job_file(self.path.parent / self.config.base)
        return base, read_yaml(base)

    def _cell(self, labels: dict[str, str], place: int) -> Cell:
        """Return the cell with these labels. Raises ConfigError if its job is invalid."""
        values = dict(self.config.set)
        for more in (*(self.config.axes[axis][name] for axis, name in labels.items()), self.size_changes.set):
            values = {
                field: value for field, value in values.items() if field not in more
            } | more  # a later override replaces an earlier one and moves to the end
        given = {name: values.pop(name, "") for name in ("sites", "folder")}
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, str | int):
                raise ConfigError(f"{name}: {value!r}: expected a number or text; see `consilium simulate --help`")
        sites, data = map(str, given.values())
        counts = self.config.counts
        if "counts" in values:
            counts = validate(CountsConfig, values.pop("counts"), Path("counts"))
        texts = [f"{field}={json.dumps(value, default=str)}" for field, value in values.items()]  # YAML has dates
        base, raw = self._base
        try:
            config = make_job(raw, base, dict(map(parse_override, texts)), plugins=None, author=True)
        except ConfigError as error:  # the study's file gave these fields, not the base job's
            fields = "|".join(map(re.escape, values)) or "$."
            line = re.compile(rf"^{re.escape(str(base))}(?=: ({fields})\b)", re.MULTILINE)
            raise ConfigError(line.sub(lambda _: str(self.path), str(error))) from None
        name, metrics = cell_digest(config, sites, data), TASKS[config.task.name].metric_names(config.task)
        return Cell(name, labels, texts, self.workspace / "cells" / name, base, sites, data, counts, place, metrics)


def cell_digest(config: JobConfig, sites: str, data: str) -> str:
    """Return a digest of all that distinguishes cells: the settings, the sites, and the folder of the data."""
    return hashlib.sha256(json.dumps([config.digest, config.training.rounds, sites, data]).encode()).hexdigest()[:16]


def _check_published(study: Study, cells: list[Cell]) -> None:
    """Raise ConfigError for a published number that fits several cells, is given twice, or is no score of its cells.

    Also for a floor of a score that no cell has.
    """
    seen: set[tuple[str, str, str]] = set()

    def check(where: str, names: Set[str], known: Set[str]) -> None:
        if wrong := sorted(names - known - DIAGNOSED.keys() - {f"{HELD_OUT}{one}" for one in known}):
            raise ConfigError(
                f"{where}: {wrong[0]!r} is not a score of these cells; they have "
                f"{', '.join(sorted(known))}{did_you_mean(wrong[0], known)}"
            )

    check(f"{study.path}: floor", study.config.floor.keys() - {"about"}, set[str]().union(*(one.metrics for one in cells)))
    for row in study.config.published:
        where, labels = f"{study.path}: published: {labels_text(row)}", {k: str(v) for k, v in row.items() if k in study.axes}
        fitting = [one for one in cells if labels.items() <= one.labels.items()]
        names = {name for name, value in row.items() if name not in labels and not isinstance(value, str)}
        if fitting:
            check(where, names, set[str]().union(*(one.metrics for one in fitting)))
        places = [{axis: one.labels[axis] for axis in study.config.compared_axes} for one in fitting] or [labels]
        if unsaid := [axis for axis in places[0] if len({one[axis] for one in places}) > 1]:
            raise ConfigError(f"{where}: fits several cells; say {' and '.join(unsaid)} too")
        numbers = {(labels_text(places[0]), str(row.get("site", "")), name) for name in names}
        if twice := sorted(name for *_, name in numbers & seen):
            raise ConfigError(f"{where}: another row has {twice[0]!r} of the same cells; keep one of them")
        seen |= numbers


def fits_choice(labels: Mapping[str, str], when: Choice) -> bool:
    """Tell whether labels fit a choice: on each axis in `when`, one of the values listed there."""
    return all(labels.get(axis) in values for axis, values in when.items())


def studies_folder() -> Path:
    """Return the folder of Consilium's own studies: in this folder, in one above it, or in the package."""
    places = [Path(), *Path.cwd().parents, Path(str(files("consilium") / "examples"))]
    return next((one / STUDIES for one in places if (one / STUDIES).is_dir()), STUDIES)


def load(path: Path | str, size: Size = "", workspace: Path | None = None) -> Study:
    """Return the study in a file, or the study of that name in jobs/studies. Raises ConfigError.

    `workspace`: the folder of its runs; by default runs/studies/NAME, or runs/studies/NAME-SIZE.
    """
    studies = studies_folder()
    candidates = [Path(path), studies / f"{path}.yaml"]
    if (file := next((one for one in candidates if one.is_file()), None)) is None:
        if len(Path(path).parts) > 1:
            raise ConfigError(f"{path}: no such folder or file; give a run's folder, a study's file, or a study's name")
        there = sorted(one.stem for one in studies.glob("*.yaml"))
        near = difflib.get_close_matches(str(path), there, n=3) or there[:3]
        known = f"such as {', '.join(near)}; `consilium study list` has all" if there else "none is here"
        raise ConfigError(f"{path}: no such study; give a file, or a name in {studies} ({known})")
    config = validate(StudyConfig, read_yaml(file), file)
    if size and getattr(config, size) is None:
        raise ConfigError(f"{file}: {size}: the study has no such section; add it, or run the study without --{size}")
    study = Study(file, config, workspace or Path(), size)
    if (count := math.prod(map(len, study.axes.values()))) > MOST_CELLS:  # checked before so many cells are made
        raise ConfigError(f"{file}: axes: {count} cells, over {MOST_CELLS}; make several studies of it")
    return study if workspace else replace(study, workspace=RUNS / "-".join(filter(None, (study.name, size))))


def pick(study: Study, only: list[str]) -> list[Cell]:
    """Return the cells that fit all `--only AXIS=VALUE`. For an axis given twice, both values fit. Raises ConfigError."""
    wanted: dict[str, list[str]] = {}
    for text in only:
        axis, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(f"--only: {text!r} is not AXIS=VALUE; write for example --only seed=1")
        wanted.setdefault(axis, []).append(value)
    try:
        study.config.check_choice("--only", wanted)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if found := [cell for cell in study.cells() if fits_choice(cell.labels, wanted)]:
        return found
    raise ConfigError(f"--only: {' '.join(only)}: leaves no cell of this study; name other values")
