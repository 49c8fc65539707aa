"""What a job promises and a hospital allows: differential privacy by unit, budgets, and secure aggregation."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from consilium.adapters.registry import AdapterConfig
from consilium.config.data import DataConfig
from consilium.config.sections import DiagnosticsConfig, FederationConfig, ServerConfig, TrainingConfig
from consilium.core.schema import SMALLEST_NOISE, Positive, Section, Seed, read_fingerprint
from consilium.models.registry import ModelConfig
from consilium.tasks.registry import TaskConfig

Unit: TypeAlias = Literal["record", "patient", "site"]
"""What a claim may be about, the finer first."""
NEEDS_MASKS = (
    "a share of the noise protects nobody from a server that sees each site's update, and without secure_aggregation it does; "
    "add the section, or use local"
)
"""Why noise in shares is refused without masks."""


NoiseMultiplier = Annotated[
    Annotated[float, Field(ge=0, le=1e4)] | None,
    Field(description="sets the noise itself, instead of `epsilon` (0: clip only, protects nothing)"),
]
Delta = Annotated[float, Field(gt=0, lt=1, description="the chance that epsilon does not hold")]


class SiteLevelDpConfig(Section):
    """Site-level DP: all of a site's data is hidden behind its clipped and noised updates."""

    unit: Literal["site"]
    epsilon: Annotated[
        Annotated[float, Field(gt=0, le=1e4)] | None,
        Field(description="what the whole run may cost a site; give it or `noise_multiplier`"),
    ] = None
    noise_multiplier: NoiseMultiplier = None
    delta: Delta = 1e-5
    clip: Annotated[float, Field(gt=0, le=1e6, description="bounds an update's norm")]
    trust: Annotated[
        Literal["local", "central", "distributed"],
        Field(
            description="who adds the noise: each site all of it (local), the server (central), or each site a share of it"
            " (distributed), so that only the sum, which is all that secure aggregation shows, carries the "
            "whole"
        ),
    ] = "local"
    adjacency: Annotated[
        Literal["zero-out", "replace"],
        Field(description="a site's update against none (zero-out), or any two data sets at it (replace, twice the noise)"),
    ] = "zero-out"
    accountant: Annotated[Literal["exact", "prv", "rdp"], Field(description="how releases add up")] = "exact"
    calibration: Annotated[
        Literal["honest", "paper"],
        Field(
            description="`calibration` paper takes the noise that DEeR's code takes for `epsilon`, to reproduce its "
            "tables. It counts batches of images where sites' updates are released, at delta 1 / sites, and "
            "clips every tensor on its own. What that really keeps is accounted and printed beside, and is "
            "what a site's budget must cover"
        ),
    ] = "honest"
    sites: Annotated[
        Annotated[int, Field(ge=2, le=10_000)] | None, Field(description="how many take part, calibration paper only")
    ] = None
    samples: Annotated[
        Annotated[int, Field(ge=1, le=10**9)] | None,
        Field(description="the training images of all sites together, calibration paper only"),
    ] = None

    @model_validator(mode="after")
    def _one_noise(self) -> Self:
        return _one_noise(self)

    @model_validator(mode="after")
    def _paper(self) -> Self:
        counts = {"sites": self.sites, "samples": self.samples}
        if self.calibration == "honest":
            if given := [name for name, value in counts.items() if value is not None]:
                raise ValueError(f"{given[0]}: of calibration paper only; remove it")
            return self
        if missing := [name for name, value in {"epsilon": self.epsilon, **counts}.items() if value is None]:
            raise ValueError(f"calibration: 'paper' makes its noise from epsilon, sites and samples; give {missing[0]}")
        if self.trust == "distributed":
            raise ValueError("trust: 'distributed': calibration paper clips tensors one by one, off the grid; use local")
        if self.adjacency != "zero-out":
            raise ValueError(f"adjacency: {self.adjacency!r} is not the paper's (calibration paper); use zero-out")
        return self


class _DpSgdConfig(Section):
    """What DP-SGD by records and by patients share."""

    unit: str
    epsilon: Annotated[
        Annotated[float, Field(gt=0, le=1e4)] | None,
        Field(description="what the whole run may cost a record or patient; give it or `noise_multiplier`"),
    ] = None
    noise_multiplier: NoiseMultiplier = None
    delta: Delta = 1e-5
    clip: Annotated[float, Field(gt=0, le=1e6, description="bounds the gradient of a record or patient")] = 1.0
    accountant: Annotated[Literal["prv", "rdp"], Field(description="how steps add up")] = "prv"
    trust: Annotated[
        Literal["local", "distributed"],
        Field(description="who adds the noise: each site for itself, or all in shares under secure aggregation"),
    ] = "local"
    sample_rate: Annotated[
        Annotated[float, Field(gt=0, lt=1)] | None,
        Field(description="trust distributed: with which each is drawn at a step, at every site"),
    ] = None
    divisor: Annotated[
        Positive | None, Field(description="trust distributed: of the step's sum; about how many all sites draw together")
    ] = None
    adjacency: ClassVar[str] = "zero-out"
    calibration: ClassVar[str] = "honest"

    @model_validator(mode="after")
    def _one_noise(self) -> Self:
        return _one_noise(self)

    @model_validator(mode="after")
    def _of_trust(self) -> Self:
        given = {"sample_rate": self.sample_rate, "divisor": self.divisor}
        if self.trust == "distributed" and (missing := [name for name, value in given.items() if value is None]):
            raise ValueError(f"{missing[0]}: trust 'distributed' takes one step a round, with numbers that all know; give it")
        if self.trust == "local" and (extra := [name for name, value in given.items() if value is not None]):
            raise ValueError(f"{extra[0]}: of trust distributed only; remove it")
        return self


class RecordLevelDpConfig(_DpSgdConfig):
    """Record-level DP-SGD: each record is hidden by clipping its gradient to `clip`, noise and Poisson batches.

    With trust local the number of records is public: a site tells it, and its weight and noise follow from it. `trust`
    distributed takes one step a round over all sites' records, and sites' shares of noise are one noise together.
    """

    unit: Literal["record"]


class PatientLevelDpConfig(_DpSgdConfig):
    """Patient-level DP-SGD: all entries of a data list with one `patient` are hidden together.

    The list must name patients. Steps draw patients, and `training.batch_size` counts them. A patient's gradient is the mean
    over at most `per_patient` of its samples, clipped to `clip` as one. With trust local the number of patients is
    public.
    """

    unit: Literal["patient"]
    per_patient: Annotated[
        int, Field(ge=1, le=4096, description="a step takes the mean over so many of a patient's samples at most")
    ] = 4


DpSgdConfig: TypeAlias = PatientLevelDpConfig | RecordLevelDpConfig
"""The sections by which training itself is private."""


def _one_noise(section: Any) -> Any:
    if (section.epsilon is None) == (section.noise_multiplier is None):
        raise ValueError("one of epsilon and noise_multiplier; give exactly one")
    return section


PrivacyConfig = Annotated[SiteLevelDpConfig | DpSgdConfig, Field(discriminator="unit")]


class BudgetConfig(Section):
    """How much a data set may spend in all jobs together."""

    epsilon: Annotated[float, Field(gt=0, le=1e4, description="what all jobs together may ever cost")]
    delta: Annotated[float, Field(gt=0, lt=1, description="the chance that epsilon does not hold")] = 1e-5


class HospitalPrivacyPolicy(Section):
    """What a hospital lets jobs do to its privacy."""

    dataset: Annotated[
        Annotated[str, Field(min_length=1, max_length=200)] | None,
        Field(
            description="`dataset` names the data in the ledger (default: the data list's path); give every list of the "
            "same patients one name"
        ),
    ] = None
    budgets: Annotated[
        dict[Unit, BudgetConfig],
        Field(
            description="how much one record, one patient, or the whole site, may spend in all jobs; every job counts "
            "against every budget, and one that a budget does not bound is refused"
        ),
    ] = Field(default_factory=dict)
    trust: Annotated[
        tuple[Literal["local", "central", "distributed"], ...] | None,
        Field(
            description="who may be trusted to add the noise; with it, or with any budget (then only `local`, unless it "
            "says more), a job without noise is refused"
        ),
    ] = None
    ledger: Annotated[Path | None, Field(description="the privacy ledger's file, if not in `state`")] = None
    noise_seed: Annotated[
        Seed | None,
        Field(description="`noise_seed` makes noise repeatable for tests; the run is then not private, and its records say so"),
    ] = None

    def ledger_in(self, root: Path) -> Path:
        """Return the ledger's file at a site that keeps its records below `root`."""
        return self.ledger or root / "ledger.sqlite"

    @property
    def protects(self) -> bool:
        """Whether jobs must be private here."""
        return bool(self.budgets) or self.trust is not None


# secure aggregation ----------------------------------------------------------------------------------------------------
# Secure aggregation: the `secure_aggregation:` sections of job.yaml and site.yaml, and the check of a job with masks.

MOST_WEIGHT = 65_536
"""The most that a site's update may weigh, unless federation.max_weight says it."""
PartnerName = Annotated[str, Field(min_length=1, max_length=128)]
Fingerprint = Annotated[str, Field(max_length=256), AfterValidator(read_fingerprint)]
FEWEST = 3
"""Of two sites each knows the other's update from the sum."""


class SecureAggregationConfig(Section):
    """Sites mask their updates, so that the server, with up to `colluders` sites, learns their sum only."""

    threshold: Annotated[
        Annotated[int, Field(ge=2, le=10_000)] | None,
        Field(
            description="how many of the n sites asked must stay to the end of a phase; by default floor(2 n / 3) + 1. "
            "Needed are 2 threshold > n + colluders and threshold >= colluders + 2, so with the defaults at "
            "least three sites. Without noise all of them must send an update, and no sums, of whatever runs, "
            "may show fewer than `threshold` hospitals together"
        ),
    ] = None
    colluders: Annotated[int, Field(ge=0, le=10000, description="sites that may work together with the server")] = 1
    bound: Annotated[
        Positive | None, Field(description="larger numbers are cut off at it; by default what sums of all sites have room for")
    ] = None


class SitePartnersConfig(Section):
    """What a site asks of secure aggregation before it takes part."""

    partners: Annotated[
        dict[PartnerName, Fingerprint],
        Field(
            max_length=10_000,
            description="the other sites by name, with the SHA-256 fingerprints of their public keys (64 hex digits, "
            "colons or not; `consilium doctor` prints a kit's), compared out of band; no other is accepted. "
            "Needed where `privacy.budgets` are. To remove one revokes it",
        ),
    ] = Field(default_factory=dict)
    min_colluders: Annotated[int, Field(ge=0, le=10000, description="jobs that count on fewer are refused")] = 1
    min_sites: Annotated[int, Field(ge=FEWEST, le=10000, description="fewer sites together are refused")] = FEWEST


def check_masked(
    strategy: Any,
    server: ServerConfig | None,
    diagnostics: DiagnosticsConfig,
    privacy: PrivacyConfig | None,
    federation: FederationConfig,
) -> None:
    """Raise ValueError, naming field, value and remedy, for a setting that needs single updates or other sums."""
    if strategy.traits.needs == "sites" or strategy.traits.pools_data:
        what = "needs single sites' updates, which nobody sees"
        raise ValueError(f"secure_aggregation: strategy {strategy.name!r} {what}; remove the section, or use fedit")
    if server is not None and server.robust:
        raise ValueError(f"secure_aggregation: server.mean {server.mean!r} needs single sites' updates; use weighted")
    if diagnostics.deviation or diagnostics.looks_inside:
        raise ValueError("secure_aggregation: diagnostics deviation, leakage and oracle look at single sites; remove them")
    if privacy is not None and federation.weighting == "samples":
        raise ValueError(
            "federation.weighting: 'samples': with privacy and secure_aggregation every site weighs 1; use uniform"
        )
    if federation.max_weight is not None and federation.max_weight > MOST_WEIGHT:
        what = f"over the {MOST_WEIGHT} that secure_aggregation has room for"
        raise ValueError(f"federation.max_weight: {federation.max_weight}: {what}; lower it")


# dpsgd -----------------------------------------------------------------------------------------------------------------
# Checks of a job with DP-SGD, or with noise in shares, against its other sections.


def check_apart(
    dpsgd: DpSgdConfig, data: DataConfig, training: TrainingConfig, adapter: AdapterConfig, model: ModelConfig, task: TaskConfig
) -> None:
    """Raise ValueError, naming field, value and remedy, for a setting that ties the records (or patients) of a batch together.

    DP-SGD's noise is made for a sum that one of them moves by the clip at most. That holds only while its gradient does not
    depend on those beside it.
    """
    unit, noise_multiplier = dpsgd.unit, dpsgd.noise_multiplier
    if data.most_training is not None:
        what = f"chooses by how many there are, so one {unit} more changes which others are there"
        raise ValueError(f"data.most_training: {data.most_training} {what} (privacy.unit {unit}); leave it out")
    if training.accumulate > 1:
        raise ValueError(f"training.accumulate: cannot be over 1 with privacy.unit {unit}; raise batch_size instead")
    if training.compile:
        raise ValueError(f"training.compile: true hides the layers whose gradients privacy.unit {unit} takes; use false")
    if training.precision == "bf16":
        what = f"rounds a record's gradient by who is beside it, so no privacy.unit {unit}"
        raise ValueError(f"training.precision: 'bf16' {what}; use auto or fp32")
    adapter.keep_apart()
    model.keep_apart()
    if model.dtype == "int8":
        what = "chooses by the whole batch what it computes in 16 bits, which ties its samples together"
        raise ValueError(f"model.dtype: 'int8' {what} under privacy.unit {unit}; use nf4 or bf16")
    task.keep_apart()
    if noise_multiplier is not None and 0 < noise_multiplier < SMALLEST_NOISE:
        what = f"under {SMALLEST_NOISE} no accountant tells it from none"
        raise ValueError(f"privacy.noise_multiplier: {noise_multiplier}: {what}; raise it, or use 0 to clip only")


def check_shares(
    privacy: SiteLevelDpConfig | DpSgdConfig,
    masks: SecureAggregationConfig | None,
    training: TrainingConfig,
    server: ServerConfig | None,
) -> None:
    """Raise ValueError, naming field, value and remedy, for a setting that excludes noise in shares (`trust: distributed`)."""
    if masks is None:
        raise ValueError(f"privacy.trust: 'distributed': {NEEDS_MASKS}")
    if isinstance(privacy, SiteLevelDpConfig):
        return
    if training.local_steps != 1:
        what = f"{training.local_steps or 'none'}: DP-SGD over all sites takes one step a round"
        raise ValueError(f"training.local_steps: {what}; use 1")
    if training.schedule != "constant":
        what = "falls within a round, which has one step (privacy.trust distributed)"
        raise ValueError(f"training.schedule: {training.schedule!r} {what}; leave it out")
    if training.optimizer_state == "kept":
        what = "is of sites, and the server takes the steps (privacy.trust distributed)"
        raise ValueError(f"training.optimizer_state: 'kept' {what}; leave it out")
    if server is not None:
        what = "DP-SGD over all sites takes the server's steps by training.optimizer"
        raise ValueError(f"server: {what}; remove the section")
