"""A frozen base in a quarter of the memory or less, by bitsandbytes: NF4 and LLM.int8().

NF4 (Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", NeurIPS 2023) keeps 4 bits a number and a scale for every
64; int8 (Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale", NeurIPS 2022) 8 bits and a scale
a row, with columns of inputs over 6 computed separately. Products are in autocast's type, or the input's.
"""

from copy import copy
from typing import Any, cast

import bitsandbytes as bnb
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilium.models.dtypes import BLOCK, computing

OUTLIERS = 6.0
"""From where on LLM.int8() computes a column of inputs in 16 bits, as in the paper."""


class _Product(torch.autograd.Function):
    """The product of a frozen layer, which saves only the layer for the backward pass.

    bitsandbytes' own keeps an int8 layer's input, and that where checkpointing does not find it. NF4's multiplies with a weight
    for each row where a batch has four dimensions.
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
        return (rows @ layer.whole(rows.dtype)).view(*gradient.shape[:-1], layer.in_features), None


def _computed(x: Tensor, layer: nn.Module) -> Tensor:
    """Return (..., out) of x (..., in). Raises ConfigError, see computing."""
    return cast(Tensor, _Product.apply(x.to(computing(x)), layer))


class Nf4Linear(bnb.nn.Linear4bit):
    """A linear layer whose weight is NF4."""

    W_q = None
    """By which PEFT's DoRA knows that it must ask for the whole weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., out) of x (..., in), in its type or autocast's. The parent's would round the bias for good."""
        return _computed(x, self)

    def product(self, x: Tensor) -> Tensor:
        """Return (..., out) of x (..., in), without gradients."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if x.device.type == "cpu":
            return F.linear(x, self.whole(x.dtype), bias)
        return bnb.matmul_4bit(x, self.weight, quant_state=self.weight.quant_state, bias=bias)

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Return the weight (out, in) that is computed with.

        A scale's 64 numbers may go over the end of a row, where bitsandbytes' code for a CPU begins with the next scale. So
        rows are given to it that end with a scale, or a single one.
        """
        state, numbers = copy(self.weight.quant_state), self.out_features * self.in_features
        width = BLOCK if numbers % BLOCK == 0 else numbers
        state.shape = torch.Size((numbers // width, width))
        whole = bnb.functional.dequantize_4bit(self.weight, state)
        return whole.reshape(self.out_features, self.in_features).to(dtype)

    def dequantize(self) -> Tensor:
        """Return the whole weight (out, in), float32."""
        return self.whole(torch.float32)


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

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Return the weight (out, in) that is computed with."""
        return self.state.CB.to(dtype).mul_(self.state.SCB[:, None] / 127)


def quantize(layer: nn.Linear, dtype: str) -> None:
    """Turn a linear layer into one of `dtype`, in place, with its hooks; numbers are rounded when it moves to its device."""
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
