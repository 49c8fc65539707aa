"""FedHera: federated heterogeneous rank adaptation: download many ranks, train few.

The server keeps the exact global update W of every layer and its spectrum. Two water-fillings per site decide, layer by layer,
how many ranks it downloads (Algorithm 1) and trains (Algorithm 2). The trained prefix is uploaded, the rest is a frozen tail in
the forward pass, faded in by a gate that trusts sites aligned with the federation (adaptive tail warm-up, Eq. 11 and 12).
Aggregation: W += sum p_i s (B_i A_i - B0_i A0_i) (Eq. 10, `residual`), or without the start subtracted (`standard`).

Source: K. Xiao, Q. Wang, C. Anagnostopoulos, Z. Tan, W. Li, "FedHera: Towards Drift-Resilient Federated Fine-tuning with
Heterogeneous Resources": Section 4, Eq. 4 to 12, Algorithms 1 and 2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from consilium.linalg import lowrank
from consilium.linalg.lowrank import Change, Product, Spectrum, Update
from consilium.messages import Payload, SiteInfo, Tensors
from consilium.strategies.strategy import ServerState, SiteResult, shares
from consilium.strategies.unequal import allocation
from consilium.strategies.unequal.exact import ExactServer, stored_spectra, truncated_factors
from consilium.strategies.unequal.layers import changes, others, prefix_and_tail, shapes

BYTES = 4
"""Of a number on the wire."""
STATE = 4
"""Numbers in memory per trained number: itself, its gradient, Adam's two moments."""


@dataclass(frozen=True)
class FedHera(ExactServer):
    """Decoupled download and training ranks.

    `allocation`: water filling over energies, the paper's `literal` rules, or `even` ranks in all layers. `gate`: Eq. 12
    (`paper`), the authors' code (`neutral`), or a tail that is always whole (`open`). `score`: of the sites' whole products, as
    printed, or of what they changed (`residual`).
    """

    name: ClassVar[str] = "fedhera"

    aggregation: Literal["residual", "standard"] = "residual"
    allocation: Literal["water_filling", "literal", "even"] = "water_filling"
    gate: Literal["paper", "neutral", "open"] = "paper"
    score: Literal["product", "residual"] = "product"
    decay: Annotated[float, Field(gt=0, le=1)] = 0.9

    # server half ------------------------------------------------------------------------------------------------------

    def broadcast(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return W truncated to the site's download ranks, split into what it trains and the tail behind the site's gate."""
        gate, tensors = self.gate_of(state, site.name), dict(others(state.shared))
        found, (download, train) = stored_spectra(state), self.ranks(state, site)
        for layer, rank in download.items():
            tensors |= prefix_and_tail(layer, truncated_factors(state, layer, found[layer], rank), train[layer], gate)
        return Payload(state.round, state.phase, tensors)

    def ranks(self, state: ServerState, site: SiteInfo) -> tuple[dict[str, int], dict[str, int]]:
        """Return (download, train) ranks by layer; a tail never holds ranks without energy."""
        found, capacity, dims = stored_spectra(state), self.affordable_ranks(site), shapes(state.initial)
        costs = allocation.download_costs(list(dims.values()), BYTES)
        energies = [self._energies(found[layer], cost / max(costs)) for layer, cost in zip(dims, costs, strict=True)]
        literal, total = self.allocation == "literal", sum(costs)
        download = allocation.download_ranks(energies, costs, capacity["download"] * total, literal)
        memory = [STATE * cost for cost in costs]
        budgets = (capacity["time"] * total, capacity["memory"] * sum(memory))
        train = allocation.train_ranks(energies, download, allocation.Training(costs, memory, *budgets), literal)
        real = [int(found[layer].values.count_nonzero()) for layer in dims]
        download = [max(t, min(d, r)) for d, t, r in zip(download, train, real, strict=True)]
        return dict(zip(dims, download, strict=True)), dict(zip(dims, train, strict=True))

    def _energies(self, found: Spectrum, cost: float) -> list[float]:
        if self.allocation == "even":
            return allocation.energies(torch.zeros_like(found.values), 0.0, cost)
        return allocation.energies(found.values, found.energy, cost)

    def download_ranks(self, state: ServerState, site: SiteInfo) -> dict[str, int]:
        """Return what the site downloads by layer."""
        return self.ranks(state, site)[0]

    def download_numbers(self, sent: Payload, site: SiteInfo) -> int:
        """Return the site's whole download budget, which the first round, without an update, does not use."""
        return int(self.affordable_ranks(site)["download"] * sum(map(sum, shapes(sent.tensors).values())))

    def gate_of(self, state: ServerState, name: str) -> float:
        """Return lambda of a site in this round."""
        if self.gate == "open":
            return 1.0
        score = float(state.sites[name]["alignment"]) if name in state.sites else None
        age = state.round - 1 - state.reported.get(name, -1)
        return allocation.gate(state.round, score, age, self.gate, self.decay)

    def merge_layer(self, update: Update, layer: list[Change]) -> Update:
        """Return W plus the sites' changes, or plus their products."""
        merged = lowrank.residuals if self.aggregation == "residual" else lowrank.products
        return lowrank.add(update, merged(layer, 1.0))

    def sites_after(self, state: ServerState, uploads: Mapping[str, SiteResult]) -> dict[str, Tensors]:
        """Return every site's last alignment s_i with the federation (Eq. 11)."""
        share = shares(uploads)
        layers = [[self._scored(change) for change in changes(uploads, share, layer)] for layer in shapes(state.initial)]
        scores = lowrank.alignments(layers, [share[name] for name in sorted(share)])
        return state.sites | {name: {"alignment": torch.tensor([s])} for name, s in zip(sorted(share), scores, strict=True)}

    def _scored(self, change: Change) -> Product:
        return change.end if self.score == "product" else lowrank.residuals([Change(1.0, change.start, change.end)], 1.0)
