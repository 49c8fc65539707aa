"""RunRecord: the one reader of a run's folder, for pages, comparisons, result tables, studies, commands; and a study's cells.

A run's files may have been written by others, or be torn. `read_run` keeps what is whole, and notes what is not;
`read_finished` refuses a run that has not ended or has a damaged file.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from consilium.config.job import JobConfig, load_run_job
from consilium.config.site import SIMULATION
from consilium.core.errors import ConfigError
from consilium.core.messages import BYTES_DOWN, BYTES_UP, HELD_OUT, SPLITS, TRAIN_SECONDS, MetricKey, Stage
from consilium.core.registry import Plugins
from consilium.core.sanitize import shown
from consilium.core.schema import dotted
from consilium.core.storage import locked, write_atomic
from consilium.report.plain_files import Line, Number, read_events, read_json, read_plain, strict_model, subfolders
from consilium.strategies.strategy import Role, Strategy
from consilium.tasks.registry import TASKS, Scores

Results = Mapping[str, Mapping[str, float]]
"""Metrics of the closing evaluation by site."""
Curve = dict[int, float]
"""A measure by rounds done."""
OWNER = "owner.json"
"""In every run's folder of a startup kit, at the server and at a site."""
PACKAGES = (
    "consilium", "nvflare", "torch", "transformers", "monai", "peft", "opacus", "segment-anything", "safetensors", "numpy"
)  # fmt: skip
"""Of versions.json beside MACHINE and the code; any other is a plug-in's."""
MACHINE = ("python", "platform")
"""Fields of versions.json that say where a run was, not which code it ran."""
POOLED = "centralized"
"""The name under which a run on pooled data joins, in place of its sites."""


_EPSILON = dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]
_FILES: dict[str, TypeAdapter[Any]] = {
    "results.json": TypeAdapter(dict[str, dict[str, Number]]),
    "privacy.json": TypeAdapter(strict_model("privacy", {"epsilon": (_EPSILON, {})})),
    SIMULATION: TypeAdapter(strict_model("simulation", {"content": (dict[str, str], {})})),
}


@dataclass(frozen=True)
class RunRecord:
    """A run, finished or not.

    `settings`: job.yaml by dotted field. `lines`: its known events, without what a resumption repeats. `results`: None before
    the end. `content`: a digest of each site's data, of a simulation. `damaged`: names of files that hold what no run writes;
    `lost_lines`: lines of metrics.jsonl that are torn or damaged. Of a study's cell: `labels` by axis; `data`: the data's
    folder and a digest of the samples read; `whole`: a digest of all samples. "" where it is unknown.
    """

    name: str
    folder: Path
    config: JobConfig
    settings: Mapping[str, Any]
    scores: Scores
    lines: list[Line]
    results: Results | None
    privacy: Mapping[str, Any] | None
    content: Mapping[str, str]
    versions: Mapping[str, str]
    damaged: Set[str] = frozenset()
    lost_lines: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    data: tuple[str, str] = ("", "")
    whole: str = ""

    def of(self, *events: str) -> Iterator[Line]:
        """Yield the lines of these events."""
        return (line for line in self.lines if line["event"] in events)

    @property
    def seed(self) -> int:
        """Of training; generated data follow it too."""
        return int(self.settings["training.seed"])

    @property
    def private(self) -> bool:
        """Whether its job is; its epsilon may still be unknown."""
        return bool(self.settings["privacy.unit"] != "none")

    @property
    def pooled(self) -> bool:
        """Whether the sites' data travelled in place of updates."""
        return self.config.strategy.traits.pools_data

    @cached_property
    def sites(self) -> frozenset[str]:
        """Sites that took part or asked to."""
        joined = {line["site"] for line in self.lines if "site" in line and (line["event"] != "refused" or line.get("joining"))}
        return frozenset({*joined, *(self.results or ())} - {POOLED})

    @cached_property
    def test_only(self) -> frozenset[str]:
        """Sites that do not train: they are in no mean."""
        return frozenset(line["site"] for line in self.of("joined") if line.get("test_only") is True)

    @cached_property
    def seeded(self) -> list[str]:
        """Sites whose noise came from a seed: their promise is void."""
        return sorted({line["site"] for line in self.of("joined") if line.get("seeded") is True})

    @cached_property
    def ended(self) -> Line | None:
        """The event that says at which round and why the run ended early; None if it did not."""
        return next(self.of("ended"), None)

    @property
    def last_round(self) -> int:
        """After how many rounds the closing evaluation comes, or came."""
        return int(self.ended["round"] if self.ended else self.settings["training.rounds"])

    @cached_property
    def unscored(self) -> dict[str, str]:
        """Why sites have no closing scores, by site: they were refused in the closing evaluation."""
        scored = {line["site"] for line in self.of("final") if line["round"] >= self.last_round}
        refused = [one for one in self.of("refused") if one["round"] >= self.last_round and not one.get("joining")]
        return {line["site"]: line["reason"] for line in refused if line["site"] not in scored}

    @cached_property
    def closing(self) -> Results:
        """The closing scores by site; before the end the last ones on validation data."""
        found: dict[str, dict[str, float]] = {}
        for line in self.of("result", "final"):
            found.setdefault(line["site"], {}).update({n: v for n, v in line["metrics"].items() if MetricKey.parse(n)})
        return found if self.results is None else self.results

    @cached_property
    def split(self) -> str | None:
        """What was scored: test where any site has it; None where nothing was."""
        return split_of(self.closing)

    @cached_property
    def metric(self) -> str:
        """The score that the task is judged by, of those reported."""
        return self.scores.lead(key.metric for one in self.closing.values() for name in one if (key := MetricKey.parse(name)))

    def score(self, site: str, stage: Stage, metric: str) -> float | None:
        """Return a closing score, which may be NaN; None where there is none."""
        return self.closing.get(site, {}).get(str(MetricKey(self.split or SPLITS[-1], stage, metric)))

    def curves(self, metric: str, after: bool) -> dict[str, Curve]:
        """Return a metric by site and rounds done; `after`: it was measured after a round's training, else before it."""
        found: dict[str, Curve] = {}
        for (round, phase, site), metrics in sorted(self.rounds.items()):
            if (value := known(metrics.get(metric))) is not None and (after or phase <= 0):
                found.setdefault(site, {})[round + after] = value
        return found

    def validation(self, stage: Stage, metric: str = "") -> dict[str, Curve]:
        """Return a validation score, by default the leading one, by the rounds of training behind the model.

        The last point is of the model that the closing evaluation scores.
        """
        name = str(MetricKey("validation", stage, metric or self.metric))
        found = self.curves(name, stage is Stage.PERSONALIZED)
        for line in self.of("final"):
            if line["site"] in found and (value := known(line["metrics"].get(name))) is not None:
                found[line["site"]][self.last_round] = value
        return found

    def held_out(self, metric: str) -> float | None:
        """Return the mean validation score, before the last round, of the sites that it did not ask to train; None for none."""
        key, found = str(MetricKey("validation", Stage.GLOBAL, metric)), dict[int, list[float]]()
        for (round, phase, _), metrics in self.rounds.items():
            if phase == HELD_OUT and key in metrics:
                found.setdefault(round, []).append(metrics[key])
        return math.fsum(found[max(found)]) / len(found[max(found)]) if found else None

    @cached_property
    def rounds(self) -> dict[tuple[int, int, str], Mapping[str, float]]:
        """Metrics by round, phase and site."""
        answers = self.of("result", "held_out")
        return {(one["round"], one.get("phase", HELD_OUT), one["site"]): one["metrics"] for one in answers}

    @cached_property
    def diagnostics(self) -> dict[tuple[int, int], dict[str, float]]:
        """Finite numbers that the run measured of itself, by round and phase."""
        found = {(one["round"], one["phase"]): one["values"] for one in self.of("diagnostics")}
        return {place: {name: v for name, v in one.items() if math.isfinite(v)} for place, one in found.items()}

    def total(self, *names: str) -> float | None:
        """Return a sum over sites and rounds of training; None unless every result of every round has these metrics."""
        trained = {place: one for place, one in self.rounds.items() if place[1] != HELD_OUT}
        if not {round for round, *_ in trained} >= {*range(self.last_round)}:
            return None
        values = [one.get(name, math.nan) for one in trained.values() for name in names]
        return known(sum(values))

    @property
    def bytes(self) -> float | None:
        """Of tensors, up and down; None where data travelled instead, or not all of it is on record."""
        return None if self.pooled else self.total(BYTES_UP, BYTES_DOWN)

    @property
    def seconds(self) -> float | None:
        """Of the sites' training, summed; None where not all of it is on record."""
        return self.total(TRAIN_SECONDS)

    @cached_property
    def epsilon(self) -> float | None:
        """The epsilon guaranteed at the job's delta; None where the run is not private or does not tell it."""
        private = self.config.privacy
        return None if private is None else (self.privacy or {"epsilon": {}})["epsilon"].get(f"{private.delta:g}")

    @cached_property
    def code_versions(self) -> dict[str, str]:
        """The digest of the code and the versions of packages."""
        return {name: one for name, one in self.versions.items() if name not in MACHINE and one != "not installed"}

    @cached_property
    def trained(self) -> dict[Role, int] | None:
        """How many parameters travel, stay at a site and do not train; None where the run does not tell."""
        recorded = next(self.of("parameters"), None)
        return None if recorded is None else {role: recorded[role.value] for role in Role}

    @cached_property
    def base(self) -> str:
        """The SHA-256 of the frozen weights, from the server's checkpoint; "" where the package has them or it is unknown."""
        path = self.folder / "server" / "state.safetensors"
        try:
            with safe_open("" if path.is_symlink() else path, framework="np") as file:
                meta = json.loads((file.metadata() or {}).get("meta", "{}"))
        except (OSError, SafetensorError, ValueError, RecursionError):
            return ""
        return str(meta.get("checkpoint") or "") if isinstance(meta, dict) else ""


def job_of(folder: Path, plugins: Plugins = None) -> JobConfig:
    """Return the job of a run's or an adapter's folder. Raises ConfigError, which names a plug-in's package that is missing."""
    try:
        return load_run_job(folder, plugins)
    except ConfigError:
        places = [folder.absolute(), *folder.absolute().parents][:5]  # RUN/sites/NAME/adapters/WHICH
        versions = next((found for place in places if (found := read_json(place / "versions.json"))), {})
        own = [name for name in versions if name not in (*PACKAGES, *MACHINE, "code") and not distribution_there(name)]
        if not own:
            raise
        named = ", ".join(f"{shown(name, 80)} {shown(versions[name], 40)}" for name in own)
        raise ConfigError(
            f"{folder}: the run is of another package's kind: {named}, which is not installed here; install it"
        ) from None


def distribution_there(name: str) -> bool:
    """Tell whether a package is installed."""
    try:
        return bool(version(name))
    except (PackageNotFoundError, ValueError):
        return False


def read_run(folder: Path, name: str = "", labels: Mapping[str, str] | None = None) -> RunRecord:
    """Return the run of a folder, as far as it is whole. Raises ConfigError where the folder holds none."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give the folder of `simulate --workspace`, or of a study's runs")
    if not (folder / "job.yaml").is_file() or (folder / "job.yaml").is_symlink():
        raise ConfigError(f"{folder}: holds no run (no job.yaml); give the folder of `simulate --workspace`")
    config = job_of(folder)
    damaged: set[str] = set()
    files: dict[str, Any] = {}
    for file, kind in _FILES.items():
        try:
            files[file] = None if (data := read_plain(folder / file)) is None else kind.validate_json(data, strict=True)
        except ValidationError:
            files[file] = None
            damaged.add(file)
    lines, lost, wrong = read_events(folder / "metrics.jsonl")
    damaged |= {"metrics.jsonl"} if wrong else set()
    private, simulation = files["privacy.json"], files[SIMULATION]
    settings = dotted(config.model_dump(mode="json"))
    return RunRecord(
        name or str(folder),
        folder,
        config,
        {"privacy.unit": "none"} | {key: value for key, value in settings.items() if key != "privacy"},
        TASKS[config.task.name].scores(config.task),
        lines,
        files["results.json"],
        None if private is None else private.model_dump(),
        {} if simulation is None else simulation.content,
        {shown(key, 80): shown(one, 200) for key, one in read_json(folder / "versions.json").items() if isinstance(one, str)},
        damaged,
        lost,
        labels or {},
    )


def read_finished(folder: Path, name: str = "", labels: Mapping[str, str] | None = None) -> RunRecord:
    """Return the finished run of a folder. Raises ConfigError if it holds none, has not ended, or a file is damaged."""
    found = read_run(folder, name, labels)
    if (linked := folder / "results.json").is_symlink():
        raise ConfigError(f"{linked}: is a link, which may lead anywhere; put the file itself there")
    if found.results is None and "results.json" not in found.damaged:
        raise ConfigError(f"{folder}: the run has not ended (no results.json); resume it")
    if found.damaged:
        raise ConfigError(f"{folder / min(found.damaged)}: is damaged; delete its folder and run the job anew")
    return found


def is_simulation(folder: Path) -> bool:
    """Tell whether a run's folder is that of a simulation, whose sites' folders are in it; a startup kit's never is."""
    return (folder / SIMULATION).is_file() and not (folder / OWNER).exists() and not (folder / OWNER).is_symlink()


def split_of(results: Results) -> str | None:
    """Return what was scored: test where any site has it; None where nothing was."""
    keys = {key.split for metrics in results.values() for name in metrics if (key := MetricKey.parse(name))}
    return next((split for split in reversed(SPLITS) if split in keys), None)


def known(value: float | None) -> float | None:
    """Return a finite number; None for any other."""
    return None if value is None or not math.isfinite(value) else value


def roles_of(strategy: Strategy, names: Iterable[str]) -> dict[str, Role]:
    """Return each tensor's role over round 1 and the rounds of a period: shared if it is ever shared."""
    places = strategy.traits.role_schedule(1, len(strategy.traits.phases))
    all_of = {name: {strategy.role(name, *place) for place in places} for name in names}
    return {name: next(r for r in (Role.SHARED, Role.LOCAL, Role.FROZEN) if r in found) for name, found in all_of.items()}


# study cells -----------------------------------------------------------------------------------------------------------
# Which cells the studies of a workspace have now: written by `study run`, read by reports, comparisons and `use`.

CELLS, KEPT = "cells", "studies.json"


_CELLS = TypeAdapter(dict[str, dict[str, dict[str, str]]])


@dataclass(frozen=True)
class StudyCell:
    """A cell of a study: its folder, and its values on all axes."""

    folder: Path
    labels: Mapping[str, str]

    @property
    def name(self) -> str:
        """Its values on all axes, as `method=IAT,seed=0`; "" where it has none."""
        return ",".join(f"{shown(axis)}={shown(value)}" for axis, value in self.labels.items())


def keep_cells(workspace: Path, study: str, cells: Mapping[str, Mapping[str, str]]) -> None:
    """Keep a study's cells, by folder and in its order; other studies' stay."""
    with locked(workspace):
        write_atomic(workspace / KEPT, json.dumps(_kept(workspace) | {study: dict(cells)}, indent=1).encode())


def study_cells(workspace: Path) -> list[StudyCell]:
    """Return the cells that have begun and are of a study as it was last run; of a workspace that does not say, all."""
    there = {one.name: one for one in subfolders(workspace / CELLS)}
    if kept := _kept(workspace):
        labels = {name: one for cells in kept.values() for name, one in cells.items() if name in there}
        return [StudyCell(there[name], one) for name, one in labels.items()]
    return [StudyCell(folder, _labels(folder)) for folder in there.values()]


def cell_folder(path: Path) -> Path:
    """Return the run of a study that STUDY/AXIS=VALUE,AXIS=VALUE names, or the path as it is.

    Raises ConfigError, naming the runs there are, for a study alone, or values that no run of it has, or two have.
    """
    study = path if (path / CELLS).is_dir() and not (path / "job.yaml").exists() else path.parent
    if (path.exists() and study != path) or not (study / CELLS).is_dir():
        return path
    done = [cell for cell in study_cells(study) if (cell.folder / "results.json").is_file()]
    wanted = "" if study == path else ",".join(part.strip() for part in path.name.split(","))
    if wanted and (meant := [cell.folder for cell in done if cell.name == wanted]):
        if len(meant) > 1:
            two = f"{CELLS}/{meant[0].name} and {CELLS}/{meant[1].name}, of two forms of a study or of two studies"
            remedy = "run `consilium study run` again, which keeps what is the study's now, or move the older folder away"
            raise ConfigError(f"{shown(study, 200)}: {wanted} is two runs, {two}; {remedy}")
        return meant[0]
    known = sorted({cell.name for cell in done} - {""})
    raise ConfigError(f"{shown(path)}: which run of the study? Give {shown(study)}/ and one of: {join_names(known)}")


def join_names(names: list[str]) -> str:
    """Return names separated by commas, twenty at most."""
    return ", ".join(map(shown, names[:20])) + (f" and {len(names) - 20} more" if len(names) > 20 else "") or "none"


def earlier_cells(workspace: Path, study: str, present: Iterable[str]) -> list[Path]:
    """Return the folders of cells that neither a study, which now has those `present`, nor another one here has any more."""
    known = {*present, *(name for key, cells in _kept(workspace).items() if key != study for name in cells)}
    return [one for one in subfolders(workspace / CELLS) if one.name not in known and (one / "cell.json").is_file()]


def values_of_cell(folder: Path) -> str:
    """Return a study's run's values on all axes, as `method=IAT,seed=0`; "" for any other run."""
    return StudyCell(folder, _labels(folder)).name


def _labels(folder: Path) -> dict[str, str]:
    labels = read_json(folder / "cell.json").get("labels")
    return labels if isinstance(labels, dict) else {}


def _kept(workspace: Path) -> dict[str, dict[str, dict[str, str]]]:
    """Return what is kept of each study, the labels of its cells; without what is damaged or of a former version."""
    try:
        return _CELLS.validate_python(read_json(workspace / KEPT), strict=True)
    except ValidationError:
        return {}
