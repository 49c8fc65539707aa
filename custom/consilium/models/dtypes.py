"""The number types in which a frozen base is stored, and in which its layers compute."""

import torch
from torch import Tensor

from consilium.core.errors import ConfigError

QUANTIZED = frozenset({"nf4", "int8"})
"""Types of bitsandbytes; see quantized.py."""
BLOCK = 64
"""How many consecutive numbers of a flattened weight share a scale in NF4."""


def compute_dtype(input: Tensor) -> torch.dtype:
    """Return the type in which a quantized layer computes: autocast's, or the input's.

    Raises ConfigError for an integer input, which a model has cast to the type of a quantized weight's bytes.
    """
    if not input.is_floating_point():
        raise ConfigError("model.dtype: this model casts numbers to the type of a layer's weight; use bf16 or fp32")
    kind = input.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
