"""FedSA-LoRA: share A, keep B at the site.

The server's own model has B = 0, so only per-site evaluation means anything.

Source: P. Guo, S. Zeng, Y. Wang, H. Fan, F. Wang, L. Qu, "Selective Aggregation for Low-Rank Adaptation in Federated
Learning", ICLR 2025.
"""

from dataclasses import dataclass
from typing import ClassVar

from consilium.adapters.names import lora_factor
from consilium.strategies.strategy import Role, Strategy


@dataclass(frozen=True)
class FedSALoRA(Strategy):
    """Share lora_A; lora_B and any other adapter tensor (a head) stay local."""

    name: ClassVar[str] = "fedsa_lora"

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return SHARED for lora_A, LOCAL for the rest."""
        return Role.SHARED if lora_factor(name, self.name) == "A" else Role.LOCAL
