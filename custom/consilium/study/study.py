"""A study and its cells: each a job, told by names on the axes, with a folder of its own that follows from the job."""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from consilium.config.job import JobConfig, job_file, load_job, make_job
from consilium.config.overrides import parse_override
from consilium.errors import ConfigError
from consilium.report.compare import DIAGNOSED, HELD_OUT
from consilium.schema import nearest, read_yaml, validate
from consilium.study.config import MOST_CELLS, Choice, CountsConfig, SizeConfig, StudyConfig
from consilium.study.grid_errors import GridErrors
from consilium.tasks.registry import TASKS

STUDIES = Path("jobs/studies")
Size = Literal["", "smoke", "small"]


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
        config = load_job(self.base, _parsed(self.overrides), plugins=None, author=True)
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
        return _title(self.path, self.size)

    @property
    def heading(self) -> str:
        """Its name, and how a command asks for its size where it is a smaller one."""
        return f"{self.name} (--{self.size})" if self.size else self.name

    @property
    def published(self) -> list[dict[str, str | int | float]]:
        """The published numbers: rows of labels and metrics."""
        return self.config.published

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
        """Return (labels, reason) of what is left out."""
        return [(labels, why) for labels in self.grid() if (why := self._why_not(labels))]

    def _why_not(self, labels: Mapping[str, str]) -> str:
        return next((one.reason for one in self.config.exclude if chosen(labels, one.when)), "")

    def cells(self) -> list[Cell]:
        """Return all cells. Raises ConfigError with every mistake of every cell's job, by axis value."""
        return self._cells

    @cached_property
    def _cells(self) -> list[Cell]:
        wanted = [labels for labels in self.grid() if not self._why_not(labels)]
        if not wanted:
            raise ConfigError(f"{self.path}: axes and exclude leave no cell; leave some values in")
        errors, found = GridErrors(wanted), list[Cell]()
        for place, labels in enumerate(wanted):
            with errors.of(labels):
                found.append(self._cell(labels, place))
        errors.raise_if_any()
        _check_apart(self.path, found)
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
        sites, data = (_text(name, values.pop(name, "")) for name in ("sites", "folder"))
        counts = _counts(values.pop("counts")) if "counts" in values else self.config.counts
        texts = [f"{field}={_json(field, value)}" for field, value in values.items()]
        base, raw = self._base
        with _told_by(self.path, base, values):
            config = make_job(raw, base, _parsed(texts), plugins=None, author=True)
        name, metrics = identity(config, sites, data), TASKS[config.task.name].metric_names(config.task)
        return Cell(name, labels, texts, self.workspace / "cells" / name, base, sites, data, counts, place, metrics)


@contextmanager
def _told_by(study: Path, base: Path, fields: Iterable[str]) -> Iterator[None]:
    """Name the study's file in the place of the base job's, in errors of fields that the study gives."""
    try:
        yield
    except ConfigError as error:
        given = "|".join(map(re.escape, fields))
        line = re.compile(rf"^{re.escape(str(base))}(?=: ({given})\b)", re.MULTILINE)
        raise ConfigError(line.sub(lambda _: str(study), str(error)) if given else str(error)) from None


def _title(path: Path, size: Size) -> str:
    return f"{path.stem}-{size}" if size else path.stem


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ConfigError(f"{name}: {value!r}: expected a number or text; see `consilium simulate --help`")
    return str(value)


def _counts(value: Any) -> CountsConfig:
    return validate(CountsConfig, value, Path("counts"))


def _json(field: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError:  # YAML has dates
        raise ConfigError(f"{field}: {value}: a {type(value).__name__} is no job's value; put it in quotes") from None


def _parsed(overrides: list[str]) -> dict[str, Any]:
    return dict(map(parse_override, overrides))


def identity(config: JobConfig, sites: str, data: str) -> str:
    """Return what tells a cell from every other: all its settings, who takes part, and which folder the data are in."""
    parts = [config.digest, config.training.rounds, sites, data]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _check_apart(path: Path, cells: list[Cell]) -> None:
    """Raise ConfigError for two cells with one job: it would run once and stand for two results."""
    seen: dict[str, Cell] = {}
    for cell in cells:
        if (other := seen.setdefault(cell.id, cell)) is not cell:
            raise ConfigError(f"{path}: {other.name} and {cell.name} are the same job; take one of them out")


def _check_published(study: Study, cells: list[Cell]) -> None:
    """Raise ConfigError for a published number that would stand beside nothing, beside several, or where another one does.

    And for a floor of a score that no cell has.
    """
    seen: set[tuple[str, str, str]] = set()
    scores = frozenset[str]().union(*(one.metrics for one in cells))
    if wrong := sorted(study.config.floor.keys() - scores - {"about"}):
        raise _no_score(f"{study.path}: floor", wrong[0], scores)
    for row in study.published:
        where, labels = f"{study.path}: published: {named(row)}", {k: str(v) for k, v in row.items() if k in study.axes}
        fitting = [one for one in cells if labels.items() <= one.labels.items()]
        names = {name for name, value in row.items() if name not in labels and not isinstance(value, str)}
        known = frozenset[str]().union(*(one.metrics for one in fitting))
        if fitting and (wrong := sorted(names - known - DIAGNOSED.keys() - {f"{HELD_OUT}{one}" for one in known})):
            raise _no_score(where, wrong[0], known)
        place = _place(where, [{axis: one.labels[axis] for axis in study.config.named_axes} for one in fitting] or [labels])
        numbers = {(place, str(row.get("site", "")), name) for name in names}
        if twice := sorted(name for *_, name in numbers & seen):
            raise ConfigError(f"{where}: another row has {twice[0]!r} of the same cells; keep one of them")
        seen |= numbers


def _no_score(where: str, name: str, known: frozenset[str]) -> ConfigError:
    what = f"{where}: {name!r} is no score of these cells"
    return ConfigError(f"{what}; they have {', '.join(sorted(known))}{nearest(name, known)}")


def _place(where: str, places: list[dict[str, str]]) -> str:
    """Return the one place that a published number fits. Raises ConfigError for several: they differ in more than the seed."""
    if unsaid := [axis for axis in places[0] if len({one[axis] for one in places}) > 1]:
        raise ConfigError(f"{where}: fits several cells; say {' and '.join(unsaid)} too")
    return named(places[0])


def chosen(labels: Mapping[str, str], when: Choice) -> bool:
    """Tell whether labels have one of the values named on every axis named."""
    return all(labels.get(axis) in values for axis, values in when.items())


def load(path: Path | str, size: Size = "", workspace: Path | None = None) -> Study:
    """Return the study of a file, or of that name in jobs/studies. Raises ConfigError.

    `workspace`: where its runs are; by default runs/studies/NAME, or NAME-SIZE.
    """
    path = study_file(Path(path))
    config = validate(StudyConfig, read_yaml(path), path)
    if size and getattr(config, size) is None:
        raise ConfigError(f"{path}: {size}: the study has no such section; add it, or run the study without --{size}")
    study = Study(path, config, workspace or Path("runs/studies") / _title(path, size), size)
    if (count := math.prod(map(len, study.axes.values()))) > MOST_CELLS:  # counted before anything is that large
        raise ConfigError(f"{path}: axes: {count} cells, over {MOST_CELLS}; make several studies of it")
    return study


def study_file(path: Path) -> Path:
    """Return the file of a study that is given by path, or by name. Raises ConfigError."""
    candidates = [path, STUDIES / f"{path}.yaml"]
    if found := next((one for one in candidates if one.is_file()), None):
        return found
    known = ", ".join(sorted(one.stem for one in STUDIES.glob("*.yaml"))) or "none"
    raise ConfigError(f"{path}: no such study; give a file, or a name in {STUDIES} (there: {known})")


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
