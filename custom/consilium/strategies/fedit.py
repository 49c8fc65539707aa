"""FedIT: federated averaging of both LoRA factors.

    A = sum_k p_k A_k,   B = sum_k p_k B_k

The product of the mean factors is not the mean of the products: B A != sum_k p_k B_k A_k. This is a known flaw of the method.

Source: J. Zhang, S. Vahidian, M. Kuo, C. Li, R. Zhang, T. Yu, G. Wang, Y. Chen, "Towards Building the FederatedGPT: Federated
Instruction Tuning", ICASSP 2024.
"""

from dataclasses import dataclass
from typing import ClassVar

from consilium.strategies.strategy import Role, Strategy, Traits


@dataclass(frozen=True)
class FedIT(Strategy):
    """Share every adapter tensor."""

    name: ClassVar[str] = "fedit"

    @property
    def traits(self) -> Traits:
        """See Strategy."""
        return Traits(elementwise=True)

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return SHARED."""
        return Role.SHARED
