"""Secure aggregation: the `secure_aggregation:` sections of job.yaml and site.yaml, and the check of a job with masks."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from consilium.config.diagnostics import DiagnosticsConfig
from consilium.config.federation import FederationConfig
from consilium.config.privacy import PrivacyConfig
from consilium.config.server import ServerConfig
from consilium.core.schema import Positive, Section, read_fingerprint

MOST_WEIGHT = 65_536
"""The most that a site's update may weigh, unless federation.max_weight says it."""
PartnerName = Annotated[str, Field(min_length=1, max_length=128)]
Fingerprint = Annotated[str, Field(max_length=256), AfterValidator(read_fingerprint)]
FEWEST = 3
"""Of two sites each knows the other's update from the sum."""


class SecureAggregationConfig(Section):
    """Sites mask their updates, so that the server, with up to `colluders` sites, learns their sum only."""

    threshold: Annotated[
        Annotated[int, Field(ge=2, le=10_000)] | None,
        Field(
            description="how many of the n sites asked must stay to the end of a phase; by default floor(2 n / 3) + 1. "
            "Needed are 2 threshold > n + colluders and threshold >= colluders + 2, so with the defaults at "
            "least three sites. Without noise all of them must send an update, and no sums, of whatever runs, "
            "may show fewer than `threshold` hospitals together"
        ),
    ] = None
    colluders: Annotated[int, Field(ge=0, le=10000, description="sites that may work together with the server")] = 1
    bound: Annotated[
        Positive | None, Field(description="larger numbers are cut off at it; by default what sums of all sites have room for")
    ] = None


class SitePartnersConfig(Section):
    """What a site asks of secure aggregation before it takes part."""

    partners: Annotated[
        dict[PartnerName, Fingerprint],
        Field(
            max_length=10_000,
            description="the other sites by name, with the SHA-256 fingerprints of their public keys (64 hex digits, "
            "colons or not; `consilium doctor` prints a kit's), compared out of band; no other is accepted. "
            "Needed where `privacy.budgets` are. To remove one revokes it",
        ),
    ] = Field(default_factory=dict)
    min_colluders: Annotated[int, Field(ge=0, le=10000, description="jobs that count on fewer are refused")] = 1
    min_sites: Annotated[int, Field(ge=FEWEST, le=10000, description="fewer sites together are refused")] = FEWEST


def check_masked(
    strategy: Any,
    server: ServerConfig | None,
    diagnostics: DiagnosticsConfig,
    privacy: PrivacyConfig | None,
    federation: FederationConfig,
) -> None:
    """Raise ValueError, naming field, value and remedy, for a setting that needs single updates or other sums."""
    if strategy.traits.needs == "sites" or strategy.traits.pools_data:
        what = "needs single sites' updates, which nobody sees"
        raise ValueError(f"secure_aggregation: strategy {strategy.name!r} {what}; remove the section, or use fedit")
    if server is not None and server.robust:
        raise ValueError(f"secure_aggregation: server.mean {server.mean!r} needs single sites' updates; use weighted")
    if diagnostics.deviation or diagnostics.looks_inside:
        raise ValueError("secure_aggregation: diagnostics deviation, leakage and oracle look at single sites; remove them")
    if privacy is not None and federation.weighting == "samples":
        raise ValueError(
            "federation.weighting: 'samples': with privacy and secure_aggregation every site weighs 1; use uniform"
        )
    if federation.max_weight is not None and federation.max_weight > MOST_WEIGHT:
        what = f"over the {MOST_WEIGHT} that secure_aggregation has room for"
        raise ValueError(f"federation.max_weight: {federation.max_weight}: {what}; lower it")
