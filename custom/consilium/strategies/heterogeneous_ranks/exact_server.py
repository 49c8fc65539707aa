"""Base class of FedHera and similar algorithms: the server keeps each layer's exact global update W, with one SVD per round.

ServerState.shared holds W / s as `<layer>.left` (out, k) and `<layer>.right` (k, in), or as `<layer>.dense` (out, in), see
lowrank.py, and a head unchanged. ServerState.matrices holds `<layer>.u`, `.values` and `.v`, the first singular triplets, and
`.energy`, ||W / s||_F^2 and its error. ServerState.initial holds the factors that all sites start from. Their rows of A fill
directions without an update.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from consilium.core import lowrank
from consilium.core.lazy import Tensor, torch
from consilium.core.lowrank import Change, Product, Spectrum, Update
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.strategies.heterogeneous_ranks.layer_factors import (
    changes,
    factors,
    mean_non_lora_tensors,
    non_lora_tensors,
    pair,
    shapes,
)
from consilium.strategies.heterogeneous_ranks.ranks import UnequalRanks
from consilium.strategies.strategy import ServerState, SiteResult, next_phase, shares


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
        zero = {layer: lowrank.zero_update(*shape) for layer, shape in shapes(initial).items()}
        state = ServerState(
            0, 0, non_lora_tensors(initial), {n: t for n, t in initial.items() if n not in non_lora_tensors(initial)}
        )
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
        round, phase = next_phase(state, self.traits.phases_of(state.round))
        reported = state.reported | dict.fromkeys(results, state.round)
        after = replace(state, round=round, phase=phase, shared=mean_non_lora_tensors(state, results, share), reported=reported)
        return self._with_spectra(replace(after, sites=self.sites_after(state, results, updates)), updates)

    def _with_spectra(self, state: ServerState, updates: Mapping[str, Update]) -> ServerState:
        """Return the state with `updates` as W / s, and with their SVDs."""
        top = max(len(tensor) for name, tensor in state.initial.items() if name.endswith(".lora_A"))
        shared, matrices = dict(state.shared), dict[str, Tensor]()
        for layer, update in updates.items():
            parts = {"left": update.left, "right": update.right} if update.dense is None else {"dense": update.dense}
            shared |= {f"{layer}.{part}": tensor for part, tensor in parts.items()}
        wanted = updates if self.decomposes else {}
        for layer, found in lowrank.spectra(wanted, top).items():
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
    return lowrank.balanced_factors(found, rank, 1.0, state.initial[f"{layer}.lora_A"])


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
        update = updates.get(layer) or lowrank.Update(*factors(state.shared, layer))
        found = lowrank.spectrum(update, len(initial))
        tensors |= pair(layer, lowrank.balanced_factors(found, len(initial), 1.0, initial))
    return tensors
