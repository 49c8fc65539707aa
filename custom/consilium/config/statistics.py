"""The `statistics:` section of job.yaml."""

from typing import Annotated, Literal

from pydantic import Field

from consilium.core.schema import Section

SMALLEST = 3
"""Under it a count is of somebody."""


class StatisticsConfig(Section):
    """Counts that every site is asked for once, before the first round, so that a federation sees how its sites differ."""

    minimum: Annotated[
        int,
        Field(
            ge=SMALLEST,
            le=100_000,
            description="counts of fewer patients are merged with their neighbours; a site's own minimum may be higher",
        ),
    ] = 10
    bins: Annotated[Literal[4, 8, 16, 32], Field(description="`bins` of grey levels")] = 16
    only: Annotated[bool, Field(description="the job ends with the statistics and trains nothing")] = False
