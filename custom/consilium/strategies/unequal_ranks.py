"""Base classes of algorithms for sites with unequal ranks: tiers, factors and tails of a layer, drift, and exact aggregation.

A site's ranks come from its tier, or from `capacity` in its site.yaml. A layer's adapter is `<layer>.lora_A` (r, in) and
`<layer>.lora_B` (out, r), which are trained and uploaded. An algorithm may add frozen ranks, a tail: `tail_A` (k, in), `tail_B`
(out, k) and `gate` (1,). Ranks differ by site and layer, so the server needs every site's result and the payload that it was
sent. Global updates are stored divided by the job's scaling s, a constant for all ranks. Only the site's forward pass
multiplies by s.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from consilium.adapters.names import GATE, TAIL, WHOLE, checked_lora_factor, is_base, is_frozen_part, is_head
from consilium.core import low_rank_sums
from consilium.core.errors import ConfigError
from consilium.core.lazy import Tensor, torch
from consilium.core.low_rank_sums import Change, Product, Spectrum, Update
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.core.schema import Seed, Share
from consilium.core.seeding import seed_for
from consilium.strategies.strategy import Role, RoundResults, ServerState, SiteResult, Strategy, Traits, next_state, shares

# layers ----------------------------------------------------------------------------------------------------------------
# Functions on the adapter tensors of one layer: trained factors, frozen tails, changes from uploads, averages of the rest.


LAST_PARTS = ("mask_decoder", "lm_head")
"""Parts of a model after its encoder. Sorted by name, they would come before `vision_encoder` and before `model`."""


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return the shapes (out, in) of the LoRA layers in `tensors`, by layer, in order of depth.

    Layer names are sorted part by part, with numbers compared as numbers. A mask decoder and an output layer come last.
    """

    def depth(layer: str) -> tuple[bool, list[tuple[bool, int, str]]]:
        parts = layer.split(".")
        return parts[0] in LAST_PARTS, [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]

    layers = sorted((name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A")), key=depth)
    return {layer: (len(tensors[f"{layer}.lora_B"]), tensors[f"{layer}.lora_A"].shape[1]) for layer in layers}


def non_lora_tensors(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return the tensors outside LoRA: a classifier's head and trained parts of the base.

    Factors, tails and gates are left out.
    """
    return {name: tensor for name, tensor in tensors.items() if is_head(name) or is_base(name)}


def pair(layer: str, product: Product) -> Tensors:
    """Return a product (B, A) as the tensors of the layer's trained factors."""
    return {f"{layer}.lora_A": product[1], f"{layer}.lora_B": product[0]}


def first_ranks(tensors: Mapping[str, Tensor], rank: int) -> Tensors:
    """Return the first `rank` ranks of every layer's trained factors, and the tensors outside LoRA."""
    found = dict(non_lora_tensors(tensors))
    for layer in shapes(tensors):
        b, a = factors(tensors, layer)
        found |= pair(layer, (b[:, :rank].clone(), a[:rank].clone()))
    return found


def prefix_and_tail(layer: str, product: Product, rank: int, gate: float) -> Tensors:
    """Return the first `rank` ranks of a product (B, A) as trained factors, and the others as the frozen tail with `gate`."""
    b, a = product
    tensors = pair(layer, (b[:, :rank], a[:rank]))
    if a.shape[0] > rank:
        tensors |= {f"{layer}.tail_A": a[rank:], f"{layer}.tail_B": b[:, rank:], f"{layer}.{GATE}": torch.tensor([gate])}
    return tensors


def with_factored_tails(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return `tensors` with every tail as two factors: a tail sent as one matrix (out, in) is paired with an identity."""
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(f".{WHOLE}")}
    for name in sorted(tensors.keys() - found.keys()):
        layer, whole = name.removesuffix(f".{WHOLE}"), tensors[name]
        out, into = whole.shape
        b, a = (whole, torch.eye(into)) if into <= out else (torch.eye(out), whole)
        found |= {f"{layer}.tail_A": a.to(whole), f"{layer}.tail_B": b.to(whole), f"{layer}.{GATE}": whole.new_ones(1)}
    return found


def full_download_numbers(tensors: Mapping[str, Tensor]) -> int:
    """Return the count of numbers in trained factors and a head, plus a tail as large as each layer's weights."""
    trained = sum(t.numel() for n, t in tensors.items() if not is_frozen_part(n))
    return trained + sum(out * into for out, into in shapes(tensors).values())


def factors(tensors: Mapping[str, Tensor], layer: str) -> Product:
    """Return (B, A) of a layer's trained factors."""
    return tensors[f"{layer}.lora_B"], tensors[f"{layer}.lora_A"]


def changes(uploads: Mapping[str, SiteResult], share: Mapping[str, float], layer: str, tails: bool = False) -> list[Change]:
    """Return the change of one layer at every site: its weight, and its factors before and after training.

    Sites are in the order of names. A site that did not train the layer has rank 0. With `tails` the frozen ranks are appended
    to both factors, without the gate, which gives the site's whole product.
    """
    found = []
    for name, upload in sorted(uploads.items()):
        (b, a), (db, da) = factors(upload.sent.tensors, layer), factors(upload.update.tensors, layer)
        start, end = (b, a), (b + db, a + da)
        if tails:
            start, end = _with_tail(upload, layer, start), _with_tail(upload, layer, end)
        found.append(Change(share[name], start, end))
    return found


def _with_tail(upload: SiteResult, layer: str, product: Product) -> Product:
    if f"{layer}.tail_A" not in upload.sent.tensors:
        return product
    tail_a, tail_b = (upload.sent.tensors[f"{layer}.{part}"] for part in TAIL)
    return torch.cat([product[0], tail_b], 1), torch.cat([product[1], tail_a])


def mean_non_lora_tensors(state: ServerState, uploads: Mapping[str, SiteResult], share: Mapping[str, float]) -> Tensors:
    """Return the non-LoRA tensors (a head, trained parts of the base) plus the weighted mean of their updates.

    The sum is in float64, over the sites in the order of names.
    """
    moved = {n: t.double() for n, t in non_lora_tensors(state.shared).items()}
    for name, upload in sorted(uploads.items()):
        moved = {n: t + share[name] * upload.update.tensors[n].double() for n, t in moved.items()}
    return {n: t.to(state.shared[n].dtype) for n, t in moved.items()}


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
    total = low_rank_sums.sum_tensors([low_rank_sums.gram(layer) for layer in zip(*sites, strict=True)])
    norms = total.diagonal().clamp(min=0).sqrt()
    cosines = total / (norms[:, None] * norms + 1e-12)
    count = len(sites)
    return float((1 - cosines)[~torch.eye(count, dtype=torch.bool)].mean()) if count > 1 else 0.0


def oracle_drift(site: Sequence[Product], oracle: Sequence[Product]) -> tuple[float, float]:
    """Return (||W - W*||_F, the same over ||W*||_F) (FedHera, Eq. 14 and 15) for a site's layer changes W and an oracle's W*.

    The oracle is the same site, trained at a high rank from the whole global update on the same batches. If the oracle did not
    move, the second value is 0 for a site that did not move either, and infinite for one that did.
    """
    total = low_rank_sums.sum_tensors([low_rank_sums.gram(both) for both in zip(site, oracle, strict=True)])
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

    def weighted_tiers(self) -> dict[str, tuple[Tier, float]]:
        """Return the tiers that the profile names, each with its probability."""
        return {name: (self.tiers[name], share) for name, share in self._tier_probabilities().items()}

    def draw_tier(self, site: str) -> Tier:
        """Return the tier drawn from the profile for a site without `capacity`."""
        shares = self._tier_probabilities()
        draw = random.Random(seed_for(self.seed, "tier", site))
        return self.tiers[draw.choices(list(shares), list(shares.values()))[0]]

    def affordable_ranks(self, site: SiteInfo) -> dict[str, float]:
        """Return the average ranks per layer that the site's limits allow, by limit: `download`, `time` and `memory`."""
        tier = self.draw_tier(site.name)
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
    """Return the strategy for an adapter with the same rank at all sites: with unequal ranks, that of one tier with `rank`.

    Raises ConfigError if the job sets tiers.
    """
    if not isinstance(strategy, UnequalRanks):
        return strategy
    if strategy.tiers != _paper_tiers() or strategy.profile != "uniform":
        what = "are for sites of unequal ranks, and adapter.kind 'lora' has one"
        raise ConfigError(f"strategy.tiers, strategy.profile: {what}; remove them, or use dual_rank")
    return replace(strategy, tiers={"all": Tier(rank, rank)}, profile={"all": 1.0})


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)


# exact server ----------------------------------------------------------------------------------------------------------
# The server of FedHera and similar algorithms keeps each layer's exact global update W, with one SVD per round.
#
# ServerState.shared holds W / s as `<layer>.left` (out, k) and `<layer>.right` (k, in), or as `<layer>.dense` (out, in), see
# low_rank_sums.py, and a head unchanged. ServerState.matrices holds `<layer>.u`, `.values` and `.v`, the first singular
# triplets, and `.energy`, ||W / s||_F^2 and its error. ServerState.initial holds the factors that all sites start from. Their
# rows of A fill directions without an update.


@dataclass(frozen=True)
class ExactServer(UnequalRanks):
    """Base of algorithms that merge products. `merge_layer` computes a layer's next global update."""

    decomposes: ClassVar[bool] = True
    """Whether the server computes the SVD. An algorithm that sends no truncations does not need it."""

    @property
    def merges_tails(self) -> bool:
        """Whether `merge_layer` receives the sites' whole products, with frozen tails."""
        return False

    def merge_layer(self, update: Update, layer: list[Change]) -> Update:
        """Return a layer's next global update, given its current `update` and each site's change of the layer."""
        raise NotImplementedError

    def site_weights(self, state: ServerState, uploads: Mapping[str, SiteResult]) -> dict[str, float]:
        """Return each site's weight p_i in the merge; the weights sum to 1."""
        return shares(uploads)

    def sites_after(
        self, state: ServerState, uploads: Mapping[str, SiteResult], updates: Mapping[str, Update]
    ) -> dict[str, Tensors]:
        """Return the tensors that the server stores per site after this round. `updates`: the new global updates by layer."""
        return state.sites

    def initialize(self, initial: Tensors) -> ServerState:
        """Return the state before round 0: W = 0."""
        zero = {layer: low_rank_sums.zero_update(*shape) for layer, shape in shapes(initial).items()}
        others = non_lora_tensors(initial)
        state = ServerState(0, 0, others, {n: t for n, t in initial.items() if n not in others})
        return self._with_spectra(state, zero)

    def payload(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return the global update truncated to the site's download ranks; the site trains all of it."""
        ranks = self.download_ranks(state, site)
        tensors = dict(non_lora_tensors(state.shared))
        for layer, found in stored_spectra(state).items():
            tensors |= pair(layer, truncated_factors(state, layer, found, ranks[layer]))
        return Payload(state.round, state.phase, tensors)

    def final(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return the truncated global update after the last round, without a frozen tail."""
        return ExactServer.payload(self, state, site)

    def download_ranks(self, state: ServerState, site: SiteInfo) -> dict[str, int]:
        """Return the ranks that a site receives, by layer. Here these are the ranks that the site trains."""
        rank = self.train_rank(site)
        return {layer: min(rank, len(found.values)) for layer, found in stored_spectra(state).items()}

    def aggregate(self, state: ServerState, results: dict[str, SiteResult]) -> ServerState:
        """Return the next state: each layer is merged and decomposed, and a head is averaged."""
        share, updates = self.site_weights(state, results), global_updates(state)
        for layer in updates:
            updates[layer] = self.merge_layer(updates[layer], changes(results, share, layer, self.merges_tails))
        reported = state.reported | dict.fromkeys(results, state.round)
        after = next_state(self, state, shared=mean_non_lora_tensors(state, results, share), reported=reported)
        return self._with_spectra(replace(after, sites=self.sites_after(state, results, updates)), updates)

    def _with_spectra(self, state: ServerState, updates: Mapping[str, Update]) -> ServerState:
        """Return the state with `updates` as W / s, and with their SVDs."""
        top = max(len(tensor) for name, tensor in state.initial.items() if name.endswith(".lora_A"))
        shared, matrices = dict(state.shared), dict[str, Tensor]()
        for layer, update in updates.items():
            parts = {"left": update.left, "right": update.right} if update.dense is None else {"dense": update.dense}
            shared |= {f"{layer}.{part}": tensor for part, tensor in parts.items()}
        wanted = updates if self.decomposes else {}
        for layer, found in low_rank_sums.spectra(wanted, top).items():
            matrices |= {f"{layer}.u": found.left, f"{layer}.values": found.values, f"{layer}.v": found.right}
            matrices[f"{layer}.energy"] = torch.tensor([found.energy, found.error], dtype=torch.float64)
        return replace(state, shared=shared, matrices=matrices)

    def diagnostics(self, state: ServerState, results: dict[str, SiteResult]) -> dict[str, float]:
        """Return the diagnostics of UnequalRanks, and per layer the mean share of W's energy that sites' downloads retain."""
        found = super().diagnostics(state, results)
        for layer, one in stored_spectra(state).items():
            if one.energy > 0:
                parts = f"{layer}.lora_A", f"{layer}.tail_A"
                sent = [upload.sent.tensors for upload in results.values()]
                ranks = [sum(len(tensors[name]) for name in parts if name in tensors) for tensors in sent]
                found[f"retained energy/{layer}"] = 1 - sum(one.rest(rank) for rank in ranks) / one.energy / len(ranks)
        return found


def truncated_factors(state: ServerState, layer: str, found: Spectrum, rank: int) -> Product:
    """Return W / s truncated to `rank` as (B, A). A direction without an update gets the common initial row of A and B = 0."""
    return low_rank_sums.balanced_factors(found, rank, state.initial[f"{layer}.lora_A"])


def global_updates(state: ServerState) -> dict[str, Update]:
    """Return each layer's global update W / s, low-rank or dense as stored. s: the adapter's scaling (see the module)."""
    kept = {}
    for layer, (out, into) in shapes(state.initial).items():
        if (dense := state.shared.get(f"{layer}.dense")) is not None:
            kept[layer] = Update(dense.new_zeros(out, 0), dense.new_zeros(0, into), dense)
        else:
            kept[layer] = Update(state.shared[f"{layer}.left"], state.shared[f"{layer}.right"])
    return kept


def stored_spectra(state: ServerState) -> dict[str, Spectrum]:
    """Return the SVD of every layer's W / s, truncated to the largest rank of any site's adapter."""
    found = {}
    for layer in shapes(state.initial):
        u, values, v = (state.matrices[f"{layer}.{part}"] for part in ("u", "values", "v"))
        found[layer] = Spectrum(u, values, v, *state.matrices[f"{layer}.energy"].tolist())
    return found


# oracle ----------------------------------------------------------------------------------------------------------------
# Drift is measured against an oracle: a site that trains all ranks of the whole global update (FedHera, Section 6.1).
#
# The paper trains "a high-rank adapter (r = 1024)" and does not say where it starts. Ours starts from the server's whole
# update, which a site without limits would receive.


def factored_global_update(strategy: UnequalRanks, state: ServerState, initial_rows: Mapping[str, Tensor]) -> Tensors:
    """Return the server's whole update as factors to train, and a head unchanged.

    `initial_rows`: by layer a matrix (rank, in). It gives the oracle's rank, and the initial rows of A for directions without
    an update.
    """
    tensors = dict(non_lora_tensors(state.shared))
    updates = global_updates(state) if isinstance(strategy, ExactServer) else {}
    for layer, initial in initial_rows.items():
        update = updates.get(layer) or low_rank_sums.Update(*factors(state.shared, layer))
        found = low_rank_sums.spectrum(update, len(initial))
        tensors |= pair(layer, low_rank_sums.balanced_factors(found, len(initial), initial))
    return tensors
