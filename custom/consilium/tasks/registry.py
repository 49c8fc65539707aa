"""The kinds of tasks. A new one: a folder (or a file) with a TaskKind, and its line in TASKS."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from consilium.core.errors import ConfigError
from consilium.core.registry import Registry
from consilium.core.schema import Section
from consilium.data.check_report import Findings
from consilium.data.datalist import DataList, Lost
from consilium.tasks.base import Task

COUNT, LOW, HIGH = "n", "_low", "_high"
"""The metric that counts scored units, and the suffixes of a 95 % interval's ends; see bootstrap.py."""
LOWER = frozenset({"loss", "hd95", "assd", "hd95_mm", "assd_mm", "mae", "perplexity", "token_loss", "bits_per_token"})
"""Metrics of which less is better."""


def uncertainty_names(names: Iterable[str]) -> set[str]:
    """Return the names of the scores' confidence limits, and of the count of units."""
    return {COUNT, *(f"{name}{end}" for name in names for end in (LOW, HIGH))}


class TaskConfig(Section):
    """Base of every `task:` section."""

    name: str

    @property
    def outputs(self) -> int:
        """Outputs of a model's head for one sample; 0 for a task whose models have no such head."""
        return 0

    def keep_apart(self) -> None:
        """Raise ValueError, naming field, value and remedy, for a setting that ties the records of a site together."""


@dataclass(frozen=True)
class Scores:
    """How a task's scores are shown. `leading`: its main score, the first of these that is reported.

    `beside`: further columns of the closing table; `headings` by score; `remark` belongs to the table's title. `grid`: whose
    pixels are scored, where they are masks. `too_small`: the metric that counts, by class, pictures with a structure too small
    for the model's size, "" for none. `meanings`: by score, a note below tables that have it.
    """

    leading: tuple[str, ...]
    beside: tuple[str, ...]
    headings: Mapping[str, str]
    remark: str = ""
    grid: str = ""
    too_small: str = ""
    meanings: Mapping[str, str] = field(default_factory=dict)

    def lead(self, reported: Iterable[str]) -> str:
        """Return the leading score among the names of reported ones; the first choice where none is."""
        found = set(reported)
        return next((name for name in self.leading if name in found), self.leading[0])

    def heading(self, name: str) -> str:
        """Return how a score is called in a table."""
        return self.headings.get(name, name)

    def label(self, name: str) -> str:
        """Return how a score is called where no title names the grid: in figures, captions and sentences."""
        return ", ".join(part for part in (self.heading(name), self.grid_of(name)) if part)

    def grid_of(self, name: str) -> str:
        """Return whose pixels a score is of, "" for one that is of no masks."""
        return "" if name == "loss" else self.grid


Change = Callable[[DataList], DataList]


class Check(Protocol):
    """Checks a data list before training. `config`, `tokenizer`, `max_length`: the job's, if there is one.

    `max_length`: what its model takes, tokens of a text or pixels of a picture's side.
    """

    def __call__(
        self, path: Path, config: Any = None, tokenizer: Any = None, max_length: int = 0, change: Change | None = None
    ) -> Findings:
        """Raise DataError where the list itself cannot be read. `change` returns the list as the job uses it."""
        ...


@dataclass(frozen=True)
class TaskKind:
    """A kind of task. `build(config, model, data, tokenizer)`: the task on one site's data.

    `metric_names(config)`: every metric it can report; `read(path)`: a site's data list; `prepare(config, data)`: the samples
    that this job makes of it, such as a volume's planes; `look(config, item)`: raises DataError for a sample that is bad at a
    look, which a site may have left out; `usable(path, lost)`: `read` without the entries that cannot be used, which go into
    `lost`; `file`: the name of such a list; `models`: names of models made for another
    task that do this one too, their head having the task's `outputs`; `rehearse(config, model config, model, n)`: the training
    loss of n samples of full size that hold nothing, on which a step's memory is counted, and what a site can carry measured
    in a private job; `former`: what a run was made with whose job.yaml lacks a field that has another default by now;
    `undigested`: values of younger fields with which a job has the digest that it had without them.
    """

    config: type[TaskConfig]
    scores: Callable[[Any], Scores]
    metric_names: Callable[[Any], frozenset[str]]
    read: Callable[[Path], DataList]
    build: Callable[[Any, Any, DataList, Any], Task]
    check: Check | None = None
    file: str = "datalist.json"
    models: frozenset[str] = frozenset()
    prepare: Callable[[Any, DataList], DataList] = lambda config, data: data
    look: Callable[[Any, Any], None] | None = None
    usable: Callable[[Path, list[Lost]], DataList] | None = None
    rehearse: Callable[[Any, Any, Any, int], Any] | None = None
    former: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    undigested: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def completed(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `task:` section of a run's own files with what it was made with, where it lacks a field of `former`."""
        given = {name: task.get(name) or {} for name in self.former}
        return {**task, **{n: {**self.former[n], **own} if isinstance(own, dict) else own for n, own in given.items()}}


TASKS: Registry[TaskKind] = Registry(
    "task",
    {
        "segmentation": "consilium.tasks.segmentation:SEGMENTATION",
        "classification": "consilium.tasks.classification:CLASSIFICATION",
        "language": "consilium.tasks.language:LANGUAGE",
        "report": "consilium.tasks.report:REPORT",
    },
    "consilium.tasks",
    "consilium.tasks.registry:TaskKind",
)


def task_scores(task: Mapping[str, Any]) -> Scores | None:
    """Return how the scores of a `task:` section are shown; None for a task that is not known here, or not such a section."""
    try:
        kind = TASKS[str(task.get("name"))]
        return kind.scores(kind.config.model_validate(kind.completed(task)))
    except (ConfigError, KeyError, ValueError):
        return None
