"""job.yaml and site.yaml: their schema, and errors that name file, field, value and remedy."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator, model_validator

from consilium.config_adapter import BottleneckConfig, DualRankConfig, LoraConfig
from consilium.config_capacity import CapacityConfig
from consilium.config_data import PHANTOMS, DataConfig
from consilium.config_errors import all_fields, describe
from consilium.config_errors import nearest as nearest
from consilium.config_language import CausalLmConfig, LanguageConfig
from consilium.config_overrides import override
from consilium.config_privacy import PolicyConfig, PrivacyConfig
from consilium.config_records import keep_apart
from consilium.config_section import MOST_CLASSES, ClassName, Positive, Seconds, Section, Seed, Sha256, Share
from consilium.config_yaml import Loader as Loader
from consilium.config_yaml import read_yaml
from consilium.data.folders import SPLIT_FOLDERS, has_classes
from consilium.data.text import has_texts
from consilium.errors import ConfigError

T = TypeVar("T", bound=BaseModel)


class SamConfig(Section):
    """A frozen SAM, for segmentation. `checkpoint` may start with ${SITE}, the site's checkpoint folder."""

    name: Literal["sam"] = "sam"
    variant: Literal["tiny", "vit_b", "vit_l", "vit_h"]
    checkpoint: str | None = None
    checkpoint_sha256: Sha256 | None = None
    image_size: Annotated[int, Field(ge=16, le=4096, description="pixels, a multiple of the variant's patch size")]
    attention: Literal["fused", "original"] = "fused"


class ClipConfig(Section):
    """A frozen CLIP vision tower with a trained head, for classification. `checkpoint` as for SAM, see models/clip.py."""

    name: Literal["clip"]
    variant: Literal["tiny", "biomedclip", "clip"]
    checkpoint: str | None = None
    checkpoint_sha256: Sha256 | None = None
    image_size: Annotated[int, Field(ge=16, le=4096, description="pixels, a multiple of the variant's patch size")]


LabelValues = Annotated[list[Annotated[int, Field(ge=0, lt=2**16)]], Field(min_length=1, max_length=1024)]


class SegmentationConfig(Section):
    """Masks. `classes`: a list of names (label values 1, 2, ...) or a map from name to its label values."""

    name: Literal["segmentation"] = "segmentation"
    classes: Annotated[dict[ClassName, LabelValues], Field(min_length=1, max_length=MOST_CLASSES)]
    prompt: Literal["none", "box"] = "none"
    augment: bool = True

    @field_validator("classes", mode="before")
    @classmethod
    def _number_names(cls, value: Any) -> Any:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            return value
        return {name: [i] for i, name in enumerate(_each_once(value), start=1)}


class ClassificationConfig(Section):
    """One class per image. `classes`: their names, in the order of the model's outputs; integer labels count from 0."""

    name: Literal["classification"]
    classes: Annotated[list[ClassName], Field(min_length=2, max_length=MOST_CLASSES)]
    augment: bool = True

    @field_validator("classes")
    @classmethod
    def _differ(cls, value: list[str]) -> list[str]:
        return _each_once(value)


def _each_once(names: list[str]) -> list[str]:
    if twice := sorted(name for name in set(names) if names.count(name) > 1):
        raise ValueError(f"every class once; {twice[0]!r} is there twice")
    return names


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


class SiteConfig(Section):
    """A site's own site.yaml: what belongs to the hospital, not to the job. Relative paths start at the file's folder.

    `share_metrics`: whether scores leave the site beside the update; by default only in jobs without a `privacy:` section,
    because no noise protects them. `capacity` tells algorithms with unequal ranks how much this site can train and download.
    `approve: digest`: only jobs that its administrator has approved run here, see `consilium approve`.
    """

    datalist: Path | None = None
    checkpoints: Path | None = None
    state: Path | None = None
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$")] = "auto"
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    share_metrics: bool | None = None
    approve: Literal["digest"] | None = None
    capacity: CapacityConfig = CapacityConfig()
    privacy: PolicyConfig = PolicyConfig()


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


def load_site(path: Path) -> SiteConfig:
    """Read and validate a site.yaml; relative paths are resolved against its folder. Raises ConfigError."""
    site = validate(SiteConfig, read_yaml(path) or {}, path)
    paths = {k: path.parent / v for k in ("datalist", "checkpoints", "state") if (v := getattr(site, k)) is not None}
    if site.privacy.ledger is not None:
        paths["privacy"] = site.privacy.model_copy(update={"ledger": path.parent / site.privacy.ledger})
    return site.model_copy(update=paths)


def find_site(name: str, kit_local: Path | None = None) -> SiteConfig:
    """Return the site's configuration: CONSILIUM_DATA/<name>/ (simulation), else the kit's local/site.yaml, else defaults.

    See read_site_folder for the simulation folder. CONSILIUM_CHECKPOINTS fills a missing checkpoint folder. Raises
    ConfigError if CONSILIUM_DATA is set and holds nothing for this site.
    """
    site = _find_site(name, kit_local)
    shared = os.environ.get("CONSILIUM_CHECKPOINTS")
    return site if site.checkpoints or not shared else site.model_copy(update={"checkpoints": Path(shared)})


def _find_site(name: str, kit_local: Path | None) -> SiteConfig:
    if data := os.environ.get("CONSILIUM_DATA"):
        if found := read_site_folder(Path(data) / name):
            return found
        remedy = f"neither site.yaml nor datalist.json for site {name}, nor training.jsonl, nor a folder per class; make one"
        raise ConfigError(f"{Path(data) / name}: {remedy}")
    if kit_local and (kit_local / "site.yaml").is_file():
        return load_site(kit_local / "site.yaml")
    return SiteConfig()


def is_site_folder(folder: Path) -> bool:
    """Tell whether a folder is one site's, see read_site_folder; the split of a picture set (train/CLASS) is none."""
    own = any((folder / name).is_file() for name in ("site.yaml", "datalist.json"))
    return own or has_texts(folder) or (folder.name not in SPLIT_FOLDERS and has_classes(folder))


def read_site_folder(folder: Path) -> SiteConfig | None:
    """Return what one site's folder says: its site.yaml, datalist.json, JSONL lists or folders per class, else None."""
    if (folder / "site.yaml").is_file():
        return load_site(folder / "site.yaml")
    if (folder / "datalist.json").is_file():
        return SiteConfig(datalist=folder / "datalist.json")
    return SiteConfig(datalist=folder) if has_texts(folder) or has_classes(folder) else None


def validate(model: type[T], raw: Any, path: Path) -> T:
    """Return `raw`, what the file `path` holds, as a section. Raises ConfigError with one line per problem."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path}: is not a map of sections; start with `name:`, `strategy:`, `model:` ...")
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(describe(error, path, "", all_fields(model))) from None
