"""Privacy sections of job.yaml and site.yaml (differential privacy, budgets, secure aggregation), and checks between them."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from consilium.adapters.registry import AdapterConfig
from consilium.config.data import DataConfig
from consilium.config.run_sections import DiagnosticsConfig, FederationConfig, ServerConfig, TrainingConfig
from consilium.core.errors import raise_first
from consilium.core.schema import SMALLEST_NOISE, Positive, Section, Seed, fingerprint_digits
from consilium.models.registry import ModelConfig
from consilium.tasks.registry import TaskConfig

Unit: TypeAlias = Literal["record", "patient", "site"]
"""The units of a privacy guarantee, from the finest to the coarsest."""
NEEDS_MASKS = (
    "a share of the noise protects nobody from a server that sees each site's update, and without secure_aggregation it does; "
    "add the section, or use local"
)
"""Why `trust: distributed` is refused without masks."""


NoiseMultiplier = Annotated[
    Annotated[float, Field(ge=0, le=1e4)] | None,
    Field(description="the noise multiplier, instead of `epsilon` (0: clip only, which protects nothing)"),
]
Delta = Annotated[float, Field(gt=0, lt=1, description="the probability that epsilon does not hold")]


class _NoiseSection(Section):
    """Base of the privacy sections, each of which has `epsilon` and `noise_multiplier`."""

    @model_validator(mode="after")
    def _check_one_noise(self) -> Self:
        if (vars(self)["epsilon"] is None) == (vars(self)["noise_multiplier"] is None):
            raise ValueError("one of epsilon and noise_multiplier; give exactly one")
        return self


class SiteLevelDpConfig(_NoiseSection):
    """Site-level DP: clipping and noise on a site's updates protect all of its data together."""

    unit: Literal["site"]
    epsilon: Annotated[
        Annotated[float, Field(gt=0, le=1e4)] | None,
        Field(description="the epsilon that the whole run may spend per site; give it or `noise_multiplier`"),
    ] = None
    noise_multiplier: NoiseMultiplier = None
    delta: Delta = 1e-5
    clip: Annotated[float, Field(gt=0, le=1e6, description="bounds an update's norm")]
    trust: Annotated[
        Literal["local", "central", "distributed"],
        Field(
            description="who adds the noise: each site the full noise (`local`), the server (`central`), or each site a share "
            "of it (`distributed`), so that the sum has the full noise; secure aggregation shows only the sum"
        ),
    ] = "local"
    adjacency: Annotated[
        Literal["zero-out", "replace"],
        Field(
            description="`zero-out` compares a site's update with no update; `replace` compares any two data sets at the site "
            "and needs twice the noise"
        ),
    ] = "zero-out"
    accountant: Annotated[Literal["exact", "prv", "rdp"], Field(description="the accountant that composes releases")] = "exact"
    calibration: Annotated[
        Literal["honest", "paper"],
        Field(
            description="`paper` uses the noise that DEeR's code uses for `epsilon`, to reproduce its tables. That code counts "
            "batches of images although sites' updates are released, at delta 1 / sites, and clips every tensor separately. "
            "The epsilon that really holds is printed beside, and a site's budget must cover it"
        ),
    ] = "honest"
    sites: Annotated[
        Annotated[int, Field(ge=2, le=10_000)] | None, Field(description="the number of sites; calibration paper only")
    ] = None
    samples: Annotated[
        Annotated[int, Field(ge=1, le=10**9)] | None,
        Field(description="the number of training images of all sites together; calibration paper only"),
    ] = None

    @model_validator(mode="after")
    def _check_calibration(self) -> Self:
        counts = {"sites": self.sites, "samples": self.samples}
        if self.calibration == "honest":
            if given := [name for name, value in counts.items() if value is not None]:
                raise ValueError(f"{given[0]}: of calibration paper only; remove it")
            return self
        if missing := [name for name, value in {"epsilon": self.epsilon, **counts}.items() if value is None]:
            raise ValueError(f"calibration: 'paper' makes its noise from epsilon, sites and samples; give {missing[0]}")
        problems = {
            "trust: 'distributed': calibration paper clips tensors one by one, off the grid; use local": (
                self.trust == "distributed"
            ),
            f"adjacency: {self.adjacency!r} is not the paper's (calibration paper); use zero-out": self.adjacency != "zero-out",
        }
        raise_first(problems, ValueError)
        return self


class _DpSgdConfig(_NoiseSection):
    """The fields that DP-SGD by records and by patients have in common."""

    unit: str
    epsilon: Annotated[
        Annotated[float, Field(gt=0, le=1e4)] | None,
        Field(description="the epsilon that the whole run may spend per record or patient; give it or `noise_multiplier`"),
    ] = None
    noise_multiplier: NoiseMultiplier = None
    delta: Delta = 1e-5
    clip: Annotated[float, Field(gt=0, le=1e6, description="bounds the gradient of a record or patient")] = 1.0
    accountant: Annotated[Literal["prv", "rdp"], Field(description="the accountant that composes steps")] = "prv"
    trust: Annotated[
        Literal["local", "distributed"],
        Field(description="who adds the noise: each site the full noise (`local`), or each a share, with secure aggregation"),
    ] = "local"
    sample_rate: Annotated[
        Annotated[float, Field(gt=0, lt=1)] | None,
        Field(description="trust distributed: the probability with which a step draws each record or patient, at every site"),
    ] = None
    divisor: Annotated[
        Positive | None,
        Field(
            description="trust distributed: the divisor of a step's sum; about the number of records or patients that all "
            "sites together draw"
        ),
    ] = None
    adjacency: ClassVar[str] = "zero-out"
    calibration: ClassVar[str] = "honest"

    @model_validator(mode="after")
    def _check_trust(self) -> Self:
        for name, value in {"sample_rate": self.sample_rate, "divisor": self.divisor}.items():
            problems = {
                f"{name}: trust 'distributed' takes one step a round, with numbers that all know; give it": (
                    self.trust == "distributed" and value is None
                ),
                f"{name}: of trust distributed only; remove it": self.trust == "local" and value is not None,
            }
            raise_first(problems, ValueError)
        return self


class RecordLevelDpConfig(_DpSgdConfig):
    """Record-level DP-SGD: clipping each record's gradient to `clip`, noise and Poisson batches protect each record.

    With trust local the number of records is public: a site reports it, and its weight and noise depend on it. With trust
    distributed each round is one step over all sites' records, and the sites' shares of noise add up to the full noise.
    """

    unit: Literal["record"]


class PatientLevelDpConfig(_DpSgdConfig):
    """Patient-level DP-SGD: all entries of a data list with the same `patient` are protected together.

    The list must name patients. Steps draw patients, and `training.batch_size` counts patients. A patient's gradient is the
    mean over at most `per_patient` of its samples, clipped to `clip`. With trust local the number of patients is public.
    """

    unit: Literal["patient"]
    per_patient: Annotated[
        int, Field(ge=1, le=4096, description="the most samples of a patient over which a step takes the mean")
    ] = 4


DpSgdConfig: TypeAlias = PatientLevelDpConfig | RecordLevelDpConfig
"""The privacy sections with DP-SGD."""


PrivacyConfig = Annotated[SiteLevelDpConfig | DpSgdConfig, Field(discriminator="unit")]


class BudgetConfig(Section):
    """How much of a data set's privacy all jobs together may spend."""

    epsilon: Annotated[float, Field(gt=0, le=1e4, description="the epsilon that all jobs together may ever spend")]
    delta: Annotated[float, Field(gt=0, lt=1, description="the probability that epsilon does not hold")] = 1e-5


class HospitalPrivacyPolicy(Section):
    """A hospital's limits on the privacy that jobs may spend."""

    dataset: Annotated[
        Annotated[str, Field(min_length=1, max_length=200)] | None,
        Field(
            description="the name of the data in the privacy ledger, by default the data list's path; give all lists of the "
            "same patients the same name"
        ),
    ] = None
    budgets: Annotated[
        dict[Unit, BudgetConfig],
        Field(
            description="budgets for `record`, `patient` or `site`, over all jobs. Every job counts against every budget; a "
            "job with a privacy unit that bounds no cost for a budget's unit is refused"
        ),
    ] = Field(default_factory=dict)
    trust: Annotated[
        tuple[Literal["local", "central", "distributed"], ...] | None,
        Field(
            description="the values of a job's `privacy.trust` that are allowed. With this field or any budget, a job without "
            "noise is refused; with a budget alone only `local` is allowed"
        ),
    ] = None
    ledger: Annotated[Path | None, Field(description="the privacy ledger's file; by default in `state`")] = None
    noise_seed: Annotated[
        Seed | None,
        Field(description="makes the noise repeatable, for tests; the run is then not private, and its records say so"),
    ] = None

    def ledger_in(self, root: Path) -> Path:
        """Return the path of the ledger at a site whose records are in `root`."""
        return self.ledger or root / "ledger.sqlite"

    @property
    def requires_privacy(self) -> bool:
        """Whether jobs must be private here."""
        return bool(self.budgets) or self.trust is not None


# secure aggregation ----------------------------------------------------------------------------------------------------
# The `secure_aggregation:` sections of job.yaml and site.yaml, and the check of a job with masks.

MOST_WEIGHT = 65_536
"""The largest weight of a site's update if federation.max_weight is not set."""
Fingerprint = Annotated[str, Field(max_length=256), AfterValidator(fingerprint_digits)]
FEWEST = 3
"""The fewest sites. With two, each site could compute the other's update from the sum."""


class SecureAggregationConfig(Section):
    """Sites mask their updates, so that the server, even together with `colluders` sites, learns only their sum."""

    threshold: Annotated[
        Annotated[int, Field(ge=2, le=10_000)] | None,
        Field(
            description="how many of the n asked sites must stay to the end of a phase; by default floor(2 n / 3) + 1. "
            "It must satisfy 2 threshold > n + colluders and threshold >= colluders + 2, so the defaults need at "
            "least three sites. Without noise all n must send an update"
        ),
    ] = None
    colluders: Annotated[int, Field(ge=0, le=10000, description="sites that may work together with the server")] = 1
    bound: Annotated[
        Positive | None,
        Field(
            description="numbers of an update are clipped to this size; by default the largest for which sums do not overflow"
        ),
    ] = None


class SitePartnersConfig(Section):
    """A site's conditions for taking part in secure aggregation."""

    partners: Annotated[
        dict[Annotated[str, Field(min_length=1, max_length=128)], Fingerprint],
        Field(
            max_length=10_000,
            description="the other sites by name, with the SHA-256 fingerprints of their public keys (64 hex digits, with or "
            "without colons; `consilium doctor` prints that of a kit), compared out of band. No other site is accepted. "
            "Required with `privacy.budgets`. Removing an entry revokes that site",
        ),
    ] = Field(default_factory=dict)
    min_colluders: Annotated[int, Field(ge=0, le=10000, description="jobs with a smaller `colluders` are refused")] = 1
    min_sites: Annotated[int, Field(ge=FEWEST, le=10000, description="phases with fewer sites are refused")] = FEWEST


def check_masked(
    strategy: Any,
    server: ServerConfig | None,
    diagnostics: DiagnosticsConfig,
    privacy: PrivacyConfig | None,
    federation: FederationConfig,
) -> None:
    """Raise ValueError, naming field, value and remedy, for a setting that does not work with masked sums."""
    mean, most = "weighted" if server is None else server.mean, federation.max_weight
    problems = {
        f"secure_aggregation: strategy {strategy.name!r} needs single sites' updates, which nobody sees; remove the section, "
        "or use fedit": strategy.traits.needs == "sites" or strategy.traits.pools_data,
        f"secure_aggregation: server.mean {mean!r} needs single sites' updates; use weighted": mean != "weighted",
        "secure_aggregation: diagnostics deviation, leakage and oracle look at single sites; remove them": (
            diagnostics.deviation or diagnostics.reads_site_tensors
        ),
        "federation.weighting: 'samples': with privacy and secure_aggregation every site weighs 1; use uniform": (
            privacy is not None and federation.weighting == "samples"
        ),
        f"federation.max_weight: {most}: over the {MOST_WEIGHT} that secure_aggregation has room for; lower it": (
            most is not None and most > MOST_WEIGHT
        ),
    }
    raise_first(problems, ValueError)


# dpsgd -----------------------------------------------------------------------------------------------------------------
# Checks of a job with DP-SGD, or with distributed noise, against its other sections.


def check_records_independent(
    dpsgd: DpSgdConfig, data: DataConfig, training: TrainingConfig, adapter: AdapterConfig, model: ModelConfig, task: TaskConfig
) -> None:
    """Raise ValueError for a setting with which a record's (or patient's) gradient depends on others of its batch.

    DP-SGD's noise assumes that one of them changes the sum by at most the clip. The message names field, value and remedy.
    """
    unit, noise = dpsgd.unit, dpsgd.noise_multiplier
    problems = {
        f"data.most_training: {data.most_training} chooses by how many there are, so one {unit} more changes which others are "
        f"there (privacy.unit {unit}); leave it out": data.most_training is not None,
        f"training.accumulate: cannot be over 1 with privacy.unit {unit}; raise batch_size instead": training.accumulate > 1,
        f"training.compile: true hides the layers whose gradients privacy.unit {unit} takes; use false": training.compile,
        f"training.precision: 'bf16' rounds a record's gradient by who is beside it, so no privacy.unit {unit}; use auto or "
        "fp32": training.precision == "bf16",
        "model.dtype: 'int8' chooses by the whole batch what it computes in 16 bits, which ties its samples together under "
        f"privacy.unit {unit}; use nf4 or bf16": model.dtype == "int8",
        f"privacy.noise_multiplier: {noise}: under {SMALLEST_NOISE} no accountant tells it from none; raise it, or use 0 to "
        "clip only": noise is not None and 0 < noise < SMALLEST_NOISE,
    }
    raise_first(problems, ValueError)
    for section in (adapter, model, task):
        section.check_per_sample_gradients()


def check_shares(
    privacy: SiteLevelDpConfig | DpSgdConfig,
    masks: SecureAggregationConfig | None,
    training: TrainingConfig,
    server: ServerConfig | None,
) -> None:
    """Raise ValueError, naming field, value and remedy, for a setting that excludes `trust: distributed`."""
    by_step = not isinstance(privacy, SiteLevelDpConfig)
    problems = {
        f"privacy.trust: 'distributed': {NEEDS_MASKS}": masks is None,
        f"training.local_steps: {training.local_steps or 'none'}: DP-SGD over all sites takes one step a round; use 1": (
            by_step and training.local_steps != 1
        ),
        f"training.schedule: {training.schedule!r} falls within a round, which has one step (privacy.trust distributed); leave "
        "it out": by_step and training.schedule != "constant",
        "training.optimizer_state: 'kept' is of sites, and the server takes the steps (privacy.trust distributed); leave it "
        "out": by_step and training.optimizer_state == "kept",
        "server: DP-SGD over all sites takes the server's steps by training.optimizer; remove the section": (
            by_step and server is not None
        ),
    }
    raise_first(problems, ValueError)
