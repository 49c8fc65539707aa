"""Classifiers on vision encoders as `transformers` folders: the encoder, and beside it what stands behind it."""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from consilium.models.export import save_pretrained
from consilium.models.vision import VisionConfig
from consilium.models.vision.network import sees, use_own_class

HEAD_FILE = "head.safetensors"
_LOAD = """import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModel

encoder = AutoModel.from_pretrained(".", dtype=torch.float32).eval()
behind = load_file("{file}")
mean = 255 * torch.tensor({mean}).view(3, 1, 1)
std = 255 * torch.tensor({std}).view(3, 1, 1)
{patches}

@torch.no_grad()
def logits(images):
    \"\"\"Map RGB pictures (N, 3, {size}, {size}) in 0..255 to class logits (N, {outputs}).\"\"\"
    output = encoder({inputs})
    {pooled}
    features = {features}
    return {answer}
"""
_PATCHES = """

def inputs(pixels, side={side}, patch={patch}):
    grid = pixels.view(len(pixels), 3, side, patch, side, patch).permute(0, 2, 4, 3, 5, 1)
    mask = torch.ones(len(pixels), side * side, dtype=torch.int)
    shapes = torch.tensor([[side, side]] * len(pixels))
    flat = grid.reshape(len(pixels), side * side, patch * patch * 3)
    return {{"pixel_values": flat, "pixel_attention_mask": mask, "spatial_shapes": shapes}}
"""


def save(folder: Path, model: Any, config: VisionConfig) -> str:
    """See Saved. Of two towers the vision tower is written; head, projection and the classes' texts get a file."""
    asks, interpolates, kind = bool(len(model.texts)), model.interpolates, model.config.model_type
    own = sees(model.config)
    count = (config.image_size // own.patch_size) ** 2
    head, texts, scale = use_own_class(model)
    behind = {"head.weight": head.weight, "head.bias": head.bias}
    projection = getattr(model, "visual_projection", None)
    behind |= {"projection": projection.weight} if projection is not None else {}
    behind |= {"texts": scale * texts} if asks else {}
    save_pretrained(folder, getattr(model, "vision_model", model))
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in behind.items()}, folder / HEAD_FILE)
    more = ", interpolate_pos_encoding=True" if interpolates and own.image_size != config.image_size else ""
    code = _LOAD.format(
        file=HEAD_FILE,
        mean=list(config.pixels[0]),
        std=list(config.pixels[1]),
        patches=_PATCHES.format(side=config.image_size // own.patch_size, patch=own.patch_size) if kind == "siglip2" else "",
        size=config.image_size,
        outputs=head.out_features,
        inputs=f"**inputs({_PIXELS})" if kind == "siglip2" else f"pixel_values={_PIXELS}{more}",
        pooled="pooled = output.pooler_output" + (' @ behind["projection"].T' if projection is not None else ""),
        features=f"output.last_hidden_state[:, -{count}:].mean(1)" if config.features == "dense" else "pooled",
        answer='F.linear(features, behind["head.weight"], behind["head.bias"])'
        + (' + F.normalize(pooled, dim=-1) @ behind["texts"].T' if asks else ""),
    )
    return f"`AutoModel` loads the encoder; what stands behind it is {HEAD_FILE}.\n\n```python\n{code}```\n"


_PIXELS = "(images - mean) / std"
