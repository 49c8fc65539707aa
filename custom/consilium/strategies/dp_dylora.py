"""DP-DyLoRA: federated LoRA at a random rank a round.

Each round the server draws a rank b between rank_min and the adapter's rank r, one for all sites, because ranks drawn by sites
would make the update's sensitivity depend on the draw. Sites train A[:b] and B[:, :b] at scale alpha / b and upload just those,
so noise falls on active ranks only. (Ports that draw a rank a step at the site, or scale both factors, are another algorithm.)

Every rank of the result is a model: A[:b], B[:, :b] at scale alpha / b. `tested_rank: best` has each site test, and keep, the
rank that its validation split scores best; DEeR's tables print the best of all ranks on test data, which is selection on the
test. No epsilon is charged for the choice: the adapter that it picks stays at the site, and scores leave if the site lets them.

Source: J. Xu, K. Saravanan, R. van Dalen, H. Mehmood, D. Tuckey, M. Ozay, "DP-DyLoRA: Fine-Tuning Transformer-Based Models
On-Device under Differentially Private Federated Learning using Dynamic Low-Rank Adaptation", arXiv 2405.06368, 2024.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from consilium.adapters.names import factor, lora_factor
from consilium.core.lazy import Tensor, torch
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.core.schema import Rank, Seed
from consilium.core.seeding import seed_for
from consilium.strategies.strategy import Role, ServerState, Strategy
from consilium.strategies.trainer import Trainer
from consilium.strategies.traits import Traits


@dataclass(frozen=True)
class DPDyLoRA(Strategy):
    """Share both factors, cut to the round's rank."""

    name: ClassVar[str] = "dp_dylora"
    traits = Traits(scales_adapter=True, fits_only=True)

    rank_min: Annotated[Rank, Field(description="the smallest rank that a round may draw")] = 1
    seed: Annotated[Seed, Field(description="`seed` fixes the draws; they are public and independent of any data")] = 0
    tested_rank: Annotated[
        Literal["full", "best"],
        Field(description="what a site tests and keeps, the full rank or the best of all by its own validation split"),
    ] = "full"

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return SHARED for LoRA and a head. Raises ConfigError for another kind of adapter."""
        lora_factor(name, self.name)
        return Role.SHARED

    def rank(self, full: int, round: int) -> int:
        """Return the rank of a round, uniform on rank_min .. full."""
        low = min(self.rank_min, full)
        return low + seed_for(self.seed, "rank", round) % (full - low + 1)

    def _shape(self, name: str, full: tuple[int, ...], round: int) -> tuple[int, ...]:
        """Return the factor's shape cut to the round's rank."""
        if (which := factor(name)) is None:
            return full
        return (self.rank(full[0], round), full[1]) if which == "A" else (full[0], self.rank(full[1], round))

    def payload(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return the factors cut to the round's rank b, and the full rank r, which a site pads them to.

        "scaling" is r / b, which makes alpha / r the alpha / b of the round's rank.
        """
        cut = {n: _cut(t, self._shape(n, tuple(t.shape), state.round)) for n, t in state.shared.items()}
        full = float(_full_rank(state.shared))
        return Payload(state.round, state.phase, cut, {"rank": full, "scaling": full / _full_rank(cut)})

    def final(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return the factors at full rank: what is evaluated."""
        return Payload(state.round, state.phase, dict(state.shared), {"rank": float(_full_rank(state.shared))})

    def final_candidates(self, payload: Payload) -> dict[str, Payload]:
        """Return the result at every rank, in the shapes of the full one: alpha / b is alpha / r of B times r / b."""
        full = _full_rank(payload.tensors)
        if self.tested_rank == "full":
            return {f"rank {full}": payload}
        ranks = range(full, min(self.rank_min, full) - 1, -1)  # of equally good ones the highest
        return {f"rank {b}": replace(payload, tensors={n: _at(t, n, b) for n, t in payload.tensors.items()}) for b in ranks}

    def receive(self, own: Tensors, payload: Payload) -> Tensors:
        """Return the factors padded by zeros: a direction with A = 0 and B = 0 has no gradient, so it stays out of training."""
        rank = int(payload.scalars["rank"])
        return {n: _pad(t, n, rank) for n, t in payload.tensors.items()}

    def local_update(self, trainer: Trainer, payload: Payload) -> Payload:
        """Train, and return the update of the active ranks."""
        trainer.fit()
        found = trainer.update().tensors
        return Payload(payload.round, payload.phase, {n: _cut(found[n], tuple(t.shape)) for n, t in payload.tensors.items()})

    def aggregate(self, state: ServerState, results: Tensors) -> ServerState:
        """Add the mean update to the active ranks."""
        full = {n: torch.zeros(state.shared[n].shape, dtype=u.dtype) for n, u in results.items()}
        for name, update in results.items():
            _cut(full[name], tuple(update.shape)).copy_(update)
        return super().aggregate(state, full)


def _full_rank(tensors: Tensors) -> int:
    return next(t.shape[0] for n, t in tensors.items() if factor(n) == "A")


def _cut(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return tensor[tuple(slice(size) for size in shape)]


def _at(tensor: Tensor, name: str, rank: int) -> Tensor:
    if factor(name) == "A":
        return _pad(tensor[:rank], name, tensor.shape[0])
    if factor(name) == "B":
        return _pad(tensor[:, :rank], name, tensor.shape[1]) * (tensor.shape[1] / rank)
    return tensor


def _pad(tensor: Tensor, name: str, rank: int) -> Tensor:
    if factor(name) == "A":
        return torch.cat([tensor, tensor.new_zeros(rank - tensor.shape[0], tensor.shape[1])])
    if factor(name) == "B":
        return torch.cat([tensor, tensor.new_zeros(tensor.shape[0], rank - tensor.shape[1])], dim=1)
    return tensor
