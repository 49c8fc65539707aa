"""FedHomoLoRA: all sites train the largest rank that the weakest site can train.

A and B are averaged separately, as in FedIT. The result equals FedIT's at that rank.

Source: the homogeneous baseline of K. Xiao et al., "FedHera: Towards Drift-Resilient Federated Fine-tuning with Heterogeneous
Resources", Appendix D.2.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import Field

from consilium.core.messages import Tensors
from consilium.core.schema import Rank
from consilium.strategies.strategy import RoundResults, ServerState, Strategy, Traits
from consilium.strategies.unequal_ranks import UnequalRanks, first_ranks


@dataclass(frozen=True)
class FedHomoLoRA(UnequalRanks):
    """Average both factors at one rank."""

    name: ClassVar[str] = "fedhomolora"

    rank: Annotated[Rank | None, Field(description="the rank of all sites; by default the train rank of the lowest tier")] = (
        None
    )

    @property
    def traits(self) -> Traits:
        """See Strategy. All sites have the same rank."""
        return replace(super().traits, needs="sums", fixed_basis=True)

    def initialize(self, initial: Tensors) -> ServerState:
        """Return the state before round 0: the common factors truncated to the rank."""
        rank = self.rank or max(1, int(min(tier.train for tier, share in self.weighted_tiers().values() if share)))
        return ServerState(0, 0, first_ranks(initial, rank), {})

    def diagnostics(self, state: ServerState, results: RoundResults) -> dict[str, float]:
        """Return no diagnostics, because the server sees only the sum of updates."""
        return Strategy.diagnostics(self, state, results)
