"""A finished run as a comparison reads it: settings, closing scores, curve, bytes, seconds, epsilon."""

import json
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from consilium.config.job import JobConfig, load_job
from consilium.config.site import SIMULATION
from consilium.errors import ConfigError
from consilium.messages import BYTES_DOWN, BYTES_UP, HELD_OUT, SPLITS, TRAIN_SECONDS, MetricKey, Stage
from consilium.report.compare.reading import Guaranteed, Simulated, read_as, read_record, read_results
from consilium.report.means import Results
from consilium.report.page.files import read_json
from consilium.report.progress import Line, ended
from consilium.report.runlog import roles_of, test_only
from consilium.schema import dotted
from consilium.strategies.strategy import Role
from consilium.tasks.registry import TASKS, Scores

Settings = Mapping[str, Any]
"""job.yaml by dotted field; a list is one value."""
Curve = Mapping[tuple[int, str], float]
"""A validation score by rounds done and site."""
MACHINE = ("python", "platform")
"""What versions.json says of where a run was, not of what it ran."""
POOLED = "centralized"
"""What joins a run of pooled data in place of its sites."""


@dataclass(frozen=True)
class Run:
    """A finished run. `bytes` and `seconds` of training, summed over sites and rounds; `sites`: all that took part.

    `rounds`: metrics by round, phase and site. `epsilon` at the job's delta, None where the run is not private. `trained`: how
    many parameters travel (SHARED), stay at a site (LOCAL) or do not train (FROZEN), None where the run does not tell.
    `pooled`: the data travelled instead. `labels`: of a study's cell, by axis; {} for a plain run.
    `test_only`: sites that did not train. `noted`: diagnostics by round and phase. `data`: of a study's cell, its folder of the
    data, and what tells their content from other, of all samples in `whole`; "" where there is none. `ended`: where and why its
    rounds have ended early. `content`: what tells each site's data from others, of a simulation. `base`: the SHA-256 of the
    frozen weights, "" where the package has them or nobody knows. `versions`: the digest of the `code` and packages' versions.
    """

    name: str
    folder: Path
    settings: Settings
    scores: Scores
    results: Results
    sites: frozenset[str]
    rounds: Mapping[tuple[int, int, str], Mapping[str, float]]
    epsilon: float | None
    trained: Mapping[Role, int] | None = None
    pooled: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    test_only: frozenset[str] = frozenset()
    noted: Mapping[tuple[int, int], Mapping[str, float]] = field(default_factory=dict)
    data: tuple[str, str] = ("", "")
    whole: str = ""
    ended: Mapping[str, Any] | None = None
    content: Mapping[str, str] = field(default_factory=dict)
    base: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def private(self) -> bool:
        """Whether its job is; its epsilon may still be unknown."""
        return bool(self.settings["privacy.unit"] != "none")

    @property
    def seed(self) -> int:
        """Of training; generated data follow it too."""
        return int(self.settings["training.seed"])

    @cached_property
    def split(self) -> str | None:
        """What was scored in the end: test where there is one; None where nothing was."""
        keys = {key.split for metrics in self.results.values() for name in metrics if (key := MetricKey.parse(name))}
        return next((split for split in reversed(SPLITS) if split in keys), None)

    @cached_property
    def metric(self) -> str:
        """The score that its task is judged by."""
        return self.scores.lead(key.metric for one in self.results.values() for name in one if (key := MetricKey.parse(name)))

    @property
    def bytes(self) -> float | None:
        """Of tensors, up and down; None where data travelled instead, or not all of it is on record."""
        if self.pooled or not self._records({BYTES_UP, BYTES_DOWN}):
            return None
        return known(sum(one.get(BYTES_UP, 0.0) + one.get(BYTES_DOWN, 0.0) for one in self.rounds.values()))

    @property
    def seconds(self) -> float | None:
        """Of the sites' training; None where not all of it is on record, as where sites keep their metrics."""
        told = self._records({TRAIN_SECONDS})
        return known(sum(one.get(TRAIN_SECONDS, 0.0) for one in self.rounds.values())) if told else None

    def _records(self, names: Set[str]) -> bool:
        """Tell whether every round is on record, and every result in it has these metrics."""
        trained = {place: one for place, one in self.rounds.items() if place[1] != HELD_OUT}
        last = self.ended["round"] if self.ended else self.settings["training.rounds"]
        return {round for round, *_ in trained} >= {*range(last)} and all(names <= one.keys() for one in trained.values())

    def score(self, site: str, stage: Stage, metric: str) -> float | None:
        """Return a closing score, which may not be finite; None where there is none."""
        return self.results.get(site, {}).get(str(MetricKey(self.split or "test", stage, metric)))

    def curve(self, stage: Stage, metric: str) -> Curve:
        """Return the validation scores: of the global model before a round's training, of the personalized one after it."""
        after, key, found = int(stage is Stage.PERSONALIZED), str(MetricKey("validation", stage, metric)), {}
        for (round, phase, site), metrics in sorted(self.rounds.items()):
            if key in metrics and (after or phase <= 0):
                found[round + after, site] = metrics[key]
        return found

    def held_out(self, metric: str) -> float | None:
        """Return a validation score of the global model over the sites that the last round did not ask to train, before it.

        None where all were asked, or none told it.
        """
        key, found = str(MetricKey("validation", Stage.GLOBAL, metric)), dict[int, list[float]]()
        for (round, phase, _), metrics in self.rounds.items():
            if phase == HELD_OUT and key in metrics:
                found.setdefault(round, []).append(metrics[key])
        return math.fsum(found[max(found)]) / len(found[max(found)]) if found else None


def read_run(folder: Path, name: str = "", labels: Mapping[str, str] | None = None) -> Run:
    """Return the finished run of a workspace. Raises ConfigError where it is none, has not ended or cannot be read."""
    if not (folder / "job.yaml").is_file():
        raise ConfigError(f"{folder}: holds no run (no job.yaml); give the folder of `simulate --workspace`")
    config = load_job(folder / "job.yaml", plugins=None)
    if not (folder / "results.json").is_file():
        raise ConfigError(f"{folder}: the run has not ended (no results.json); resume it")
    results, record = read_results(folder / "results.json"), read_record(folder / "metrics.jsonl")
    rounds, joined = _record(record)
    return Run(
        name or str(folder),
        folder,
        flat(config.model_dump(mode="json")),
        TASKS[config.task.name].scores(config.task),
        results,
        frozenset({*results, *joined} - {POOLED}),
        rounds,
        _epsilon(config, folder),
        _trained(config, folder, record),
        config.strategy.pools_data,
        labels or {},
        test_only(folder),
        _noted(record),
        ended=ended(folder),
        content=read_as(Simulated, folder / SIMULATION).content if (folder / SIMULATION).is_file() else {},
        base=_base(folder / "server" / "state.safetensors"),
        versions=_versions(folder / "versions.json"),
    )


def flat(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings by dotted field. A section that is absent has no kind: `privacy: null` is `privacy.unit: none`."""
    found = dotted(section)
    if "privacy" in found:
        found["privacy.unit"] = "none"
        del found["privacy"]
    return found


def known(value: float | None) -> float | None:
    """Return a number, None for one that is not finite."""
    return None if value is None or not math.isfinite(value) else value


def _record(lines: Sequence[Line]) -> tuple[dict[tuple[int, int, str], dict[str, float]], set[str]]:
    """Return the metrics by round, phase and site, and who took part or wanted to. What a resumption repeats counts once."""
    rounds: dict[tuple[int, int, str], dict[str, float]] = {}
    joined: set[str] = set()
    for event in lines:
        if event["event"] == "resumed":
            rounds = {place: one for place, one in rounds.items() if place[:2] < (event["round"], event["phase"])}
        elif event["event"] in ("result", "held_out"):
            rounds[event["round"], event.get("phase", HELD_OUT), event["site"]] = event["metrics"]
        elif event["event"] == "joined" or (event["event"] == "refused" and event.get("joining")):
            joined.add(event["site"])
    return rounds, joined


def _noted(lines: Sequence[Line]) -> dict[tuple[int, int], dict[str, float]]:
    """Return what a run has measured of itself, where it is a finite number; what a resumption repeats counts once."""
    told = {(one["round"], one["phase"]): one["values"] for one in lines if one["event"] == "diagnostics"}
    return {place: {name: value for name, value in one.items() if math.isfinite(value)} for place, one in told.items()}


def _epsilon(config: JobConfig, folder: Path) -> float | None:
    """Return what privacy.json says was guaranteed at the job's delta."""
    path = folder / "privacy.json"
    if config.privacy is None or not path.is_file():
        return None
    return read_as(Guaranteed, path).epsilon.get(f"{config.privacy.delta:g}")


def _trained(config: JobConfig, folder: Path, lines: Sequence[Line]) -> dict[Role, int] | None:
    """Return the parameters of each role as the run has recorded them, or of the adapter as the server's checkpoint has it.

    None where that does not hold all that trains: a decoder that its site keeps, in a run of before there was such a record.
    """
    recorded = next((line for line in lines if line["event"] == "parameters"), None)
    if recorded is not None:
        return {role: int(recorded[role.value]) for role in Role}
    return trained_parameters(config, folder / "server" / "state.safetensors")


def trained_parameters(config: JobConfig, path: Path) -> dict[Role, int] | None:
    """Return the parameters of each role, see `trained_tensors`."""
    found = trained_tensors(config, path)
    return None if found is None else {role: sum(size for one, size in found.values() if one is role) for role in Role}


def trained_tensors(config: JobConfig, path: Path) -> dict[str, tuple[Role, int]] | None:
    """Return role and size of each tensor in the first rounds, of the adapter as the server's checkpoint has it.

    None where that does not hold all that trains: a decoder that its site keeps.
    """
    if getattr(config.adapter, "decoder", "freeze") == "keep":
        return None
    sizes = _sizes(path)
    try:
        roles = roles_of(config.strategy, sizes)
    except ConfigError:  # a tensor that the server alone has
        return None
    return {name: (role, sizes[name]) for name, role in roles.items()} or None


def _versions(path: Path) -> dict[str, str]:
    """Return what versions.json says of code and packages; {} where it cannot be read: no score depends on it."""
    found = read_json(path)
    told = found.items() if isinstance(found, dict) else ()
    return {name: one for name, one in told if isinstance(one, str) and name not in MACHINE and one != "not installed"}


def _base(path: Path) -> str:
    """Return the SHA-256 of the frozen weights as the server's checkpoint notes it; "" where it does not."""
    try:
        with safe_open(path, framework="pt") as file:
            return str(json.loads((file.metadata() or {})["meta"]).get("checkpoint") or "")
    except (OSError, SafetensorError, KeyError, ValueError, AttributeError):
        return ""


def _sizes(path: Path) -> dict[str, int]:
    """Return the numbers of values of a checkpoint's adapter tensors; {} where there is none."""
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError):
        return {}
    return {name.partition("/")[2]: math.prod(s) for name, s in shapes.items() if name.startswith(("initial/", "shared/"))}
