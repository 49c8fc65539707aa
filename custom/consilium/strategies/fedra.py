"""FedRA: each site trains a shallower network of randomly chosen blocks, drawn anew in each round.

An allocation matrix E (sites x blocks) of 0 and 1 says which blocks of the base a site has in a round: c_k of them, drawn at
random. Only the adapters of these blocks are exchanged, in both directions. The server averages each over the sites that had
it:

    theta_l <- sum_k E_kl theta_l,k / sum_k E_kl,   unchanged if no site had block l

A site runs the shallower network: a block that the site does not have returns its input. This equals stacking the other blocks
in order and costs nothing. Every block keeps its position, so SAM's windowed and global blocks keep their settings. The method
is for sites that cannot hold the whole network. `fedhello` instead runs all blocks and freezes some of them.

Source's formula: the matrix, the plain mean over the sites with a block, and unchanged blocks. Our reading: all sites have the
tensors that are in no block (SAM's mask decoder, a head), and these are averaged in the same way. SAM's decoder blocks are
never left out, because they return two streams. In the final evaluation the global model is the whole network, and the
personalized model is the shallower network that the site trained last. During a round both are the shallower network of that
round.

Source: S. Su, B. Li, X. Xue, "FedRA: A Random Allocation Strategy for Federated Tuning to Unleash the Power of Heterogeneous
Clients", ECCV 2024, arXiv 2311.11227.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pydantic import Field

from consilium.adapters.names import WHOLE_BASE, skippable_block
from consilium.core.errors import ConfigError
from consilium.core.lazy import Tensor
from consilium.core.low_rank_sums import sum_tensors
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.core.schema import Seed
from consilium.core.seeding import seed_for
from consilium.strategies.fedit import FedIT
from consilium.strategies.strategy import Role, ServerState, SiteResult, Trainer, Traits, next_state

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
    seed: Annotated[Seed, Field(description="fixes the draws of blocks, which are public and independent of any data")] = 0

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return SHARED. Raises ConfigError if the whole base trains (kind full): it has parts that no site can leave out."""
        if name.startswith(f"{WHOLE_BASE}."):
            raise ConfigError(f"strategy {self.name} leaves blocks out, with no rule for {name!r}; use adapter kind lora")
        return super().role(name, round, phase)

    def allocated_blocks(self, names: Iterable[str], round: int, site: str) -> set[str]:
        """Return the blocks that a site has in a round, its row of the allocation matrix. `names`: all shared tensors."""
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
        """Return the shared tensors; those of blocks that the site does not have in this round are empty."""
        held = self.allocated_blocks(state.shared, state.round, site.name)
        has = {name: (block := skippable_block(name)) is None or block in held for name in state.shared}
        return Payload(state.round, state.phase, {n: t if has[n] else t.new_zeros(0) for n, t in state.shared.items()})

    def final(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return the tensors of all blocks."""
        return Payload(state.round, state.phase, dict(state.shared))

    def aggregate(self, state: ServerState, results: dict[str, SiteResult]) -> ServerState:
        """Return the next state: each tensor is the plain mean over the sites that had it."""
        ordered = [results[name] for name in sorted(results)]
        shared = dict(state.shared)
        for name, value in state.shared.items():
            if moves := _site_updates(ordered, name):
                shared[name] = (value.double() + sum_tensors(moves) / len(moves)).to(value.dtype)
        return next_state(self, state, shared=shared)

    def diagnostics(self, state: ServerState, results: dict[str, SiteResult]) -> dict[str, float]:
        """Return how many of the round's sites had each block: the column sums of the allocation matrix."""
        found = list(results.values())
        blocks = {name: block for name in state.shared if (block := skippable_block(name)) is not None}
        return {f"holders/{block}": float(len(_site_updates(found, name))) for name, block in blocks.items()}

    # client half ------------------------------------------------------------------------------------------------------

    def receive(self, own: Tensors, payload: Payload) -> Tensors:
        """Return the tensors of the blocks that the site has."""
        return {name: tensor for name, tensor in payload.tensors.items() if tensor.numel()}

    def local_update(self, trainer: Trainer, payload: Payload) -> Payload:
        """Train the shallower network and return the update of its tensors, with empty tensors for the other blocks."""
        trainer.fit()
        found = trainer.update().tensors
        moved = {n: found[n] if t.numel() else t.clone() for n, t in payload.tensors.items()}
        return Payload(payload.round, payload.phase, moved)


def _site_updates(results: list[SiteResult], name: str) -> list[Tensor]:
    """Return the updates of tensor `name`, float64, from the sites that had it."""
    return [one.update.tensors[name].double() for one in results if one.sent.tensors[name].numel()]
