"""FedRA: every site trains a random, shallower net, drawn anew each round.

An allocation matrix E (sites x blocks), 0 or 1, says which blocks of the base a site has in a round: c_k of them, drawn at
random. Their adapters' tensors alone travel, both ways, and the server averages each over those who had it:

    theta_l <- sum_k E_kl theta_l,k / sum_k E_kl,   unchanged where nobody had block l

A site does run the shallower net: a block that it does not have hands on what it gets, which is the same as stacking the others
in their order, costs nothing, and leaves every block its place, so that SAM's windowed and global blocks keep their settings.
That is what the method is for, sites that cannot hold the whole net; freezing the others instead, all run, is `fedhello`.

Source's formula: the matrix, the plain mean over holders, untouched blocks. Our reading: what is in no block (SAM's mask
decoder, a head) all sites have, and it is averaged likewise; SAM's decoder blocks are never left out, as they hand on two
streams. Evaluation at the end: the global model is the whole net, the personalized one the shallower net that the site trained
last. In a round both are what the site has of the net then.

Source: S. Su, B. Li, X. Xue, "FedRA: A Random Allocation Strategy for Federated Tuning to Unleash the Power of Heterogeneous
Clients", ECCV 2024, arXiv 2311.11227.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from pydantic import Field

from consilium.adapters.names import WHOLE_BASE, skippable_block
from consilium.core.errors import ConfigError
from consilium.core.lazy import Tensor
from consilium.core.linalg.lowrank import summed
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.core.schema import Seed
from consilium.core.seeding import seed_for
from consilium.strategies.fedit import FedIT
from consilium.strategies.strategy import Role, ServerState, SiteResult, next_phase
from consilium.strategies.trainer import Trainer
from consilium.strategies.traits import Traits

Part = Annotated[float, Field(gt=0, le=1)]
SiteName = Annotated[str, Field(min_length=1, max_length=128)]


@dataclass(frozen=True)
class FedRA(FedIT):
    """Share the adapters of the blocks that a site has."""

    name: ClassVar[str] = "fedra"
    traits = Traits(needs="sites", skips_blocks=True, fits_only=True)

    share: Annotated[Part, Field(description="the share of the blocks that a site has in a round, at least one")] = 2 / 3
    by_site: Annotated[dict[SiteName, Part], Field(max_length=10_000, description="another share for some sites, by name")] = (
        field(default_factory=dict)
    )
    seed: Annotated[Seed, Field(description="fixes the draws, which are public and know no data")] = 0

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return SHARED. Raises ConfigError for a base that trains whole, which has parts that no site can do without."""
        if name.startswith(f"{WHOLE_BASE}."):
            raise ConfigError(f"strategy {self.name} leaves blocks out, with no rule for {name!r}; use adapter kind lora")
        return super().role(name, round, phase)

    def held(self, names: Iterable[str], round: int, site: str) -> set[str]:
        """Return the blocks that a site has in a round: its row of the allocation matrix."""
        stacks: dict[str, dict[str, None]] = {}
        for block in filter(None, map(skippable_block, names)):
            stacks.setdefault(block.rpartition(".")[0], {})[block] = None
        chosen: set[str] = set()
        for stack, blocks in stacks.items():
            count = max(1, int(self.by_site.get(site, self.share) * len(blocks) + 0.5))
            chosen |= set(random.Random(seed_for(self.seed, "blocks", round, site, stack)).sample(sorted(blocks), count))
        return chosen

    # server half ------------------------------------------------------------------------------------------------------

    def payload(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return what the site has this round; tensors of other blocks are empty."""
        held = self.held(state.shared, state.round, site.name)
        has = {name: (block := skippable_block(name)) is None or block in held for name in state.shared}
        return Payload(state.round, state.phase, {n: t if has[n] else t.new_zeros(0) for n, t in state.shared.items()})

    def final(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return all blocks."""
        return Payload(state.round, state.phase, dict(state.shared))

    def aggregate(self, state: ServerState, results: dict[str, SiteResult]) -> ServerState:
        """Return the next state: every tensor the plain mean over the sites that had it."""
        ordered = [results[name] for name in sorted(results)]
        shared = {name: _mean(value, _moves(ordered, name)) for name, value in state.shared.items()}
        round, phase = next_phase(state, self.traits.phases_of(state.round))
        return replace(state, round=round, phase=phase, shared=shared)

    def diagnostics(self, state: ServerState, results: dict[str, SiteResult]) -> dict[str, float]:
        """Return how many of the round's sites had each block: the column sums of the allocation matrix."""
        found = list(results.values())
        blocks = {name: block for name in state.shared if (block := skippable_block(name)) is not None}
        return {f"holders/{block}": float(len(_moves(found, name))) for name, block in blocks.items()}

    # client half ------------------------------------------------------------------------------------------------------

    def receive(self, own: Tensors, payload: Payload) -> Tensors:
        """Return the tensors of the blocks that the site has."""
        return {name: tensor for name, tensor in payload.tensors.items() if tensor.numel()}

    def local_update(self, trainer: Trainer, payload: Payload) -> Payload:
        """Train the shallower net; return the update of what the site has, empty tensors for the rest."""
        trainer.fit()
        found = trainer.update().tensors
        moved = {n: found[n] if t.numel() else t.clone() for n, t in payload.tensors.items()}
        return Payload(payload.round, payload.phase, moved)


def _moves(results: list[SiteResult], name: str) -> list[Tensor]:
    """Return the updates of a tensor, float64, of those who had it."""
    return [one.update.tensors[name].double() for one in results if one.sent.tensors[name].numel()]


def _mean(value: Tensor, moves: list[Tensor]) -> Tensor:
    return (value.double() + summed(moves) / len(moves)).to(value.dtype) if moves else value
