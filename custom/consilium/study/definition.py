"""A study and its cells: each a job, told by names on the axes, with a folder of its own that follows from the job."""

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
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from consilium.config.job import JobConfig, job_file, load_job, make_job
from consilium.config.overrides import parse_override
from consilium.core.errors import ConfigError, ConsiliumError
from consilium.core.sanitize import shown
from consilium.core.schema import Section, nearest, read_yaml, validate
from consilium.report.compare import DIAGNOSED, HELD_OUT
from consilium.tasks.registry import TASKS

# config ----------------------------------------------------------------------------------------------------------------
# A study's file: a base job, axes of named overrides, what is left out and why, and the published numbers.

MOST_CELLS = 10_000
MOST = 1e300
"""Of a printed number; an integer may be too large for a float."""


def _labelled(raw: Any) -> Any:
    """Return an axis with texts as names: numbers as written, and {FIELD: [values]} as a name for each value."""
    if not isinstance(raw, Mapping):
        return raw
    if len(raw) == 1 and isinstance(values := next(iter(raw.values())), list):
        pairs = [(_label(value), {next(iter(raw)): value}) for value in values]
    else:
        pairs = [(_label(name), {} if value is None else value) for name, value in raw.items()]
    counts = Counter(name for name, _ in pairs)  # 1 and "1" are two keys and one name
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"{twice[0]!r} is there twice; keep one, or give it another name")
    return dict(pairs)


def _label(name: Any) -> str:
    if isinstance(name, bool) or not isinstance(name, str | int | float):
        raise ValueError(f"a name that is text or a number, not {name!r}; put it in quotes, or name the values one by one")
    return str(name)


def _described(words: str) -> WrapValidator:
    """Return a validator whose error message is `words`, a description of the texts that a pattern accepts."""

    def check(raw: Any, inner: ValidatorFunctionWrapHandler) -> Any:
        try:
            return inner(raw)
        except ValidationError:
            raise ValueError(words) from None

    return WrapValidator(check)


LABEL = "a name of 1 to 40 printable characters without = and , and /, with no blank at an end"
AXIS = "a name of 1 to 40 small letters a to z, digits and _, with a letter first"
Label = Annotated[
    str, Field(pattern=r"^[^=,/\p{C}\p{Z}]([^=,/\p{C}\p{Zl}\p{Zp}]*[^=,/\p{C}\p{Z}])?$", max_length=40), _described(LABEL)
]
AxisName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=40), _described(AXIS)]
Overrides = dict[str, Any]
Axis = Annotated[dict[Label, Overrides], Field(min_length=1, max_length=1000), BeforeValidator(_labelled)]
Labels = Annotated[list[Label], BeforeValidator(lambda raw: [_label(x) for x in (raw if isinstance(raw, list) else [raw])])]
Choice = dict[AxisName, Labels]


def _row(raw: Any) -> Any:
    """Return a row as it is. Raises ValueError for a value that is neither text nor a finite number: true would count as 1."""
    for name, value in raw.items() if isinstance(raw, Mapping) else ():
        if not isinstance(name, str) or not (
            isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST)
        ):
            raise ValueError(f"names with texts and finite numbers, as in {{dice: 0.5}}; {name!r} has {shown(value, 60)}")
        if name == "site" and not isinstance(value, str):
            raise ValueError(f"the name of a site as text; put {value} in quotes")
    return raw


Row = Annotated[dict[str, str | int | float], BeforeValidator(_row)]


def _floor(raw: dict[str, str | int | float]) -> dict[str, str | int | float]:
    """Return a floor as it is. Raises ValueError unless it has words and numbers."""
    metrics = [value for name, value in raw.items() if name != "about"]
    if raw and (not isinstance(raw.get("about"), str) or not metrics or any(isinstance(one, str) for one in metrics)):
        raise ValueError("metrics with numbers and `about` with words, as in {accuracy: 0.31, about: the background}")
    return raw


class Exclusion(Section):
    """Cells that are left out, by their values on some axes."""

    when: Annotated[Choice, Field(min_length=1)]
    reason: str


class SizeConfig(Section):
    """A smaller version: `set` comes after the axes' overrides, `only` some values stay on an axis."""

    set: Overrides = Field(default_factory=dict)
    only: Choice = Field(default_factory=dict)


class CountsConfig(Section):
    """How large the data are that a study needs: how many sites, and samples of all sites together."""

    sites: Annotated[int, Field(ge=1, le=10_000)]
    training: Annotated[int, Field(ge=1)]
    validation: Annotated[int, Field(ge=0)] = 0
    test: Annotated[int, Field(ge=0)] = 0


class StudyConfig(Section):
    """A whole study. Overrides are job fields with dots, as `--set` takes them, and three names more.

    `sites`: who takes part, as `simulate --sites` takes it; `folder`: a folder in `--data` instead of all of it.
    `counts`: for an estimate of what it takes; in an override where the data differ by cell.
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
    floor: Annotated[Row, AfterValidator(_floor)] = Field(default_factory=dict)
    smoke: SizeConfig | None = None
    small: SizeConfig | None = None

    @property
    def named_axes(self) -> list[str]:
        """Axes that name what is compared: not those of seeds alone, over which scores are means."""
        return [axis for axis, values in self.axes.items() if any(set(one) != {"training.seed"} for one in values.values())]

    @model_validator(mode="after")
    def _knows_its_values(self) -> Self:
        for where, chosen in [
            *(("exclude", one.when) for one in self.exclude),
            *((name, size.only) for name, size in (("smoke", self.smoke), ("small", self.small)) if size),
        ]:
            self.check_choice(where, chosen)
        for row in self.published:
            self.check_choice("published", {k: [str(v)] for k, v in row.items() if k in self.axes})
        self._check_names()
        return self

    def _check_names(self) -> None:
        """Raise ValueError for a name that means two things in `published`, a site or a score of one seed, or nothing."""
        if "site" in self.axes:
            raise ValueError("axes: 'site' says in `published` which hospital's score it is; give the axis another name")
        seeds = self.axes.keys() - self.named_axes
        if wrong := next((axis for row in self.published for axis in row if axis in seeds), None):
            raise ValueError(
                f"published: {wrong!r} is an axis of seeds, and what is compared are means over them; leave it out"
            )
        if empty := next((row for row in self.published if not any(k not in self.axes and k != "site" for k in row)), None):
            raise ValueError(f"published: {empty}: has no number; give one, or take the row out")
        for name, value in (pair for row in self.published for pair in row.items()):
            if isinstance(value, str) and name not in {*self.axes, "site"}:
                what = f"published: {name}: {value!r}: no axis is called so{nearest(name, self.axes)}, and a score is a number"
                raise ValueError(f"{what}; write one such as 0.5, without quotes")

    def check_choice(self, where: str, chosen: Mapping[str, list[str]]) -> None:
        """Raise ValueError unless all axes and values are the study's."""
        for axis, values in chosen.items():
            if axis not in self.axes:
                raise ValueError(f"{where}: no axis {axis!r}; there are {', '.join(self.axes)}{nearest(axis, self.axes)}")
            if wrong := [value for value in values if value not in self.axes[axis]]:
                known = f"it has {', '.join(self.axes[axis])}{nearest(wrong[0], self.axes[axis])}"
                raise ValueError(f"{where}: no value {wrong[0]!r} on axis {axis!r}; {known}")


# study -----------------------------------------------------------------------------------------------------------------

STUDIES = Path("jobs/studies")
"""In Consilium's repository."""
Size = Literal["", "smoke", "small"]


class GridErrors:
    """Errors of some cells of a grid `labels`."""

    def __init__(self, labels: list[dict[str, str]]) -> None:
        self._all = labels
        self._found: dict[str, list[Mapping[str, str]]] = {}

    @contextmanager
    def of(self, labels: Mapping[str, str]) -> Iterator[None]:
        """Keep the ConsiliumError of the block as errors of the cell with these labels, a line each."""
        try:
            yield
        except ConsiliumError as error:
            for line in str(error).splitlines():
                self._found.setdefault(line, []).append(labels)

    def raise_if_any(self) -> None:
        """Raise ConfigError with a line per error, if there is any."""
        if self._found:
            raise ConfigError("\n".join(f"{describe(having, self._all)}: {line}" for line, having in self._found.items()))


def describe(having: list[Mapping[str, str]], everyone: list[dict[str, str]]) -> str:
    """Return which cells of `everyone` are meant: by the values that they alone share, else the first and how many more."""
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
    """One run of a study. `overrides`: texts for `--set`; `sites` and `data`: for `--sites`, and the folder in `--data`.

    `counts`: how large its data are, if the study says so. `folder` is an ordinary run's folder, see RunLog; `cell.json` in it
    says how far it is. `place`: its number in the study's order, from 0. `metrics`: what it can report.
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
    def name(self) -> str:
        """Its values on all axes."""
        return named(self.labels)

    def load(self) -> JobConfig:
        """Return its job. Raises ConfigError, also where its base is not what it was when the study was read."""
        config = load_job(self.base, dict(map(parse_override, self.overrides)), plugins=None, author=True)
        if identity(config, self.sites, self.data) != self.id:
            raise ConfigError(f"{self.base}: has changed since the study was read; run its command again")
        return config


def named(labels: Mapping[str, Any]) -> str:
    """Return labels as a text, such as "method=FedIT rank=8"."""
    return " ".join(f"{axis}={value}" for axis, value in labels.items())


@dataclass(frozen=True)
class Study:
    """A study's file, in full or in a smaller size, and the folder for its runs."""

    path: Path
    config: StudyConfig
    workspace: Path
    size: Size = ""

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.stem

    @property
    def title(self) -> str:
        """Its name, with its size where it is a smaller one."""
        return f"{self.name}-{self.size}" if self.size else self.name

    @property
    def heading(self) -> str:
        """The study's name, with the option of its size (--smoke, --small) if it is not the full one."""
        return f"{self.name} (--{self.size})" if self.size else self.name

    @property
    def shrunk(self) -> SizeConfig:
        """What makes it smaller."""
        return getattr(self.config, self.size) if self.size else SizeConfig()

    @property
    def axes(self) -> dict[str, list[str]]:
        """The values of every axis at this size."""
        return {axis: self.shrunk.only.get(axis, list(values)) for axis, values in self.config.axes.items()}

    def grid(self) -> list[dict[str, str]]:
        """Return the labels of every cell of this size, the excluded ones too."""
        return [dict(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values())]

    def excluded(self) -> list[tuple[dict[str, str], str]]:
        """Return (labels, reason) of the cells that are left out, with the first reason of each."""
        reasons = ((labels, (one.reason for one in self.config.exclude if chosen(labels, one.when))) for labels in self.grid())
        return [(labels, why) for labels, found in reasons if (why := next(found, ""))]

    def cells(self) -> list[Cell]:
        """Return all cells. Raises ConfigError with every error of every cell's job, by axis value."""
        return self._cells

    @cached_property
    def _cells(self) -> list[Cell]:
        left_out = {tuple(labels.values()) for labels, _ in self.excluded()}
        wanted = [labels for labels in self.grid() if tuple(labels.values()) not in left_out]
        if not wanted:
            raise ConfigError(f"{self.path}: axes and exclude leave no cell; leave some values in")
        errors, found = GridErrors(wanted), list[Cell]()
        for place, labels in enumerate(wanted):
            with errors.of(labels):
                found.append(self._cell(labels, place))
        errors.raise_if_any()
        seen: dict[str, Cell] = {}
        for cell in found:
            if (other := seen.setdefault(cell.id, cell)) is not cell:  # one run would stand for two results
                raise ConfigError(f"{self.path}: {other.name} and {cell.name} are the same job; take one of them out")
        if not self.size:  # the smaller ones may be another task
            _check_published(self, found)
        return found

    @cached_property
    def _base(self) -> tuple[Path, Any]:
        """The base job's file and what it holds."""
        base = job_file(self.path.parent / self.config.base)
        return base, read_yaml(base)

    def _cell(self, labels: dict[str, str], place: int) -> Cell:
        values = dict(self.config.set)
        for more in (*(self.config.axes[axis][name] for axis, name in labels.items()), self.shrunk.set):
            values = {field: value for field, value in values.items() if field not in more} | more  # the last one comes last
        given = {name: values.pop(name, "") for name in ("sites", "folder")}
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, str | int):
                raise ConfigError(f"{name}: {value!r}: expected a number or text; see `consilium simulate --help`")
        sites, data = map(str, given.values())
        counts = self.config.counts
        if "counts" in values:
            counts = validate(CountsConfig, values.pop("counts"), Path("counts"))
        texts = [f"{field}={_json(field, value)}" for field, value in values.items()]
        base, raw = self._base
        try:
            config = make_job(raw, base, dict(map(parse_override, texts)), plugins=None, author=True)
        except ConfigError as error:  # the study's file gave these fields, not the base job's
            fields = "|".join(map(re.escape, values)) or "$."
            line = re.compile(rf"^{re.escape(str(base))}(?=: ({fields})\b)", re.MULTILINE)
            raise ConfigError(line.sub(lambda _: str(self.path), str(error))) from None
        name, metrics = identity(config, sites, data), TASKS[config.task.name].metric_names(config.task)
        return Cell(name, labels, texts, self.workspace / "cells" / name, base, sites, data, counts, place, metrics)


def _json(field: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError:  # YAML has dates
        raise ConfigError(f"{field}: {value}: a {type(value).__name__} is not a job's value; put it in quotes") from None


def identity(config: JobConfig, sites: str, data: str) -> str:
    """Return what tells a cell from every other: all its settings, who takes part, and which folder the data are in."""
    parts = [config.digest, config.training.rounds, sites, data]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _check_published(study: Study, cells: list[Cell]) -> None:
    """Raise ConfigError for a published number without a place of its own: beside no cell, beside several, or taken.

    And for a floor of a score that no cell has.
    """
    seen: set[tuple[str, str, str]] = set()

    def check(where: str, names: Set[str], known: Set[str]) -> None:
        if wrong := sorted(names - known - DIAGNOSED.keys() - {f"{HELD_OUT}{one}" for one in known}):
            what = f"{where}: {wrong[0]!r} is not a score of these cells"
            raise ConfigError(f"{what}; they have {', '.join(sorted(known))}{nearest(wrong[0], known)}")

    check(f"{study.path}: floor", study.config.floor.keys() - {"about"}, set[str]().union(*(one.metrics for one in cells)))
    for row in study.config.published:
        where, labels = f"{study.path}: published: {named(row)}", {k: str(v) for k, v in row.items() if k in study.axes}
        fitting = [one for one in cells if labels.items() <= one.labels.items()]
        names = {name for name, value in row.items() if name not in labels and not isinstance(value, str)}
        if fitting:
            check(where, names, set[str]().union(*(one.metrics for one in fitting)))
        places = [{axis: one.labels[axis] for axis in study.config.named_axes} for one in fitting] or [labels]
        if unsaid := [axis for axis in places[0] if len({one[axis] for one in places}) > 1]:
            raise ConfigError(f"{where}: fits several cells; say {' and '.join(unsaid)} too")
        numbers = {(named(places[0]), str(row.get("site", "")), name) for name in names}
        if twice := sorted(name for *_, name in numbers & seen):
            raise ConfigError(f"{where}: another row has {twice[0]!r} of the same cells; keep one of them")
        seen |= numbers


def chosen(labels: Mapping[str, str], when: Choice) -> bool:
    """Tell whether labels have one of the values named on every axis named."""
    return all(labels.get(axis) in values for axis, values in when.items())


def studies_folder() -> Path:
    """Return the folder of Consilium's own studies: here, above this folder, or the package's own."""
    places = [Path(), *Path.cwd().parents, Path(str(files("consilium") / "examples"))]
    return next((one / STUDIES for one in places if (one / STUDIES).is_dir()), STUDIES)


def load(path: Path | str, size: Size = "", workspace: Path | None = None) -> Study:
    """Return the study of a file, or of that name in jobs/studies. Raises ConfigError.

    `workspace`: where its runs are; by default runs/studies/NAME, or NAME-SIZE.
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
    if (count := math.prod(map(len, study.axes.values()))) > MOST_CELLS:  # counted before anything is that large
        raise ConfigError(f"{file}: axes: {count} cells, over {MOST_CELLS}; make several studies of it")
    return study if workspace else replace(study, workspace=Path("runs/studies") / study.title)


def pick(study: Study, only: list[str]) -> list[Cell]:
    """Return the cells that `--only AXIS=VALUE` leaves; an axis named twice has both values. Raises ConfigError."""
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
    if found := [cell for cell in study.cells() if chosen(cell.labels, wanted)]:
        return found
    raise ConfigError(f"--only: {' '.join(only)}: leaves no cell of this study; name other values")
