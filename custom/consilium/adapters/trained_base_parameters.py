"""Names and export file of base parameters that train beside an adapter or instead of one."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from consilium.adapters.names import BASE
from consilium.adapters.registry import Decoder
from consilium.core.errors import ConfigError

DECODER = "mask_decoder."
"""Prefix of the mask decoder's parameter names."""


def decoder_names(model: nn.Module, decoder: Decoder) -> list[str]:
    """Return the adapter tensors' names for the mask decoder's parameters; [] if it is frozen.

    Raises ConfigError if the model has no mask decoder.
    """
    if decoder == "freeze":
        return []
    found = [f"{BASE}.{name}" for name, _ in model.named_parameters() if name.startswith(DECODER)]
    if not found:
        raise ConfigError(f"adapter.decoder: {decoder!r}: the model has no mask decoder; use freeze, or model sam")
    return found


def save_parameters(path: Path, values: Mapping[str, Tensor]) -> None:
    """Write `values` as a plain state dict, for `model.load_state_dict(values, strict=False)`. Without values write no file."""
    if not values:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in values.items()}, path)
