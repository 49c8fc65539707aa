"""FedHera's dual-rank adapter: one LoRA pair whose first ranks (the prefix) train and whose other ranks (the tail) are frozen.

    y = W0 x + s (B_tr A_tr x + gate * B_tail A_tail x)            (FedHera, Section 4.3)

Prefix and tail are stored in one pair of matrices, so that both parts cost one pair of products. lora_A and lora_B are
parameters that are views of the first ranks. The tail has no gradient and no optimizer state. Ranks differ by layer, and
loading tensors may change them. A layer without a tail is plain LoRA at its own rank. s is a constant of the job for all ranks.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilium.adapters import adapter_state, lora
from consilium.adapters.kinds import DualRankConfig, LoraConfig
from consilium.adapters.names import GATE, TAIL, factor, is_frozen_part, is_head, prepare_linear_layers
from consilium.adapters.registry import Shapes
from consilium.adapters.trained_base_parameters import trainable_decoder
from consilium.core.errors import CheckpointError
from consilium.models.registry import ModelKind
from consilium.models.weight_files import save_tensors


class Products(torch.autograd.Function):
    """Compute x down' diag(weights) up, with gradients only for x and the prefix: lora_A, lora_B, which begin down and up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lora_A: Tensor, lora_B: Tensor, down: Tensor, up: Tensor, weights: Tensor) -> Tensor:
        """Return up' (weights * down x), (..., out), for x (..., in), down (R, in), up (R, out) and weights (R,).

        The R ranks are the trained prefix, lora_A and lora_B, and the frozen tail.
        """
        hidden = F.linear(x, down) * weights
        ctx.save_for_backward(x, hidden[..., : len(lora_A)].contiguous(), down, up, weights)  # without the tail
        return hidden @ up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients for x, lora_A (r, in) and lora_B (out, r); None for the other arguments, which are frozen."""
        x, hidden, down, up, weights = ctx.saved_tensors
        rank, flat = hidden.shape[-1], gradient.flatten(0, -2)
        inner = (gradient @ up.T) * weights
        found: list[Tensor | None] = [None] * 6
        if ctx.needs_input_grad[0]:
            found[0] = inner @ down
        if ctx.needs_input_grad[1]:
            found[1] = (inner[..., :rank].flatten(0, -2).T @ x.flatten(0, -2)).float()
        if ctx.needs_input_grad[2]:
            found[2] = (flat.T @ hidden.flatten(0, -2)).float()
        return tuple(found)


class DualRank(adapter_state.AdapterModule):
    """A frozen linear layer with a dual-rank adapter beside it. It starts with `rank` trained ranks and no tail."""

    base: nn.Linear
    down: Tensor
    up: Tensor
    gate: Tensor

    def __init__(self, base: nn.Linear, rank: int, scaling: float, dropout: float) -> None:
        super().__init__()
        self.base, self.scaling, self.dropout = base, scaling, nn.Dropout(dropout)
        self._allocate(rank, 0)

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., out)."""
        y = self.base(x)
        if not self.enabled or not len(self.down):
            return y
        device = x.device.type
        lower = device != "meta" and torch.is_autocast_enabled(device)  # on the meta device autocast is undefined
        dtype = torch.get_autocast_dtype(device) if lower else x.dtype
        weights = self._scale_per_rank()
        parts = (self.down.to(dtype), self.up.to(dtype), weights.to(dtype))
        if not (self.dropout.p and self.training and self._tail_rank):
            return y + Products.apply(self.dropout(x).to(dtype), self.lora_A, self.lora_B, *parts).to(y.dtype)
        rank, (down, up, weights) = len(self.lora_A), parts  # the tail is frozen like the base, so dropout skips it
        y = y + ((x.to(dtype) @ down[rank:].T * weights[rank:]) @ up[rank:]).to(y.dtype)
        own = (down[:rank], up[:rank], weights[:rank])
        return y + Products.apply(self.dropout(x).to(dtype), self.lora_A, self.lora_B, *own).to(y.dtype)

    def weight_change(self) -> Tensor:
        """Return the change of the base's weight (out, in): s (B_tr A_tr + gate * B_tail A_tail)."""
        return (self.up.T * self._scale_per_rank()) @ self.down

    def _scale_per_rank(self) -> Tensor:
        """Return the factor (r + k,) of each rank: the scaling, times the gate for the tail's ranks."""
        return (
            torch.cat([torch.ones_like(self.gate).expand(len(self.lora_A)), self.gate.expand(self._tail_rank)]) * self.scaling
        )

    @property
    def _tail_rank(self) -> int:
        return len(self.down) - len(self.lora_A)

    def frozen_tensors(self) -> dict[str, Tensor]:
        """Return tail_A (k, in), tail_B (out, k) and gate (1,) as views; {} without a tail."""
        if not self._tail_rank:
            return {}
        rank = len(self.lora_A)
        return {"tail_A": self.down[rank:], "tail_B": self.up[rank:].T, GATE: self.gate}

    def allocate_tensors(self, values: Mapping[str, Tensor]) -> None:
        """Allocate the ranks that `values` (this layer's tensors) need, without copying their numbers.

        Raises CheckpointError if their names or shapes do not fit this layer.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in values.items()}
        rank, tail = (shapes.get(name, (0,))[0] for name in ("lora_A", "tail_A"))
        into, out = self.base.in_features, self.base.out_features
        fitting = {"lora_A": (rank, into), "lora_B": (out, rank)}
        fitting |= {"tail_A": (tail, into), "tail_B": (out, tail)} if tail else {}
        if {n: s for n, s in shapes.items() if n != GATE} != fitting:
            wanted = f"lora_A (r, {into}) and lora_B ({out}, r)"
            raise CheckpointError(f"adapter tensors {shapes}: do not fit a layer that takes {wanted}; same model for both?")
        self._allocate(rank, tail)

    def _allocate(self, rank: int, tail: int) -> None:
        make: dict[str, Any] = {"dtype": torch.float32, "device": self.base.weight.device}
        self.register_buffer("down", torch.zeros(rank + tail, self.base.in_features, **make), persistent=False)
        self.register_buffer("up", torch.zeros(rank + tail, self.base.out_features, **make), persistent=False)
        self.register_buffer(GATE, torch.ones(1, **make), persistent=False)
        self.lora_A, self.lora_B = nn.Parameter(self.down[:rank]), nn.Parameter(self.up[:rank].T)

    def _apply(self, *args: object, **options: object) -> "DualRank":
        """Move or cast the module as usual, then make the parameters views of the new matrices again."""
        super()._apply(*args, **options)
        rank = len(self.lora_A)
        self.lora_A.data, self.lora_B.data = self.down[:rank], self.up[:rank].T
        return self


def shapes(model: nn.Module, config: LoraConfig | DualRankConfig, base: ModelKind) -> Shapes:
    """Return the factors' shapes at the largest rank: the config's, or the layer's smaller size if that is less.

    Raises ConfigError for targets that match no layer, or an adapter that is too large.
    """
    found: Shapes = {}
    for name, layer in prepare_linear_layers(model, base.target(config.targets)).items():
        most = min(config.rank, layer.in_features, layer.out_features)
        found |= {f"{name}.lora_A": (most, layer.in_features), f"{name}.lora_B": (layer.out_features, most)}
    adapter_state.check_size(sum(rows * columns for rows, columns in found.values()))
    return found


def inject(model: nn.Module, config: LoraConfig | DualRankConfig, base: ModelKind) -> None:
    """Freeze `model` except its head and a decoder that trains; wrap every targeted layer in a DualRank."""
    ranks = {n.removesuffix(".lora_A"): shape[0] for n, shape in shapes(model, config, base).items() if factor(n) == "A"}
    for name, most in ranks.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)  # as `shapes` has found it
        adapter_state.replace(model, name, DualRank(layer, most, config.product_scaling, config.dropout))
    decoder = trainable_decoder(model, config) if isinstance(config, LoraConfig) else []
    adapter_state.freeze_base(model, [n for n, _ in model.named_parameters() if factor(n)], decoder)


def merge(model: nn.Module) -> None:
    """Add prefix and tail to the weights of every adapted layer, and remove the adapters, in place."""
    for name, layer in [(n, m) for n, m in model.named_modules() if isinstance(m, DualRank)]:
        with torch.no_grad():
            layer.base.weight += layer.weight_change().to(layer.base.weight)
        adapter_state.replace(model, name, layer.base)


def to_plain_lora(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `values` as plain LoRA, with every tail, times its gate, appended to its prefix."""
    plain = {name: tensor for name, tensor in values.items() if name.rpartition(".")[2] not in (*TAIL, GATE)}
    for name in [n for n in values if n.endswith(".tail_A")]:
        layer = name.removesuffix(".tail_A")
        plain[f"{layer}.lora_A"] = torch.cat([values[f"{layer}.lora_A"], values[name]])
        tail = values[f"{layer}.tail_B"] * values[f"{layer}.{GATE}"]
        plain[f"{layer}.lora_B"] = torch.cat([values[f"{layer}.lora_B"], tail], 1)
    return plain


def export(folder: Path, values: Mapping[str, Tensor], config: LoraConfig | DualRankConfig, base: ModelKind, name: str) -> None:
    """Write a PEFT folder of plain LoRA with each layer at its own rank, and a trained decoder beside it.

    Layers of rank 0 are left out. Layers that the target set has split are fused again, so that the folder fits the unchanged
    base.
    """
    own = {n: t for n, t in values.items() if factor(n) or is_head(n) or is_frozen_part(n)}
    plain, target = to_plain_lora(own), base.targets.get(config.targets)
    plain = target.fuse(plain) if target and target.fuse else plain
    empty = {n.rpartition(".")[0] for n, tensor in plain.items() if factor(n) and not tensor.numel()}
    kept = {n: tensor for n, tensor in plain.items() if n.rpartition(".")[0] not in empty}
    lora.save_peft(folder, kept, 1, config.product_scaling, name, head_apart=base.head_apart)
    save_tensors(folder / "decoder.safetensors", {n: t for n, t in values.items() if n not in own})
