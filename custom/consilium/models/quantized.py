"""Linear layers quantized by bitsandbytes (NF4 and LLM.int8()), for a frozen base in a quarter of the memory or less.

NF4 (Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", NeurIPS 2023) stores 4 bits per number and a scale per 64
numbers. int8 (Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale", NeurIPS 2022) stores 8 bits
per number and a scale per row; input columns with values over 6 are computed separately. Products are in autocast's type or the
input's.
"""

from copy import copy
from typing import Any, cast

import bitsandbytes as bnb
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilium.models.low_precision import BLOCK, compute_dtype

OUTLIERS = 6.0
"""The input value above which LLM.int8() computes a column in 16 bits, as in the paper."""


class _Product(torch.autograd.Function):
    """The product of a frozen layer. It saves only the layer for the backward pass.

    bitsandbytes' own function stores an int8 layer's input outside of gradient checkpointing's reach. For NF4 it multiplies
    with a weight per row if a batch has four dimensions.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        """Return (..., out) of x (..., in)."""
        ctx.layer = layer
        return layer.product(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of x."""
        (gradient,), layer = gradients, ctx.layer
        rows = gradient.reshape(-1, layer.out_features)
        return (rows @ layer.dequantized_weight(rows.dtype)).view(*gradient.shape[:-1], layer.in_features), None


def _computed(x: Tensor, layer: nn.Module) -> Tensor:
    """Return (..., out) of x (..., in). Raises ConfigError, see compute_dtype."""
    return cast(Tensor, _Product.apply(x.to(compute_dtype(x)), layer))


class Nf4Linear(bnb.nn.Linear4bit):
    """A linear layer whose weight is NF4."""

    W_q = None
    """PEFT's DoRA sees by this attribute that it must call `dequantize` for the whole weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., out) for x (..., in), in its type or autocast's. The parent's forward would round the stored bias."""
        return _computed(x, self)

    def product(self, x: Tensor) -> Tensor:
        """Return (..., out) of x (..., in), without gradients."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if x.device.type == "cpu":
            return F.linear(x, self.dequantized_weight(x.dtype), bias)
        return bnb.matmul_4bit(x, self.weight, quant_state=self.weight.quant_state, bias=bias)

    def dequantized_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight (out, in).

        The 64 numbers of a scale may cross the end of a row, where bitsandbytes' CPU code would begin a new scale. So it is
        called with rows of 64 numbers, or with a single row if the count is not a multiple of 64.
        """
        state, numbers = copy(self.weight.quant_state), self.out_features * self.in_features
        width = BLOCK if numbers % BLOCK == 0 else numbers
        state.shape = torch.Size((numbers // width, width))
        whole = bnb.functional.dequantize_4bit(self.weight, state)
        return whole.reshape(self.out_features, self.in_features).to(dtype)

    def dequantize(self) -> Tensor:
        """Return the whole weight (out, in), float32."""
        return self.dequantized_weight(torch.float32)


class Int8Linear(bnb.nn.Linear8bitLt):
    """A linear layer whose weight is int8."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., out) of x (..., in), in its type or autocast's."""
        self.state.is_training = self.training
        if self.weight.SCB is not None:  # PEFT's DoRA leaves a weight without its scales, which the state has already
            self.init_8bit_state()
        return _computed(x, self)

    def product(self, x: Tensor) -> Tensor:
        """Return (..., out) of x (..., in), without gradients."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        rows = bnb.matmul(
            x.reshape(-1, self.in_features), self.weight, bias=bias, state=self.state
        )  # it takes no four dimensions
        return cast(Tensor, rows).view(*x.shape[:-1], self.out_features)

    def dequantized_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight (out, in)."""
        return self.state.CB.to(dtype).mul_(self.state.SCB[:, None] / 127)


def quantize(layer: nn.Linear, dtype: str) -> None:
    """Turn a linear layer into one of `dtype`, in place, with its hooks. It is quantized when it moves to a device."""
    made: Any
    with torch.device("meta"):
        if dtype == "nf4":
            made = Nf4Linear(layer.in_features, layer.out_features, layer.bias is not None, quant_type="nf4")
            weight = bnb.nn.Params4bit(
                layer.weight.detach(), requires_grad=False, quant_type="nf4", compress_statistics=False, module=layer
            )
        else:
            made = Int8Linear(
                layer.in_features, layer.out_features, layer.bias is not None, has_fp16_weights=False, threshold=OUTLIERS
            )
            weight = bnb.nn.Int8Params(layer.weight.detach(), requires_grad=False, has_fp16_weights=False)
    vars(layer).update({name: value for name, value in vars(made).items() if name not in vars(layer)})
    layer.__class__ = type(made)
    cast(Any, layer).weight = weight
