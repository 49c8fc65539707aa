"""FedAdam: Adam at the server (Reddi et al., "Adaptive Federated Optimization", ICLR 2021, algorithm 2).

    m = beta_1 m + (1 - beta_1) D,   v = beta_2 v + (1 - beta_2) D^2,   x = x + lr m / (sqrt(v) + tau)

D is the sites' mean update; m = 0 and v = tau^2 at the start.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, full_like, zeros_like

from consilium.core.messages import Tensors
from consilium.core.schema import Positive, Share
from consilium.strategies.fedit import FedIT
from consilium.strategies.strategy import ServerState


@dataclass(frozen=True)
class FedAdam(FedIT):
    """Share every adapter tensor; the server takes an Adam step along the mean update."""

    name: ClassVar[str] = "fedadam"

    lr: Positive = 0.01
    beta1: Share = 0.9
    beta2: Share = 0.99
    tau: Positive = 1e-3

    def aggregate(self, state: ServerState, results: Tensors) -> ServerState:
        """Return the next state, its `optimizer` the moments "m/<name>" and "v/<name>" in float64."""
        moments: Tensors = {}
        for name, update in results.items():
            m, v = self._moments(state, name, update)
            moments |= {f"m/{name}": self.beta1 * m + (1 - self.beta1) * update}
            moments |= {f"v/{name}": self.beta2 * v + (1 - self.beta2) * update.square()}
        steps = {n: self.lr * moments[f"m/{n}"] / (moments[f"v/{n}"].sqrt() + self.tau) for n in results}
        return replace(super().aggregate(state, steps), optimizer=state.optimizer | moments)

    def _moments(self, state: ServerState, name: str, like: Tensor) -> tuple[Tensor, Tensor]:
        first = zeros_like(like), full_like(like, self.tau**2)
        return state.optimizer.get(f"m/{name}", first[0]), state.optimizer.get(f"v/{name}", first[1])
