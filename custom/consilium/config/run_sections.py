"""Sections of job.yaml that control a run: training, validation, federation, server, statistics, cross_site, diagnostics."""

import math
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from consilium.core.schema import Name, Positive, Seconds, Section, Seed, Share

# validation ------------------------------------------------------------------------------------------------------------
# When a job scores the validation split, and early stopping by these scores.


class ValidateConfig(Section):
    """When the validation split is scored (in rounds `every`, 2 `every` and so on, counted from 1), and for which models.

    The final evaluation takes place in any case.
    """

    every: Annotated[int, Field(ge=1, le=100000, description="the number of rounds from one validation to the next")] = 1
    stages: Annotated[
        tuple[Literal["global", "personalized"], ...],
        Field(
            max_length=2,
            description="`global`: the model as received from the server; `personalized`: after the site's training; "
            "[] for none",
        ),
    ] = ("global", "personalized")
    full: Annotated[
        bool, Field(description="compute all scores of the final evaluation: generated answers, distances, intervals")
    ] = False
    patience: Annotated[
        int,
        Field(
            ge=0,
            le=100_000,
            exclude_if=lambda value: not value,
            description="early stopping: the run ends after this many validations in a row without improvement of the global "
            "model's leading score (mean over sites); the final evaluation follows. 0 runs all rounds",
        ),
    ] = 0
    """Written into a job only if it is not 0, so that the digests of other jobs do not change."""

    @model_validator(mode="after")
    def _check_patience(self) -> Self:
        if self.patience and "global" not in self.stages:
            raise ValueError(
                f"patience: {self.patience}: goes by the global model's score; add global to stages, or leave it out"
            )
        return self


# training --------------------------------------------------------------------------------------------------------------
# The `training:` section of job.yaml.


class TrainingConfig(Section):
    """Local training."""

    rounds: Annotated[int, Field(ge=1, le=100_000, description="number of rounds of the run")]
    local_epochs: Annotated[int, Field(ge=1, le=1000, description="passes over a site's training data per round")] = 1
    local_steps: Annotated[
        Annotated[int, Field(ge=1, le=100_000)] | None,
        Field(description="optimizer steps per round, instead of `local_epochs`"),
    ] = None
    batch_size: Annotated[int, Field(ge=1, le=65536, description="samples per batch")] = 4
    accumulate: Annotated[int, Field(ge=1, le=4096, description="batches per optimizer step")] = 1
    optimizer: Annotated[Literal["adam", "adamw", "sgd"], Field(description="the optimizer at every site")] = "adam"
    optimizer_state: Annotated[
        Literal["fresh", "kept"],
        Field(description="`fresh`: reset in every round; `kept`: stored at the site and continued in its next round"),
    ] = "fresh"
    lr: Annotated[float, Field(gt=0, le=1000, description="learning rate")] = 1e-4
    schedule: Annotated[
        Literal["constant", "cosine", "linear"],
        Field(
            description="`cosine` and `linear` decrease the learning rate from `lr` to 0 within each round's local "
            "training, without warm-up"
        ),
    ] = "constant"
    weight_decay: Annotated[float, Field(ge=0, le=1000, description="the optimizer's weight decay")] = 0.0
    momentum: Annotated[float, Field(ge=0, lt=1, description="sgd only")] = 0.0
    precision: Annotated[
        Literal["auto", "bf16", "fp32"], Field(description="`auto`: bf16 if the GPU supports it, else fp32")
    ] = "auto"
    gradient_checkpointing: Annotated[
        bool, Field(description="recompute activations in the backward pass: less memory, more time")
    ] = False
    compile: Annotated[
        bool,
        Field(
            description="compile the model's blocks by torch.compile: the first step may take minutes, later steps are faster"
        ),
    ] = False
    seed: Annotated[Seed, Field(description="fixes, with round and site, every random choice except privacy noise")] = 0
    validation: Annotated[ValidateConfig, Field(alias="validate", description="when the validation split is scored")] = (
        ValidateConfig()
    )

    model_config = ConfigDict(serialize_by_alias=True)

    def validates(self, round: int, stage: str) -> bool:
        """Return whether the validation split is scored in this round, counted from 0, for the model of this stage."""
        return stage in self.validation.stages and (round + 1) % self.validation.every == 0

    def steps_per_round(self, num_samples: int) -> int:
        """Return the number of optimizer steps per round at a site with `num_samples` training samples."""
        if self.local_steps:
            return self.local_steps
        batches = -(-num_samples // self.batch_size)
        return self.local_epochs * -(-batches // self.accumulate)


# federation ------------------------------------------------------------------------------------------------------------
# The `federation:` section of job.yaml.


ROUNDING = 1e-9
"""More than the rounding error of a share times a number of sites: 0.07 * 100 is over 7."""


class FederationConfig(Section):
    """Participation of sites, weights and time limits."""

    min_sites: Annotated[
        int, Field(ge=1, le=10_000, description="the quorum: the fewest results with which a round counts")
    ] = 1
    fraction_train: Annotated[float, Field(gt=0, le=1, description="the share of the sites that each round asks to train")] = (
        1.0
    )
    fraction_evaluate: Annotated[
        Share,
        Field(
            description="the share of the other sites, not asked to train, that evaluate the shared model on their "
            "validation data"
        ),
    ] = 0.0
    weighting: Annotated[
        Literal["samples", "uniform"] | None,
        Field(
            description="the weights of the sites' updates; by default `samples`, the number of training samples, and "
            "`uniform` with site-level privacy"
        ),
    ] = None
    max_weight: Annotated[
        Annotated[int, Field(ge=1, le=10**9)] | None,
        Field(
            description="the largest weight of a site in the mean, for a site that reports more samples; by default no limit. "
            "With `secure_aggregation` and without `privacy:`, a site of over 65,536 samples needs it"
        ),
    ] = None
    round_timeout: Annotated[
        Seconds,
        Field(
            gt=0,
            description="how many seconds a site has for a task, such as the training of a phase; `--engine inprocess` has no "
            "limit",
        ),
    ] = 3600.0
    straggler_grace_seconds: Annotated[
        Seconds, Field(description="how many seconds to wait for further sites after the quorum has reported")
    ] = 600.0
    max_norm_ratio: Annotated[
        Positive,
        Field(description="an update is refused if its norm is over this many times the norm of the adapter's initial tensors"),
    ] = 100.0

    def count_to_train(self, sites: int) -> int:
        """Return how many of `sites` sites a round asks to train."""
        return min(sites, max(self.min_sites, math.ceil(self.fraction_train * sites - ROUNDING)))

    def count_to_evaluate(self, others: int) -> int:
        """Return how many of the `others` sites, which do not train in a round, evaluate."""
        return math.ceil(self.fraction_evaluate * others - ROUNDING)


# server ----------------------------------------------------------------------------------------------------------------
# The `server:` section of job.yaml: the kind of mean of the sites' updates, and the server's optimizer.

_USED = {
    "lr": ("momentum", "adam", "yogi"),
    "beta1": ("momentum", "adam", "yogi"),
    "beta2": ("adam", "yogi"),
    "tau": ("adam", "yogi"),
}
"""The optimizers that use each field."""
Beta = Annotated[float, Field(ge=0, lt=1)]


class ServerConfig(Section):
    """The kind of mean of the sites' updates, and the server's optimizer. Without the section the weighted mean is added."""

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
        Field(
            description="`median` and `trimmed` are computed for each number and bound the influence of a single site; each "
            "site counts once"
        ),
    ] = "weighted"
    trim: Annotated[float, Field(gt=0, lt=0.5, description="`trimmed`: the share of sites left out at each end")] = 0.1

    @property
    def learning_rate(self) -> float:
        """The learning rate, given or by default."""
        return self.lr if self.lr is not None else 1.0 if self.optimizer == "momentum" else 0.01

    @property
    def is_robust(self) -> bool:
        """Whether the mean needs single sites' updates."""
        return self.mean != "weighted"

    @model_validator(mode="after")
    def _check_no_unused_field(self) -> Self:
        """Raise ValueError for a field that has no effect. Default values are accepted: a run's job.yaml has all fields."""
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
    """Counts that every site is asked for once before the first round. They show how the sites' data differ."""

    minimum: Annotated[
        int,
        Field(
            ge=MIN_CELL_COUNT,
            le=100_000,
            description="counts of fewer patients are merged with their neighbours; a site may set a higher minimum",
        ),
    ] = 10
    bins: Annotated[Literal[4, 8, 16, 32], Field(description="number of bins of grey levels")] = 16
    only: Annotated[bool, Field(description="the job ends with the statistics and trains nothing")] = False


# cross site ------------------------------------------------------------------------------------------------------------
# The `cross_site:` section of job.yaml.


class CrossSiteConfig(Section):
    """Score every model of a finished run at every site.

    The job does not train. The other sections of job.yaml must equal those of the run.
    """

    run: Annotated[
        Name,
        Field(
            description="the run's name (its experiment) at server and sites; in a simulation the folder beside "
            "this job's workspace"
        ),
    ]
    split: Annotated[Literal["test", "validation"], Field(description="the split that is scored")] = "test"
    personalized: Annotated[
        bool,
        Field(
            description="also score the personalized models of sites whose site.yaml has `share_personalized: true`; never "
            "with `privacy:`. The shared model, with each site's own local factors, is scored in any case"
        ),
    ] = False


# diagnostics -----------------------------------------------------------------------------------------------------------
# The `diagnostics:` section of job.yaml: measurements of a run in addition to the scores.


class OracleConfig(Section):
    """Drift from an oracle (FedHera, Eq. 14 and 15), for strategies with unequal ranks.

    The oracle is the same site on the same batches. It starts from the whole global update and trains all ranks.
    """

    every: Annotated[int, Field(ge=1, le=100_000, description="measure in rounds `every`, 2 `every`, ..., counted from 1")] = 1
    sites: Annotated[int, Field(ge=1, le=10_000, description="how many of a round's sites are measured, drawn by the seed")] = 5
    rank: Annotated[
        Annotated[int, Field(ge=1, le=65536)] | None, Field(description="the oracle's rank; by default each layer's full rank")
    ] = None


class DiagnosticsConfig(Section):
    """Measurements in addition to the scores. Their numbers are written to the run's folder and the sites' folders."""

    deviation: Annotated[
        bool,
        Field(
            description="distance of the product of mean factors from the mean of products, per phase, at the server (DEeR, "
            "Eq. 7)"
        ),
    ] = False
    noise: Annotated[
        bool,
        Field(
            description="norms of the linear terms that noise adds to a product (DEeR, Eq. 10, Figure 2); measured at each "
            "site, and they stay there"
        ),
    ] = False
    drift: Annotated[
        bool,
        Field(
            description="relative change of each adapter by local training (FedSCA, Figure 3); measured at each site, and it "
            "stays there"
        ),
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
    def reads_site_tensors(self) -> bool:
        """Whether a measurement (leakage, oracle) reads the sites' tensors from outside.

        Only a simulation in one process can do that.
        """
        return self.leakage or self.oracle is not None
