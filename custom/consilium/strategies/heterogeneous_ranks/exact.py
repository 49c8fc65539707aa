"""A server that keeps every layer's global update exactly and decomposes it once a round: FedHera's and its peers'.

In `ServerState.shared`: `<layer>.left` (out, k) and `<layer>.right` (k, in), or `<layer>.dense` (out, in), of W / s, see
lowrank.py; a head as it is. In `matrices`: `<layer>.u`, `.values`, `.v` and `.energy`, the first singular triplets and
||W / s||_F^2. In `initial`: the factors all sites start from, whose rows of A fill directions that have no update yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import Field

from consilium.core.lazy import Tensor, torch
from consilium.core.linalg import lowrank
from consilium.core.linalg.lowrank import Change, Product, Spectrum, Update
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.strategies.heterogeneous_ranks.layers import changes, factors, mean_others, non_lora_tensors, pair, shapes
from consilium.strategies.heterogeneous_ranks.ranks import UnequalRanks
from consilium.strategies.strategy import ServerState, SiteResult, next_phase, shares


@dataclass(frozen=True)
class ExactServer(UnequalRanks):
    """Base of algorithms that merge products; `merge_layer` says what the sites' training does to a layer's update.

    `device`: where the server decomposes, a GPU such as cuda:0 for large layers; by default its CPU's threads, a layer each.
    """

    decomposes: ClassVar[bool] = True
    """Whether sites are sent truncations; an algorithm that truncates nothing spares the server the decomposition."""

    device: Annotated[str, Field(pattern=r"^cuda(:\d+)?$")] | None = None

    @property
    def merges_tails(self) -> bool:
        """Whether `merge_layer` sees sites' whole products, frozen tails with them."""
        return False

    def merge_layer(self, update: Update, layer: list[Change]) -> Update:
        """Return a layer's next global update from its last and the sites' training of it."""
        raise NotImplementedError

    def share(self, state: ServerState, uploads: Mapping[str, SiteResult]) -> dict[str, float]:
        """Return p_i by site; they sum to 1."""
        return shares(uploads)

    def sites_after(
        self, state: ServerState, uploads: Mapping[str, SiteResult], updates: Mapping[str, Update]
    ) -> dict[str, Tensors]:
        """Return what the server remembers of each site after this round, which leaves the global `updates`, by layer."""
        return state.sites

    def initialize(self, initial: Tensors) -> ServerState:
        """Return the state before round 0: W = 0."""
        zero = {layer: lowrank.zero(*shape) for layer, shape in shapes(initial).items()}
        state = ServerState(
            0, 0, non_lora_tensors(initial), {n: t for n, t in initial.items() if n not in non_lora_tensors(initial)}
        )
        return self._decomposed(state, zero)

    def payload(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return the global update truncated to what the site can download, all of it to train."""
        ranks = self.download_ranks(state, site)
        tensors = dict(non_lora_tensors(state.shared))
        for layer, found in stored_spectra(state).items():
            tensors |= pair(layer, truncated_factors(state, layer, found, ranks[layer]))
        return Payload(state.round, state.phase, tensors)

    def final(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return the same after the last round: no part of it is a tail then."""
        return ExactServer.payload(self, state, site)

    def download_ranks(self, state: ServerState, site: SiteInfo) -> dict[str, int]:
        """Return the ranks by layer that a site receives: in algorithms with one rank a site, those it trains."""
        rank = self.train_rank(site)
        return {layer: min(rank, len(found.values)) for layer, found in stored_spectra(state).items()}

    def aggregate(self, state: ServerState, results: dict[str, SiteResult]) -> ServerState:
        """Return the next state: every layer merged and decomposed, a head averaged."""
        share, updates = self.share(state, results), global_updates(state)
        for layer in updates:
            updates[layer] = self.merge_layer(updates[layer], changes(results, share, layer, self.merges_tails))
        round, phase = next_phase(state, self.traits.phases_of(state.round))
        reported = state.reported | dict.fromkeys(results, state.round)
        after = replace(state, round=round, phase=phase, shared=mean_others(state, results, share), reported=reported)
        return self._decomposed(replace(after, sites=self.sites_after(state, results, updates)), updates)

    def _decomposed(self, state: ServerState, updates: Mapping[str, Update]) -> ServerState:
        """Return the state with these updates of W / s and their spectra."""
        top = max(len(tensor) for name, tensor in state.initial.items() if name.endswith(".lora_A"))
        shared, matrices = dict(state.shared), dict[str, Tensor]()
        for layer, update in updates.items():
            parts = {"left": update.left, "right": update.right} if update.dense is None else {"dense": update.dense}
            shared |= {f"{layer}.{part}": tensor for part, tensor in parts.items()}
        wanted = updates if self.decomposes else {}
        for layer, found in lowrank.spectra(wanted, top, self.device).items():
            matrices |= {f"{layer}.u": found.left, f"{layer}.values": found.values, f"{layer}.v": found.right}
            matrices[f"{layer}.energy"] = torch.tensor([found.energy, found.error], dtype=torch.float64)
        return replace(state, shared=shared, matrices=matrices)

    def diagnostics(self, state: ServerState, results: dict[str, SiteResult]) -> dict[str, float]:
        """Add the energy that sites' downloads retain of the global update, per layer."""
        found = super().diagnostics(state, results)
        for layer, one in stored_spectra(state).items():
            if one.energy > 0:
                ranks = [_sent_rank(upload.sent.tensors, layer) for upload in results.values()]
                found[f"retained energy/{layer}"] = 1 - sum(one.rest(rank) for rank in ranks) / one.energy / len(ranks)
        return found


def _sent_rank(tensors: Tensors, layer: str) -> int:
    return sum(len(tensors[name]) for name in (f"{layer}.lora_A", f"{layer}.tail_A") if name in tensors)


def truncated_factors(state: ServerState, layer: str, found: Spectrum, rank: int) -> Product:
    """Return (B, A) of W / s truncated to `rank`; directions without an update start from the common rows of A."""
    return lowrank.refactor(found, rank, 1.0, state.initial[f"{layer}.lora_A"])


def global_updates(state: ServerState) -> dict[str, Update]:
    """Return W / s of every layer as the state keeps it."""
    kept = {}
    for layer, (out, into) in shapes(state.initial).items():
        if (dense := state.shared.get(f"{layer}.dense")) is not None:
            kept[layer] = Update(dense.new_zeros(out, 0), dense.new_zeros(0, into), dense)
        else:
            kept[layer] = Update(state.shared[f"{layer}.left"], state.shared[f"{layer}.right"])
    return kept


def stored_spectra(state: ServerState) -> dict[str, Spectrum]:
    """Return the decompositions of every layer's W / s, as deep as any site's adapter may be."""
    return {layer: _spectrum(state.matrices, layer) for layer in shapes(state.initial)}


def _spectrum(kept: Mapping[str, Tensor], layer: str) -> Spectrum:
    energy, error = kept[f"{layer}.energy"].tolist()
    return Spectrum(kept[f"{layer}.u"], kept[f"{layer}.values"], kept[f"{layer}.v"], energy, error)


# oracle ----------------------------------------------------------------------------------------------------------------
# The oracle that drift is measured against: the whole global update, all of its ranks to train (FedHera, Section 6.1).
#
# The paper trains "a high-rank adapter (r = 1024)" and does not say from where; ours starts from the whole update that the
# server has, which is what a site without limits would be sent.


def whole_update(strategy: UnequalRanks, state: ServerState, rows: Mapping[str, Tensor]) -> Tensors:
    """Return the server's update as factors, all of them to train, and a head as it is.

    `rows` by layer (rank, in): the oracle's rank, and where a direction without an update starts.
    """
    tensors = dict(non_lora_tensors(state.shared))
    updates = global_updates(state) if isinstance(strategy, ExactServer) else {}
    for layer, initial in rows.items():
        update = updates.get(layer) or lowrank.Update(*factors(state.shared, layer))
        found = lowrank.spectrum(update, len(initial))
        tensors |= pair(layer, lowrank.refactor(found, len(initial), 1.0, initial))
    return tensors
