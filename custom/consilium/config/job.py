"""The schema of job.yaml, its loading with overrides, and checks across sections, whose errors name field, value and remedy."""

import hashlib
import json
import os
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import Field, model_validator

from consilium.adapters.registry import ADAPTERS, AdapterConfig, AdapterKind
from consilium.config.data import PHANTOMS, DataConfig
from consilium.config.privacy import (
    MOST_WEIGHT,
    DpSgdConfig,
    PrivacyConfig,
    SecureAggregationConfig,
    SiteLevelDpConfig,
    check_masked,
    check_records_independent,
    check_shares,
)
from consilium.config.run_sections import (
    CrossSiteConfig,
    DiagnosticsConfig,
    FederationConfig,
    ServerConfig,
    StatisticsConfig,
    TrainingConfig,
)
from consilium.core.errors import ConfigError, raise_first
from consilium.core.registry import NO_PLUGINS, KindField, Plugins
from consilium.core.sanitize import shown
from consilium.core.schema import SMALLEST_NOISE, Loader, Name, Section, did_you_mean, read_yaml, validate
from consilium.data.settings import DEFAULTS, PictureSettings
from consilium.models.architecture import refuse_adapter, refuse_gguf
from consilium.models.registry import MODELS, ModelConfig
from consilium.strategies.registry import STRATEGIES
from consilium.strategies.strategy import Strategy
from consilium.tasks.registry import TASKS, TaskConfig


class JobConfig(Section):
    """A whole job: server and sites read the same file."""

    name: Annotated[Name, Field(description="the job's name, also of its folder")]
    experiment: Annotated[Name | None, Field(description="the name of one run of the job; given at submission")] = None
    strategy: Annotated[
        Strategy, KindField(STRATEGIES, "name"), Field(description="the federated algorithm; a name alone uses its defaults")
    ]
    model: Annotated[ModelConfig, KindField(MODELS, "name", "sam"), Field(description="the frozen model that is adapted")]
    adapter: Annotated[
        AdapterConfig,
        KindField(ADAPTERS, "kind", "lora"),
        Field(default={}, validate_default=True, description="the trained part of the model"),
    ]
    task: Annotated[
        TaskConfig, KindField(TASKS, "name", "segmentation"), Field(description="what the model learns, and how it is scored")
    ]
    data: Annotated[DataConfig, Field(description="generated data, or the name of the sites' data set")] = DataConfig()
    training: Annotated[TrainingConfig, Field(description="local training")]
    federation: Annotated[FederationConfig, Field(description="participation of sites, weights and time limits")] = (
        FederationConfig()
    )
    server: Annotated[
        ServerConfig | None, Field(description="the kind of mean of the sites' updates, and the server's optimizer")
    ] = None
    privacy: Annotated[
        PrivacyConfig | None, Field(description="differential privacy; without it shared tensors leave without noise")
    ] = None
    secure_aggregation: Annotated[
        SecureAggregationConfig | None, Field(description="sites mask their updates, so that the server learns only their sum")
    ] = None
    statistics: Annotated[
        StatisticsConfig | None, Field(description="counts that every site is asked for once before the first round")
    ] = None
    cross_site: Annotated[
        CrossSiteConfig | None, Field(description="score the models of a finished run at every site; no training")
    ] = None
    diagnostics: Annotated[DiagnosticsConfig, Field(description="measurements in addition to the scores")] = DiagnosticsConfig()

    @property
    def digest(self) -> str:
        """The SHA-256 of all settings except the number of rounds, so that a run may be resumed with more rounds.

        Fields are in the order of their declaration. In maps, such as `task.classes`, the order in job.yaml counts.
        """
        settings = self.model_dump(mode="json")
        del settings["training"]["rounds"]
        for section, fields in TASKS[self.task.name].undigested.items():
            for name in [name for name, value in fields.items() if settings["task"][section][name] == value]:
                del settings["task"][section][name]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    @property
    def trains(self) -> bool:
        """Whether the job trains: it is neither statistics only nor a cross-site evaluation."""
        return self.cross_site is None and (self.statistics is None or not self.statistics.only)

    @property
    def dpsgd(self) -> DpSgdConfig | None:
        """The privacy section if it asks for DP-SGD (by records or patients), else None."""
        return None if isinstance(self.privacy, SiteLevelDpConfig) else self.privacy

    @property
    def title(self) -> str:
        """The job's name in tables, ledgers and views. With calibration paper the name says so."""
        paper = self.privacy is not None and self.privacy.calibration == "paper"
        return f"{self.name} (calibration: paper)" if paper else self.name

    @property
    def packages(self) -> dict[str, str]:
        """The plug-in packages of the job's strategy, model, task and adapter: their versions by name."""
        named = (
            (STRATEGIES, self.strategy.name),
            (MODELS, self.model.name),
            (TASKS, self.task.name),
            (ADAPTERS, self.adapter.kind),
        )
        return dict(sorted(registry.packages[name] for registry, name in named if name in registry.packages))

    @property
    def adapter_kind(self) -> AdapterKind:
        """The adapter's kind; the variant with room for frozen ranks if the strategy sends them."""
        kind = ADAPTERS[self.adapter.kind]
        return kind.tailed if self.strategy.traits.sends_frozen_ranks and kind.tailed else kind

    @property
    def weighting(self) -> str:
        """How updates are weighted: `federation.weighting`, or its default.

        The default is `uniform` under site-level DP and under DP with secure aggregation, because a weight would reveal the
        data size. It is also `uniform` for a median or trimmed mean, which counts every site once. Otherwise it is `samples`.
        """
        private = self.privacy is not None and (self.privacy.unit == "site" or self.secure_aggregation is not None)
        robust = self.server is not None and self.server.is_robust
        return self.federation.weighting or ("uniform" if private or robust else "samples")

    def weight(self, num_samples: int) -> int:
        """Return the weight in the mean for a site that reports `num_samples` samples."""
        most = self.federation.max_weight
        return 1 if self.weighting == "uniform" else num_samples if most is None else min(num_samples, most)

    @property
    def max_masked_weight(self) -> int:
        """The largest weight of a masked update."""
        return 1 if self.weighting == "uniform" else self.federation.max_weight or MOST_WEIGHT

    @property
    def has_sums_without_noise(self) -> bool:
        """Whether the server receives masked sums without sufficient noise. Then only the same hospitals may be summed again.

        That includes `trust: central`, where the server adds its noise later, and `calibration: paper`, whose epsilon is not
        meaningful.
        """
        privacy = self.privacy
        if self.secure_aggregation is None:
            return False
        if privacy is None or privacy.trust == "central" or privacy.calibration == "paper":
            return True
        return privacy.noise_multiplier is not None and privacy.noise_multiplier < SMALLEST_NOISE

    @model_validator(mode="after")
    def _check_cross_site(self) -> Self:
        """Raise ValueError for a cross-site job that would send private models, or whose strategy pools the data."""
        if self.cross_site is None:
            return self
        name, sent = self.strategy.name, self.cross_site.personalized
        problems = {
            f"cross_site: strategy {name!r} has one pooled site; use consilium evaluate": self.strategy.traits.pools_data,
            "cross_site.personalized: true: a personalized model holds what no noise covers, so none is sent in a job with "
            "privacy; use false": sent and self.privacy is not None,
            "cross_site.personalized: true: a personalized model less what all sites were sent is an update without its mask; "
            "use false": sent and self.secure_aggregation is not None,
        }
        raise_first(problems, ValueError)
        return self

    @model_validator(mode="after")
    def _check_privacy(self) -> Self:
        privacy, share, most = self.privacy, self.federation.fraction_train, self.data.most_training
        adds_noise = privacy is not None and privacy.unit == "site" and privacy.trust == "local"
        noise_apart = privacy is None or privacy.trust == "local"
        problems = {
            "diagnostics.noise: true measures the noise that sites add (privacy.unit site, trust local)": (
                self.diagnostics.noise and not adds_noise
            ),
            "diagnostics.deviation: true compares single sites' updates, which have no noise of their own under this "
            "privacy.trust; use trust local, or false": self.diagnostics.deviation and not noise_apart,
        }
        raise_first(problems, ValueError)
        if self.secure_aggregation is not None:
            check_masked(self.strategy, self.server, self.diagnostics, privacy, self.federation)
        problems = {
            f"federation.fraction_train: {share}: without privacy sums over other sites in other rounds would show single "
            "ones; use 1": self.has_sums_without_noise and share < 1,
            f"data.most_training: {most} and the same with one sample more would tell a patient's values by statistics; remove "
            "one of them": self.statistics is not None and most is not None,
        }
        raise_first(problems, ValueError)
        if privacy is None:
            return self
        patience = self.training.validation.patience
        problems = {
            f"training.validate.patience: {patience} would let validation scores, which no noise covers, choose the round; "
            "leave it out of a job with privacy": patience > 0,
            "diagnostics: leakage and oracle look at what privacy keeps at the site; remove them": (
                self.diagnostics.reads_site_tensors
            ),
            "federation.weighting: 'samples' with privacy.unit site would leak data sizes; use uniform": (
                privacy.unit == "site" and self.weighting != "uniform"
            ),
        }
        raise_first(problems, ValueError)
        if privacy.trust == "distributed":
            check_shares(privacy, self.secure_aggregation, self.training, self.server)
        if self.dpsgd is not None:
            check_records_independent(self.dpsgd, self.data, self.training, self.adapter, self.model, self.task)
        return self

    @model_validator(mode="after")
    def _check_robust_mean(self) -> Self:
        """Raise ValueError for a robust mean together with weights or with privacy whose noise is made for the sum."""
        if self.server is None or not self.server.is_robust:
            return self
        mean, most = self.server.mean, self.federation.max_weight
        once = f"with server.mean {mean!r}, which counts sites once; leave it out"
        trust = None if self.privacy is None else self.privacy.trust
        problems = {
            f"federation.weighting: 'samples' {once}": self.federation.weighting == "samples",
            f"federation.max_weight: {most} {once}": most is not None,
            f"privacy.trust: {trust!r}: server.mean {mean!r} sees every site's update, and noise on their sum is made for the "
            "mean; use local": trust not in (None, "local"),
        }
        raise_first(problems, ValueError)
        return self

    @model_validator(mode="after")
    def _check_task_and_data(self) -> "JobConfig":
        wanted = MODELS[self.model.name].task
        if wanted != self.task.name and self.model.name not in TASKS[self.task.name].models:
            raise ValueError(f"task.name: {self.task.name!r} does not fit model.name {self.model.name!r}; expected {wanted!r}")
        if isinstance(self.task, PictureSettings) and MODELS[self.model.name].tokenizer is not None:
            for name in PictureSettings.model_fields:
                if name in self.task.model_fields_set and (value := getattr(self.task, name)) != getattr(DEFAULTS, name):
                    what = f"is for pictures, and model.name {self.model.name!r} reads texts; leave it out"
                    raise ValueError(f"task.{name}: {value!r} {what}")
        packed = getattr(self.task, "packed", False)
        kind = self.data.phantoms.kind if self.data.phantoms else ""
        made_for = PHANTOMS.get(kind, self.task.name)
        problems = {
            "task.packed: true needs a llama, mistral or qwen without a shorter sliding window, and a strategy that looks at "
            "no features; use false": packed and (not self.model.supports_packing() or self.strategy.traits.parts),
            f"data.phantoms.kind: {kind!r} does not fit task.name {self.task.name!r}; it is for {made_for}": (
                made_for != self.task.name
            ),
            f"data.phantoms.kind: {kind!r} are pictures, and the model's config says no image_side; add it there, or give "
            "sites data lists": kind and made_for != "language" and not self.model.image_side,
        }
        raise_first(problems, ValueError)
        return self


def load_job(
    path: Path, overrides: Mapping[str, Any] | None = None, plugins: Plugins = NO_PLUGINS, author: bool = False
) -> JobConfig:
    """Return the validated job from a job.yaml, or from the one inside a job folder.

    `overrides` maps dotted fields, such as "training.lr", to values that replace the file's before validation. `plugins`: the
    packages whose strategies, models, tasks and adapters the job may name, see core/registry.py. `author`: the caller owns the
    file, so it may name a model's config.json by path, see embed_architecture. Raises ConfigError with one line per
    problem.
    """
    path = job_file(path)
    try:
        return make_job(read_yaml(path), path, overrides, plugins, author)
    except ConfigError as error:
        lines = str(error).split("\n")
        for field in overrides or ():  # a line on an overridden field begins with --set instead of the file
            of_field = tuple(f"{path}: {field}{end}" for end in (":", "."))
            lines = [f"--set: {line.removeprefix(f'{path}: ')}" if line.startswith(of_field) else line for line in lines]
        raise ConfigError("\n".join(lines), error.reason, error.told) from None


def load_run_job(folder: Path, plugins: Plugins = NO_PLUGINS) -> JobConfig:
    """Return the job from the job.yaml that a run wrote into its folder.

    Fields that the file lacks get the defaults of the version that wrote it, where a task's defaults have changed since.
    """
    path = job_file(folder / "job.yaml")
    raw = read_yaml(path)
    task = raw.get("task") if isinstance(raw, dict) else None
    if isinstance(task, dict) and (name := task.get("name")) in list(TASKS):
        raw["task"] = TASKS[name].with_former_defaults(task)
    return make_job(raw, path, None, plugins)


def make_job(raw: Any, path: Path, overrides: Mapping[str, Any] | None, plugins: Plugins, author: bool = False) -> JobConfig:
    """Return the validated job from `raw`, the parsed file `path`, which is not changed. See load_job for the arguments."""
    if isinstance(raw, Mapping) and {"base", "axes"} <= raw.keys():
        base = shown(os.path.normpath(path.parent / str(raw["base"])))
        values = "; its `set:` values go to --set" if raw.get("set") else ""
        raise ConfigError(f"{path}: is a study's file, not a job; give its base job instead, {base}{values}")
    raw = deepcopy(raw)
    kinds = {name: mark for name, field in JobConfig.model_fields.items() for mark in field.metadata}
    apply_overrides(raw, overrides or {}, path, {name: mark.key for name, mark in kinds.items() if isinstance(mark, KindField)})
    if author:
        embed_architecture(raw, path)
    config = validate(JobConfig, raw, path, plugins)
    if author:  # settings without effect are errors for a job's author only, so a finished run with one can still be read
        if config.model.checkpoint and "${SITE}" not in config.model.checkpoint:
            refuse_adapter(Path(config.model.checkpoint), f"{path}: model.checkpoint")
        training, most = config.training, config.federation.max_weight
        problems = {
            f"{path}: training.momentum: {training.momentum} is of optimizer sgd, not {training.optimizer}; use sgd, or "
            "momentum 0": training.momentum and training.optimizer != "sgd",
            f"{path}: federation.max_weight: {most} bounds weights, and every site counts once here; use null": (
                most is not None and config.weighting == "uniform"
            ),
        }
        raise_first(problems)
    return config


def job_file(path: Path) -> Path:
    """Return the path of the job.yaml in a job folder, or `path` if it is a file. Raises ConfigError if there is none."""
    candidates = [path] if path.is_file() else [path / "app/config/job.yaml", path / "job.yaml"]
    found = next((c for c in candidates if c.is_file()), None)
    if found is None:
        remedy = "`consilium init FOLDER` writes those of the package into FOLDER/jobs"
        near = did_you_mean(path.name, [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else [])
        raise ConfigError(f"{path}: no job.yaml there{near}; give a job folder or a job.yaml; {remedy}")
    return found


# overrides --------------------------------------------------------------------------------------------------------------
# `--set FIELD=VALUE`: values that replace those of a file before it is validated.


def parse_override(override: str) -> tuple[str, Any]:
    """Return (field, value) from a text KEY=VALUE. Raises ConfigError for other texts."""
    key, separator, value = override.partition("=")
    if not separator or not all(key.split(".")):
        raise ConfigError(f"--set: {override!r} is not KEY=VALUE; write for example --set training.lr=0.001")
    try:
        return key, yaml.load(value, Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
        raise ConfigError(f"--set: {override[:80]!r}: the value is not valid YAML ({why}); put text in quotes") from None


def apply_overrides(raw: Any, overrides: Mapping[str, Any], path: Path, keys: Mapping[str, str]) -> None:
    """Write `overrides`, by dotted field, into `raw`, the parsed file `path`. Raises ConfigError for an unknown section.

    `keys`: for each section that may be written as the name of its kind alone, the key of that name (strategy -> name).
    """
    # Refuse a rank that is set without alpha, because alpha / rank would change silently.
    adapter = raw.get("adapter") if isinstance(raw, dict) else None
    alone = "adapter.rank" in overrides and not {"adapter", "adapter.alpha"} & overrides.keys()
    if alone and isinstance(adapter, dict) and "alpha" in adapter and overrides["adapter.rank"] != adapter.get("rank"):
        raise ConfigError(
            f"{path}: adapter.rank: {overrides['adapter.rank']}: the file has alpha {adapter['alpha']}, and alpha / rank "
            "scales the adapter; set adapter.alpha too (equal to the rank scales by 1), or take it out of the file"
        )
    for field, value in overrides.items():
        *sections, last = field.split(".")
        place = raw
        for section in sections:
            if not isinstance(place, dict):
                break
            if place.get(section) is None:
                place[section] = {}
            elif section in keys and isinstance(place[section], str):
                place[section] = {keys[section]: place[section]}
            place = place[section]
        if not isinstance(place, dict):
            raise ConfigError(f"--set: {field}: there is no section above it; check the field's name")
        place[last] = value


# config.json ------------------------------------------------------------------------------------------------------------
# The path of a model's config.json in a job is replaced by the file's contents.

LARGEST_CONFIG = 2**20
"""The largest config.json in bytes. Published ones have a few thousand."""


def embed_architecture(raw: Any, job: Path) -> bool:
    """Replace a path in `model.config` of `raw`, the parsed file `job`, by the contents of that config.json.

    The path of the file or its folder is relative to the folder of job.yaml. This is done only on the machine of the job's
    author: a site or server refuses a path and opens no file. Returns whether there was a path. Raises ConfigError;
    CheckpointError for an adapter or a GGUF file.
    """
    model = raw.get("model") if isinstance(raw, dict) else None
    named = model.get("config") if isinstance(model, dict) else None
    if not isinstance(named, str) or not named:
        return False
    path = job.parent / named
    refuse_adapter(path, f"{job}: model.config")
    refuse_gguf(path, f"{job}: model.config")
    path = path / "config.json" if path.is_dir() else path
    try:
        if not path.is_file():
            raise FileNotFoundError(2, "no such file")
        with path.open("rb") as file:
            text = file.read(LARGEST_CONFIG + 1)
        found = json.loads(text.decode("utf-8")) if len(text) <= LARGEST_CONFIG else None
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else "no valid JSON"
        raise ConfigError(
            f"{job}: model.config: {named!r}: {why}; name a transformers folder or its config.json, by an absolute path or one "
            "from job.yaml's folder"
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(
            f"{job}: model.config: {named!r}: no map of at most {LARGEST_CONFIG} bytes; name a model's config.json"
        )
    raw["model"]["config"] = found
    return True


def read_job_bytes(job: Path) -> bytes:
    """Return the contents of the file `job`, with the config.json inserted if the job names one by path. Raises ConfigError."""
    raw = read_yaml(job)
    return yaml.safe_dump(raw, sort_keys=False).encode() if embed_architecture(raw, job) else job.read_bytes()
