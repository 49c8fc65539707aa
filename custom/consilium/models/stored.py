"""A frozen base in half the memory: its linear layers' weights kept as bfloat16.

Autocast makes a bfloat16 copy of a float32 weight in every step and keeps it for the backward pass: a frozen base costs 6 bytes
a number. Kept as bfloat16 it costs 2, and what is computed under `precision: bf16` is the same, bit for bit. All that trains
(adapters, heads, decoders), norms and embeddings stay float32.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class StoredLinear(nn.Linear):
    """A linear layer whose weight is of another type than what it computes with: cast at each use, but not under autocast."""

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., out) of input (..., in), in its type or autocast's."""
        if torch.is_autocast_enabled(input.device.type):
            return F.linear(input, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)


def store(model: nn.Module, dtype: str, trained: Iterable[Tensor]) -> nn.Module:
    """Keep the plain linear layers of `model` as `dtype`, "fp32" or "bf16", in place, but for those `trained`; return it.

    A layer that shares its weight with another module (an output layer with the embedding) stays as it is.
    """
    if dtype == "fp32":
        return model
    kept = {id(tensor) for tensor in trained}
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    for module in [m for m in model.modules() if type(m) is nn.Linear]:
        own = [id(parameter) for parameter in module.parameters(recurse=False)]
        if kept.isdisjoint(own) and all(holders[one] == 1 for one in own):
            module.to(torch.bfloat16)
            module.__class__ = StoredLinear
    return model
