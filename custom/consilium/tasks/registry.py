"""The registry of task kinds. A new kind needs a folder (or a file) with a TaskKind, and a line in TASKS."""

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
"""Metrics for which lower values are better."""


def uncertainty_names(names: Iterable[str]) -> set[str]:
    """Return the names of the scores' confidence limits, and of the count of units."""
    return {COUNT, *(f"{name}{end}" for name in names for end in (LOW, HIGH))}


class TaskConfig(Section):
    """Base of every `task:` section."""

    name: str

    @property
    def outputs(self) -> int:
        """The number of outputs of a model's head per sample; 0 for a task whose models have no such head."""
        return 0

    def check_per_sample_gradients(self) -> None:
        """Raise ValueError for a setting with which a record's gradient depends on other records of the site.

        The message names field, value and remedy. It is called under record-level privacy.
        """

    def warnings(self) -> tuple[str, ...]:
        """Return what a person should know about these settings: once per job, not at each site."""
        return ()


@dataclass(frozen=True)
class Scores:
    """How a task's scores are shown.

    `leading`: the main score is the first of these that is reported. `beside`: further columns of the results table.
    `headings`: by score. `remark`: the end of the table's title. `grid`: whose pixels are scored, for masks. `too_small`: the
    metric that counts, by class, pictures with a structure too small for the model's size; "" for none. `meanings`: by score, a
    note below tables with that score.
    """

    leading: tuple[str, ...]
    beside: tuple[str, ...]
    headings: Mapping[str, str]
    remark: str = ""
    grid: str = ""
    too_small: str = ""
    meanings: Mapping[str, str] = field(default_factory=dict)

    def leading_name(self, reported: Iterable[str]) -> str:
        """Return the name of the leading score among the `reported` names; the first of `leading` if none is reported."""
        found = set(reported)
        return next((name for name in self.leading if name in found), self.leading[0])

    def heading(self, name: str) -> str:
        """Return a score's heading in a table."""
        return self.headings.get(name, name)

    def label(self, name: str) -> str:
        """Return a score's heading with its grid, for figures, captions and sentences."""
        return ", ".join(part for part in (self.heading(name), self.pixel_grid(name)) if part)

    def pixel_grid(self, name: str) -> str:
        """Return whose pixels a score counts, "" for the loss and for tasks without masks."""
        return "" if name == "loss" else self.grid


Change = Callable[[DataList], DataList]


class Check(Protocol):
    """Checks a data list before training. `config`, `tokenizer`, `input_size`: from the job, if there is one.

    `input_size`: the size of the model's input: tokens of a text, or pixels of a picture's side.
    """

    def __call__(
        self, path: Path, config: Any = None, tokenizer: Any = None, input_size: int = 0, prepare_list: Change | None = None
    ) -> Findings:
        """Return the findings. Raises DataError if the list cannot be read.

        `prepare_list` returns the list as the job uses it.
        """
        ...


@dataclass(frozen=True)
class TaskKind:
    """The functions and properties of one kind of task.

    - `scores(config)` returns how its scores are shown; `metric_names(config)` the names of all metrics that it can report.
    - `read(path)` returns a site's data list; `file` is the usual name of such a list.
    - `build(config, model, data, tokenizer)` returns the task on one site's data.
    - `check` checks a data list for `consilium data check`.
    - `models`: names of models made for another task that can do this one too, with the task's `outputs` as size of their head.
    - `prepare(config, data)` returns the samples that a job makes of a data list, such as a volume's planes.
    - `look(config, item)` raises DataError for a sample whose header or label is bad; a site may leave such samples out.
    - `usable(path, lost)` is `read` without the entries that cannot be used, which are added to `lost`.
    - `rehearse(config, model config, model, n)` returns the training loss of n empty samples of full size. It serves to count a
      step's memory, and in a private job to measure a site's capacity.
    - `former`: the values of fields that a run's job.yaml lacks, where the default has changed since.
    - `undigested`: values of newer fields that leave a job's digest as it was without these fields.
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

    def with_former_defaults(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `task:` section of a run's files, completed with the values of `former` for the fields that it lacks."""
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
    """Return how the scores of a `task:` section are shown; None for an unknown task or an invalid section."""
    try:
        kind = TASKS[str(task.get("name"))]
        return kind.scores(kind.config.model_validate(kind.with_former_defaults(task)))
    except (ConfigError, KeyError, ValueError):
        return None
