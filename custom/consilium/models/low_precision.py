"""Stores the linear layers of a frozen base in less memory: as bfloat16, or quantized by quantized.py.

Autocast makes a bfloat16 copy of a float32 weight in every step and keeps it for the backward pass. So a frozen base takes 6
bytes per number. Stored as bfloat16 it takes 2, and results under `precision: bf16` are equal bit for bit. All trained tensors
(adapters, heads, decoders), norms and embeddings stay float32.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilium.core.errors import ConfigError

QUANTIZED = frozenset({"nf4", "int8"})
"""Types of bitsandbytes; see quantized.py."""
READ_WEIGHTS = frozenset({"patch_embedding", "weights_proj", "prediction_coefs", "correction_coefs"})
"""Layers whose weight's type is read (SigLIP 2, DeepSeek 3.2) or whose weight is clamped (Gemma 3n). They stay float32."""
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


class StoredLinear(nn.Linear):
    """A linear layer that casts its stored weight to the input's type at each use; under autocast, autocast does so."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer to input (..., in); return (..., out) in the input's type or autocast's."""
        if torch.is_autocast_enabled(input.device.type):
            return F.linear(input, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)


def store_frozen_as(model: nn.Module, dtype: str, trained: Iterable[Tensor]) -> nn.Module:
    """Store the plain linear layers of `model` as `dtype` (see ModelConfig), in place, except those `trained`; return `model`.

    A layer that shares its weight with another module (an output layer with the embedding) is unchanged. Raises ConfigError
    for nf4 and int8 if bitsandbytes is missing.
    """
    if dtype != "fp32":
        replace_frozen_linear(model, trained, dtype, _quantizer(dtype) if dtype in QUANTIZED else None)
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dtype == torch.float32 and tensor.device.type == "cpu":
                tensor.data = tensor.data.clone()  # a tensor that is mapped from a checkpoint keeps its whole file in memory
    return model


def replace_frozen_linear(
    model: nn.Module, trained: Iterable[Tensor], dtype: str, quantize: Callable[[nn.Linear, str], None] | None
) -> None:
    """Store the frozen linear layers as bfloat16, or by `quantize`, in place.

    An output layer is never quantized, because its errors matter most.
    """
    found = [cast(Any, m).get_output_embeddings() for m in model.modules() if hasattr(m, "get_output_embeddings")]
    outputs = {id(part) for output in found if output is not None for part in output.modules()}
    for layer in frozen_linear(model, trained):
        if quantize is not None and id(layer) not in outputs:
            quantize(layer, dtype)
        else:
            layer.to(torch.bfloat16)
            layer.__class__ = StoredLinear


def frozen_linear(model: nn.Module, trained: Iterable[Tensor]) -> list[nn.Linear]:
    """Return the plain linear layers whose parameters are not `trained`, not shared, and not read by the model's own code."""
    kept = {id(tensor) for tensor in trained}
    holders = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    found = list[nn.Linear]()
    for name, module in model.named_modules():
        own = [id(parameter) for parameter in module.parameters(recurse=False)]
        called = name.removesuffix(".base_layer").removesuffix(".base").rpartition(".")[2]  # inside an adapter's module
        plain = type(module) is nn.Linear and called not in READ_WEIGHTS
        if plain and kept.isdisjoint(own) and all(holders[one] == 1 for one in own):
            found.append(cast(nn.Linear, module))
    return found


def require_storable(model: nn.Module, dtype: str, trained: Iterable[Tensor]) -> None:
    """Raise ConfigError if `store_frozen_as` would leave over half of the frozen numbers, without embeddings, unchanged.

    Experts stored as one tensor are left unchanged.
    """
    if dtype == "fp32":
        return
    kept = list(trained)
    linear = {id(layer.weight) for layer in frozen_linear(model, kept)}
    aside = {id(tensor) for tensor in kept} | {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    sizes = {n: (p.numel(), id(p) in linear) for n, p in model.named_parameters() if p.ndim > 1 and id(p) not in aside}
    left = {name: size for name, (size, stored) in sizes.items() if not stored}
    if 2 * sum(left.values()) > (whole := sum(size for size, _ in sizes.values())):
        share, largest = 100 * sum(left.values()) // whole, max(left, key=left.__getitem__)
        raise ConfigError(
            f"model.dtype: {dtype!r}: {share} % of what is frozen is in no linear layer ({largest} and the like) and would "
            "stay float32; use fp32"
        )


def require_library(dtype: str) -> None:
    """Raise ConfigError for nf4 and int8 where bitsandbytes is missing."""
    if dtype in QUANTIZED:
        _quantizer(dtype)


def _quantizer(dtype: str) -> Callable[[nn.Linear, str], None]:
    try:
        module = import_module("consilium.models.quantized")  # loads bitsandbytes
    except Exception as error:  # bitsandbytes may be missing, or fail at its own libraries while it loads
        why = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"model.dtype: {dtype!r}: bitsandbytes cannot be loaded here ({why}); pip install 'consilium-flare[quant]', or use "
            "bf16"
        ) from None
    found: Callable[[nn.Linear, str], None] = module.quantize
    return found
