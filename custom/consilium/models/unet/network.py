"""U-Net and its residual form by MONAI, with the input and output of our segmentation models.

Sources: O. Ronneberger, P. Fischer, T. Brox, "U-Net: Convolutional Networks for Biomedical Image Segmentation", MICCAI 2015;
Z. Zhang, Q. Liu, Y. Wang, "Road Extraction by Deep Residual U-Net", IEEE GRSL 2018. FedSCA's Figure 7 prints neither sizes nor
norm. Our reading: five levels of 64 to 1024 channels as in the first paper; MONAI's `UNet` without residual units (one
convolution per level and direction), or with two of them; instance norm without running statistics. The first paper has no norm
and the second batch norm, whose running statistics are not parameters, would differ by site, and make a picture's result depend
on its batch.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from monai.networks.nets import UNet
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from consilium.core.errors import CheckpointError, ConfigError
from consilium.models.unet import MEAN, UnetConfig
from consilium.models.weight_files import page, refuse_adapter, refuse_adapter_tensors, save_weights, tensor_names

LEVELS = 5
UNITS = {"unet": 0, "resunet": 2}
"""Convolutions of a residual unit; 0 for none."""
SPREAD = 58.0
"""The 8-bit deviation of pixels that becomes 1; the middle one of SAM's three."""
_CODE = """import torch
from monai.networks.nets import UNet
from safetensors.torch import load_file

net = UNet(2, 3, {classes}, {channels}, {strides}, num_res_units={units})
net.load_state_dict({{name.removeprefix("net."): tensor for name, tensor in load_file("model.safetensors").items()}})
net.eval()


@torch.no_grad()
def logits(images):
    \"\"\"Map RGB pictures (N, 3, {size}, {size}) in 0..255 to mask logits (N, {classes}, {size}, {size}).\"\"\"
    return net((images - torch.tensor({mean}).view(3, 1, 1)) / {spread})
"""


class PictureUnet(nn.Module):
    """MONAI's UNet on RGB pictures in 0..255."""

    mean: Tensor

    def __init__(self, variant: Literal["unet", "resunet"], width: int, classes: int) -> None:
        super().__init__()
        channels = [width * 2**level for level in range(LEVELS)]
        self.net = UNet(2, 3, classes, channels, [2] * (LEVELS - 1), num_res_units=UNITS[variant])
        self.register_buffer("mean", torch.tensor(MEAN, dtype=torch.float32).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor, prompts: Tensor | None = None) -> Tensor:
        """Map RGB images (N, 3, S, S) in 0..255 to mask logits (N, C, S, S); it takes no `prompts`."""
        return self.net((images - self.mean) / SPREAD)


def build_unet(
    variant: Literal["unet", "resunet"], width: int, classes: int, seed: int, checkpoint: Path | None
) -> PictureUnet:
    """Return a U-Net in evaluation mode, with the weights of `checkpoint`, else those that `seed` gives at every site.

    Raises CheckpointError for a file that is missing, damaged or for another model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = PictureUnet(variant, width, classes)
    if checkpoint is not None:
        refuse_adapter(checkpoint)
        refuse_adapter_tensors(checkpoint, tensor_names(checkpoint))
        try:
            model.load_state_dict(load_file(checkpoint))
        except (OSError, SafetensorError, RuntimeError) as error:
            reason = str(error).splitlines()[0][:120]
            raise CheckpointError(
                f"model.checkpoint: {checkpoint}: cannot be used ({reason}); give the model.safetensors of a unet of the same "
                "variant, width and classes"
            ) from None
    return model.eval()


def build(config: UnetConfig, task: Any, checkpoint: Path | None, weights: bool, use_checkpointing: bool) -> PictureUnet:
    """See registry.Build."""
    if getattr(task, "prompt", "none") != "none":
        raise ConfigError(f"task.prompt: {task.prompt!r}: model unet takes no prompts; use none")
    if use_checkpointing:
        raise ConfigError("training.gradient_checkpointing: model unet has none; use false")
    return build_unet(config.variant, config.width, len(task.classes), config.seed, checkpoint if weights else None)


def save(folder: Path, model: PictureUnet, config: UnetConfig, task: Any, tokenizer: Any) -> str:
    """See registry.Saved. `model.checkpoint` of a later job takes the file as it is."""
    save_weights(folder, model)
    code = _CODE.format(
        classes=model.net.out_channels, channels=[config.width * 2**level for level in range(LEVELS)],
        strides=[2] * (LEVELS - 1), units=UNITS[config.variant], size=config.image_size, mean=MEAN, spread=SPREAD,
    )  # fmt: skip
    return page("model.safetensors holds MONAI's `UNet`.", code)
