"""The `diagnostics:` section of job.yaml: what a run measures of itself beside the scores."""

from typing import Annotated

from pydantic import Field

from consilium.core.schema import Section

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
