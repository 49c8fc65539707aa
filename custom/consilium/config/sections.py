"""Sections of job.yaml on how a run goes: training, validation, federation, server, statistics, cross_site, diagnostics."""

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from consilium.core.schema import Name, Positive, Seconds, Section, Seed, Share

# validation ------------------------------------------------------------------------------------------------------------
# When a job scores the validation split, and whether these scores end it.


class ValidateConfig(Section):
    """When the validation split is scored: in rounds `every`, 2 `every` and so on, counted from 1, and by which models.

    The closing evaluation comes in any case.
    """

    every: Annotated[int, Field(ge=1, le=100000, description="score in every so many rounds")] = 1
    stages: Annotated[
        tuple[Literal["global", "personalized"], ...],
        Field(max_length=2, description="the model as it comes from the server, and after the site's training; [] for none"),
    ] = ("global", "personalized")
    full: Annotated[bool, Field(description="score as at the end: written answers, distances, intervals")] = False
    patience: Annotated[
        int,
        Field(
            ge=0,
            le=100_000,
            exclude_if=lambda value: not value,
            description="the run ends when the mean over sites of the global model's leading score has not improved in so "
            "many validations in a row; the closing evaluation follows. 0 runs all rounds",
        ),
    ] = 0
    """Written into a job only where it is on, so that no other job's digest tells of it."""

    @model_validator(mode="after")
    def _sees_the_global_model(self) -> Self:
        if self.patience and "global" not in self.stages:
            raise ValueError(
                f"patience: {self.patience}: goes by the global model's score; add global to stages, or leave it out"
            )
        return self


# training --------------------------------------------------------------------------------------------------------------
# The `training:` section of job.yaml.


class TrainingConfig(Section):
    """Local training."""

    rounds: Annotated[int, Field(ge=1, le=100_000, description="rounds of the whole run")]
    local_epochs: Annotated[int, Field(ge=1, le=1000, description="passes over a site's training data in a round")] = 1
    local_steps: Annotated[
        Annotated[int, Field(ge=1, le=100_000)] | None,
        Field(description="optimizer steps in a round, instead of `local_epochs`"),
    ] = None
    batch_size: Annotated[int, Field(ge=1, le=65536, description="samples in a batch")] = 4
    accumulate: Annotated[int, Field(ge=1, le=4096, description="batches per optimizer step")] = 1
    optimizer: Annotated[Literal["adam", "adamw", "sgd"], Field(description="the optimizer at every site")] = "adam"
    optimizer_state: Annotated[
        Literal["fresh", "kept"],
        Field(description="`fresh`: empty in every round; `kept`: it stays at the site, which goes on with it"),
    ] = "fresh"
    lr: Annotated[float, Field(gt=0, le=1000, description="learning rate")] = 1e-4
    schedule: Annotated[
        Literal["constant", "cosine", "linear"],
        Field(
            description="`schedule` cosine and linear let the learning rate fall from `lr` to 0 within each round's local "
            "training, without warm-up"
        ),
    ] = "constant"
    weight_decay: Annotated[float, Field(ge=0, le=1000, description="the optimizer's weight decay")] = 0.0
    momentum: Annotated[float, Field(ge=0, lt=1, description="sgd only")] = 0.0
    precision: Annotated[Literal["auto", "bf16", "fp32"], Field(description="`auto` is bf16 where the GPU has it")] = "auto"
    gradient_checkpointing: Annotated[bool, Field(description="less memory for more time")] = False
    compile: Annotated[
        bool, Field(description="the model's blocks by torch.compile: the first step takes up to minutes, all others less")
    ] = False
    seed: Annotated[Seed, Field(description="with round and site it fixes every random choice but privacy noise")] = 0
    validation: Annotated[ValidateConfig, Field(alias="validate", description="when the validation split is scored")] = (
        ValidateConfig()
    )

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


# federation ------------------------------------------------------------------------------------------------------------
# The `federation:` section of job.yaml.


class FederationConfig(Section):
    """Who takes part."""

    min_sites: Annotated[int, Field(ge=1, le=10_000, description="the quorum of a round")] = 1
    fraction_train: Annotated[float, Field(gt=0, le=1, description="the share of the sites that a round asks to train")] = 1.0
    fraction_evaluate: Annotated[
        Share,
        Field(
            description="`fraction_evaluate` of the sites that are not asked evaluate the shared model before the round, "
            "on their validation data"
        ),
    ] = 0.0
    weighting: Annotated[
        Literal["samples", "uniform"] | None,
        Field(description="what a site's update weighs; by default its samples, and `uniform` under site-level privacy"),
    ] = None
    max_weight: Annotated[
        Annotated[int, Field(ge=1, le=10**9)] | None,
        Field(
            description="the most samples that one site counts for in the mean, whatever it says it has; without it, what "
            "it says"
        ),
    ] = None
    round_timeout: Annotated[Seconds, Field(gt=0, description="seconds that a round may take")] = 3600.0
    straggler_grace_seconds: Annotated[Seconds, Field(description="wait for more sites once the quorum is in")] = 600.0
    max_norm_ratio: Annotated[
        Positive, Field(description="an update whose norm is over this many times that of the adapter at its start is refused")
    ] = 100.0


# server ----------------------------------------------------------------------------------------------------------------
# The `server:` section of job.yaml: the mean of the sites' updates, and the step along it.

_USED = {
    "lr": ("momentum", "adam", "yogi"),
    "beta1": ("momentum", "adam", "yogi"),
    "beta2": ("adam", "yogi"),
    "tau": ("adam", "yogi"),
}
"""The optimizers that use each field."""
Beta = Annotated[float, Field(ge=0, lt=1)]


class ServerConfig(Section):
    """Which mean of the sites' updates is taken, and which step along it. Without the section: the weighted mean, as it is."""

    optimizer: Annotated[
        Literal["momentum", "adam", "yogi"] | None,
        Field(description="FedAvgM, FedAdam or FedYogi; its state is in the server's checkpoint"),
    ] = None
    lr: Annotated[Positive | None, Field(description="the server's learning rate; by default 1 for `momentum`, else 0.01")] = (
        None
    )
    beta1: Annotated[Beta, Field(description="decay of the momentum")] = 0.9
    beta2: Annotated[Beta, Field(description="decay of the squares (`adam`, `yogi`)")] = 0.99
    tau: Annotated[Positive, Field(description="added to the root of the squares (`adam`, `yogi`)")] = 1e-3
    mean: Annotated[
        Literal["weighted", "median", "trimmed"],
        Field(description="`median` and `trimmed`, number by number, bound what one site can do; each site counts once"),
    ] = "weighted"
    trim: Annotated[float, Field(gt=0, lt=0.5, description="`trimmed`: the share of sites left out at each end")] = 0.1

    @property
    def step_size(self) -> float:
        """The learning rate, given or by default."""
        return self.lr if self.lr is not None else 1.0 if self.optimizer == "momentum" else 0.01

    @property
    def robust(self) -> bool:
        """Whether the mean needs every site's update by itself."""
        return self.mean != "weighted"

    @model_validator(mode="after")
    def _uses_all(self) -> Self:
        """Raise ValueError for a field that would do nothing. A default is let through: a run's own job.yaml has all fields."""
        given = {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}
        for name in _USED:
            if name in given and self.optimizer not in _USED[name]:
                kinds = " or ".join(_USED[name])
                raise ValueError(f"{name}: {getattr(self, name)} is of optimizer {kinds}; name one of them, or leave it out")
        if "trim" in given and self.mean != "trimmed":
            raise ValueError(f"trim: {self.trim} is of mean trimmed; write that, or leave it out")
        return self


# statistics ------------------------------------------------------------------------------------------------------------
# The `statistics:` section of job.yaml.

MIN_CELL_COUNT = 3
"""The fewest patients in a published count: smaller cells may identify a person."""


class StatisticsConfig(Section):
    """Counts that every site is asked for once, before the first round, so that a federation sees how its sites differ."""

    minimum: Annotated[
        int,
        Field(
            ge=MIN_CELL_COUNT,
            le=100_000,
            description="counts of fewer patients are merged with their neighbours; a site's own minimum may be higher",
        ),
    ] = 10
    bins: Annotated[Literal[4, 8, 16, 32], Field(description="`bins` of grey levels")] = 16
    only: Annotated[bool, Field(description="the job ends with the statistics and trains nothing")] = False


# cross site ------------------------------------------------------------------------------------------------------------
# The `cross_site:` section of job.yaml.


class CrossSiteConfig(Section):
    """Every model of a run that has ended, scored at every site.

    The job trains nothing; the rest of job.yaml is the run's.
    """

    run: Annotated[
        Name,
        Field(
            description="the run's name at server and sites, which is its experiment; for a simulation the folder beside "
            "this job's workspace"
        ),
    ]
    split: Annotated[Literal["test", "validation"], Field(description="which samples are scored")] = "test"
    personalized: Annotated[
        bool,
        Field(
            description="besides the shared model, which every site runs with its own local factors, the models of sites "
            "whose site.yaml says `share_personalized: true`; never with `privacy:`"
        ),
    ] = False


# diagnostics -----------------------------------------------------------------------------------------------------------
# The `diagnostics:` section of job.yaml: what a run measures of itself beside the scores.

Every = Annotated[int, Field(ge=1, le=100_000, description="look in every so many rounds, counted from 1")]
SiteCount = Annotated[int, Field(ge=1, le=10_000, description="how many of a round's sites, drawn by the seed")]
OracleRank = Annotated[int, Field(ge=1, le=65536, description="the oracle's rank; by default whatever a layer has")]


class OracleConfig(Section):
    """Drift from an oracle (FedHera, Eq. 14 and 15), for strategies with unequal ranks.

    The oracle is the same site on the same batches, from the whole global update and with all ranks training.
    """

    every: Annotated[Every, Field(description="look in every so many rounds, counted from 1")] = 1
    sites: Annotated[SiteCount, Field(description="how many of a round's sites, drawn by the seed")] = 5
    rank: Annotated[OracleRank | None, Field(description="the oracle's rank; by default whatever a layer has")] = None


class DiagnosticsConfig(Section):
    """What a run measures of itself beside the scores. Pictures of it lie in the run's folder and in the sites'."""

    deviation: Annotated[
        bool,
        Field(
            description="how far the product of the mean factors lies from the mean of the products, each phase, at the "
            "server (DEeR, Eq. 7)"
        ),
    ] = False
    noise: Annotated[
        bool,
        Field(
            description="norms of the linear terms that noise adds to a product (DEeR, Eq. 10, Figure 2), at each site, "
            "which keeps them"
        ),
    ] = False
    drift: Annotated[
        bool, Field(description="how far local training moves each adapter (FedSCA, Figure 3), at each site, which keeps it")
    ] = False
    leakage: Annotated[
        bool,
        Field(
            description="common drift and heterogeneity leakage of shared factors (Proposition 3.2 of IAT + SOR), for "
            "strategies that keep one factor of a layer at the site; only in a simulation in one process"
        ),
    ] = False
    oracle: Annotated[
        OracleConfig | None, Field(description="drift from a high-rank oracle; only in a simulation in one process")
    ] = None

    @property
    def looks_inside(self) -> bool:
        """Whether anything looks inside the sites."""
        return self.leakage or self.oracle is not None
