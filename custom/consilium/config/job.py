"""The schema of job.yaml, its loading, and checks across sections, whose errors name file, field, value and remedy."""

import hashlib
import json
import os
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from consilium.adapters.registry import ADAPTERS, AdapterConfig, AdapterKind
from consilium.config.data import PHANTOMS, DataConfig
from consilium.config.inline_model_config import embed_architecture
from consilium.config.overrides import apply_overrides, override_error_text
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
from consilium.core.errors import ConfigError
from consilium.core.registry import NO_PLUGINS, KindField, Plugins
from consilium.core.sanitize import shown
from consilium.core.schema import SMALLEST_NOISE, Name, Section, did_you_mean, read_yaml, validate
from consilium.data.settings import DEFAULTS, PictureSettings
from consilium.models.architecture import refuse_adapter
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
        found = [registry.packages[name] for registry, name in named if name in registry.packages]
        return dict(sorted(found))

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
        if self.strategy.traits.pools_data:
            raise ValueError(f"cross_site: strategy {self.strategy.name!r} has one pooled site; use consilium evaluate")
        if self.cross_site.personalized and self.privacy is not None:
            what = "a personalized model holds what no noise covers, so none is sent in a job with privacy"
            raise ValueError(f"cross_site.personalized: true: {what}; use false")
        if self.cross_site.personalized and self.secure_aggregation is not None:
            what = "a personalized model less what all sites were sent is an update without its mask"
            raise ValueError(f"cross_site.personalized: true: {what}; use false")
        return self

    @model_validator(mode="after")
    def _check_privacy(self) -> Self:
        self._check_diagnostics()
        if self.secure_aggregation is not None:
            check_masked(self.strategy, self.server, self.diagnostics, self.privacy, self.federation)
            if self.has_sums_without_noise and self.federation.fraction_train < 1:
                what = "sums over other sites in other rounds would show single ones"
                raise ValueError(f"federation.fraction_train: {self.federation.fraction_train}: without privacy {what}; use 1")
        if self.statistics is not None and self.data.most_training is not None:
            what = "and the same with one sample more would tell a patient's values by statistics; remove one of them"
            raise ValueError(f"data.most_training: {self.data.most_training} {what}")
        if self.privacy is None:
            return self
        if patience := self.training.validation.patience:
            what = "would let validation scores, which no noise covers, choose the round"
            raise ValueError(f"training.validate.patience: {patience} {what}; leave it out of a job with privacy")
        if self.diagnostics.reads_site_tensors:
            raise ValueError("diagnostics: leakage and oracle look at what privacy keeps at the site; remove them")
        if self.privacy.unit == "site" and self.weighting != "uniform":
            raise ValueError("federation.weighting: 'samples' with privacy.unit site would leak data sizes; use uniform")
        if self.privacy.trust == "distributed":
            check_shares(self.privacy, self.secure_aggregation, self.training, self.server)
        if self.dpsgd is not None:
            check_records_independent(self.dpsgd, self.data, self.training, self.adapter, self.model, self.task)
        return self

    def _check_diagnostics(self) -> None:
        """Raise ValueError, naming field, value and remedy, for a diagnostic that privacy forbids or that measures nothing."""
        site = self.privacy is not None and self.privacy.unit == "site"
        if self.diagnostics.noise and not (site and self.privacy is not None and self.privacy.trust == "local"):
            raise ValueError("diagnostics.noise: true measures the noise that sites add (privacy.unit site, trust local)")
        if self.diagnostics.deviation and self.privacy is not None and self.privacy.trust != "local":
            what = "compares single sites' updates, which have no noise of their own under this privacy.trust"
            raise ValueError(f"diagnostics.deviation: true {what}; use trust local, or false")

    @model_validator(mode="after")
    def _check_robust_mean(self) -> Self:
        """Raise ValueError for a robust mean together with weights or with privacy whose noise is made for the sum."""
        if self.server is None or not self.server.is_robust:
            return self
        if self.federation.weighting == "samples" or self.federation.max_weight is not None:
            field = "weighting: 'samples'" if self.federation.weighting else f"max_weight: {self.federation.max_weight}"
            raise ValueError(f"federation.{field} with server.mean {self.server.mean!r}, which counts sites once; leave it out")
        if self.privacy is not None and self.privacy.trust != "local":
            what = "sees every site's update, and noise on their sum is made for the mean"
            raise ValueError(f"privacy.trust: {self.privacy.trust!r}: server.mean {self.server.mean!r} {what}; use local")
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
        if getattr(self.task, "packed", False) and not (self.model.supports_packing() and not self.strategy.traits.parts):
            what = "needs a llama, mistral or qwen without a shorter sliding window, and a strategy that looks at no features"
            raise ValueError(f"task.packed: true {what}; use false")
        kind = self.data.phantoms.kind if self.data.phantoms else None
        if kind and PHANTOMS[kind] != self.task.name:
            what = f"does not fit task.name {self.task.name!r}; it is for {PHANTOMS[kind]}"
            raise ValueError(f"data.phantoms.kind: {kind!r} {what}")
        if kind and PHANTOMS[kind] != "language" and not self.model.image_side:
            what = "are pictures, and the model's config says no image_side"
            raise ValueError(f"data.phantoms.kind: {kind!r} {what}; add it there, or give sites data lists")
        return self


def load_job(
    path: Path, overrides: Mapping[str, Any] | None = None, plugins: Plugins = NO_PLUGINS, author: bool = False
) -> JobConfig:
    """Return the validated job from a job.yaml, or from the one inside a job folder.

    `overrides` maps dotted fields, such as "training.lr", to values that replace the file's before validation. `plugins`: the
    packages whose strategies, models, tasks and adapters the job may name, see core/registry.py. `author`: the caller owns the
    file, so it may name a model's config.json by path, see inline_model_config.py. Raises ConfigError with one line per
    problem.
    """
    path = job_file(path)
    try:
        return make_job(read_yaml(path), path, overrides, plugins, author)
    except ConfigError as error:
        if not overrides:
            raise
        raise ConfigError(override_error_text(str(error), overrides, path), error.reason, error.told) from None


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
    _refuse_study(raw, path)
    raw = deepcopy(raw)
    kinds = {name: mark for name, field in JobConfig.model_fields.items() for mark in field.metadata}
    keys = {name: mark.key for name, mark in kinds.items() if isinstance(mark, KindField)}
    apply_overrides(raw, overrides or {}, path, keys)
    if author:
        embed_architecture(raw, path)
    config = validate(JobConfig, raw, path, plugins)
    if author:
        _check_effects(config, path)
    return config


def _refuse_study(raw: Any, path: Path) -> None:
    """Raise ConfigError if `raw` is the content of a study's file, which names its base job in `base`."""
    if isinstance(raw, Mapping) and {"base", "axes"} <= raw.keys():
        base = shown(os.path.normpath(path.parent / str(raw["base"])))
        values = "; its `set:` values go to --set" if raw.get("set") else ""
        raise ConfigError(f"{path}: is a study's file, not a job; give its base job instead, {base}{values}")


def _check_effects(config: JobConfig, path: Path) -> None:
    """Raise ConfigError for a setting without effect, and for a checkpoint that is an adapter."""
    # Settings without effect are errors for a job's author only, so a finished run with one can still be read.
    if config.model.checkpoint and "${SITE}" not in config.model.checkpoint:
        refuse_adapter(Path(config.model.checkpoint), f"{path}: model.checkpoint")
    training, most = config.training, config.federation.max_weight
    if training.momentum and training.optimizer != "sgd":
        what = f"is of optimizer sgd, not {training.optimizer}; use sgd, or momentum 0"
        raise ConfigError(f"{path}: training.momentum: {training.momentum} {what}")
    if most is not None and config.weighting == "uniform":
        raise ConfigError(f"{path}: federation.max_weight: {most} bounds weights, and every site counts once here; use null")


def job_file(path: Path) -> Path:
    """Return the path of the job.yaml in a job folder, or `path` if it is a file. Raises ConfigError if there is none."""
    candidates = [path] if path.is_file() else [path / "app/config/job.yaml", path / "job.yaml"]
    found = next((c for c in candidates if c.is_file()), None)
    if found is None:
        remedy = "`consilium init FOLDER` writes those of the package into FOLDER/jobs"
        near = did_you_mean(path.name, [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else [])
        raise ConfigError(f"{path}: no job.yaml there{near}; give a job folder or a job.yaml; {remedy}")
    return found
