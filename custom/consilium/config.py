"""job.yaml and site.yaml: their schema, and errors that name file, field, value and remedy."""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from consilium.errors import ConfigError

T = TypeVar("T", bound=BaseModel)


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values cannot change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(Section):
    """The frozen model. `checkpoint` may start with ${SITE}, the site's checkpoint folder."""

    name: Literal["sam"] = "sam"
    variant: Literal["tiny", "vit_b", "vit_l", "vit_h"]
    checkpoint: str | None = None
    image_size: Annotated[int, Field(ge=16, description="pixels, a multiple of the variant's patch size")]
    attention: Literal["fused", "original"] = "fused"


class AdapterConfig(Section):
    """What is trained inside the model. `targets`: paper, qv, all-linear, or a regular expression on module names."""

    kind: Literal["lora"] = "lora"
    rank: Annotated[int, Field(ge=1)] = 8
    alpha: Annotated[float, Field(gt=0)] = 8.0
    targets: str = "paper"
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


class TaskConfig(Section):
    """What is predicted. `classes`: a list of names (label values 1, 2, ...) or a map from name to its label values."""

    name: Literal["segmentation"] = "segmentation"
    classes: Annotated[dict[str, list[int]], Field(min_length=1)]
    prompt: Literal["none", "box"] = "none"
    augment: bool = True

    @field_validator("classes", mode="before")
    @classmethod
    def _number_names(cls, value: Any) -> Any:
        return {name: [i] for i, name in enumerate(value, start=1)} if isinstance(value, list) else value


class PhantomConfig(Section):
    """Generated data for a site that has none of its own: counts per split and the strength of both shifts (0 to 1)."""

    kind: Literal["fundus", "nuclei"]
    training: Annotated[int, Field(ge=1)] = 24
    validation: Annotated[int, Field(ge=0)] = 8
    test: Annotated[int, Field(ge=0)] = 16
    appearance: Annotated[float, Field(ge=0, le=1)] = 0.7
    annotation: Annotated[float, Field(ge=0, le=1)] = 0.7


class DataConfig(Section):
    """Data the job brings along; a site's own data list always wins."""

    phantoms: PhantomConfig | None = None


class TrainingConfig(Section):
    """Local training. `local_steps`, when given, replaces `local_epochs`; `precision` auto is bf16 where the GPU has it."""

    rounds: Annotated[int, Field(ge=1)]
    local_epochs: Annotated[int, Field(ge=1)] = 1
    local_steps: Annotated[int, Field(ge=1)] | None = None
    batch_size: Annotated[int, Field(ge=1)] = 4
    accumulate: Annotated[int, Field(ge=1, description="batches per optimizer step")] = 1
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    lr: Annotated[float, Field(gt=0)] = 1e-4
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    momentum: Annotated[float, Field(ge=0, lt=1, description="sgd only")] = 0.0
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    gradient_checkpointing: bool = False
    seed: Annotated[int, Field(ge=0)] = 0


class FederationConfig(Section):
    """Who takes part. `min_sites` is the quorum of a round, `sample` the fraction of sites asked; times in seconds."""

    min_sites: Annotated[int, Field(ge=1)] = 1
    sample: Annotated[float, Field(gt=0, le=1)] = 1.0
    weighting: Literal["samples", "uniform"] | None = None
    round_timeout: Annotated[float, Field(gt=0)] = 3600.0
    grace: Annotated[float, Field(ge=0, description="wait for more sites once the quorum is in")] = 600.0


class SitePrivacyConfig(Section):
    """Site-level DP: all of a site's data is hidden behind its clipped and noised updates. `clip` bounds an update's norm.

    `noise_multiplier` instead of `epsilon` sets the noise itself (0: clip only, protects nothing). `trust`: who adds the
    noise: each site all of it (local), each a share of it (distributed, honest under secure aggregation only), the server
    (central). `adjacency`: a site's update against none (zero-out), or any two data sets at it (replace, twice the noise).
    """

    unit: Literal["site"]
    epsilon: Annotated[float, Field(gt=0)] | None = None
    noise_multiplier: Annotated[float, Field(ge=0)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    clip: Annotated[float, Field(gt=0)]
    trust: Literal["local", "distributed", "central"] = "local"
    adjacency: Literal["zero-out", "replace"] = "zero-out"
    accountant: Literal["exact", "prv", "rdp"] = "exact"

    @model_validator(mode="after")
    def _one_noise(self) -> Self:
        return _one_noise(self)


class RecordPrivacyConfig(Section):
    """Record-level DP-SGD: each record is hidden by clipping per-sample gradients to `clip`, noise and Poisson batches."""

    unit: Literal["record"]
    epsilon: Annotated[float, Field(gt=0)] | None = None
    noise_multiplier: Annotated[float, Field(ge=0)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    clip: Annotated[float, Field(gt=0)] = 1.0
    accountant: Literal["prv", "rdp"] = "prv"
    trust: ClassVar[str] = "local"
    adjacency: ClassVar[str] = "add-or-remove"

    @model_validator(mode="after")
    def _one_noise(self) -> Self:
        return _one_noise(self)


def _one_noise(section: Any) -> Any:
    if (section.epsilon is None) == (section.noise_multiplier is None):
        raise ValueError("one of epsilon and noise_multiplier; give exactly one")
    return section


PrivacyConfig = Annotated[SitePrivacyConfig | RecordPrivacyConfig, Field(discriminator="unit")]


class JobConfig(Section):
    """A whole job: server and sites read the same file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    strategy: dict[str, Any]
    model: ModelConfig
    adapter: AdapterConfig = AdapterConfig()
    task: TaskConfig
    data: DataConfig = DataConfig()
    training: TrainingConfig
    federation: FederationConfig = FederationConfig()
    privacy: PrivacyConfig | None = None

    @property
    def weighting(self) -> str:
        """What weighs a site's update; with site-level DP uniform, because a weight would tell the site's data size."""
        private = self.privacy is not None and self.privacy.unit == "site"
        return self.federation.weighting or ("uniform" if private else "samples")

    @model_validator(mode="after")
    def _keeps_privacy(self) -> Self:
        if self.privacy is None:
            return self
        if self.privacy.unit == "site" and self.weighting != "uniform":
            raise ValueError("federation.weighting: 'samples' with privacy.unit site would leak data sizes; use uniform")
        if self.privacy.unit == "record" and self.training.accumulate > 1:
            raise ValueError("training.accumulate: cannot be over 1 with privacy.unit record; raise batch_size instead")
        if self.privacy.unit == "site" and self.privacy.trust == "distributed" and self.federation.min_sites < 2:
            raise ValueError(
                "federation.min_sites: 1 with privacy.trust distributed: a lone site has no one to share; use local"
            )
        return self

    @field_validator("strategy", mode="before")
    @classmethod
    def _name_only(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class BudgetConfig(Section):
    """How much a data set may spend in all jobs together."""

    epsilon: Annotated[float, Field(gt=0)]
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5


class PolicyConfig(Section):
    """What a hospital lets jobs do to its privacy. With any budget, a job that cannot keep one in its unit is refused.

    `dataset` names the data in the ledger (default: the data list's path); give every list of the same patients one name.
    `noise_seed` makes noise repeatable for tests; it protects nobody, and the ledger says so.
    """

    dataset: str | None = None
    budgets: dict[Literal["site", "record"], BudgetConfig] = {}
    trust: list[Literal["local", "distributed", "central"]] = ["local"]
    ledger: Path | None = None
    noise_seed: Annotated[int, Field(ge=0)] | None = None


class SiteConfig(Section):
    """A site's own site.yaml: what belongs to the hospital, not to the job. Relative paths start at the file's folder.

    `share_metrics`: whether scores leave the site beside the update; by default only in jobs without a `privacy:` section,
    because no noise protects them.
    """

    datalist: Path | None = None
    checkpoints: Path | None = None
    state: Path | None = None
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$")] = "auto"
    threads: Annotated[int, Field(ge=1)] | None = None
    share_metrics: bool | None = None
    privacy: PolicyConfig = PolicyConfig()


def load_job(path: Path, overrides: Mapping[str, Any] | None = None) -> JobConfig:
    """Read and validate a job.yaml, or the one inside a job folder. Raises ConfigError with one line per problem.

    `overrides` maps dotted fields, such as "training.lr", to values that replace the file's before validation.
    """
    path = job_file(path)
    raw = _read_yaml(path)
    for field, value in (overrides or {}).items():
        _override(raw, field, value, path)
    return _validate(JobConfig, raw, path)


def _override(raw: Any, field: str, value: Any, path: Path) -> None:
    *sections, last = field.split(".")
    for section in sections:
        if not isinstance(raw, dict):
            raise ConfigError(f"{path}: {field}: there is no section above it; check the field's name")
        raw = raw.setdefault(section, {})
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: {field}: there is no section above it; check the field's name")
    raw[last] = value


def job_file(path: Path) -> Path:
    """Return the job.yaml of a job folder (or the file itself). Raises ConfigError if there is none."""
    candidates = [path] if path.is_file() else [path / "app/config/job.yaml", path / "job.yaml"]
    found = next((c for c in candidates if c.is_file()), None)
    if found is None:
        raise ConfigError(f"{path}: no job.yaml there; give a job folder such as jobs/quickstart or a job.yaml")
    return found


def load_site(path: Path) -> SiteConfig:
    """Read and validate a site.yaml; relative paths are resolved against its folder. Raises ConfigError."""
    site = _validate(SiteConfig, _read_yaml(path) or {}, path)
    paths = {k: path.parent / v for k in ("datalist", "checkpoints", "state") if (v := getattr(site, k)) is not None}
    if site.privacy.ledger is not None:
        paths["privacy"] = site.privacy.model_copy(update={"ledger": path.parent / site.privacy.ledger})
    return site.model_copy(update=paths)


def find_site(name: str, kit_local: Path | None = None) -> SiteConfig:
    """Return the site's configuration: CONSILIUM_DATA/<name>/ (simulation), else the kit's local/site.yaml, else defaults.

    In the simulation folder a site.yaml wins over a bare datalist.json. CONSILIUM_CHECKPOINTS fills a missing checkpoint
    folder. Raises ConfigError if CONSILIUM_DATA is set and holds nothing for this site.
    """
    site = _find_site(name, kit_local)
    shared = os.environ.get("CONSILIUM_CHECKPOINTS")
    return site if site.checkpoints or not shared else site.model_copy(update={"checkpoints": Path(shared)})


def _find_site(name: str, kit_local: Path | None) -> SiteConfig:
    if data := os.environ.get("CONSILIUM_DATA"):
        folder = Path(data) / name
        if (folder / "site.yaml").is_file():
            return load_site(folder / "site.yaml")
        if (folder / "datalist.json").is_file():
            return SiteConfig(datalist=folder / "datalist.json")
        raise ConfigError(f"{folder}: neither site.yaml nor datalist.json for site {name}; make one folder per site")
    if kit_local and (kit_local / "site.yaml").is_file():
        return load_site(kit_local / "site.yaml")
    return SiteConfig()


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give an existing file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML ({' '.join(str(error).split())}); fix the line named") from None


def _validate(model: type[T], raw: Any, path: Path) -> T:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path}: is not a map of sections; start with `name:`, `strategy:`, `model:` ...")
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(describe(error, path, "", _all_fields(model))) from None


def describe(error: ValidationError, path: Path | str, prefix: str, fields: list[str]) -> str:
    """Return one line per problem: file: field: value: what is expected, and the nearest known name."""
    lines = []
    for item in error.errors():
        field = prefix + ".".join(_location(item["loc"]))
        if item["type"] == "missing":
            lines.append(f"{path}: {field}: missing; add it")
        elif item["type"].startswith("union_tag"):
            key, known = item["ctx"]["discriminator"].strip("'"), item["ctx"].get("expected_tags", "see the README")
            lines.append(f"{path}: {field}.{key}: {item['ctx'].get('tag', 'missing')}: expected one of {known}")
        elif item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            lines.append(f"{path}: {field}: unknown field; remove it{nearest(str(item['loc'][-1]), fields)}")
        else:
            message = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
            where = f"{field}: {item['input']!r}: expected " if item["loc"] else ""
            lines.append(f"{path}: {where}{message}")
    return "\n".join(lines)


def _location(loc: tuple[int | str, ...]) -> list[str]:
    """Return the field's path as written in the file, without pydantic's marks of which union member it tried."""
    tags = {("privacy", "site"), ("privacy", "record")}
    return [str(p) for i, p in enumerate(loc) if p != "list[int]" and not (i == 1 and (loc[0], p) in tags)]


def nearest(word: str | None, known: Any) -> str:
    """Return " (did you mean ...?)" for the closest known word, or an empty string."""
    match = difflib.get_close_matches(str(word), list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def _all_fields(model: type[BaseModel]) -> list[str]:
    names = list(model.model_fields)
    for info in model.model_fields.values():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            names += _all_fields(info.annotation)
    return names
