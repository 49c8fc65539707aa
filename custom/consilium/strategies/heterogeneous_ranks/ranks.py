"""Sites with unequal ranks: what each can carry (tiers or its own word), and what all algorithms for them share.

A layer's adapter is `<layer>.lora_A` (r, in) and `<layer>.lora_B` (out, r), trained and uploaded, and, where the algorithm has
one, a frozen tail `tail_A` (k, in), `tail_B` (out, k) with its `gate` (1,). Ranks differ by site and layer, so the server needs
every site's result and what that site was sent. Global updates are kept divided by the job's scaling s, one constant at all
ranks: the site's forward pass multiplies by it, and nothing else depends on it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from consilium.adapters.names import GATE, TAIL, WHOLE, is_frozen_part, lora_factor
from consilium.core.errors import ConfigError
from consilium.core.lazy import torch
from consilium.core.linalg import lowrank
from consilium.core.linalg.lowrank import Product
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.core.schema import Seed, Share
from consilium.core.seeding import seed_for
from consilium.strategies.heterogeneous_ranks.layers import factors, shapes
from consilium.strategies.strategy import Role, RoundResults, ServerState, SiteResult, Strategy
from consilium.strategies.traits import Traits

# drift -----------------------------------------------------------------------------------------------------------------
# How far sites move apart, and how much of an adapter only takes part in the forward pass.


def moves(upload: SiteResult) -> list[Product]:
    """Return B A - B0 A0 of every layer of one site."""
    found = []
    for layer in shapes(upload.sent.tensors):
        (b0, a0), (db, da) = factors(upload.sent.tensors, layer), factors(upload.update.tensors, layer)
        found.append((torch.cat([db, b0], 1), torch.cat([a0 + da, da])))
    return found


def cross_drift(sites: Sequence[Sequence[Product]]) -> float:
    """Return the mean over pairs of 1 - cos of the sites' whole updates (FedHera, Eq. 29); 0 for a single site.

    A site that did not move points nowhere: its cosine with all others is 0.
    """
    total = lowrank.summed([lowrank.gram(layer) for layer in zip(*sites, strict=True)])
    norms = total.diagonal().clamp(min=0).sqrt()
    cosines = total / (norms[:, None] * norms + 1e-12)
    count = len(sites)
    return float((1 - cosines)[~torch.eye(count, dtype=torch.bool)].mean()) if count > 1 else 0.0


def oracle_drift(site: Sequence[Product], oracle: Sequence[Product]) -> tuple[float, float]:
    """Return ||W - W*||_F and that over ||W*||_F (FedHera, Eq. 14 and 15) of a site's `moves` against an oracle's, by layer.

    The oracle is the same site, trained at a high rank from the whole global update on the same batches. Where the oracle did
    not move, the second is 0 for a site that did not either, infinite for one that did.
    """
    total = lowrank.summed([lowrank.gram(both) for both in zip(site, oracle, strict=True)])
    apart = max(0.0, float(total[0, 0] + total[1, 1] - 2 * total[0, 1])) ** 0.5
    norm = float(total[1, 1]) ** 0.5
    return apart, apart / norm if norm > 0 else (0.0 if apart == 0 else float("inf"))


def information_gain(sent: Payload) -> float:
    """Return adapter numbers in the forward pass over those that train (FedHera, Appendix F.7); 1 without tails.

    0 where nothing trains, which has no ratio.
    """
    numbers = {name: tensor.numel() for name, tensor in sent.tensors.items() if not name.endswith(f".{GATE}")}
    tail = sum(count for name, count in numbers.items() if name.rpartition(".")[2] in (*TAIL, WHOLE))
    total = sum(numbers.values())
    return total / (total - tail) if total > tail else 0.0


# ranks -----------------------------------------------------------------------------------------------------------------

TierName = Annotated[str, Field(min_length=1, max_length=64)]


@dataclass(frozen=True)
class Tier:
    """Ranks per layer, on average, that a class of sites can train and download."""

    train: Annotated[float, Field(le=1e6)]
    download: Annotated[float, Field(le=1e6)]


PROFILES: dict[str, dict[str, float]] = {
    "uniform": {"low": 1 / 3, "medium": 1 / 3, "high": 1 / 3},
    "skewed": {"low": 0.3, "medium": 0.5, "high": 0.2},
}
"""How likely a site that says nothing of itself is of each tier (FedHera, Table 4)."""


def _paper_tiers() -> dict[str, Tier]:
    return {"low": Tier(4, 32), "medium": Tier(8, 48), "high": Tier(16, 64)}


@dataclass(frozen=True)
class UnequalRanks(Strategy):
    """Base of algorithms whose ranks differ by site."""

    least_train: ClassVar[float | None] = None
    """0 where a tier may train nothing; None: every tier trains some rank."""

    tiers: Annotated[
        dict[TierName, Tier],
        Field(
            max_length=64,
            description="ranks per layer, on average, that each class of sites trains and downloads; by default 4 and 32 "
            "(low), 8 and 48 (medium), 16 and 64 (high)",
        ),
    ] = field(default_factory=_paper_tiers)
    profile: Annotated[
        Literal["uniform", "skewed"] | Annotated[dict[TierName, Share], Field(min_length=1, max_length=64)],
        Field(description="how likely a site that says nothing is of each tier"),
    ] = "uniform"
    seed: Annotated[Seed, Field(description="`seed` fixes which tier a site that says nothing belongs to")] = 0

    @property
    def traits(self) -> Traits:
        """See Strategy."""
        return Traits(needs="sites", ranks_differ=True, fixed_basis=False)

    def __post_init__(self) -> None:
        if unknown := sorted(self._shares().keys() - self.tiers.keys()):
            raise ConfigError(f"strategy.profile: tier {unknown[0]!r} is not in strategy.tiers; known: {', '.join(self.tiers)}")
        if not sum(self._shares().values()) > 0:
            raise ConfigError("strategy.profile: every share is 0; give one tier a share over 0")
        if bad := [name for name, tier in self.tiers.items() if not self._may_be(tier)]:
            least = "over 0" if self.least_train is None else "0 or more"
            raise ConfigError(f"strategy.tiers.{bad[0]}: train must be {least} and at most download, which is over 0")

    def _may_be(self, tier: Tier) -> bool:
        some = tier.train > 0 or tier.train == self.least_train
        return some and tier.train <= tier.download and tier.download > 0

    def _shares(self) -> dict[str, float]:
        return PROFILES[self.profile] if isinstance(self.profile, str) else self.profile

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return FROZEN for tails and gates, SHARED for factors and a head. Raises ConfigError for another adapter."""
        if is_frozen_part(name):
            return Role.FROZEN
        lora_factor(name, self.name)
        return Role.SHARED

    def at_rank(self, rank: int) -> "UnequalRanks":
        """Return it with one tier, which trains and downloads `rank`. Raises ConfigError where the job has tiers."""
        if self.tiers != _paper_tiers() or self.profile != "uniform":
            what = "are for sites of unequal ranks, and adapter.kind 'lora' has one"
            raise ConfigError(f"strategy.tiers, strategy.profile: {what}; remove them, or use dual_rank")
        return replace(self, tiers={"all": Tier(rank, rank)}, profile={"all": 1.0})

    def profile_tiers(self) -> dict[str, tuple[Tier, float]]:
        """Return the tiers that the profile names, each with its share of the sites."""
        return {name: (self.tiers[name], share) for name, share in self._shares().items()}

    def tier(self, name: str) -> Tier:
        """Return the tier of a site that says nothing of itself, drawn by the profile."""
        shares = self._shares()
        draw = random.Random(seed_for(self.seed, "tier", name))
        return self.tiers[draw.choices(list(shares), list(shares.values()))[0]]

    def affordable_ranks(self, site: SiteInfo) -> dict[str, float]:
        """Return ranks per layer on average that the site can afford in `download`, `time` and `memory`."""
        tier = self.tier(site.name)
        return {"download": tier.download, "time": tier.train, "memory": tier.train} | dict(site.capacity)

    def train_rank(self, site: SiteInfo) -> int:
        """Return the one rank, at least 1, that an algorithm with equal ranks in all layers trains and sends."""
        return max(1, int(min(self.affordable_ranks(site).values())))

    # server half ------------------------------------------------------------------------------------------------------

    def diagnostics(self, state: ServerState, results: RoundResults) -> dict[str, float]:
        """Return cross-client drift (Eq. 29), information gain ratio and memory saturation, means over the round's sites."""
        return {
            "drift/cross": cross_drift([moves(upload) for upload in results.values()]),
            "ranks/information_gain": _mean([gain for upload in results.values() if (gain := information_gain(upload.sent))]),
            "memory/saturation": _mean([self._saturation(upload) for upload in results.values()]),
        }

    def _saturation(self, upload: SiteResult) -> float:
        """Return trained numbers over what the site's memory budget allows."""
        dims = shapes(upload.sent.tensors)
        budget = self.affordable_ranks(upload.site)["memory"] * sum(map(sum, dims.values()))
        used = sum(len(upload.sent.tensors[f"{layer}.lora_A"]) * sum(dims[layer]) for layer in dims)
        return used / budget if budget else 1.0  # a site that may train nothing leaves nothing unused

    # client half ------------------------------------------------------------------------------------------------------

    def receive(self, own: Tensors, payload: Payload) -> Tensors:
        """Return what the server sent: a site keeps nothing from round to round."""
        return dict(payload.tensors)


def at_one_rank(strategy: Strategy, rank: int) -> Strategy:
    """Return the strategy for an adapter of one rank at all sites. Raises ConfigError where that is impossible."""
    return strategy.at_rank(rank) if isinstance(strategy, UnequalRanks) else strategy


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)
