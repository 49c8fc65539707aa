"""Modules that a strategy may request beside the job's adapter: a second, local adapter; a vector between encoder and head.

A job's `adapter:` section does not name them; the strategy's traits do.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from consilium.adapters import adapter_state
from consilium.adapters.names import FEATURE_SHIFT, HEAD, LOCAL_ADAPTER, MEAN, SHIFT, factor, local_factor_name
from consilium.adapters.registry import AdapterKind, Shapes
from consilium.core.errors import ConfigError
from consilium.models.registry import Cut, ModelKind


class FeatureShift(adapter_state.AdapterModule):
    """Adds `shift` (C,) to features along their axis `axis`. `mean` (C,): a mean of features that a strategy stores here."""

    mean: Tensor
    hook: RemovableHandle
    """The hook on the encoder's last module that calls this module."""

    def __init__(self, width: int, axis: int) -> None:
        super().__init__()
        self.axis, self.seen = axis, torch.zeros(0)
        self.shift = nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Return the features plus `shift`. In training, store the features without `shift` for `batch_mean`."""
        if not self.enabled:
            return features
        if self.training:
            self.seen = features
        return features + self.shift.view([-1 if axis == self.axis % features.ndim else 1 for axis in range(features.ndim)])

    def frozen_tensors(self) -> dict[str, Tensor]:
        """See AdapterModule."""
        return {"mean": self.mean}

    def batch_mean(self) -> Tensor:
        """Return the mean (C,), with gradient, over the last training batch and all positions of its pictures or texts."""
        return self.seen.float().movedim(self.axis, -1).flatten(0, -2).mean(0)


def part_shapes(parts: Collection[str], adapter: Shapes, model: nn.Module, base: ModelKind) -> Shapes:
    """Return the names and shapes of the tensors that `parts` add to an adapter with these shapes.

    Raises ConfigError if a part needs the point between encoder and head and the model has none.
    """
    found: Shapes = {}
    if LOCAL_ADAPTER in parts:
        found |= {local_factor_name(name): shape for name, shape in adapter.items() if factor(name)}
    if FEATURE_SHIFT in parts:
        found |= dict.fromkeys((SHIFT, MEAN), (feature_point_of(model, base).width,))
    return found


def add_parts(parts: Collection[str], model: nn.Module, kind: AdapterKind, config: Any, base: ModelKind) -> None:
    """Add the parts to a model that has its adapter.

    Raises ConfigError if a part needs the point between encoder and head and the model has none.
    """
    if LOCAL_ADAPTER in parts and kind.add_local:
        kind.add_local(model, config)
    if FEATURE_SHIFT in parts:
        cut = feature_point_of(model, base)
        part = FeatureShift(cut.width, cut.axis)
        model.add_module("feature_shift", part)
        part.hook = cut.module.register_forward_hook(lambda module, args, output: part(output))
        adapter_state.add_names(model, [SHIFT])


@torch.no_grad()
def merge_shift(model: nn.Module, base: ModelKind) -> None:
    """Add the vector between encoder and head to a bias of the model, and remove its module, in place.

    The bias is that of the encoder's last module or of the head. Raises ConfigError for a model without either.
    """
    part = getattr(model, "feature_shift", None)
    if not isinstance(part, FeatureShift):
        return
    last, head = list(feature_point_of(model, base).module.modules())[-1], getattr(model, HEAD, None)
    if isinstance(bias := getattr(last, "bias", None), nn.Parameter):
        bias.add_(part.shift)
    elif isinstance(head, nn.Linear) and isinstance(head.bias, nn.Parameter):
        head.bias.add_(head.weight @ part.shift)
    else:
        what = "the vector between encoder and head cannot be merged: the model has no bias there"
        raise ConfigError(f"strategy: {what}; use --format peft")
    part.hook.remove()
    del model.feature_shift


def feature_point_of(model: nn.Module, base: ModelKind) -> Cut:
    """Return the point between a model's encoder and head. Raises ConfigError for a model that defines none."""
    try:
        found = base.cut(model) if base.cut else None
    except AttributeError:
        found = None
    if found is None:
        what = "has no single point where its encoder ends, which the strategy needs (SAM 2 and 3 pass on several maps)"
        remedy = "use weights of the first SAM, clip, vision, or a language model laid out like Llama"
        raise ConfigError(f"model: {type(model).__name__} {what}; {remedy}")
    return found
