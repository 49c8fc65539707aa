"""Types in which a frozen base is kept, and in which its layers compute."""

import torch
from torch import Tensor

from consilium.core.errors import ConfigError

QUANTIZED = frozenset({"nf4", "int8"})
"""Types of bitsandbytes; see quantized.py."""
BLOCK = 64
"""Numbers that share a scale in NF4, counted through a whole weight, from row to row."""


def computing(input: Tensor) -> torch.dtype:
    """Return the type in which a quantized layer computes: autocast's, or the input's.

    Raises ConfigError for integers: the model has cast its input to the type of a weight's bytes.
    """
    if not input.is_floating_point():
        raise ConfigError("model.dtype: this model casts numbers to the type of a layer's weight; use bf16 or fp32")
    kind = input.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
