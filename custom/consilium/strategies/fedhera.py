"""FedHera: federated heterogeneous rank adaptation: download many ranks, train few.

The server keeps the exact global update W of every layer and its spectrum. Two water-fillings per site decide for each layer
how many ranks the site downloads (Algorithm 1) and trains (Algorithm 2). The trained ranks, a prefix, are uploaded. The other
ranks, the tail, are frozen in the forward pass. A gate multiplies the tail; it is larger for sites whose updates align with the
federation's (adaptive tail warm-up, Eq. 11 and 12). Aggregation is one of three rules. p_i is a
site's weight in the mean, s the adapter's scaling, B0_i A0_i the product that the site was sent:
- `residual`: W += sum p_i s (B_i A_i - B0_i A0_i) (Eq. 10);
- `literal`: the same without subtracting B0_i A0_i (the paper's "standard", Appendix F.6);
- `replace`: W = sum p_i s B_i A_i over the sites' whole products, tails included (the default of the authors' code).

Source: K. Xiao, Q. Wang, C. Anagnostopoulos, Z. Tan, W. Li, "FedHera: Towards Drift-Resilient Federated Fine-tuning with
Heterogeneous Resources": Section 4, Eq. 4 to 12, Algorithms 1 and 2; Table 12 for `random`. The authors' code:
github.com/shock-xiaoke/FedHera, f2389f8. `cumulative` and `replace` are read from it; both use each site's tail without the
gate.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from consilium.core import low_rank_sums
from consilium.core.lazy import Tensor, torch
from consilium.core.low_rank_sums import Change, Update
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.core.seeding import seed_for
from consilium.strategies.strategy import ServerState, SiteResult, Traits, shares
from consilium.strategies.unequal_ranks import (
    ExactServer,
    changes,
    non_lora_tensors,
    prefix_and_tail,
    shapes,
    stored_spectra,
    truncated_factors,
)


@dataclass(frozen=True)
class FedHera(ExactServer):
    """Decoupled download and training ranks."""

    name: ClassVar[str] = "fedhera"

    least_train: ClassVar[float] = 0.0

    aggregation: Annotated[
        Literal["residual", "literal", "replace"],
        Field(
            description="`residual`: the paper's Eq. 10; `replace`: the authors' code; `literal`: the paper's other printed "
            "rule, with which W grows in each round"
        ),
    ] = "residual"
    allocation: Annotated[
        Literal["water_filling", "literal", "even", "random"],
        Field(
            description="water filling over energies, the paper's `literal` rules, `even` ranks in all layers, or `random` ones"
        ),
    ] = "water_filling"
    energy: Annotated[
        Literal["normalized", "raw"],
        Field(
            description="a rank's energy: `normalized` by the sum of its layer (Eq. 4), or `raw` squared singular values, "
            "which are comparable between layers"
        ),
    ] = "normalized"
    gate: Annotated[
        Literal["paper", "neutral", "open"],
        Field(description="`paper`: Eq. 12; `neutral`: the authors' code; `open`: the gate is always 1"),
    ] = "paper"
    score: Annotated[
        Literal["product", "residual", "cumulative"],
        Field(
            description="which cosine the gate uses: of each site's trained product with the mean of them, as printed "
            "(`product`), of the changes of these products (`residual`), or of products with tails and all of W "
            "(`cumulative`). Sites of a tier that trains 0 ranks have no weight in the mean"
        ),
    ] = "product"
    decay: Annotated[float, Field(gt=0, le=1, description="beta of Eq. 12: decay per missed round in a site's gate")] = 0.9

    @property
    def traits(self) -> Traits:
        """See Strategy."""
        what = "adds every site's whole start again in each round, so that W grows without any training"
        said = f"strategy.aggregation: 'literal' {what}; use residual, unless the print's own rule is what you want to see"
        return replace(super().traits, warnings=(said,) if self.aggregation == "literal" else ())

    # server half ------------------------------------------------------------------------------------------------------

    def payload(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return W truncated to the site's download ranks, split into trained ranks and a tail with the site's gate."""
        gate, tensors = self.site_gate(state, site.name), dict(non_lora_tensors(state.shared))
        found, (download, train) = stored_spectra(state), self.download_and_train_ranks(state, site)
        for layer, rank in download.items():
            tensors |= prefix_and_tail(layer, truncated_factors(state, layer, found[layer], rank), train[layer], gate)
        return Payload(state.round, state.phase, tensors)

    def download_and_train_ranks(self, state: ServerState, site: SiteInfo) -> tuple[dict[str, int], dict[str, int]]:
        """Return (download, train) ranks by layer. A frozen tail never holds ranks of energy 0."""
        found, capacity, dims = stored_spectra(state), self.affordable_ranks(site), shapes(state.initial)
        # Numbers per rank: Eq. 6 without the bytes per number, which cancel. Time and memory per trained number are the same in
        # all layers. So alpha and beta of Algorithm 2 change no order: it is Algorithm 1 with the smaller of its two budgets.
        costs, most = [out + into for out, into in dims.values()], max(len(one.values) for one in found.values())
        budgets = {limit: int(min(ranks, most) * sum(costs)) for limit, ranks in capacity.items()}
        trained = min(budgets["time"], budgets["memory"])
        if self.allocation == "random":
            seed = seed_for(self.seed, "ranks", state.round, site.name)
            download = random_ranks([len(one.values) for one in found.values()], costs, budgets["download"], seed)
            train = random_ranks(download, costs, trained, seed_for(seed, "train"))
        else:
            whole = sum(one.energy for one in found.values())
            rows = []
            for one, cost in zip(found.values(), costs, strict=True):
                by = one.energy if self.energy == "normalized" else whole  # the sum over all layers divides `raw` energies
                values, by = (torch.zeros_like(one.values), 0.0) if self.allocation == "even" else (one.values, by)
                rows.append(energies(values, by, cost / max(costs)))
            download = fill_ranks(rows, costs, budgets["download"], self.allocation == "literal")
            train = fill_ranks([row[:cap] for row, cap in zip(rows, download, strict=True)], costs, trained)
        real = [int(found[layer].values.count_nonzero()) for layer in dims]
        download = [max(t, min(d, r)) for d, t, r in zip(download, train, real, strict=True)]
        return dict(zip(dims, download, strict=True)), dict(zip(dims, train, strict=True))

    def download_ranks(self, state: ServerState, site: SiteInfo) -> dict[str, int]:
        """Return the ranks that the site downloads, by layer."""
        return self.download_and_train_ranks(state, site)[0]

    def download_numbers(self, state: ServerState, site: SiteInfo) -> int:
        """Return the numbers of the site's download budget, at most those of all ranks, and those of a head."""
        sizes = [(sum(shape), len(state.initial[f"{layer}.lora_A"])) for layer, shape in shapes(state.initial).items()]
        budget = int(self.affordable_ranks(site)["download"] * sum(size for size, _ in sizes))
        others = sum(tensor.numel() for tensor in non_lora_tensors(state.shared).values())
        return min(budget, sum(size * most for size, most in sizes)) + others

    def site_gate(self, state: ServerState, name: str) -> float:
        """Return a site's gate lambda in this round."""
        if self.gate == "open":
            return 1.0
        score = float(state.sites[name]["alignment"]) if name in state.sites else None
        age = state.round - 1 - state.reported.get(name, -1)
        return gate(state.round, score, age, self.gate, self.decay)

    def site_weights(self, state: ServerState, uploads: Mapping[str, SiteResult]) -> dict[str, float]:
        """Return p_i by site, proportional to samples.

        A site that trained no rank in any layer gets 0, unless no site did or `aggregation` is `replace`.
        """
        trained = {name: one for name, one in uploads.items() if self.merges_tails or _trained_ranks(one)}
        return dict.fromkeys(uploads, 0.0) | shares(trained or uploads)

    @property
    def merges_tails(self) -> bool:
        """See ExactServer."""
        return self.aggregation == "replace"

    def merge_layer(self, update: Update, layer: list[Change]) -> Update:
        """Return W plus the sites' weighted changes (residual) or products (literal), or the products alone (replace)."""
        if self.aggregation == "residual":
            return low_rank_sums.add(update, low_rank_sums.weighted_sum_of_changes(layer))
        base = low_rank_sums.zero_update(*update.shape) if self.aggregation == "replace" else update
        return low_rank_sums.add(base, low_rank_sums.weighted_sum_of_products(layer))

    def sites_after(
        self, state: ServerState, uploads: Mapping[str, SiteResult], updates: Mapping[str, Update]
    ) -> dict[str, Tensors]:
        """Return each site's last alignment s_i with the federation (Eq. 11).

        A site that was absent or trained no rank keeps its last value.
        """
        active = {name: one for name, one in uploads.items() if _trained_ranks(one)}
        if not active:
            return state.sites
        share = shares(active)
        layers = {n: changes(active, share, n, self.score == "cumulative") for n in shapes(state.initial)}
        if self.score == "cumulative":
            scores = low_rank_sums.alignments_with({n: [one.end for one in found] for n, found in layers.items()}, updates)
        else:
            whole = self.score == "product"  # else the change in the round counts
            products = [
                [
                    one.end if whole else low_rank_sums.weighted_sum_of_changes([Change(1.0, one.start, one.end)])
                    for one in found
                ]
                for found in layers.values()
            ]
            scores = low_rank_sums.alignments(products, [share[name] for name in sorted(share)])
        return state.sites | {name: {"alignment": torch.tensor([s])} for name, s in zip(sorted(share), scores, strict=True)}


def _trained_ranks(upload: SiteResult) -> int:
    """Return the number of ranks that a site trained, summed over layers."""
    return sum(len(tensor) for name, tensor in upload.update.tensors.items() if name.endswith(".lora_A"))


# ranks -----------------------------------------------------------------------------------------------------------------
# The water-filling gives the ranks of each layer that a site receives and trains. The gate multiplies its frozen ranks.

NOTHING = 1e-30
"""The energy given to a rank without energy, so that it comes after all others (epsilon of Eq. 4, and the uniform start)."""

Energies = Sequence[Sequence[float]]
"""For each layer the energies of its ranks 1, 2, ..., in non-increasing order. Their number is the layer's cap R_l."""


def energies(values: Tensor, total: float, cost: float = 1.0) -> list[float]:
    """Return E_k = sigma_k^2 / (total + eps) (Eq. 4) for singular values (r,); `total` = ||W||_F^2.

    Ranks without energy (all ranks while W = 0) get nearly uniform energies far below any real one: NOTHING times `cost` (the
    layer's cost per rank over that of the most expensive layer), slightly less at each further rank. So layers get such ranks
    in turn. Exact ties would give all of them to the first layers; without the cost, the cheapest layers would get all.
    """
    found = values.double().square() / total if total > 0 else torch.zeros(len(values), dtype=torch.float64)
    blank = NOTHING * cost * (1 - 1e-9 * torch.arange(len(values), dtype=torch.float64))
    return torch.where(found > NOTHING, found, blank).tolist()


def fill_ranks(energies: Energies, costs: Sequence[int], budget: int, literal: bool = False) -> list[int]:
    """Return the ranks of each layer (Algorithm 1): greedy on E_{l, r+1} / c_l until `budget` (same unit as `costs`) is spent.

    A layer that no longer fits is skipped, and cheaper layers may still get ranks. With `literal` the allocation stops there,
    as printed. Ties go to the lower layer index.
    """
    ranks = [0] * len(energies)
    heap = [(-row[0] / cost, layer) for layer, (row, cost) in enumerate(zip(energies, costs, strict=True)) if row]
    heapify(heap)
    while heap:
        layer = heappop(heap)[1]
        if costs[layer] <= budget:
            budget -= costs[layer]
            ranks[layer] += 1
            if ranks[layer] < len(energies[layer]):
                heappush(heap, (-energies[layer][ranks[layer]] / costs[layer], layer))
        elif literal:
            break
    return ranks


def random_ranks(caps: Sequence[int], costs: Sequence[int], budget: int, seed: int) -> list[int]:
    """Return random ranks <= caps per layer (Table 12).

    Each step gives one rank to a layer drawn from those that still fit the budget. All layers have equal odds, as in the
    authors' code.
    """
    ranks, draw = [0] * len(caps), random.Random(seed)
    while open_layers := [n for n, cap in enumerate(caps) if ranks[n] < cap and costs[n] <= budget]:
        layer = draw.choice(open_layers)
        ranks[layer] += 1
        budget -= costs[layer]
    return ranks


def gate(
    completed: int,
    score: float | None,
    age: int,
    schedule: Literal["paper", "neutral"] = "paper",
    decay: float = 0.9,
) -> float:
    """Return the gate lambda in [0, 1) that multiplies a site's frozen tail after `completed` rounds (t); 0 for t = 0.

    `score`: the site's last alignment s_i in [-1, 1], None before its first report (counts as 0). `age`: rounds since that
    report (t - t_i; 0 if the site took part in the last round). `paper` (Eq. 12) is 1 - exp(-(t / 2)(1 + s) decay^age): a stale
    site loses its tail. `neutral` is 1 - exp(-(t / 2)(1 + s decay^age)): a stale site returns to the gate of s = 0.
    """
    aligned = 0.0 if score is None else min(1.0, max(-1.0, score))
    fresh = 1.0 if score is None else decay**age
    weight = (1 + aligned) * fresh if schedule == "paper" else 1 + aligned * fresh
    return -math.expm1(-completed / 2 * weight)
