"""Secure aggregation: the `secure_aggregation:` sections of job.yaml and site.yaml, and what a job with it cannot have."""

from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field

from consilium.core.schema import SMALLEST_NOISE, Positive, Section, read_fingerprint

if TYPE_CHECKING:
    from consilium.config.job import JobConfig

MOST_WEIGHT = 65_536
"""The most that a site's update may weigh, unless federation.max_weight says it."""
PartnerName = Annotated[str, Field(min_length=1, max_length=128)]
Fingerprint = Annotated[str, Field(max_length=256), AfterValidator(read_fingerprint)]
FEWEST = 3
"""Of two sites each knows the other's update from the sum."""


class SecureAggregationConfig(Section):
    """Sites mask their updates, so that the server, with up to `colluders` sites, learns their sum only.

    `threshold`: how many of the n sites asked must stay to the end of a phase; by default floor(2 n / 3) + 1. Needed are
    2 threshold > n + colluders and threshold >= colluders + 2, so with the defaults at least three sites. Without noise all of
    them must send an update, and no sums, of whatever runs, may show fewer than `threshold` hospitals together.
    """

    threshold: Annotated[int, Field(ge=2, le=10_000)] | None = None
    colluders: Annotated[int, Field(ge=0, le=10_000, description="sites that may work together with the server")] = 1
    bound: (
        Annotated[Positive, Field(description="no site sends a larger number; by default what sums of all sites have room for")]
        | None
    ) = None


class SitePartnersConfig(Section):
    """What a site asks of secure aggregation before it takes part.

    `partners`: the other sites by name, with the SHA-256 fingerprints of their public keys (64 hex digits, colons or not;
    `consilium doctor` prints a kit's), compared out of band; no other is accepted. Needed where `privacy.budgets` are. To
    remove one revokes it.
    """

    partners: Annotated[dict[PartnerName, Fingerprint], Field(max_length=10_000)] = Field(default_factory=dict)
    min_colluders: Annotated[int, Field(ge=0, le=10_000, description="jobs that count on fewer are refused")] = 1
    min_sites: Annotated[int, Field(ge=FEWEST, le=10_000, description="fewer sites together are refused")] = FEWEST


def check_masked(job: "JobConfig") -> None:
    """Raise ValueError, naming field, value and remedy, for what secure aggregation hides or cannot sum."""
    strategy = job.strategy
    if strategy.traits.needs == "sites" or strategy.traits.pools_data:
        what = "needs single sites' updates, which nobody sees"
        raise ValueError(f"secure_aggregation: strategy {strategy.name!r} {what}; remove the section, or use fedit")
    if job.server is not None and job.server.robust:
        raise ValueError(f"secure_aggregation: server.mean {job.server.mean!r} needs single sites' updates; use weighted")
    if job.diagnostics.deviation or job.diagnostics.looks_inside:
        raise ValueError("secure_aggregation: diagnostics deviation, leakage and oracle look at single sites; remove them")
    if job.privacy is not None and job.federation.weighting == "samples":
        raise ValueError(
            "federation.weighting: 'samples': with privacy and secure_aggregation every site weighs 1; use uniform"
        )
    if without_noise(job) and job.federation.fraction_train < 1:
        what = "sums over other sites in other rounds would show single ones"
        raise ValueError(f"federation.fraction_train: {job.federation.fraction_train}: without privacy {what}; use 1")
    if job.federation.max_weight is not None and job.federation.max_weight > MOST_WEIGHT:
        what = f"over the {MOST_WEIGHT} that secure_aggregation has room for"
        raise ValueError(f"federation.max_weight: {job.federation.max_weight}: {what}; lower it")


def without_noise(job: "JobConfig") -> bool:
    """Tell whether the masked sums of a job come to the server without noise: then only the same hospitals may be summed again.

    A trusted server adds its noise later. The paper's calibration keeps no epsilon that means anything.
    """
    privacy = job.privacy
    if job.secure_aggregation is None:
        return False
    if privacy is None or privacy.trust == "central" or privacy.calibration == "paper":
        return True
    return privacy.noise_multiplier is not None and privacy.noise_multiplier < SMALLEST_NOISE


def most_weight(job: "JobConfig") -> int:
    """Return what a site's update weighs at most, as all know."""
    return 1 if job.weighting == "uniform" else job.federation.max_weight or MOST_WEIGHT
