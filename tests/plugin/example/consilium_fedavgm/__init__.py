"""FedAvgM: momentum at the server (Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated
Visual Classification", arXiv 1909.06335, 2019).

    v = momentum v + D,   x = x + lr v

D is the sites' mean update; v = 0 at the start.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import zeros_like

from consilium.core.messages import Tensors
from consilium.core.schema import Positive, Share
from consilium.strategies.fedit import FedIT
from consilium.strategies.strategy import ServerState


@dataclass(frozen=True)
class FedAvgM(FedIT):
    """Share every adapter tensor; the server moves along a running sum of mean updates."""

    name: ClassVar[str] = "fedavgm"

    momentum: Share = 0.9
    lr: Positive = 1.0

    def aggregate(self, state: ServerState, results: Tensors) -> ServerState:
        """Return the next state, its `optimizer` the velocity by tensor name in float64."""
        before = {name: state.optimizer.get(name, zeros_like(update)) for name, update in results.items()}
        velocity = {name: self.momentum * before[name] + update for name, update in results.items()}
        moved = super().aggregate(state, {name: self.lr * v for name, v in velocity.items()})
        return replace(moved, optimizer=state.optimizer | velocity)
