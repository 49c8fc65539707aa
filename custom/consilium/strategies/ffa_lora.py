"""FFA-LoRA: A stays frozen at its common initial value; B is trained and averaged.

With the same A_0 at all sites the mean of the products is exact: sum_k p_k B_k A_0 = (sum_k p_k B_k) A_0.

Source: Y. Sun, Z. Li, Y. Li, B. Ding, "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024.
"""

from dataclasses import dataclass
from typing import ClassVar

from consilium.adapters.names import checked_lora_factor
from consilium.strategies.strategy import Role, Strategy


@dataclass(frozen=True)
class FFALoRA(Strategy):
    """Freeze lora_A, share lora_B and any other adapter tensor. A_0 is sent once, when a site joins."""

    name: ClassVar[str] = "ffa_lora"

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return FROZEN for lora_A, SHARED for the rest."""
        return Role.FROZEN if checked_lora_factor(name, self.name) == "A" else Role.SHARED
