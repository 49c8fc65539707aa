"""The `cross_site:` section of job.yaml."""

from typing import Annotated, Literal

from pydantic import Field

from consilium.core.schema import Name, Section


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
