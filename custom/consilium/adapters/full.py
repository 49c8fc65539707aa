"""Full fine-tuning: no adapter, all of the base trains.

It is what adapters are measured against (FedAvg-F and FedProx-F of FedSCA's Table 3), and the way for a model that has no
published weights to be frozen (unet).
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from consilium.adapters import layers
from consilium.adapters.base import save_parameters
from consilium.adapters.kinds import FullConfig
from consilium.adapters.names import WHOLE_BASE, is_head
from consilium.adapters.registry import Shapes
from consilium.models.registry import ModelKind


def _trainable_base(model: nn.Module, config: FullConfig) -> list[str]:
    return [f"{WHOLE_BASE}.{name}" for name, _ in model.named_parameters() if not is_head(name)]


def _shapes(model: nn.Module, config: FullConfig, base: ModelKind) -> Shapes:
    """Return {}: all that trains is the base's. Raises ConfigError for a model too large to send."""
    layers.check_size(sum(parameter.numel() for parameter in model.parameters()))
    return {}


def _inject(model: nn.Module, config: FullConfig, base: ModelKind) -> None:
    layers.freeze_base(model, [], _trainable_base(model, config))


def _export(folder: Path, values: Mapping[str, Tensor], config: FullConfig, base: ModelKind, name: str) -> None:
    save_parameters(folder / "model.safetensors", values)


def merge(model: nn.Module) -> None:
    """Do nothing: what trains are the base's own layers."""
