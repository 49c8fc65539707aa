"""Image classifiers on the vision tower of BiomedCLIP, or on a tiny one that ships here.

The weights are read from BiomedCLIP's file or the package's, and written as a folder of `transformers`.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, ViTConfig, ViTForImageClassification, ViTModel

from consilium.core.errors import CheckpointError
from consilium.core.storage import PUBLIC, write_atomic
from consilium.models.architecture import OPENAI, require_multiple
from consilium.models.clip import ClipConfig
from consilium.models.weight_files import load_tensors, page, save_pretrained

TINY_WEIGHTS = Path(__file__).parent.parent / "weights" / "tiny_clip.safetensors"
PIXEL_MEAN, PIXEL_STD = OPENAI  # in 0..1; BiomedCLIP and the tiny tower use the same
TRUNK = "visual.trunk."
_TIMM = (
    (r"cls_token", "embeddings.cls_token"),
    (r"pos_embed", "embeddings.position_embeddings"),
    (r"patch_embed\.proj", "embeddings.patch_embeddings.projection"),
    (r"blocks\.(\d+)\.norm1", r"layers.\1.layernorm_before"),
    (r"blocks\.(\d+)\.norm2", r"layers.\1.layernorm_after"),
    (r"blocks\.(\d+)\.attn\.proj", r"layers.\1.attention.o_proj"),
    (r"blocks\.(\d+)\.mlp", r"layers.\1.mlp"),
    (r"norm", "layernorm"),
)
"""timm's names -> those of a ViTModel. The fused qkv is split separately."""
_WANTED = {
    "biomedclip": "give BiomedCLIP's open_clip_pytorch_model.bin or .safetensors",
    "tiny": "leave the field out, the tiny weights ship with the package",
}
BILINEAR = 2  # as PIL counts filters
_LOAD = """import torch
from transformers import AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained(".").eval()
mean = 255 * torch.tensor({mean}).view(3, 1, 1)
std = 255 * torch.tensor({std}).view(3, 1, 1)


@torch.no_grad()
def logits(images):
    \"\"\"Map RGB pictures (N, 3, {size}, {size}) in 0..255 to class logits (N, {outputs}).\"\"\"
    return model((images - mean) / std).logits
"""


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
    state = _read(variant, checkpoint or (TINY_WEIGHTS if variant == "tiny" else None)) if weights else None
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
    """Load all tensors except the head, interpolating position embeddings if the model's picture size differs.

    Raises CheckpointError, naming the first tensor that differs, unless names and shapes agree.
    """
    want = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("head.")}
    state = {name: _resize(name, tensor.float(), want.get(name)) for name, tensor in tensors.items()}
    if wrong := sorted(n for n in want.keys() | state.keys() if n not in want or n not in state):
        raise CheckpointError(
            f"model.checkpoint: {path}: another architecture than model.variant: {wrong[0]} is "
            f"{'missing' if wrong[0] in want else 'one too many'}; change one"
        )
    if wrong := sorted(n for n in want if want[n].shape != state[n].shape):
        raise CheckpointError(
            f"model.checkpoint: {path}: another architecture than model.variant: {wrong[0]} is {tuple(state[wrong[0]].shape)}, "
            f"not {tuple(want[wrong[0]].shape)}; change one"
        )
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


def _read(variant: str, checkpoint: Path | None) -> dict[str, Tensor]:
    """Return a variant's weights by ClipClassifier's names, without a head. Raises CheckpointError for an unusable file."""
    if checkpoint is None:
        raise CheckpointError(f"model.checkpoint: missing; {variant} needs its weights by path: {_WANTED[variant]}")
    if not checkpoint.exists():
        raise CheckpointError(f"model.checkpoint: {checkpoint}: no such file; {_WANTED[variant]}")
    state = load_tensors(checkpoint)
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"model.checkpoint: {checkpoint}: holds no tensors by name; fetch it again")
    if variant == "tiny":
        if "vision_model.embeddings.cls_token" not in state:
            raise CheckpointError(f"model.checkpoint: {checkpoint}: holds no tiny tower; {_WANTED[variant]}")
        return state
    trunk = {name.removeprefix(TRUNK): tensor for name, tensor in state.items() if name.startswith(TRUNK)}
    if "cls_token" not in trunk:
        raise CheckpointError(f"model.checkpoint: {checkpoint}: holds no {TRUNK}cls_token; {_WANTED[variant]}")
    found = {f"vision_model.{n}": t for name, tensor in trunk.items() for n, t in _to_vit_tensors(name, tensor).items()}
    if (projection := state.get("visual.head.proj.weight")) is not None:
        found["projection.weight"] = projection
    return found


def _to_vit_tensors(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return {name in a ViTModel: tensor} of a timm tensor. A fused qkv tensor becomes three entries."""
    if match := re.fullmatch(r"blocks\.(\d+)\.attn\.qkv\.(weight|bias)", name):
        layer, kind = match.groups()
        return {f"layers.{layer}.attention.{p}_proj.{kind}": t for p, t in zip("qkv", tensor.chunk(3), strict=True)}
    for pattern, replacement in _TIMM:
        if match := re.match(rf"{pattern}(?=\.|$)", name):
            return {match.expand(replacement) + name[match.end() :]: tensor}
    return {name: tensor}


def save(folder: Path, model: ClipClassifier, config: ClipConfig, task: Any, tokenizer: Any) -> str:
    """See registry.Saved. The classifier becomes a ViTForImageClassification."""
    size = config.image_size
    settings = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": size, "width": size},
        "resample": BILINEAR,
        "do_center_crop": False,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": PIXEL_MEAN,
        "image_std": PIXEL_STD,
        "do_convert_rgb": True,
    }
    write_atomic(folder / "preprocessor_config.json", json.dumps(settings, indent=1).encode(), PUBLIC)
    save_pretrained(folder, _as_vit(model, getattr(task, "classes", None)))
    code = _LOAD.format(mean=list(PIXEL_MEAN), std=list(PIXEL_STD), size=size, outputs=model.head.out_features)
    return page("A `transformers` folder: `AutoModelForImageClassification` loads it.", code)


@torch.no_grad()
def _as_vit(model: ClipClassifier, classes: list[str] | None) -> ViTForImageClassification:
    """Return the classifier as a ViTForImageClassification, with projection and head merged into one linear layer."""
    tower: Any = model.vision_model
    head = model.head
    config = type(tower.config)(**tower.config.to_dict())
    names = classes or [f"output {number}" for number in range(head.out_features)]
    config.id2label, config.label2id = dict(enumerate(names)), {name: number for number, name in enumerate(names)}
    whole = ViTForImageClassification(config)
    projection = model.projection.weight if isinstance(model.projection, nn.Linear) else None
    weight: Tensor = head.weight if projection is None else (head.weight.double() @ projection.double()).float()
    own = {f"vit.{name}": tensor for name, tensor in tower.state_dict().items()}
    whole.load_state_dict(own | {"classifier.weight": weight, "classifier.bias": head.bias})
    return whole.eval()
