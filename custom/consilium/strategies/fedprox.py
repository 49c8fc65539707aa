"""FedProx: federated averaging with a proximal term: local loss + mu / 2 ||w - w_global||^2.

Source: T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, "Federated Optimization in Heterogeneous Networks",
MLSys 2020: Eq. 2.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from consilium.core.lazy import Tensor
from consilium.core.low_rank_sums import sum_tensors
from consilium.core.messages import Payload
from consilium.core.schema import Factor
from consilium.strategies.fedit import FedIT
from consilium.strategies.strategy import LocalStep, Trainer, Traits


@dataclass(frozen=True)
class FedProx(FedIT):
    """Share every adapter tensor. A penalty pulls the trained tensors back to the received ones."""

    name: ClassVar[str] = "fedprox"
    traits = Traits(elementwise=True, fits_only=True)

    mu: Annotated[Factor, Field(description="strength of the proximal term")] = 0.01

    def local_update(self, trainer: Trainer, payload: Payload) -> Payload:
        """Train with the proximal term."""
        trainer.fit(penalty=self.penalty)
        return trainer.update()

    def penalty(self, step: LocalStep) -> Tensor | None:
        """Return mu / 2 times the squared distance of the trained tensors to their anchors; None if mu is 0."""
        if not self.mu:
            return None
        terms = [(p - step.anchors[n]).square().sum() for n, p in step.params.items() if p.requires_grad]
        return self.mu / 2 * sum_tensors(terms) if terms else None
