"""A model as files of its parameters: by its own names, or as a folder of `transformers`."""

from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_model
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS = "model.safetensors"


def save_weights(folder: Path, model: nn.Module) -> None:
    """Write the model's state dict; of parameters that are one (tied weights) one copy."""
    save_model(model, str(folder / WEIGHTS), metadata={"format": "pt"})


def save_pretrained(folder: Path, model: "PreTrainedModel") -> None:
    """Write config.json and weights, without a progress bar."""
    from transformers.utils import logging

    noisy = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if noisy:
            logging.enable_progress_bar()
