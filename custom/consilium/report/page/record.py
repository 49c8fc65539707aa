"""What a run has recorded so far, finished or not, checked piece by piece: a damaged line costs that line alone."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from consilium.config.job import JobConfig, load_job
from consilium.config.site import SIMULATION
from consilium.errors import ConfigError
from consilium.messages import MetricKey, Stage
from consilium.report.clean import shown
from consilium.report.lines import LINES
from consilium.report.means import Results
from consilium.report.page.files import Line, number, read_json, read_lines
from consilium.report.progress import without_repeats
from consilium.tasks.registry import TASKS, Scores

OWNER = "owner.json"
"""It is in every run's folder of a startup kit, at the server and at a site."""
Curve = dict[int, float]


@dataclass(frozen=True)
class Record:
    """A run. `lines`: its record, without repeats; `damaged`: lines that say nothing; `results`: None until the end."""

    folder: Path
    config: JobConfig
    scores: Scores
    lines: list[Line]
    damaged: int
    resumed: int
    results: Results | None
    versions: Mapping[str, str]
    privacy: Mapping[str, Any] | None

    @property
    def simulated(self) -> bool:
        """Whether all sites were on this machine: only then are their folders here, and rightly so."""
        return is_simulation(self.folder)

    def of(self, *events: str) -> Iterator[Line]:
        """Yield the lines of these events."""
        return (line for line in self.lines if line["event"] in events)

    @cached_property
    def sites(self) -> list[str]:
        """Who took part or was asked to, by name."""
        named = {line["site"] for line in self.of("joined", "result", "held_out", "final", "refused")}
        return sorted({*named, *(site for line in self.of("started") for site in line["sites"])})

    @cached_property
    def apart(self) -> list[str]:
        """Sites that only test: they are in no mean."""
        return sorted({line["site"] for line in self.of("joined") if line.get("test_only") is True})

    @property
    def seeded(self) -> list[str]:
        """The sites whose noise came from a seed."""
        return sorted({line["site"] for line in self.of("joined") if line.get("seeded") is True})

    @cached_property
    def rounds(self) -> int:
        """How many rounds have ended."""
        return len({line["round"] for line in self.of("concluded") if line["phase"] == self._last_phase})

    @cached_property
    def ended(self) -> Line | None:
        """Where and why the rounds have ended early; None where they have not."""
        return next(self.of("ended"), None)

    @property
    def _last_phase(self) -> int:
        return max((line["phase"] for line in self.of("concluded")), default=0)

    @cached_property
    def closing(self) -> Results:
        """The closing scores by site; before the end what validation said last."""
        if self.results is not None:
            return self.results
        found: dict[str, dict[str, float]] = {}
        for line in self.of("result", "final"):
            found.setdefault(line["site"], {}).update({n: v for n, v in line["metrics"].items() if MetricKey.parse(n)})
        return found

    @cached_property
    def metric(self) -> str:
        """The score that the task is judged by, of those reported."""
        reported = [*self.closing.values(), *(line["metrics"] for line in self.of("result"))]
        return self.scores.lead(key.metric for one in reported for name in one if (key := MetricKey.parse(name)))

    def curves(self, name: str, after: bool) -> dict[str, Curve]:
        """Return a metric by site and rounds done; `after`: it was measured after a round's training, else before it."""
        found: dict[str, Curve] = {}
        for line in self.of("result", "held_out"):
            if (value := line["metrics"].get(name)) is not None and (after or line.get("phase", 0) <= 0):
                found.setdefault(line["site"], {})[line["round"] + after] = value
        return found

    def validation(self, stage: Stage) -> dict[str, Curve]:
        """Return the leading score on validation data, by site and rounds done."""
        return self.curves(str(MetricKey("validation", stage, self.metric)), stage is Stage.PERSONALIZED)


def is_simulation(folder: Path) -> bool:
    """Tell whether a run's folder is that of a simulation, whose sites' folders are in it; a startup kit's never is."""
    return (folder / SIMULATION).is_file() and not (folder / OWNER).exists() and not (folder / OWNER).is_symlink()


def read_record(folder: Path) -> Record:
    """Return the run of a folder. Raises ConfigError where it is none."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give the folder of `simulate --workspace`, or of a study's runs")
    if not (folder / "job.yaml").is_file() or (folder / "job.yaml").is_symlink():
        raise ConfigError(f"{folder}: holds no run (no job.yaml); give the folder of `simulate --workspace`")
    config = load_job(folder / "job.yaml", plugins=None)
    raw, damaged = read_lines(folder / "metrics.jsonl")
    lines = [line for one in raw if (line := checked(one)) is not None]
    return Record(
        folder,
        config,
        TASKS[config.task.name].scores(config.task),
        without_repeats(lines),
        damaged + sum(str(one.get("event")) in LINES for one in raw) - len(lines),
        sum(line["event"] == "resumed" for line in lines),
        results_of(read_json(folder / "results.json")),
        _texts(read_json(folder / "versions.json")),
        found if isinstance(found := read_json(folder / "privacy.json"), dict) else None,
    )


def checked(line: Line) -> Line | None:
    """Return a line of a known event with every value of its kind, of metrics the finite numbers; None for any other."""
    kind = LINES.get(str(line.get("event")))
    if kind is None:
        return None
    found = line | ({"metrics": metrics_of(line["metrics"])} if "metrics" in line else {})
    try:
        return found | kind.model_validate(found).model_dump() | {"time": number(line.get("time"))}
    except (ValidationError, OverflowError):
        return None


def metrics_of(raw: Any) -> dict[str, float]:
    """Return the finite numbers among metrics."""
    items = raw.items() if isinstance(raw, dict) else ()
    return {name: value for name, one in items if isinstance(name, str) and (value := number(one)) is not None}


def results_of(raw: Any) -> dict[str, dict[str, float]] | None:
    """Return closing scores by site; None where there are none."""
    return {site: metrics_of(one) for site, one in sorted(raw.items())} if isinstance(raw, dict) else None


def _texts(raw: Any) -> dict[str, str]:
    return {shown(name, 80): shown(one, 200) for name, one in raw.items()} if isinstance(raw, dict) else {}
