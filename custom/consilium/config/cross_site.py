"""The `cross_site:` section of job.yaml."""

from typing import Literal

from consilium.core.schema import Name, Section


class CrossSiteConfig(Section):
    """Every model of a run that has ended, scored at every site. The job trains nothing; the rest of job.yaml is the run's.

    `run`: the run's name at server and sites, which is its experiment; for a simulation the folder beside this job's workspace.
    `split`: which samples are scored. `personalized`: besides the shared model, which every site runs with its own local
    factors, the models of sites whose site.yaml says `share_personalized: true`; never with `privacy:`.
    """

    run: Name
    split: Literal["test", "validation"] = "test"
    personalized: bool = False
