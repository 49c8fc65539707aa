"""The `diagnostics:` section of job.yaml."""

from typing import Annotated

from pydantic import Field

from consilium.schema import Section

Every = Annotated[int, Field(ge=1, le=100_000, description="look in every so many rounds, counted from 1")]
SiteCount = Annotated[int, Field(ge=1, le=10_000, description="how many of a round's sites, drawn by the seed")]
OracleRank = Annotated[int, Field(ge=1, le=65536, description="of the oracle; by default whatever a layer has")]


class OracleConfig(Section):
    """Drift from an oracle (FedHera, Eq. 14 and 15), for strategies with unequal ranks.

    The oracle is the same site on the same batches, from the whole global update and with all ranks training.
    """

    every: Every = 1
    sites: SiteCount = 5
    rank: OracleRank | None = None


class DiagnosticsConfig(Section):
    """What a simulation in one process looks at inside its sites; nothing of it is there where sites are hospitals.

    `leakage`: the two parts of Proposition 3.2 (IAT + SOR), for strategies that keep one factor of a layer at the site.
    """

    leakage: bool = False
    oracle: OracleConfig | None = None

    @property
    def wanted(self) -> bool:
        """Whether there is anything to look at."""
        return self.leakage or self.oracle is not None
