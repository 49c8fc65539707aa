"""DP-DyLoRA: federated LoRA at a rank that is drawn in each round.

In each round the server draws one rank b for all sites, between rank_min and the adapter's rank r. Ranks drawn by the sites
would make the update's sensitivity depend on the draw. Sites train A[:b] and B[:, :b] at scale alpha / b and upload these only,
so noise is added to active ranks only. (Ports that draw a rank per step at the site, or scale both factors, are another
algorithm.)

Every rank of the result is a model: A[:b], B[:, :b] at scale alpha / b. With `tested_rank: best` each site tests and stores the
rank with the best score on its validation split. DEeR's tables print the best of all ranks on test data, which is selection on
the test data. No epsilon is charged for the choice, because the chosen adapter stays at the site. Scores leave only if the site
allows it.

Source: J. Xu, K. Saravanan, R. van Dalen, H. Mehmood, D. Tuckey, M. Ozay, "DP-DyLoRA: Fine-Tuning Transformer-Based Models
On-Device under Differentially Private Federated Learning using Dynamic Low-Rank Adaptation", arXiv 2405.06368, 2024.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from consilium.adapters.names import checked_lora_factor, factor
from consilium.core.lazy import Tensor, torch
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.core.schema import Rank, Seed
from consilium.core.seeding import seed_for
from consilium.strategies.strategy import Role, ServerState, Strategy, Trainer, Traits


@dataclass(frozen=True)
class DPDyLoRA(Strategy):
    """Share both factors, truncated to the round's rank."""

    name: ClassVar[str] = "dp_dylora"
    traits = Traits(scales_adapter=True, fits_only=True)

    rank_min: Annotated[Rank, Field(description="the smallest rank that a round may draw")] = 1
    seed: Annotated[Seed, Field(description="fixes the draws of ranks, which are public and independent of any data")] = 0
    tested_rank: Annotated[
        Literal["full", "best"],
        Field(description="the rank that a site tests and stores: the full one, or the best on its own validation split"),
    ] = "full"

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return SHARED for LoRA and a head. Raises ConfigError for another kind of adapter."""
        checked_lora_factor(name, self.name)
        return Role.SHARED

    def rank(self, full: int, round: int) -> int:
        """Return the rank of a round, drawn uniformly from rank_min .. full."""
        low = min(self.rank_min, full)
        return low + seed_for(self.seed, "rank", round) % (full - low + 1)

    def payload(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return the factors truncated to the round's rank b, and the full rank r, to which a site pads them.

        The scalar "scaling" is r / b: it turns the adapter's alpha / r into alpha / b.
        """
        cut = dict(state.shared)
        for name, tensor in state.shared.items():
            if factor(name) == "A":
                cut[name] = tensor[: self.rank(tensor.shape[0], state.round)]
            elif factor(name) == "B":
                cut[name] = tensor[:, : self.rank(tensor.shape[1], state.round)]
        full = float(_full_rank(state.shared))
        return Payload(state.round, state.phase, cut, {"rank": full, "scaling": full / _full_rank(cut)})

    def final(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return the factors at full rank, for the final evaluation."""
        return Payload(state.round, state.phase, dict(state.shared), {"rank": float(_full_rank(state.shared))})

    def final_candidates(self, payload: Payload) -> dict[str, Payload]:
        """Return the result at every rank b, zero-padded to full shapes.

        B is multiplied by r / b, so that the scale alpha / r acts as alpha / b.
        """
        full = _full_rank(payload.tensors)
        if self.tested_rank == "full":
            return {f"rank {full}": payload}
        ranks = range(full, min(self.rank_min, full) - 1, -1)  # of equally good ones the highest
        found = {}
        for b in ranks:
            tensors = dict(payload.tensors)
            for name, tensor in payload.tensors.items():
                if factor(name) == "A":
                    tensors[name] = _pad(tensor[:b], name, tensor.shape[0])
                elif factor(name) == "B":
                    tensors[name] = _pad(tensor[:, :b], name, tensor.shape[1]) * (tensor.shape[1] / b)
            found[f"rank {b}"] = replace(payload, tensors=tensors)
        return found

    def receive(self, own: Tensors, payload: Payload) -> Tensors:
        """Return the factors padded with zeros. A direction with A = 0 and B = 0 has no gradient, so it does not train."""
        rank = int(payload.scalars["rank"])
        return {n: _pad(t, n, rank) for n, t in payload.tensors.items()}

    def local_update(self, trainer: Trainer, payload: Payload) -> Payload:
        """Train and return the update of the active ranks."""
        trainer.fit()
        found = trainer.update().tensors
        return Payload(payload.round, payload.phase, {n: _cut(found[n], tuple(t.shape)) for n, t in payload.tensors.items()})

    def aggregate(self, state: ServerState, results: Tensors) -> ServerState:
        """Return the next state: the mean update added to the active ranks."""
        full = {n: torch.zeros(state.shared[n].shape, dtype=u.dtype) for n, u in results.items()}
        for name, update in results.items():
            _cut(full[name], tuple(update.shape)).copy_(update)
        return super().aggregate(state, full)


def _full_rank(tensors: Tensors) -> int:
    return next(t.shape[0] for n, t in tensors.items() if factor(n) == "A")


def _cut(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return tensor[tuple(slice(size) for size in shape)]


def _pad(tensor: Tensor, name: str, rank: int) -> Tensor:
    if factor(name) == "A":
        return torch.cat([tensor, tensor.new_zeros(rank - tensor.shape[0], tensor.shape[1])])
    if factor(name) == "B":
        return torch.cat([tensor, tensor.new_zeros(tensor.shape[0], rank - tensor.shape[1])], dim=1)
    return tensor
