"""Sites with unequal ranks: what each can carry (tiers or its own word), and what all algorithms for them share.

A layer's adapter is `<layer>.lora_A` (r, in) and `<layer>.lora_B` (out, r), trained and uploaded, and, where the algorithm has
one, a frozen tail `tail_A` (k, in), `tail_B` (out, k) with its `gate` (1,). Ranks differ by site and layer, so the server needs
every site's result and what that site was sent. Global updates are kept divided by the job's scaling s, one constant at all
ranks: the site's forward pass multiplies by it, and nothing else depends on it.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from consilium.adapters.names import GATE, TAIL, is_frozen_part, is_head, lora_factor
from consilium.errors import ConfigError
from consilium.linalg import lowrank
from consilium.linalg.lowrank import Change, Product
from consilium.messages import Payload, SiteInfo, Tensors
from consilium.schema import Seed, Share
from consilium.seeding import seed_for
from consilium.strategies.strategy import Gathered, Role, ServerState, Strategy, Upload

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
    """Base of algorithms whose ranks differ by site. `seed` fixes which tier a site that says nothing belongs to."""

    needs: ClassVar[Literal["sums", "sites"]] = "sites"
    ranks_differ: ClassVar[bool] = True

    tiers: Annotated[dict[TierName, Tier], Field(max_length=64)] = field(default_factory=_paper_tiers)
    profile: Literal["uniform", "skewed"] | Annotated[dict[TierName, Share], Field(min_length=1, max_length=64)] = "uniform"
    seed: Seed = 0

    def __post_init__(self) -> None:
        if unknown := sorted(self._shares().keys() - self.tiers.keys()):
            raise ConfigError(f"strategy.profile: tier {unknown[0]!r} is not in strategy.tiers; known: {', '.join(self.tiers)}")
        if not sum(self._shares().values()) > 0:
            raise ConfigError("strategy.profile: every share is 0; give one tier a share over 0")
        if bad := [name for name, tier in self.tiers.items() if not 0 < tier.train <= tier.download]:
            raise ConfigError(f"strategy.tiers.{bad[0]}: train must be over 0 and at most download")

    def _shares(self) -> dict[str, float]:
        return PROFILES[self.profile] if isinstance(self.profile, str) else self.profile

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return FROZEN for tails and gates, SHARED for factors and a head. Raises ConfigError for another adapter."""
        if is_frozen_part(name):
            return Role.FROZEN
        lora_factor(name, self.name)
        return Role.SHARED

    def profile_tiers(self) -> dict[str, tuple[Tier, float]]:
        """Return the tiers that the profile names, each with its share of the sites."""
        return {name: (self.tiers[name], share) for name, share in self._shares().items()}

    def download_numbers(self, sent: Payload, site: SiteInfo) -> int:
        """Return how many numbers a site downloads in a round, once there is an update."""
        return sum(tensor.numel() for tensor in sent.tensors.values())

    def tier(self, name: str) -> Tier:
        """Return the tier of a site that says nothing of itself, drawn by the profile."""
        shares = self._shares()
        draw = random.Random(seed_for(self.seed, "tier", name))
        return self.tiers[draw.choices(list(shares), list(shares.values()))[0]]

    def capacity(self, site: SiteInfo) -> dict[str, float]:
        """Return ranks per layer on average that the site can afford in `download`, `time` and `memory`."""
        tier = self.tier(site.name)
        return {"download": tier.download, "time": tier.train, "memory": tier.train} | dict(site.capacity)

    def train_rank(self, site: SiteInfo) -> int:
        """Return the one rank, at least 1, that an algorithm with equal ranks in all layers trains and sends."""
        return max(1, int(min(self.capacity(site).values())))

    # server half ------------------------------------------------------------------------------------------------------

    def diagnostics(self, state: ServerState, gathered: Gathered) -> dict[str, float]:
        """Return cross-client drift (Eq. 29), information gain ratio and memory saturation, means over the round's sites."""
        return {
            "drift/cross": cross_drift([moves(upload) for upload in gathered.values()]),
            "ranks/information_gain": _mean([information_gain(upload.sent) for upload in gathered.values()]),
            "memory/saturation": _mean([self._saturation(name, upload) for name, upload in gathered.items()]),
        }

    def _saturation(self, name: str, upload: Upload) -> float:
        """Return trained numbers over what the site's memory budget allows."""
        dims = shapes(upload.sent.tensors)
        budget = self.capacity(upload.site)["memory"] * sum(map(sum, dims.values()))
        return sum(len(upload.sent.tensors[f"{layer}.lora_A"]) * sum(dims[layer]) for layer in dims) / budget

    # site half --------------------------------------------------------------------------------------------------------

    def receive(self, params: Tensors, payload: Payload) -> Tensors:
        """Return what the server sent: a site keeps nothing from round to round."""
        return dict(payload.tensors)


# tensors by layer -----------------------------------------------------------------------------------------------------


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return (out, in) by layer, in the order of the model's depth, which is the order of the numbers in their names."""
    layers = sorted((name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A")), key=_depth)
    return {layer: (len(tensors[f"{layer}.lora_B"]), tensors[f"{layer}.lora_A"].shape[1]) for layer in layers}


def _depth(layer: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in layer.split(".")]


def others(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return what is no factor, tail or gate: a classifier's head, which is averaged."""
    return {name: tensor for name, tensor in tensors.items() if is_head(name)}


def pair(layer: str, product: Product) -> Tensors:
    """Return a product (B, A) as the layer's trained factors."""
    return {f"{layer}.lora_A": product[1], f"{layer}.lora_B": product[0]}


def split(layer: str, product: Product, rank: int, gate: float) -> Tensors:
    """Return a product's first `rank` ranks as trained factors, the rest as the frozen tail."""
    b, a = product
    tensors = pair(layer, (b[:, :rank], a[:rank]))
    if a.shape[0] > rank:
        tensors |= {f"{layer}.tail_A": a[rank:], f"{layer}.tail_B": b[:, rank:], f"{layer}.{GATE}": torch.tensor([gate])}
    return tensors


def factors(tensors: Mapping[str, Tensor], layer: str) -> Product:
    """Return (B, A) of a layer's trained factors."""
    return tensors[f"{layer}.lora_B"], tensors[f"{layer}.lora_A"]


def trained(upload: Upload) -> Tensors:
    """Return a site's shared tensors after its training."""
    return {name: upload.sent.tensors[name] + change for name, change in upload.update.tensors.items()}


def weights(uploads: Mapping[str, Upload]) -> dict[str, float]:
    """Return p_i, the uploads' weights over their sum."""
    total = sum(upload.weight for upload in uploads.values())
    return {name: upload.weight / total for name, upload in uploads.items()}


def changes(uploads: Mapping[str, Upload], share: Mapping[str, float], layer: str) -> list[Change]:
    """Return every site's training of one layer, in the order of names; of rank 0 where a site did not train it."""
    found = []
    for name, upload in sorted(uploads.items()):
        (b, a), (db, da) = factors(upload.sent.tensors, layer), factors(upload.update.tensors, layer)
        found.append(Change(share[name], (b, a), (b + db, a + da)))
    return found


def mean_others(state: ServerState, uploads: Mapping[str, Upload], share: Mapping[str, float]) -> Tensors:
    """Return the head plus the weighted mean of its updates, summed in float64 by name."""
    moved = {n: t.double() for n, t in others(state.shared).items()}
    for name, upload in sorted(uploads.items()):
        moved = {n: t + share[name] * upload.update.tensors[n].double() for n, t in moved.items()}
    return {n: t.to(state.shared[n].dtype) for n, t in moved.items()}


# diagnostics ----------------------------------------------------------------------------------------------------------


def moves(upload: Upload) -> list[Product]:
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
    total = sum(lowrank.gram(layer) for layer in zip(*sites, strict=True))
    norms = total.diagonal().clamp(min=0).sqrt()
    cosines = total / (norms[:, None] * norms + 1e-12)
    count = len(sites)
    return float((1 - cosines)[~torch.eye(count, dtype=torch.bool)].mean()) if count > 1 else 0.0


def oracle_drift(site: Sequence[Product], oracle: Sequence[Product]) -> tuple[float, float]:
    """Return ||W - W*||_F and that over ||W*||_F (FedHera, Eq. 14 and 15) of a site's `moves` against an oracle's, by layer.

    The oracle is the same site, trained at a high rank from the whole global update on the same batches. Where the oracle did
    not move, the second is 0 for a site that did not either, infinite for one that did.
    """
    total = sum(lowrank.gram(both) for both in zip(site, oracle, strict=True))
    apart = max(0.0, float(total[0, 0] + total[1, 1] - 2 * total[0, 1])) ** 0.5
    norm = float(total[1, 1]) ** 0.5
    return apart, apart / norm if norm > 0 else (0.0 if apart == 0 else float("inf"))


def information_gain(sent: Payload) -> float:
    """Return adapter numbers in the forward pass over those that train (FedHera, Appendix F.7); 1 without tails."""
    numbers = {name: tensor.numel() for name, tensor in sent.tensors.items() if not name.endswith(f".{GATE}")}
    tail = sum(count for name, count in numbers.items() if name.rpartition(".")[2] in TAIL)
    total = sum(numbers.values())
    return total / max(total - tail, 1)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)
