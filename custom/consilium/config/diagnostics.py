"""The `diagnostics:` section of job.yaml: what a run measures of itself beside the scores."""

from consilium.schema import Section


class DiagnosticsConfig(Section):
    """What a run measures of itself beside the scores. Pictures of it lie in the run's folder and in the sites'.

    `deviation`: how far the product of the mean factors lies from the mean of the products, each phase, at the server (DEeR,
    Eq. 7). `noise`: norms of the linear terms that noise adds to a product (DEeR, Eq. 10, Figure 2), at each site, which keeps
    them. `drift`: how far local training moves each adapter (FedSCA, Figure 3), at each site, which keeps it.
    """

    deviation: bool = False
    noise: bool = False
    drift: bool = False
