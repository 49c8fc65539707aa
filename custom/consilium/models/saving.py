"""A model as a file of its parameters, by its own names."""

from pathlib import Path

from safetensors.torch import save_model
from torch import nn

WEIGHTS = "model.safetensors"


def save_weights(folder: Path, model: nn.Module) -> None:
    """Write the model's state dict; of parameters that are one (tied weights) one copy."""
    save_model(model, str(folder / WEIGHTS), metadata={"format": "pt"})
