"""Linear layers whose .weight is read directly instead of through forward(). Adapters and low precision leave them out.

The lists follow the code of `transformers`; tests/models/test_custom_weight_access.py compares them with it.
"""

from __future__ import annotations

from collections.abc import Set

from consilium.core.lazy import nn

_USED = {
    "out_proj": (
        "mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h", "bamba", "granitemoehybrid", "zamba2",
    ),
    "x_proj": ("mamba", "falcon_mamba"),
    "dt_proj": ("mamba", "falcon_mamba", "jamba"),
    "classifier": ("longcat_flash",),
}  # fmt: skip
"""Layers whose weight is used directly by a kernel, with the architectures. An adapter in such a layer has no effect."""
_ASKED = frozenset({"patch_embedding", "weights_proj", "prediction_coefs", "correction_coefs"})
"""Layers of any architecture whose weight's type is read (SigLIP 2, DeepSeek 3.2) or whose weight is clamped (Gemma 3n)."""
_ASKED_OF = {"down_proj": ("inkling2_loop",)}
"""Layers whose weight's type is read in these architectures only; other architectures use layers of this name as usual."""
_WRAPPED = (".base_layer", ".base")
"""The names of a wrapped layer inside an adapter's module."""


def architectures(model: nn.Module) -> set[str]:
    """Return the `model_type` of a model of `transformers` and of its parts."""
    found = (getattr(getattr(module, "config", None), "model_type", None) for module in model.modules())
    return {kind for kind in found if isinstance(kind, str)}


def reading_architecture(name: str, kinds: Set[str]) -> str | None:
    """Return the first of the architectures `kinds` that uses this layer's weight directly, None if none does."""
    return min(kinds & set(_USED.get(_own(name), ())), default=None)


def is_weight_read(name: str, kinds: Set[str]) -> bool:
    """Return whether code of these architectures reads this layer's weight directly, so that its type must not change."""
    own = _own(name)
    return own in _ASKED or not kinds.isdisjoint(_ASKED_OF.get(own, ())) or reading_architecture(name, kinds) is not None


def _own(name: str) -> str:
    """Return a layer's name in its module, without an adapter's wrapper."""
    for wrapped in _WRAPPED:
        name = name.removesuffix(wrapped)
    return name.rpartition(".")[2]
