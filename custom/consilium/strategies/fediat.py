"""IAT + SOR: inverse asymmetric tuning with a subspace orthogonality regularizer.

IAT (Eq. 4-5): encoder layers share B and keep A local (appearance shift), decoder layers share A and keep B local
(annotation shift). The paper's Figure 5 compares four splits:

    M1 share A everywhere (= FedSA-LoRA)    M2 share B everywhere
    M3 encoder shares A, decoder B          M4 encoder shares B, decoder A (= IAT)

SOR (Eq. 7-8): in r x r space, penalize the squared cosine between the shared factor's change in this round and the
moving average of the private factor's drift. Gradients reach the shared factor only.

Source: X. Zhao, W. Huang, L. Zhuang, H. Wu, A. Jiang, Z. Wang, W. He, M. Feng, M. Ye, B. Xu, "Shift-Dependent Asymmetry:
Orthogonal Inverse Low-Rank Adaptation for Federated Medical Segmentation", ICML 2026, arXiv 2606.08687: Eq. 4, 5, 7 and 8.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from consilium.adapters.names import factor
from consilium.core.errors import ConfigError
from consilium.core.lazy import Tensor, torch
from consilium.core.messages import Payload
from consilium.core.schema import Factor, Positive
from consilium.strategies.strategy import LocalStep, Role, Strategy, Trainer, Traits

Sharing = Literal["M1", "M2", "M3", "M4"]
SHARINGS: dict[Sharing, tuple[str, str]] = {"M1": ("A", "A"), "M2": ("B", "B"), "M3": ("A", "B"), "M4": ("B", "A")}
"""For each scheme, the factor shared in (encoder, decoder)."""
ENCODERS, DECODER = ("image_encoder", "vision_encoder"), "mask_decoder"
"""Prefixes of SAM's layer names. Meta's encoder is `image_encoder`, that of `transformers` is `vision_encoder`."""


@dataclass(frozen=True)
class FedIAT(Strategy):
    """IAT + SOR, with the sharing schemes M1 to M4.

    With `eps_scale: relative`, eps is multiplied by |A0|^2 |B0|^2 of each layer. Both proxies are products with A0 and B0, so
    SOR then does not depend on the factors' scale. The paper prints no epsilon: its value and scale are our reading. 1e-5 is
    the smallest power of ten with which SOR's gradient, at lambda 1e-4, stayed below the task's. This was measured on the
    quickstart's model at the two learning rates tried (1e-4, 3e-3).
    """

    name: ClassVar[str] = "fediat"

    sharing: Annotated[
        Sharing, Field(description="which factor is shared in (encoder, decoder): M1 (A, A), M2 (B, B), M3 (A, B), M4 (B, A)")
    ] = "M4"
    sor_weight: Annotated[Factor, Field(description="lambda of SOR; 0 switches it off")] = 1e-4
    ema: Annotated[
        float, Field(ge=0, lt=1, description="rho, the momentum of the moving average of the private factor's drift")
    ] = 0.9
    eps: Annotated[
        Positive, Field(description="epsilon in the denominator of SOR's cosine: keeps it finite, and damps small changes")
    ] = 1e-5
    eps_scale: Annotated[
        Literal["relative", "absolute"],
        Field(description="`relative`: eps times the factors' squared norms; `absolute`: eps as it is"),
    ] = "relative"

    @property
    def traits(self) -> Traits:
        """See Strategy."""
        variants = tuple({"sharing": sharing} for sharing in SHARINGS)
        return Traits(fits_only=True, label=f"{self.name} {self.sharing}", variants=variants)

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return SHARED or LOCAL by `sharing`.

        Raises ConfigError for a tensor that is not a LoRA factor of the encoder or decoder.
        """
        return Role.SHARED if factor(name) == self.shared_factor(name) else Role.LOCAL

    def shared_factor(self, name: str) -> str:
        """Return "A" or "B", the factor that the layer of this LoRA tensor shares. Raises ConfigError for other tensors."""
        part = name.partition(".")[0]
        if factor(name) is None or part not in (*ENCODERS, DECODER):
            raise ConfigError(
                f"strategy fediat cannot place adapter tensor {name!r}: it knows LoRA factors under image_encoder.*, "
                "vision_encoder.* and mask_decoder.*; use model sam with adapter kind lora, or another strategy"
            )
        return SHARINGS[self.sharing][0 if part in ENCODERS else 1]

    def local_update(self, trainer: Trainer, payload: Payload) -> Payload:
        """Train with the subspace orthogonality regularizer."""
        trainer.fit(penalty=self.penalty)
        return trainer.update()

    def penalty(self, step: LocalStep) -> Tensor | None:
        """Return lambda * L_SOR, and update the moving averages of the private factors' drift in `step.memory`."""
        if not self.sor_weight:
            return None
        # Layers with the same shared factor and the same shapes are a group, which needs one batched product.
        groups, terms = dict[str, list[str]](), []
        for name in step.params:
            if factor(name) == "A":
                layer = name.removesuffix(".lora_A")
                sizes = f"{tuple(step.params[name].shape)}{tuple(step.params[layer + '.lora_B'].shape)}"
                groups.setdefault(f"{self.shared_factor(name)}{sizes}", []).append(layer)
        for key, layers in groups.items():
            shared, private = ("A", "B") if key.startswith("A") else ("B", "A")
            shared_0, private_0 = (
                self._stacked_anchor(key, shared, layers, step),
                self._stacked_anchor(key, private, layers, step),
            )
            with torch.no_grad():
                gap, before = _stack(step.params, layers, private) - private_0, step.memory.get(key)
                drift = (1 - self.ema) * gap if before is None else torch.lerp(gap, before, self.ema)  # 0 at the round's start
                step.memory[key] = drift
            moved = _stack(step.params, layers, shared) - shared_0
            proxy_sh = moved.mT @ shared_0 if shared == "B" else moved @ shared_0.mT
            proxy_lo = private_0.mT @ drift if private == "B" else private_0 @ drift.mT
            terms.append(squared_cosine(proxy_sh, proxy_lo, self._cosine_epsilon(shared_0, private_0)).sum())
        return self.sor_weight * torch.stack(terms).sum()

    def _cosine_epsilon(self, shared_0: Tensor, private_0: Tensor) -> Tensor:
        """Return the epsilon that Eq. 8 adds to the product of norms, per layer (L,), scaled by `eps_scale`.

        Where B0 = 0 it is the square root of the smallest positive number, so that dividing a gradient by it stays finite.
        """
        if self.eps_scale == "absolute":
            return shared_0.new_full((len(shared_0),), self.eps)
        squares = [part.square().sum(dim=(-2, -1)) for part in (shared_0, private_0)]
        return (self.eps * squares[0] * squares[1]).clamp(min=math.sqrt(torch.finfo(shared_0.dtype).tiny))

    def _stacked_anchor(self, key: str, which: str, layers: list[str], step: LocalStep) -> Tensor:
        """Return one factor's anchors (values at the start of `fit`), stacked over the layers once per `fit`."""
        slot = f"anchor {which} {key}"
        if slot not in step.memory:
            step.memory[slot] = _stack(step.anchors, layers, which)
        return step.memory[slot]


def squared_cosine(shared: Tensor, local: Tensor, eps: Tensor | float) -> Tensor:
    """Return (<P, Q>_F / (|P|_F |Q|_F + eps))^2 per layer (L,), for P = `shared` and Q = `local`, both (L, r, r); `eps` (L,).

    Gradients reach `shared` only. At P = 0 or Q = 0 value and gradient are exactly 0, because PyTorch's norm has subgradient 0.
    """
    local = local.detach()
    inner = (shared * local).sum(dim=(-2, -1))
    norms = torch.linalg.vector_norm(shared, dim=(-2, -1)) * torch.linalg.vector_norm(local, dim=(-2, -1))
    return (inner / (norms + eps)).square()


def _stack(tensors: Mapping[str, Tensor], layers: list[str], which: str) -> Tensor:
    return torch.stack([tensors[f"{layer}.lora_{which}"] for layer in layers])
