"""A frozen base in a quarter of the memory or less, by bitsandbytes: NF4 and LLM.int8().

NF4 (Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", NeurIPS 2023) keeps 4 bits a number and a scale for every
64; int8 (Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale", NeurIPS 2022) 8 bits and a scale
a row, with columns of inputs over 6 computed apart. Products are in autocast's type, or that of what comes in.
"""

from typing import Any, cast

import bitsandbytes as bnb
import torch
from torch import Tensor, nn

from consilium.models.stored import computing

OUTLIERS = 6.0
"""From where on LLM.int8() computes a column of inputs in 16 bits, as in the paper."""


class Nf4Linear(bnb.nn.Linear4bit):
    """A linear layer whose weight is NF4."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., out) of x (..., in), in its type or autocast's. The parent's would round the bias for good."""
        dtype = computing(x)
        bias = None if self.bias is None else self.bias.to(dtype)
        return bnb.matmul_4bit(x.to(dtype), self.weight, quant_state=self.weight.quant_state, bias=bias)


class Int8Linear(bnb.nn.Linear8bitLt):
    """A linear layer whose weight is int8."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., out) of x (..., in), in its type or autocast's."""
        dtype, self.state.is_training = computing(x), self.training
        if self.weight.CB is not None:
            self.init_8bit_state()
        bias = None if self.bias is None else self.bias.to(dtype)
        return bnb.matmul(x.to(dtype), self.weight, bias=bias, state=self.state)


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
