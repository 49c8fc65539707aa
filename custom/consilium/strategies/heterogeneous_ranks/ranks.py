"""Base class of algorithms for sites with unequal ranks, their tiers, and the diagnostics of drift.

A site's ranks come from its tier, or from `capacity` in its site.yaml. A layer's adapter is `<layer>.lora_A` (r, in) and
`<layer>.lora_B` (out, r), which are trained and uploaded. An algorithm may add frozen ranks, a tail: `tail_A` (k, in), `tail_B`
(out, k) and `gate` (1,). Ranks differ by site and layer, so the server needs every site's result and the payload that it was
sent. Global updates are stored divided by the job's scaling s, a constant for all ranks. Only the site's forward pass
multiplies by s.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from consilium.adapters.names import GATE, TAIL, WHOLE, checked_lora_factor, is_frozen_part
from consilium.core import lowrank
from consilium.core.errors import ConfigError
from consilium.core.lazy import torch
from consilium.core.lowrank import Product
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.core.schema import Seed, Share
from consilium.core.seeding import seed_for
from consilium.strategies.heterogeneous_ranks.layer_factors import factors, shapes
from consilium.strategies.strategy import Role, RoundResults, ServerState, SiteResult, Strategy
from consilium.strategies.traits import Traits

# drift -----------------------------------------------------------------------------------------------------------------
# How far the sites' updates diverge, and which share of an adapter is in the forward pass but does not train.


def layer_changes(upload: SiteResult) -> list[Product]:
    """Return B A - B0 A0 of every layer of one site, as products (left, right)."""
    found = []
    for layer in shapes(upload.sent.tensors):
        (b0, a0), (db, da) = factors(upload.sent.tensors, layer), factors(upload.update.tensors, layer)
        found.append((torch.cat([db, b0], 1), torch.cat([a0 + da, da])))
    return found


def cross_drift(sites: Sequence[Sequence[Product]]) -> float:
    """Return the mean of 1 - cos over all pairs of sites' whole updates (FedHera, Eq. 29); 0 for a single site.

    A site without any change has cosine 0 with all others.
    """
    total = lowrank.sum_tensors([lowrank.gram(layer) for layer in zip(*sites, strict=True)])
    norms = total.diagonal().clamp(min=0).sqrt()
    cosines = total / (norms[:, None] * norms + 1e-12)
    count = len(sites)
    return float((1 - cosines)[~torch.eye(count, dtype=torch.bool)].mean()) if count > 1 else 0.0


def oracle_drift(site: Sequence[Product], oracle: Sequence[Product]) -> tuple[float, float]:
    """Return (||W - W*||_F, the same over ||W*||_F) (FedHera, Eq. 14 and 15) for a site's layer changes W and an oracle's W*.

    The oracle is the same site, trained at a high rank from the whole global update on the same batches. If the oracle did not
    move, the second value is 0 for a site that did not move either, and infinite for one that did.
    """
    total = lowrank.sum_tensors([lowrank.gram(both) for both in zip(site, oracle, strict=True)])
    apart = max(0.0, float(total[0, 0] + total[1, 1] - 2 * total[0, 1])) ** 0.5
    norm = float(total[1, 1]) ** 0.5
    return apart, apart / norm if norm > 0 else (0.0 if apart == 0 else float("inf"))


def information_gain(sent: Payload) -> float:
    """Return the count of adapter numbers in the forward pass over the count that trains (FedHera, Appendix F.7).

    Without tails it is 1. If no number trains, return 0.
    """
    numbers = {name: tensor.numel() for name, tensor in sent.tensors.items() if not name.endswith(f".{GATE}")}
    tail = sum(count for name, count in numbers.items() if name.rpartition(".")[2] in (*TAIL, WHOLE))
    total = sum(numbers.values())
    return total / (total - tail) if total > tail else 0.0


# ranks -----------------------------------------------------------------------------------------------------------------

TierName = Annotated[str, Field(min_length=1, max_length=64)]


@dataclass(frozen=True)
class Tier:
    """The average ranks per layer that a class of sites can train and download."""

    train: Annotated[float, Field(le=1e6, description="average ranks per layer that the tier trains")]
    download: Annotated[float, Field(le=1e6, description="average ranks per layer that the tier downloads, at least `train`")]


PROFILES: dict[str, dict[str, float]] = {
    "uniform": {"low": 1 / 3, "medium": 1 / 3, "high": 1 / 3},
    "skewed": {"low": 0.3, "medium": 0.5, "high": 0.2},
}
"""The probability of each tier for a site without `capacity` in its site.yaml (FedHera, Table 4)."""


def _paper_tiers() -> dict[str, Tier]:
    return {"low": Tier(4, 32), "medium": Tier(8, 48), "high": Tier(16, 64)}


@dataclass(frozen=True)
class UnequalRanks(Strategy):
    """Base of algorithms whose ranks differ by site."""

    least_train: ClassVar[float | None] = None
    """0: a tier may train no rank. None: every tier must train some rank."""

    tiers: Annotated[
        dict[TierName, Tier],
        Field(
            max_length=64,
            description="average ranks per layer that each class of sites trains and downloads; by default 4 and 32 "
            "(low), 8 and 48 (medium), 16 and 64 (high)",
        ),
    ] = field(default_factory=_paper_tiers)
    profile: Annotated[
        Literal["uniform", "skewed"] | Annotated[dict[TierName, Share], Field(min_length=1, max_length=64)],
        Field(description="the probability of each tier for a site without `capacity` in its site.yaml"),
    ] = "uniform"
    seed: Annotated[Seed, Field(description="fixes which tier is drawn for a site without `capacity`")] = 0

    @property
    def traits(self) -> Traits:
        """See Strategy."""
        return Traits(needs="sites", ranks_differ=True, fixed_basis=False)

    def __post_init__(self) -> None:
        if unknown := sorted(self._tier_probabilities().keys() - self.tiers.keys()):
            raise ConfigError(f"strategy.profile: tier {unknown[0]!r} is not in strategy.tiers; known: {', '.join(self.tiers)}")
        if not sum(self._tier_probabilities().values()) > 0:
            raise ConfigError("strategy.profile: every share is 0; give one tier a share over 0")
        for name, tier in self.tiers.items():
            trains = tier.train > 0 or tier.train == self.least_train
            if not (trains and tier.train <= tier.download and tier.download > 0):
                least = "over 0" if self.least_train is None else "0 or more"
                raise ConfigError(f"strategy.tiers.{name}: train must be {least} and at most download, which is over 0")

    def _tier_probabilities(self) -> dict[str, float]:
        """Return the probability of each tier, from the named profile or as given in the job."""
        return PROFILES[self.profile] if isinstance(self.profile, str) else self.profile

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return FROZEN for tails and gates, SHARED for factors and a head. Raises ConfigError for other kinds of adapter."""
        if is_frozen_part(name):
            return Role.FROZEN
        checked_lora_factor(name, self.name)
        return Role.SHARED

    def at_rank(self, rank: int) -> "UnequalRanks":
        """Return the strategy with one tier, which trains and downloads `rank`. Raises ConfigError if the job sets tiers."""
        if self.tiers != _paper_tiers() or self.profile != "uniform":
            what = "are for sites of unequal ranks, and adapter.kind 'lora' has one"
            raise ConfigError(f"strategy.tiers, strategy.profile: {what}; remove them, or use dual_rank")
        return replace(self, tiers={"all": Tier(rank, rank)}, profile={"all": 1.0})

    def weighted_tiers(self) -> dict[str, tuple[Tier, float]]:
        """Return the tiers that the profile names, each with its probability."""
        return {name: (self.tiers[name], share) for name, share in self._tier_probabilities().items()}

    def site_tier(self, site: str) -> Tier:
        """Return the tier drawn from the profile for a site without `capacity`."""
        shares = self._tier_probabilities()
        draw = random.Random(seed_for(self.seed, "tier", site))
        return self.tiers[draw.choices(list(shares), list(shares.values()))[0]]

    def affordable_ranks(self, site: SiteInfo) -> dict[str, float]:
        """Return the average ranks per layer that the site's limits allow, by limit: `download`, `time` and `memory`."""
        tier = self.site_tier(site.name)
        return {"download": tier.download, "time": tier.train, "memory": tier.train} | dict(site.capacity)

    def train_rank(self, site: SiteInfo) -> int:
        """Return the rank, at least 1, that the site trains if an algorithm uses equal ranks in all layers."""
        return max(1, int(min(self.affordable_ranks(site).values())))

    # server half ------------------------------------------------------------------------------------------------------

    def diagnostics(self, state: ServerState, results: RoundResults) -> dict[str, float]:
        """Return cross-client drift (Eq. 29), and the mean information gain and memory saturation of the round's sites."""
        saturations = []  # the count of trained numbers over the count that the site's memory budget allows
        for upload in results.values():
            dims = shapes(upload.sent.tensors)
            budget = self.affordable_ranks(upload.site)["memory"] * sum(map(sum, dims.values()))
            used = sum(len(upload.sent.tensors[f"{layer}.lora_A"]) * sum(dims[layer]) for layer in dims)
            saturations.append(used / budget if budget else 1.0)  # a site with budget 0 counts as saturated
        return {
            "drift/cross": cross_drift([layer_changes(upload) for upload in results.values()]),
            "ranks/information_gain": _mean([gain for upload in results.values() if (gain := information_gain(upload.sent))]),
            "memory/saturation": _mean(saturations),
        }

    # client half ------------------------------------------------------------------------------------------------------

    def receive(self, own: Tensors, payload: Payload) -> Tensors:
        """Return the payload's tensors. A site stores nothing between rounds."""
        return dict(payload.tensors)


def at_one_rank(strategy: Strategy, rank: int) -> Strategy:
    """Return the strategy for an adapter with the same rank at all sites. Raises ConfigError if the job sets tiers."""
    return strategy.at_rank(rank) if isinstance(strategy, UnequalRanks) else strategy


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)
