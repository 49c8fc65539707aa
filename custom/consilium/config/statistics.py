"""The `statistics:` section of job.yaml."""

from typing import Annotated, Literal

from pydantic import Field

from consilium.core.schema import Section

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
