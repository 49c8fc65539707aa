"""Image classifiers on the vision tower of BiomedCLIP, or on a tiny one that ships here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, ViTConfig, ViTModel

from consilium.models.architecture import require_multiple
from consilium.models.clip import ClipConfig, published

TINY_WEIGHTS = Path(__file__).parent.parent / "weights" / "tiny_clip.safetensors"
PIXEL_MEAN, PIXEL_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""OpenAI's, in 0..1; BiomedCLIP and the tiny tower use the same."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a variant: `native` image size and patch in pixels; `projection` is the width behind it, 0 for none."""

    width: int
    depth: int
    heads: int
    native: int
    patch: int
    projection: int = 0


SHAPES: dict[str, Shape] = {
    "tiny": Shape(128, 4, 4, 64, 8),
    "biomedclip": Shape(768, 12, 12, 224, 16, 512),
}


class ClipClassifier(nn.Module):
    """A vision tower, its projection if the checkpoint has one, and a linear head that starts at zero."""

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, tower: PreTrainedModel, width: int, projection: int, classes: int) -> None:
        super().__init__()
        self.vision_model = tower
        self.projection = nn.Linear(width, projection, bias=False) if projection else nn.Identity()
        self.head = nn.Linear(projection or width, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.register_buffer("pixel_mean", 255 * torch.tensor(PIXEL_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("pixel_std", 255 * torch.tensor(PIXEL_STD).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Map RGB images (N, 3, S, S) in 0..255 to class logits (N, C)."""
        return self.head(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        """Map RGB images (N, 3, S, S) in 0..255 to (N, F): the class token after the last LayerNorm, projected."""
        output = self.vision_model((images - self.pixel_mean) / self.pixel_std)
        return self.projection(output.last_hidden_state[:, 0])


def build_clip(
    variant: Literal["tiny", "biomedclip"],
    checkpoint: Path | None,
    image_size: int | None,
    classes: int,
    weights: bool = True,
    gradient_checkpointing: bool = False,
) -> ClipClassifier:
    """Return a classifier with published weights and a zero head, in evaluation mode.

    `checkpoint`: the file open_clip_pytorch_model.bin (or .safetensors); None means the shipped weights and is for tiny only.
    Another `image_size` than the native one interpolates position embeddings. `weights=False` lays the model out only (also
    under torch.device("meta")). Raises CheckpointError for a missing, damaged or other checkpoint, ConfigError for an
    impossible size.
    """
    shape = SHAPES[variant]
    size = image_size or shape.native
    require_multiple(size, shape.patch, f"the patch size {shape.patch}")
    state = published.read(variant, checkpoint or (TINY_WEIGHTS if variant == "tiny" else None)) if weights else None
    # BiomedCLIP's timm trunk is exactly a ViTModel without its pooler
    sizes = ViTConfig(
        hidden_size=shape.width, intermediate_size=4 * shape.width, num_hidden_layers=shape.depth,
        num_attention_heads=shape.heads, image_size=size, patch_size=shape.patch, layer_norm_eps=1e-6,
    )  # fmt: skip
    model = ClipClassifier(ViTModel(sizes, add_pooling_layer=False), shape.width, shape.projection, classes)
    if state is not None:
        _fill(model, state, checkpoint or TINY_WEIGHTS)
    if gradient_checkpointing:
        model.vision_model.activation_checkpointing_enable({"use_reentrant": False})
    return model.eval()


def build(config: ClipConfig, task: Any, checkpoint: Path | None, weights: bool, use_checkpointing: bool) -> ClipClassifier:
    """See registry.Build."""
    return build_clip(config.variant, checkpoint, config.image_size, task.outputs, weights, use_checkpointing)


def _fill(model: ClipClassifier, tensors: dict[str, Tensor], path: Path) -> None:
    """Load all tensors except the head, interpolating position embeddings if the model's picture size differs."""
    want = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("head.")}
    state = {name: _resize(name, tensor.float(), want.get(name)) for name, tensor in tensors.items()}
    published.require_equal_layout(path, want, state)
    model.load_state_dict(state, strict=False)  # strict but for the head, which starts at zero


def _resize(name: str, tensor: Tensor, want: Tensor | None) -> Tensor:
    """Interpolate position embeddings (..., 1 + h * w, C) to the model's grid; the class token's stays."""
    if want is None or tensor.shape == want.shape or "position_embedding" not in name or tensor.shape[-1] != want.shape[-1]:
        return tensor
    flat = tensor.flatten(0, -2)
    old, new = round((len(flat) - 1) ** 0.5), round((want.numel() / want.shape[-1] - 1) ** 0.5)
    grid = flat[1:].T.reshape(1, -1, old, old)
    moved = F.interpolate(grid, (new, new), mode="bicubic", antialias=True).flatten(2)[0].T
    return torch.cat([flat[:1], moved]).view_as(want)
