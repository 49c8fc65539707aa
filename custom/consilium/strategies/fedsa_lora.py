"""FedSA-LoRA: share A, keep B at the site.

The server's own model has B = 0, so only the evaluation of each site's model is meaningful.

On bottleneck adapters, A(f) = M_u GELU(M_d f) + f, the down-projection M_d takes the role of A and the up-projection M_u that
of B. Source's formula: A = sum_k p_k A_k, B_k stays; the source has no bottlenecks. FedSCA's tables have a row "FedSA" with
bottlenecks and say only that the "global module" is exchanged. Our reading: M_d with its bias is shared; M_u with its bias and
a trained decoder stay. It is uncertain which half was shared there, and whether the decoder was. Their 2.8G is half of the 5.5G
of adapters and decoder together; ours sends 2.0G.

Source: P. Guo, S. Zeng, Y. Wang, H. Fan, F. Wang, L. Qu, "Selective Aggregation for Low-Rank Adaptation in Federated
Learning", ICLR 2025.
"""

from dataclasses import dataclass
from typing import ClassVar

from consilium.adapters.names import bottleneck_half, checked_lora_factor
from consilium.strategies.strategy import Role, Strategy


@dataclass(frozen=True)
class FedSALoRA(Strategy):
    """Share lora_A, or a bottleneck's down-projection; lora_B, the up-projection and any other tensor (a head) stay local."""

    name: ClassVar[str] = "fedsa_lora"

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return SHARED for lora_A and M_d, LOCAL for the rest. Raises ConfigError if the whole model trains."""
        first = (bottleneck_half(name) or checked_lora_factor(name, self.name)) in ("A", "down")
        return Role.SHARED if first else Role.LOCAL
