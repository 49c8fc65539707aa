"""job.yaml: what a job is made of, and errors that name file, field, value and remedy."""

import hashlib
import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from consilium.adapters.registry import ADAPTERS, AdapterConfig, AdapterKind
from consilium.config.cross_site import CrossSiteConfig
from consilium.config.data import PHANTOMS, DataConfig
from consilium.config.diagnostics import DiagnosticsConfig
from consilium.config.dpsgd import check_apart, check_shares
from consilium.config.inline_model_config import embed_architecture
from consilium.config.overrides import override
from consilium.config.privacy import DpSgdConfig, PrivacyConfig, SiteLevelDpConfig
from consilium.config.secure_aggregation import SecureAggregationConfig, check_masked
from consilium.config.server import ServerConfig
from consilium.config.statistics import StatisticsConfig
from consilium.config.validation import ValidateConfig
from consilium.core.errors import ConfigError
from consilium.core.registry import NO_PLUGINS, KindField, Plugins
from consilium.core.schema import Name, Positive, Seconds, Section, Seed, Share, read_yaml, validate
from consilium.models.registry import MODELS, ModelConfig
from consilium.strategies.registry import STRATEGIES
from consilium.tasks.registry import TASKS, TaskConfig

if TYPE_CHECKING:
    from consilium.strategies.strategy import Strategy
else:
    Strategy = Any  # its module needs torch, which reading a job.yaml does only for the strategy that it names


class TrainingConfig(Section):
    """Local training. `local_steps`, when given, replaces `local_epochs`; `precision` auto is bf16 where the GPU has it.

    `schedule` cosine and linear let the learning rate fall from `lr` to 0 within each round's local training, without warm-up.
    """

    rounds: Annotated[int, Field(ge=1, le=100_000)]
    local_epochs: Annotated[int, Field(ge=1, le=1000)] = 1
    local_steps: Annotated[int, Field(ge=1, le=100_000)] | None = None
    batch_size: Annotated[int, Field(ge=1, le=65536)] = 4
    accumulate: Annotated[int, Field(ge=1, le=4096, description="batches per optimizer step")] = 1
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    optimizer_state: Annotated[
        Literal["fresh", "kept"],
        Field(description="`fresh`: empty in every round; `kept`: it stays at the site, which goes on with it"),
    ] = "fresh"
    lr: Annotated[float, Field(gt=0, le=1000)] = 1e-4
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    weight_decay: Annotated[float, Field(ge=0, le=1000)] = 0.0
    momentum: Annotated[float, Field(ge=0, lt=1, description="sgd only")] = 0.0
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    gradient_checkpointing: bool = False
    compile: bool = False
    seed: Seed = 0
    validation: Annotated[ValidateConfig, Field(alias="validate")] = ValidateConfig()

    model_config = ConfigDict(serialize_by_alias=True)

    def validates(self, round: int, stage: str) -> bool:
        """Tell whether the validation split is scored in this round, counted from 0, by the model of this stage."""
        return stage in self.validation.stages and (round + 1) % self.validation.every == 0

    def steps_per_round(self, num_samples: int) -> int:
        """Return the optimizer steps of one round at a site with `num_samples` training samples."""
        if self.local_steps:
            return self.local_steps
        batches = -(-num_samples // self.batch_size)
        return self.local_epochs * -(-batches // self.accumulate)


class FederationConfig(Section):
    """Who takes part. `min_sites` is the quorum of a round, `fraction_train` of the sites are asked; times in seconds.

    `max_norm_ratio`: an update whose norm is over this many times that of the adapter at its start is refused.
    `max_weight`: the most samples that one site counts for in the mean, whatever it says it has; without it, what it says.
    `fraction_evaluate` of the sites that are not asked evaluate the shared model before the round, on their validation data.
    """

    min_sites: Annotated[int, Field(ge=1, le=10_000)] = 1
    fraction_train: Annotated[float, Field(gt=0, le=1)] = 1.0
    fraction_evaluate: Share = 0.0
    weighting: Literal["samples", "uniform"] | None = None
    max_weight: Annotated[int, Field(ge=1, le=10**9)] | None = None
    round_timeout: Annotated[Seconds, Field(gt=0)] = 3600.0
    straggler_grace_seconds: Annotated[Seconds, Field(description="wait for more sites once the quorum is in")] = 600.0
    max_norm_ratio: Positive = 100.0


class JobConfig(Section):
    """A whole job: server and sites read the same file. `experiment` names one run of it; given at submission."""

    name: Name
    experiment: Name | None = None
    strategy: Annotated[Strategy, KindField(STRATEGIES, "name")]
    model: Annotated[ModelConfig, KindField(MODELS, "name", "sam")]
    adapter: Annotated[AdapterConfig, KindField(ADAPTERS, "kind", "lora"), Field(default={}, validate_default=True)]
    task: Annotated[TaskConfig, KindField(TASKS, "name", "segmentation")]
    data: DataConfig = DataConfig()
    training: TrainingConfig
    federation: FederationConfig = FederationConfig()
    server: ServerConfig | None = None
    privacy: PrivacyConfig | None = None
    secure_aggregation: SecureAggregationConfig | None = None
    statistics: StatisticsConfig | None = None
    cross_site: CrossSiteConfig | None = None
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()

    @property
    def digest(self) -> str:
        """The SHA-256 of all settings but the number of rounds: what makes it the same job, which a resumption may prolong.

        Fields stand in the order in which they are declared; in maps, such as `task.classes`, the order of a job.yaml counts.
        """
        settings = self.model_dump(mode="json")
        del settings["training"]["rounds"]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    @property
    def trains(self) -> bool:
        """Whether the job does more than ask for statistics, or for scores of an earlier run's models."""
        return self.cross_site is None and (self.statistics is None or not self.statistics.only)

    @property
    def dpsgd(self) -> DpSgdConfig | None:
        """The privacy section, where it makes training itself private (DP-SGD, by records or patients)."""
        return None if isinstance(self.privacy, SiteLevelDpConfig) else self.privacy

    @property
    def title(self) -> str:
        """The job's name as tables, ledgers and views show it: with the calibration where that is not honest."""
        paper = self.privacy is not None and self.privacy.calibration == "paper"
        return f"{self.name} (calibration: paper)" if paper else self.name

    @property
    def packages(self) -> dict[str, str]:
        """The other packages, by name, that strategy, model, task and adapter come from, with their versions."""
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
        """What is registered of the adapter: with room for frozen tails where the strategy sends such and it has that."""
        kind = ADAPTERS[self.adapter.kind]
        return kind.tailed() if self.strategy.traits.sends_frozen_ranks and kind.tailed else kind

    @property
    def weighting(self) -> str:
        """What weighs a site's update; with site-level DP and shares of noise uniform: a weight would tell the data size.

        A median or trimmed mean counts every site once.
        """
        private = self.privacy is not None and (self.privacy.unit == "site" or self.secure_aggregation is not None)
        robust = self.server is not None and self.server.robust
        return self.federation.weighting or ("uniform" if private or robust else "samples")

    def weight(self, num_samples: int) -> int:
        """Return what the update of a site that says it has so many samples weighs in the mean."""
        most = self.federation.max_weight
        return 1 if self.weighting == "uniform" else num_samples if most is None else min(num_samples, most)

    @model_validator(mode="after")
    def _lends(self) -> Self:
        """Raise ValueError for a cross-site job that would have private models travel, or has a single, pooled one."""
        if self.cross_site is None:
            return self
        if self.strategy.traits.pools_data:
            raise ValueError(f"cross_site: strategy {self.strategy.name!r} has one pooled site; use consilium evaluate")
        if self.cross_site.personalized and self.privacy is not None:
            what = "a personalized model holds what no noise covers, so none travels in a job with privacy"
            raise ValueError(f"cross_site.personalized: true: {what}; use false")
        if self.cross_site.personalized and self.secure_aggregation is not None:
            what = "a personalized model less what all sites were sent is an update without its mask"
            raise ValueError(f"cross_site.personalized: true: {what}; use false")
        return self

    @model_validator(mode="after")
    def _keeps_privacy(self) -> Self:
        self._keep_diagnostics()
        if self.secure_aggregation is not None:
            check_masked(self)
        if self.statistics is not None and self.data.most_training is not None:
            what = "and the same with one sample more would tell a patient's values by statistics; remove one of them"
            raise ValueError(f"data.most_training: {self.data.most_training} {what}")
        if self.privacy is None:
            return self
        if patience := self.training.validation.patience:
            what = "would let validation scores, which no noise covers, choose the round"
            raise ValueError(f"training.validate.patience: {patience} {what}; leave it out of a job with privacy")
        if self.diagnostics.looks_inside:
            raise ValueError("diagnostics: leakage and oracle look at what privacy keeps at the site; remove them")
        if self.privacy.unit == "site" and self.weighting != "uniform":
            raise ValueError("federation.weighting: 'samples' with privacy.unit site would leak data sizes; use uniform")
        check_shares(self)
        check_apart(self)
        return self

    def _keep_diagnostics(self) -> None:
        """Raise ValueError, naming field, value and remedy, for a diagnostic that tells what no noise covers, or nothing."""
        site = self.privacy is not None and self.privacy.unit == "site"
        if self.diagnostics.noise and not (site and self.privacy is not None and self.privacy.trust == "local"):
            raise ValueError("diagnostics.noise: true measures the noise that sites add (privacy.unit site, trust local)")
        if self.diagnostics.deviation and self.privacy is not None and self.privacy.trust != "local":
            what = "compares single sites' updates, which have no noise of their own under this privacy.trust"
            raise ValueError(f"diagnostics.deviation: true {what}; use trust local, or false")

    @model_validator(mode="after")
    def _means_of_sites(self) -> Self:
        """Raise ValueError for a robust mean with what it does without: weights, and sums that hide the sites."""
        if self.server is None or not self.server.robust:
            return self
        if self.federation.weighting == "samples" or self.federation.max_weight is not None:
            field = "weighting: 'samples'" if self.federation.weighting else f"max_weight: {self.federation.max_weight}"
            raise ValueError(f"federation.{field} with server.mean {self.server.mean!r}, which counts sites once; leave it out")
        if self.privacy is not None and self.privacy.trust != "local":
            what = "sees every site's update, and noise on their sum is made for the mean"
            raise ValueError(f"privacy.trust: {self.privacy.trust!r}: server.mean {self.server.mean!r} {what}; use local")
        return self

    @model_validator(mode="after")
    def _fit_together(self) -> "JobConfig":
        wanted = MODELS[self.model.name].task
        if wanted != self.task.name and self.model.name not in TASKS[self.task.name].models:
            raise ValueError(f"task.name: {self.task.name!r} does not fit model.name {self.model.name!r}; expected {wanted!r}")
        if getattr(self.task, "packed", False) and not (self.model.packs() and not self.strategy.traits.parts):
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
    """Read and validate a job.yaml, or the one inside a job folder. Raises ConfigError with one line per problem.

    `overrides` maps dotted fields, such as "training.lr", to values that replace the file's before validation. `plugins`: the
    packages whose strategies, models, tasks and adapters the job may name, see core/registry.py. `author`: the file is its
    user's own, so that it may name a model's config.json by path, see inline_model_config.py.
    """
    path = job_file(path)
    return make_job(read_yaml(path), path, overrides, plugins, author)


def make_job(raw: Any, path: Path, overrides: Mapping[str, Any] | None, plugins: Plugins, author: bool = False) -> JobConfig:
    """Return the job of what the file `path` holds, which stays as it is; otherwise as load_job."""
    raw = deepcopy(raw)
    kinds = {name: mark for name, field in JobConfig.model_fields.items() for mark in field.metadata}
    keys = {name: mark.key for name, mark in kinds.items() if isinstance(mark, KindField)}
    override(raw, overrides or {}, path, keys)
    if author:
        embed_architecture(raw, path)
    config = validate(JobConfig, raw, path, plugins)
    if author:
        _check_used(config, path)
    return config


def _check_used(config: JobConfig, path: Path) -> None:
    """Raise ConfigError for a setting that does nothing beside others. A finished run may have it, and stays readable."""
    training, most = config.training, config.federation.max_weight
    if training.momentum and training.optimizer != "sgd":
        what = f"is of optimizer sgd, not {training.optimizer}; use sgd, or momentum 0"
        raise ConfigError(f"{path}: training.momentum: {training.momentum} {what}")
    if most is not None and config.weighting == "uniform":
        raise ConfigError(f"{path}: federation.max_weight: {most} bounds weights, and every site counts once here; use null")


def job_file(path: Path) -> Path:
    """Return the job.yaml of a job folder (or the file itself). Raises ConfigError if there is none."""
    candidates = [path] if path.is_file() else [path / "app/config/job.yaml", path / "job.yaml"]
    found = next((c for c in candidates if c.is_file()), None)
    if found is None:
        raise ConfigError(f"{path}: no job.yaml there; give a job folder such as jobs/quickstart or a job.yaml")
    return found
