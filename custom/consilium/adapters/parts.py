"""What a strategy may ask for beside the job's adapter: a second, local adapter; a vector between encoder and head.

A job's `adapter:` section is the same for all strategies; these parts come with the strategy.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from consilium.adapters import layers
from consilium.adapters.names import FEATURE_SHIFT, HEAD, LOCAL_ADAPTER, MEAN, SHIFT, factor, local_twin
from consilium.adapters.registry import AdapterKind, Shapes
from consilium.core.errors import ConfigError
from consilium.models.registry import Cut, ModelKind


class FeatureShift(layers.AdapterModule):
    """Adds `shift` (C,) to features whose axis `axis` has C entries; `mean` (C,) is a mean of features, for a strategy."""

    mean: Tensor
    hook: RemovableHandle
    """What makes the encoder's last module call this one."""

    def __init__(self, width: int, axis: int) -> None:
        super().__init__()
        self.axis, self.seen = axis, torch.zeros(0)
        self.shift = nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Return the features, moved; those of the last training batch, not moved, are kept for `batch_mean`."""
        if not self.enabled:
            return features
        if self.training:
            self.seen = features
        return features + self.shift.view([-1 if axis == self.axis % features.ndim else 1 for axis in range(features.ndim)])

    def frozen(self) -> dict[str, Tensor]:
        """See AdapterModule."""
        return {"mean": self.mean}

    def batch_mean(self) -> Tensor:
        """Return the mean (C,) over the last training batch, and over all places of a picture or text, with its graph."""
        return self.seen.float().movedim(self.axis, -1).flatten(0, -2).mean(0)


def part_shapes(parts: Collection[str], adapter: Shapes, model: nn.Module, base: ModelKind) -> Shapes:
    """Return names and shapes of what the parts add to an adapter of these shapes. Raises ConfigError as `cut_of`."""
    found: Shapes = {}
    if LOCAL_ADAPTER in parts:
        found |= {local_twin(name): shape for name, shape in adapter.items() if factor(name)}
    if FEATURE_SHIFT in parts:
        found |= dict.fromkeys((SHIFT, MEAN), (cut_of(model, base).width,))
    return found


def add_parts(parts: Collection[str], model: nn.Module, kind: AdapterKind, config: Any, base: ModelKind) -> None:
    """Put the parts into a model that has its adapter. Raises ConfigError as `cut_of`."""
    if LOCAL_ADAPTER in parts and kind.add_local:
        kind.add_local(model, config)
    if FEATURE_SHIFT in parts:
        cut = cut_of(model, base)
        part = FeatureShift(cut.width, cut.axis)
        model.add_module("feature_shift", part)
        part.hook = cut.module.register_forward_hook(lambda module, args, output: part(output))
        layers.add_names(model, [SHIFT])


@torch.no_grad()
def merge_shift(model: nn.Module, base: ModelKind) -> None:
    """Add the vector between encoder and head to a bias that is there already, and take it out, in place.

    Raises ConfigError for a model without such a bias.
    """
    part = getattr(model, "feature_shift", None)
    if not isinstance(part, FeatureShift):
        return
    last, head = list(cut_of(model, base).module.modules())[-1], getattr(model, HEAD, None)
    if isinstance(bias := getattr(last, "bias", None), nn.Parameter):
        bias.add_(part.shift)
    elif isinstance(head, nn.Linear) and isinstance(head.bias, nn.Parameter):
        head.bias.add_(head.weight @ part.shift)
    else:
        what = "the vector between encoder and head cannot be merged: the model has no bias there"
        raise ConfigError(f"strategy: {what}; use --format peft")
    part.hook.remove()
    del model.feature_shift


def cut_of(model: nn.Module, base: ModelKind) -> Cut:
    """Return where encoder and head of a model meet. Raises ConfigError for a model that does not say."""
    try:
        found = base.cut(model) if base.cut else None
    except AttributeError:
        found = None
    if found is None:
        what = "has no single point where its encoder ends, which the strategy needs (SAM 2 and 3 pass on several maps)"
        remedy = "use weights of the first SAM, clip, vision, or a language model laid out like Llama"
        raise ConfigError(f"model: {type(model).__name__} {what}; {remedy}")
    return found
