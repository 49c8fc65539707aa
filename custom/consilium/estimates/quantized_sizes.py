"""Layers as large as quantized ones, for counting memory where neither weights nor bitsandbytes are.

NF4 takes half a byte a number and four for every 64, int8 one and four a row. Both make the whole weight of one layer anew, in
the type that is computed in, forward and back; nothing of it is kept.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilium.models.dtypes import BLOCK, computing
from consilium.models.low_precision import replace


class _Unpacked(torch.autograd.Function):
    """x W' + b with a W that is made where it is needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, int], bias: Tensor | None) -> Tensor:
        """Return (..., out) of x (..., in)."""
        ctx.shape = shape
        return F.linear(x, x.new_empty(shape), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of x."""
        return gradients[0] @ gradients[0].new_empty(ctx.shape), None, None


class Packed(nn.Linear):
    """A linear layer of which `weight` are the bytes."""

    W_q = None
    """By which PEFT's DoRA knows that it must ask for the whole weight."""

    def dequantize(self) -> Tensor:
        """Return a whole weight (out, in), float32."""
        return self.weight.new_empty((self.out_features, self.in_features), dtype=torch.float32)

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., out) of input (..., in). Raises ConfigError, see computing."""
        x = input.to(computing(input))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return _Unpacked.apply(x, (self.out_features, self.in_features), bias)  # type: ignore[no-any-return, no-untyped-call]


def pack(model: nn.Module, dtype: str, trained: Iterable[Tensor]) -> None:
    """Put such layers, of "nf4" or "int8", in the place of those that `store` would quantize."""
    replace(model, trained, dtype, _pack)


def _pack(layer: nn.Linear, dtype: str) -> None:
    numbers = layer.in_features * layer.out_features
    size = -(-numbers // 2) + 4 * -(-numbers // BLOCK) if dtype == "nf4" else numbers + 4 * layer.out_features
    layer.weight = nn.Parameter(torch.empty(size, dtype=torch.uint8, device=layer.weight.device), requires_grad=False)
    layer.__class__ = Packed
