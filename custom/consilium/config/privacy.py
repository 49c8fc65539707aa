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


class SiteLevelDpConfig(Section):
    """Site-level DP: all of a site's data is hidden behind its clipped and noised updates. `clip` bounds an update's norm.

    `noise_multiplier` instead of `epsilon` sets the noise itself (0: clip only, protects nothing). `trust`: who adds the
    noise: each site all of it (local), the server (central), or each site a share of it (distributed), so that only the sum,
    which is all that secure aggregation shows, carries the whole. `adjacency`: a site's update against none (zero-out), or any
    two data sets at it (replace, twice the noise).

    `calibration` paper takes the noise that DEeR's code takes for `epsilon`, to reproduce its tables. It counts batches of
    images where sites' updates are released, at delta 1 / sites, and clips every tensor on its own. What that really keeps is
    accounted and printed beside, and is what a site's budget must cover. `sites`: how many take part, calibration paper only.
    `samples`: the training images of all sites together, calibration paper only.
    """

    unit: Literal["site"]
    epsilon: Annotated[float, Field(gt=0, le=1e4)] | None = None
    noise_multiplier: Annotated[float, Field(ge=0, le=1e4)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    clip: Annotated[float, Field(gt=0, le=1e6)]
    trust: Literal["local", "central", "distributed"] = "local"
    adjacency: Literal["zero-out", "replace"] = "zero-out"
    accountant: Literal["exact", "prv", "rdp"] = "exact"
    calibration: Literal["honest", "paper"] = "honest"
    sites: Annotated[int, Field(ge=2, le=10_000)] | None = None
    samples: Annotated[int, Field(ge=1, le=10**9)] | None = None

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
    epsilon: Annotated[float, Field(gt=0, le=1e4)] | None = None
    noise_multiplier: Annotated[float, Field(ge=0, le=1e4)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    clip: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    accountant: Literal["prv", "rdp"] = "prv"
    trust: Literal["local", "distributed"] = "local"
    sample_rate: (
        Annotated[float, Field(gt=0, lt=1, description="trust distributed: with which each is drawn at a step, at every site")]
        | None
    ) = None
    divisor: (
        Annotated[Positive, Field(description="trust distributed: of the step's sum; about how many all sites draw together")]
        | None
    ) = None
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
    """Patient-level DP-SGD: all entries of a data list with one `patient` are hidden together. The list must name patients.

    Steps draw patients, and `training.batch_size` counts them. A patient's gradient is the mean over at most `per_patient` of
    its samples, clipped to `clip` as one. With trust local the number of patients is public. `trust` as for record.
    """

    unit: Literal["patient"]
    per_patient: Annotated[int, Field(ge=1, le=4096)] = 4


DpSgdConfig: TypeAlias = PatientLevelDpConfig | RecordLevelDpConfig
"""The sections by which training itself is private."""


def _one_noise(section: Any) -> Any:
    if (section.epsilon is None) == (section.noise_multiplier is None):
        raise ValueError("one of epsilon and noise_multiplier; give exactly one")
    return section


PrivacyConfig = Annotated[SiteLevelDpConfig | DpSgdConfig, Field(discriminator="unit")]


class BudgetConfig(Section):
    """How much a data set may spend in all jobs together."""

    epsilon: Annotated[float, Field(gt=0, le=1e4)]
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5


class HospitalPrivacyPolicy(Section):
    """What a hospital lets jobs do to its privacy.

    `dataset` names the data in the ledger (default: the data list's path); give every list of the same patients one name.
    `budgets`: how much one record, one patient, or the whole site, may spend in all jobs; every job counts against every
    budget, and one that a budget does not bound is refused. `trust`: who may be trusted to add the noise; with it, or with
    any budget (then only `local`, unless it says more), a job without noise is refused. `noise_seed` makes noise repeatable
    for tests; it protects nobody, and the ledger says so.
    """

    dataset: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    budgets: dict[Unit, BudgetConfig] = Field(default_factory=dict)
    trust: tuple[Literal["local", "central", "distributed"], ...] | None = None
    ledger: Path | None = None
    noise_seed: Seed | None = None

    def ledger_in(self, root: Path) -> Path:
        """Return the ledger's file at a site that keeps its records below `root`."""
        return self.ledger or root / "ledger.sqlite"

    @property
    def protects(self) -> bool:
        """Whether jobs must be private here."""
        return bool(self.budgets) or self.trust is not None
