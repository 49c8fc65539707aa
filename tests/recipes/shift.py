"""An adapter: a trained vector added to the outputs of linear layers, W x + b + s; s = 0 at the start."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from consilium.adapters import adapter_state
from consilium.adapters.names import prepare_linear_layers
from consilium.adapters.registry import AdapterConfig, AdapterKind, Shapes
from consilium.models.registry import ModelKind


class ShiftConfig(AdapterConfig):
    """`targets`: a set of the model's or a regex (RE2)."""

    targets: str = "paper"


class Shift(adapter_state.AdapterModule):
    """Adds its vector; switched off, nothing."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., features) to the same."""
        return x + self.bias if self.enabled else x


def shapes(model: nn.Module, config: ShiftConfig, base: ModelKind) -> Shapes:
    """Return a vector per adapted layer."""
    found = prepare_linear_layers(model, base.target(config.targets))
    return {f"{name}.shift.bias": (layer.out_features,) for name, layer in found.items()}


def inject(model: nn.Module, config: ShiftConfig, base: ModelKind) -> None:
    """Freeze the model and add a Shift to every adapted layer, which keeps its name and code."""
    names = shapes(model, config, base)
    for name, shape in names.items():
        layer = model.get_submodule(name.removesuffix(".shift.bias"))
        layer.add_module("shift", Shift(*shape))
        layer.register_forward_hook(lambda module, args, output: module.shift(output))
    adapter_state.freeze_base(model, names)


def export(folder: Path, values: Mapping[str, Tensor], config: Any, base: ModelKind, name: str) -> None:
    """Write adapter.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({n: t.detach().cpu().contiguous() for n, t in values.items()}, folder / "adapter.safetensors", {"base": name})


SHIFT = AdapterKind(ShiftConfig, shapes, inject, export)
