"""What a job asks and what a hospital allows: the `privacy:` sections of job.yaml and site.yaml."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from consilium.core.schema import Positive, Section, Seed

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
