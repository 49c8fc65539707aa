"""The `federation:` section of job.yaml."""

from typing import Annotated, Literal

from pydantic import Field

from consilium.core.schema import Positive, Seconds, Section, Share


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
