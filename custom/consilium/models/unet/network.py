"""U-Net and its residual form by MONAI, with the input and output of our segmentation models.

Sources: O. Ronneberger, P. Fischer, T. Brox, "U-Net: Convolutional Networks for Biomedical Image Segmentation", MICCAI 2015;
Z. Zhang, Q. Liu, Y. Wang, "Road Extraction by Deep Residual U-Net", IEEE GRSL 2018. FedSCA's Figure 7 prints neither sizes nor
norm. Our reading: five levels of 64 to 1024 channels as in the first, MONAI's `UNet` without residual units (one convolution a
level and direction) and with two of them. Instance norm without statistics of its own, where the first has none and the second
batch norm: running statistics are no parameters, would differ by site, and tie the pictures of a batch together.
"""

from pathlib import Path
from typing import Literal

import torch
from monai.networks.nets import UNet
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from consilium.core.errors import CheckpointError
from consilium.models.unet import MEAN

LEVELS = 5
UNITS = {"unet": 0, "resunet": 2}
"""Convolutions of a residual unit; 0 for none."""
SPREAD = 58.0
"""8-bit values that become 1; the middle of SAM's three."""


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

    Raises CheckpointError for a file that is missing, damaged or of another model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = PictureUnet(variant, width, classes)
    if checkpoint is not None:
        _fill(model, checkpoint)
    return model.eval()


def _fill(model: PictureUnet, path: Path) -> None:
    try:
        model.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:120]
        what = "give the model.safetensors of a unet of the same variant, width and classes"
        raise CheckpointError(f"model.checkpoint: {path}: cannot be used ({reason}); {what}") from None
