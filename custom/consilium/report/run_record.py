"""RunRecord, by which pages, comparisons, result tables, studies and commands read a run's folder; and a study's cells.

Others may have written a run's files, and files may be damaged. `read_run` takes the valid files and notes the damaged ones.
`read_finished_run` refuses a run that has not ended or has a damaged file.
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from consilium.config.job import JobConfig, load_run_job
from consilium.config.site import SIMULATION
from consilium.core.errors import ConfigError
from consilium.core.grouping import group_by_key
from consilium.core.messages import BYTES_DOWN, BYTES_UP, HELD_OUT, SPLITS, TRAIN_SECONDS, TRAIN_STEPS, MetricKey, Stage
from consilium.core.registry import Plugins, installed_version
from consilium.core.sanitize import first_names_text, shown
from consilium.core.schema import flatten_settings
from consilium.core.storage import make_private_folder, write_atomic
from consilium.report.untrusted_files import Line, Number, read_events, read_json, read_plain, strict_model, subfolders
from consilium.strategies.strategy import Role, Strategy
from consilium.tasks.registry import TASKS, Scores

Results = Mapping[str, Mapping[str, float]]
"""Metrics of the final evaluation by site."""
Curve = dict[int, float]
"""A measure, by the number of rounds done."""
OWNER = "owner.json"
"""A file in each run's folder of a startup kit, at the server and at a site. A simulation has none."""
PACKAGES = (
    "consilium", "nvflare", "torch", "transformers", "monai", "peft", "opacus", "segment-anything", "safetensors", "numpy"
)  # fmt: skip
"""Packages in versions.json. Other names there are MACHINE, the code's digest and plug-ins' packages."""
MACHINE = ("python", "platform")
"""Fields of versions.json that describe the machine, not the code."""
POOLED = "centralized"
"""The name of the one participant in a run on pooled data."""


_FILES: dict[str, TypeAdapter[Any]] = {
    "results.json": TypeAdapter(dict[str, dict[str, Number]]),
    # epsilon is inf if the noise multiplier is 0
    "privacy.json": TypeAdapter(strict_model("privacy", {"epsilon": (dict[str, Annotated[float, Field(ge=0)]], {})})),
    SIMULATION: TypeAdapter(strict_model("simulation", {"content": (dict[str, str], {})})),
}


@dataclass(frozen=True)
class RunRecord:
    """A run, finished or not, as its files describe it.

    `settings`: job.yaml by dotted field. `lines`: the events of metrics.jsonl; those that a resumed run repeats are there once.
    `results`: None before the end. `content`: of a simulation, a digest of each site's data. `damaged`: names of files with
    values that no run writes. `lost_lines`: number of damaged lines in metrics.jsonl.

    A study's cell also has `labels`, its value on each axis; `data`, the data's folder and a digest of the samples that it
    reads; and `whole`, a digest of all samples. Unknown ones are "".
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

    def lines_of(self, *events: str) -> Iterator[Line]:
        """Yield the lines of these events."""
        return (line for line in self.lines if line["event"] in events)

    @property
    def seed(self) -> int:
        """The seed of training, and of generated data."""
        return int(self.settings["training.seed"])

    @property
    def is_private(self) -> bool:
        """Whether the job asks for differential privacy. The epsilon may be unknown even so."""
        return bool(self.settings["privacy.unit"] != "none")

    @property
    def is_pooled(self) -> bool:
        """Whether the run trained on all sites' data in one place, so that no updates were sent."""
        return self.config.strategy.traits.pools_data

    @cached_property
    def sites(self) -> frozenset[str]:
        """Sites that took part, and sites that were refused when they joined."""
        joined = {line["site"] for line in self.lines if "site" in line and (line["event"] != "refused" or line.get("joining"))}
        return frozenset({*joined, *(self.results or ())} - {POOLED})

    @cached_property
    def test_only(self) -> frozenset[str]:
        """Sites that only test. They are in no mean."""
        return frozenset(line["site"] for line in self.lines_of("joined") if line.get("test_only") is True)

    @cached_property
    def seeded_sites(self) -> list[str]:
        """Sites whose noise came from a seed, so that their privacy promise is void."""
        return sorted({line["site"] for line in self.lines_of("joined") if line.get("seeded") is True})

    @cached_property
    def early_end(self) -> Line | None:
        """The event that says at which round and why the run ended early; None if it did not."""
        return next(self.lines_of("ended"), None)

    @property
    def rounds_before_final_evaluation(self) -> int:
        """The planned rounds, or the round in which early stopping ended the run."""
        return int(self.early_end["round"] if self.early_end else self.settings["training.rounds"])

    @cached_property
    def unscored(self) -> dict[str, str]:
        """Sites without final scores because they were refused in the final evaluation, each with the reason."""
        scored = {line["site"] for line in self.lines_of("final") if line["round"] >= self.rounds_before_final_evaluation}
        refused = [
            one
            for one in self.lines_of("refused")
            if one["round"] >= self.rounds_before_final_evaluation and not one.get("joining")
        ]
        return {line["site"]: line["reason"] for line in refused if line["site"] not in scored}

    @cached_property
    def latest_scores(self) -> Results:
        """The final scores by site. Before the end of the run, the last scores on validation data."""
        found: dict[str, dict[str, float]] = {}
        for line in self.lines_of("result", "final"):
            found.setdefault(line["site"], {}).update({n: v for n, v in line["metrics"].items() if MetricKey.parse(n)})
        return found if self.results is None else self.results

    @cached_property
    def split(self) -> str | None:
        """The split that was scored: test if any site has test scores, else validation; None without scores."""
        return split_of(self.latest_scores)

    @cached_property
    def metric(self) -> str:
        """The leading score of the task, among those reported."""
        return self.scores.leading_name(
            key.metric for one in self.latest_scores.values() for name in one if (key := MetricKey.parse(name))
        )

    def score(self, site: str, stage: Stage, metric: str) -> float | None:
        """Return a final score, which may be NaN; None if the site has none."""
        return self.latest_scores.get(site, {}).get(str(MetricKey(self.split or SPLITS[-1], stage, metric)))

    def curves(self, metric: str, after_training: bool) -> dict[str, Curve]:
        """Return a metric by site and number of rounds done. `after_training`: measured after a round's training."""
        found: dict[str, Curve] = {}
        for (round, phase, site), metrics in sorted(self.round_metrics.items()):
            if (value := finite_score(metrics.get(metric))) is not None and (after_training or phase <= 0):
                found.setdefault(site, {})[round + after_training] = value
        return found

    def validation_curves(self, stage: Stage, metric: str = "") -> dict[str, Curve]:
        """Return each site's validation scores of a model, by the number of rounds that the model was trained.

        `metric`: by default the leading score. The last point belongs to the model that the final evaluation scores.
        """
        name = str(MetricKey("validation", stage, metric or self.metric))
        found = self.curves(name, stage is Stage.PERSONALIZED)
        for line in self.lines_of("final"):
            if line["site"] in found and (value := finite_score(line["metrics"].get(name))) is not None:
                found[line["site"]][self.rounds_before_final_evaluation] = value
        return found

    def held_out_score(self, metric: str) -> float | None:
        """Return the mean validation score of the sites that the last round did not ask to train, taken before that round.

        None if there is no such score.
        """
        key, items = str(MetricKey("validation", Stage.GLOBAL, metric)), self.round_metrics.items()
        found = group_by_key((round, one[key]) for (round, phase, _), one in items if phase == HELD_OUT and key in one)
        return math.fsum(found[max(found)]) / len(found[max(found)]) if found else None

    @cached_property
    def round_metrics(self) -> dict[tuple[int, int, str], Mapping[str, float]]:
        """Metrics by round, phase and site."""
        answers = self.lines_of("result", "held_out")
        return {(one["round"], one.get("phase", HELD_OUT), one["site"]): one["metrics"] for one in answers}

    @cached_property
    def diagnostics(self) -> dict[tuple[int, int], dict[str, float]]:
        """The finite diagnostics of the run, such as drift, by round and phase."""
        found = {(one["round"], one["phase"]): one["values"] for one in self.lines_of("diagnostics")}
        return {place: {name: v for name, v in one.items() if math.isfinite(v)} for place, one in found.items()}

    def total(self, *names: str) -> float | None:
        """Return the sum of metrics over all sites and training rounds; None unless every result of every round has them."""
        trained = {place: one for place, one in self.round_metrics.items() if place[1] != HELD_OUT}
        if not {round for round, *_ in trained} >= {*range(self.rounds_before_final_evaluation)}:
            return None
        return finite_score(sum(one.get(name, math.nan) for one in trained.values() for name in names))

    @property
    def bytes(self) -> float | None:
        """Bytes of tensors sent up and down; None for a run on pooled data, and if not all of them are on record."""
        return None if self.is_pooled else self.total(BYTES_UP, BYTES_DOWN)

    @property
    def training_seconds(self) -> float | None:
        """Seconds of training, summed over sites; None if not all of them are on record."""
        return self.total(TRAIN_SECONDS)

    @cached_property
    def steps(self) -> list[float]:
        """A site's optimizer steps by the number of rounds done, mean over the sites; [] if not all of them are on record."""
        trained = {place: one for place, one in self.round_metrics.items() if place[1] != HELD_OUT}
        if not trained or self.total(TRAIN_STEPS) is None:
            return []
        made = [0.0] * (1 + max(round + 1 for round, *_ in trained))
        for (round, *_), one in trained.items():
            made[round + 1] += one[TRAIN_STEPS]
        return [sum_ / len({site for *_, site in trained}) for sum_ in itertools.accumulate(made)]

    @cached_property
    def epsilon(self) -> float | None:
        """The epsilon guaranteed at the job's delta; None if the run is not private or the epsilon is not on record."""
        private = self.config.privacy
        return None if private is None else (self.privacy or {"epsilon": {}})["epsilon"].get(f"{private.delta:g}")

    @cached_property
    def parameter_counts(self) -> dict[Role, int] | None:
        """Numbers of shared, local and frozen parameters, by role; None if they are not on record."""
        recorded = next(self.lines_of("parameters"), None)
        return None if recorded is None else {role: recorded[role.value] for role in Role}

    @cached_property
    def base(self) -> str:
        """The SHA-256 of the frozen weights, from the server's state; "" if it is unknown or the package has the weights."""
        path = self.folder / "server" / "state.safetensors"
        try:
            with safe_open("" if path.is_symlink() else path, framework="np") as file:
                meta = json.loads((file.metadata() or {}).get("meta", "{}"))
        except (OSError, SafetensorError, ValueError, RecursionError):
            return ""
        return str(meta.get("checkpoint") or "") if isinstance(meta, dict) else ""


def job_of(folder: Path, plugins: Plugins = None) -> JobConfig:
    """Return the job in a run's or an adapter's folder. Raises ConfigError; it names a plug-in's package that is missing."""
    try:
        return load_run_job(folder, plugins)
    except ConfigError:
        places = [folder.absolute(), *folder.absolute().parents][:5]  # RUN/sites/NAME/adapters/WHICH
        versions = next((found for place in places if (found := read_json(place / "versions.json"))), {})
        own = [name for name in versions if name not in (*PACKAGES, *MACHINE, "code") and not installed_version(name)]
        if not own:
            raise
        named = ", ".join(f"{shown(name, 80)} {shown(versions[name], 40)}" for name in own)
        raise ConfigError(
            f"{folder}: the run is of another package's kind: {named}, which is not installed here; install it"
        ) from None


def read_run(folder: Path, name: str = "", labels: Mapping[str, str] | None = None) -> RunRecord:
    """Return the run in a folder, without damaged files. Raises ConfigError if the folder holds no run."""
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
    settings = flatten_settings(config.model_dump(mode="json"))
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


def read_finished_run(folder: Path, name: str = "", labels: Mapping[str, str] | None = None) -> RunRecord:
    """Return the finished run in a folder. Raises ConfigError if there is none, it has not ended, or a file is damaged."""
    found = read_run(folder, name, labels)
    if (linked := folder / "results.json").is_symlink():
        raise ConfigError(f"{linked}: is a link, which may lead anywhere; put the file itself there")
    if found.results is None and "results.json" not in found.damaged:
        raise ConfigError(f"{folder}: the run has not ended (no results.json); resume it")
    if found.damaged:
        raise ConfigError(f"{folder / min(found.damaged)}: is damaged; delete its folder and run the job anew")
    return found


def is_simulation(folder: Path) -> bool:
    """Tell whether a run's folder is from a simulation, so that it has the sites' own folders. A startup kit's never is."""
    return (folder / SIMULATION).is_file() and not (folder / OWNER).exists() and not (folder / OWNER).is_symlink()


def split_of(results: Results) -> str | None:
    """Return the split that was scored: test if any site has test scores, else validation; None without scores."""
    keys = {key.split for metrics in results.values() for name in metrics if (key := MetricKey.parse(name))}
    return next((split for split in reversed(SPLITS) if split in keys), None)


def unit_of(task: Mapping[str, Any]) -> str:
    """Return the word for a unit that gets a score: image, volume, patient or record. `task`: the section of the job."""
    if (per := dict(task.get("scores") or {}).get("per")) in ("image", "volume", "patient"):
        return str(per)
    return "record" if task.get("name") in ("language", "report") else "image"


def finite_score(value: float | None) -> float | None:
    """Return the value if it is a finite number, else None."""
    return None if value is None or not math.isfinite(value) else value


def roles_of(strategy: Strategy, names: Iterable[str]) -> dict[str, Role]:
    """Return each tensor's role: shared if any round shares it, else local if any round trains it, else frozen.

    The rounds looked at are those of the strategy's role schedule from round 1 on.
    """
    places = strategy.traits.phase_schedule(1, len(strategy.traits.phases))
    all_of = {name: {strategy.role(name, *place) for place in places} for name in names}
    return {name: next(r for r in (Role.SHARED, Role.LOCAL, Role.FROZEN) if r in found) for name, found in all_of.items()}


# study cells -----------------------------------------------------------------------------------------------------------
# The list of the cells that the study in a workspace has now. `study run` writes it; reports, comparisons and `use` read it.

CELLS, LIST = "cells", "study.json"
RUNS = Path("runs/studies")
"""The folder of the studies' workspaces, unless --workspace gives another."""


@dataclass(frozen=True)
class StudyCell:
    """A cell of a study: its folder, and its value on each axis."""

    folder: Path
    labels: Mapping[str, str]

    @property
    def name(self) -> str:
        """Its value on each axis, as in `method=IAT,seed=0`; "" for a cell without labels."""
        return ",".join(f"{shown(axis)}={shown(value)}" for axis, value in self.labels.items())


def save_cells(workspace: Path, cells: Mapping[str, Mapping[str, str]]) -> None:
    """Save the labels of a study's cells, by folder, in the study's order."""
    write_atomic(make_private_folder(workspace) / LIST, json.dumps(dict(cells), indent=1).encode())


def study_cells(workspace: Path) -> list[StudyCell]:
    """Return the cells of the study in a workspace that have begun. Without a valid list, return all cells."""
    there = {one.name: one for one in subfolders(workspace / CELLS)}
    try:
        labels = TypeAdapter(dict[str, dict[str, str]]).validate_python(read_json(workspace / LIST), strict=True)
    except ValidationError:
        labels = {}
    return [StudyCell(there[name], labels[name]) for name in labels if name in there] or list(map(stored_cell, there.values()))


def cell_folder(path: Path) -> Path:
    """Return the folder of the cell that a path STUDY/AXIS=VALUE,AXIS=VALUE names; any other path is returned unchanged.

    STUDY is a workspace, or a study's file. Raises ConfigError, with a list of the finished cells, if the path names a study
    only, or no cell or two cells fit.
    """
    if path.parent.is_file():
        path = RUNS / path.parent.stem / path.name
    study = path if (path / CELLS).is_dir() and not (path / "job.yaml").exists() else path.parent
    if (path.exists() and study != path) or not (study / CELLS).is_dir():
        sized = [one for one in (Path(f"{study}-small"), Path(f"{study}-smoke")) if (one / CELLS).is_dir()]
        if sized and not path.exists():
            places = " or ".join(shown(one / path.name, 200) for one in sized)
            raise ConfigError(f"{shown(path, 200)}: no such run; a smaller size has its own folder; if it ran, give {places}")
        return path
    done = [cell for cell in study_cells(study) if (cell.folder / "results.json").is_file()]
    wanted = "" if study == path else ",".join(part.strip() for part in path.name.split(","))
    meant = [cell.folder for cell in done if wanted and cell.name == wanted]
    if len(meant) == 1:
        return meant[0]
    if meant:
        folders = " and ".join(f"{CELLS}/{one.name}" for one in meant)
        raise ConfigError(f"{shown(study, 200)}: {wanted} is the name of {folders}; give the folder of one")
    known = sorted({cell.name for cell in done} - {""})
    raise ConfigError(f"{shown(path)}: which run of the study? Give {shown(study)}/ and one of: {join_names(known)}")


def join_names(names: list[str]) -> str:
    """Return at most twenty names separated by commas, and the number of the others; "none" for no names."""
    return first_names_text([shown(name) for name in names], 20) or "none"


def orphaned_cells(workspace: Path, present: Iterable[str]) -> list[Path]:
    """Return the folders of cells that are not among the `present` ones, because the study has changed."""
    known = set(present)
    return [one for one in subfolders(workspace / CELLS) if one.name not in known and (one / "cell.json").is_file()]


def stored_cell(folder: Path) -> StudyCell:
    """Return the cell in a folder by its own record; without labels for a run of no study."""
    labels = read_json(folder / "cell.json").get("labels")
    return StudyCell(folder, labels if isinstance(labels, dict) else {})
