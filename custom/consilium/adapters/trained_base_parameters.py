"""Base parameters that train beside an adapter (SAM's mask decoder) or instead of one (kind full).

Full fine-tuning is the reference for adapters (FedAvg-F and FedProx-F in FedSCA's Table 3), and the choice for unet, which has
no published weights to freeze.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from consilium.adapters import adapter_state
from consilium.adapters.kinds import BottleneckConfig, FullConfig, LoraConfig
from consilium.adapters.names import BASE, WHOLE_BASE, is_head
from consilium.adapters.registry import Shapes
from consilium.core.errors import ConfigError
from consilium.models.registry import ModelKind
from consilium.models.weight_files import save_tensors

DECODER = "mask_decoder."
"""Prefix of the mask decoder's parameter names."""


def trainable_decoder(model: nn.Module, config: LoraConfig | BottleneckConfig) -> list[str]:
    """Return the adapter tensors' names for the mask decoder's parameters; [] if it is frozen.

    Raises ConfigError if the model has no mask decoder.
    """
    if config.decoder == "freeze":
        return []
    found = [f"{BASE}.{name}" for name, _ in model.named_parameters() if name.startswith(DECODER)]
    if not found:
        raise ConfigError(f"adapter.decoder: {config.decoder!r}: the model has no mask decoder; use freeze, or model sam")
    return found


# kind full ---------------------------------------------------------------------------------------------------------------


def whole_base(model: nn.Module, config: FullConfig) -> list[str]:
    """See AdapterKind.trainable_base."""
    return [f"{WHOLE_BASE}.{name}" for name, _ in model.named_parameters() if not is_head(name)]


def full_adapter_shapes(model: nn.Module, config: FullConfig, base: ModelKind) -> Shapes:
    """Return {}: the base's parameters are no adapter tensors. Raises ConfigError for a model too large to send."""
    adapter_state.check_size(sum(parameter.numel() for parameter in model.parameters()))
    return {}


def train_whole(model: nn.Module, config: FullConfig, base: ModelKind) -> None:
    """See AdapterKind.inject."""
    adapter_state.freeze_base(model, [], whole_base(model, config))


def export_full_weights(folder: Path, values: Mapping[str, Tensor], config: FullConfig, base: ModelKind, name: str) -> None:
    """See AdapterKind.export."""
    save_tensors(folder / "model.safetensors", values)
