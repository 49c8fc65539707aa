"""U-Nets for others: a state dict and the code that builds MONAI's network."""

from pathlib import Path

from consilium.models.export import save_weights
from consilium.models.unet import MEAN, UnetConfig
from consilium.models.unet.network import LEVELS, SPREAD, UNITS, PictureUnet

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


def save(folder: Path, model: PictureUnet, config: UnetConfig) -> str:
    """See Saved. `model.checkpoint` of a later job takes the file as it is."""
    save_weights(folder, model)
    code = _CODE.format(
        classes=model.net.out_channels, channels=[config.width * 2**level for level in range(LEVELS)],
        strides=[2] * (LEVELS - 1), units=UNITS[config.variant], size=config.image_size, mean=MEAN, spread=SPREAD,
    )  # fmt: skip
    return f"model.safetensors holds MONAI's `UNet`.\n\n```python\n{code}```\n"
