"""job.yaml and site.yaml: their schema, and errors that name file, field, value and remedy."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from consilium.adapters.bottleneck import BottleneckConfig
from consilium.adapters.dual_rank import DualRankConfig
from consilium.adapters.lora import LoraConfig
from consilium.config.data import PHANTOMS, DataConfig
from consilium.config.overrides import override
from consilium.config.privacy import PrivacyConfig
from consilium.config.records import keep_apart
from consilium.errors import ConfigError
from consilium.models.causal_lm import CausalLmConfig
from consilium.models.clip import ClipConfig
from consilium.models.sam import SamConfig
from consilium.schema import (
    Positive,
    Seconds,
    Section,
    Seed,
    Share,
    read_yaml,
    validate,
)
from consilium.tasks.classification import ClassificationConfig
from consilium.tasks.language import LanguageConfig
from consilium.tasks.segmentation import SegmentationConfig


class TrainingConfig(Section):
    """Local training. `local_steps`, when given, replaces `local_epochs`; `precision` auto is bf16 where the GPU has it.

    `schedule` cosine lets the learning rate fall from `lr` to 0 within each round's local training, without warm-up.
    """

    rounds: Annotated[int, Field(ge=1, le=100_000)]
    local_epochs: Annotated[int, Field(ge=1, le=1000)] = 1
    local_steps: Annotated[int, Field(ge=1, le=100_000)] | None = None
    batch_size: Annotated[int, Field(ge=1, le=65536)] = 4
    accumulate: Annotated[int, Field(ge=1, le=4096, description="batches per optimizer step")] = 1
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    lr: Annotated[float, Field(gt=0, le=1000)] = 1e-4
    schedule: Literal["constant", "cosine"] = "constant"
    weight_decay: Annotated[float, Field(ge=0, le=1000)] = 0.0
    momentum: Annotated[float, Field(ge=0, lt=1, description="sgd only")] = 0.0
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    gradient_checkpointing: bool = False
    seed: Seed = 0


class FederationConfig(Section):
    """Who takes part. `min_sites` is the quorum of a round, `sample` the fraction of sites asked; times in seconds.

    `max_norm_ratio`: an update whose norm is over this many times that of the adapter at its start is refused.
    `max_weight`: the most samples that one site counts for in the mean, whatever it says it has; without it, what it says.
    `held_out`: the fraction of the sites not asked that evaluate the shared model before each round, on their validation data.
    """

    min_sites: Annotated[int, Field(ge=1, le=10_000)] = 1
    sample: Annotated[float, Field(gt=0, le=1)] = 1.0
    held_out: Share = 0.0
    weighting: Literal["samples", "uniform"] | None = None
    max_weight: Annotated[int, Field(ge=1, le=10**9)] | None = None
    round_timeout: Annotated[Seconds, Field(gt=0)] = 3600.0
    grace: Annotated[Seconds, Field(description="wait for more sites once the quorum is in")] = 600.0
    max_norm_ratio: Positive = 100.0


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]  # it becomes a folder's name
DEFAULT_KIND = {"model": ("name", "sam"), "task": ("name", "segmentation"), "adapter": ("kind", "lora")}
"""Sections of several kinds: the key that tells them apart, and the kind meant where it is left out."""
FITS = {"sam": "segmentation", "clip": "classification", "causal_lm": "language"}
"""The task each model does."""


class JobConfig(Section):
    """A whole job: server and sites read the same file. `experiment` names one run of it; given at submission."""

    name: Name
    experiment: Name | None = None
    strategy: dict[str, Any]
    model: Annotated[SamConfig | ClipConfig | CausalLmConfig, Field(discriminator="name")]
    adapter: Annotated[LoraConfig | DualRankConfig | BottleneckConfig, Field(discriminator="kind")] = LoraConfig()
    task: Annotated[SegmentationConfig | ClassificationConfig | LanguageConfig, Field(discriminator="name")]
    data: DataConfig = DataConfig()
    training: TrainingConfig
    federation: FederationConfig = FederationConfig()
    privacy: PrivacyConfig | None = None

    @property
    def digest(self) -> str:
        """The SHA-256 of all settings but the number of rounds: what makes it the same job, which a resumption may prolong."""
        settings = self.model_dump(mode="json")
        del settings["training"]["rounds"]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    @property
    def weighting(self) -> str:
        """What weighs a site's update; with site-level DP uniform, because a weight would tell the site's data size."""
        private = self.privacy is not None and self.privacy.unit == "site"
        return self.federation.weighting or ("uniform" if private else "samples")

    def weight(self, num_samples: int) -> int:
        """Return what the update of a site that says it has so many samples weighs in the mean."""
        most = self.federation.max_weight
        return 1 if self.weighting == "uniform" else num_samples if most is None else min(num_samples, most)

    @model_validator(mode="after")
    def _keeps_privacy(self) -> Self:
        if self.privacy is None:
            return self
        if self.privacy.unit == "site" and self.weighting != "uniform":
            raise ValueError("federation.weighting: 'samples' with privacy.unit site would leak data sizes; use uniform")
        if self.privacy.unit == "record":
            keep_apart(self.privacy.noise_multiplier, self.training, self.adapter, self.model)
        return self

    @field_validator("strategy", mode="before")
    @classmethod
    def _name_only(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator(*DEFAULT_KIND, mode="before")
    @classmethod
    def _default_kind(cls, value: Any, info: ValidationInfo) -> Any:
        key, kind = DEFAULT_KIND[info.field_name]
        return {key: kind} | value if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _fit_together(self) -> "JobConfig":
        if (wanted := FITS[self.model.name]) != self.task.name:
            raise ValueError(f"task.name: {self.task.name!r} does not fit model.name {self.model.name!r}; expected {wanted!r}")
        kind = self.data.phantoms.kind if self.data.phantoms else None
        if kind and PHANTOMS[kind] != wanted:
            raise ValueError(f"data.phantoms.kind: {kind!r} does not fit task.name {wanted!r}; it is for {PHANTOMS[kind]}")
        return self


def load_job(path: Path, overrides: Mapping[str, Any] | None = None) -> JobConfig:
    """Read and validate a job.yaml, or the one inside a job folder. Raises ConfigError with one line per problem.

    `overrides` maps dotted fields, such as "training.lr", to values that replace the file's before validation.
    """
    path = job_file(path)
    raw = read_yaml(path)
    override(raw, overrides or {}, path)
    return validate(JobConfig, raw, path)


def job_file(path: Path) -> Path:
    """Return the job.yaml of a job folder (or the file itself). Raises ConfigError if there is none."""
    candidates = [path] if path.is_file() else [path / "app/config/job.yaml", path / "job.yaml"]
    found = next((c for c in candidates if c.is_file()), None)
    if found is None:
        raise ConfigError(f"{path}: no job.yaml there; give a job folder such as jobs/quickstart or a job.yaml")
    return found
