"""Full fine-tuning: no adapter, the whole base trains.

It is the reference for adapters (FedAvg-F and FedProx-F in FedSCA's Table 3), and the choice for unet, which has no published
weights to freeze.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from consilium.adapters import adapter_state
from consilium.adapters.kinds import FullConfig
from consilium.adapters.names import WHOLE_BASE, is_head
from consilium.adapters.registry import Shapes
from consilium.adapters.trained_base_parameters import save_parameters
from consilium.models.registry import ModelKind


def _trainable_base(model: nn.Module, config: FullConfig) -> list[str]:
    return [f"{WHOLE_BASE}.{name}" for name, _ in model.named_parameters() if not is_head(name)]


def _shapes(model: nn.Module, config: FullConfig, base: ModelKind) -> Shapes:
    """Return {}, because all trained parameters belong to the base. Raises ConfigError for a model too large to send."""
    adapter_state.check_size(sum(parameter.numel() for parameter in model.parameters()))
    return {}


def _inject(model: nn.Module, config: FullConfig, base: ModelKind) -> None:
    adapter_state.freeze_base(model, [], _trainable_base(model, config))


def _export(folder: Path, values: Mapping[str, Tensor], config: FullConfig, base: ModelKind, name: str) -> None:
    save_parameters(folder / "model.safetensors", values)


def merge(model: nn.Module) -> None:
    """Do nothing, because the trained parameters are already the base's own."""
