"""FedHomoLoRA: all sites train the rank that the weakest can.

A and B are averaged each, as in FedIT, whose result it equals at that rank.

Source: the homogeneous baseline of K. Xiao et al., "FedHera: Towards Drift-Resilient Federated Fine-tuning with Heterogeneous
Resources", Appendix D.2.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import Field

from consilium.core.messages import Tensors
from consilium.core.schema import Rank
from consilium.strategies.heterogeneous_ranks.layers import factors, non_lora_tensors, pair, shapes
from consilium.strategies.heterogeneous_ranks.ranks import UnequalRanks
from consilium.strategies.strategy import RoundResults, ServerState, Strategy
from consilium.strategies.traits import Traits


@dataclass(frozen=True)
class FedHomoLoRA(UnequalRanks):
    """Average both factors at one rank."""

    name: ClassVar[str] = "fedhomolora"

    rank: Annotated[Rank | None, Field(description="the rank of all; by default what the lowest tier trains")] = None

    @property
    def traits(self) -> Traits:
        """See Strategy; there is one rank for all."""
        return replace(super().traits, needs="sums", fixed_basis=True)

    def initialize(self, initial: Tensors) -> ServerState:
        """Return the state before round 0: the common factors cut to the rank."""
        rank = self.rank or int(min(self.tiers[name].train for name in self._shares()))
        shared = dict(non_lora_tensors(initial))
        for layer in shapes(initial):
            b, a = factors(initial, layer)
            shared |= pair(layer, (b[:, :rank].clone(), a[:rank].clone()))
        return ServerState(0, 0, shared, {})

    def diagnostics(self, state: ServerState, results: RoundResults) -> dict[str, float]:
        """Return nothing: the server sees the sum only."""
        return Strategy.diagnostics(self, state, results)
