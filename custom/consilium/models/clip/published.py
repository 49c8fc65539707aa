"""Reads CLIP checkpoints of two layouts into the names of ClipClassifier. Other files give an error of one line."""

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from consilium.core.errors import CheckpointError
from consilium.models.base_weights import load_tensors

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


def read(variant: str, checkpoint: Path | None) -> dict[str, Tensor]:
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


def require_equal_layout(path: Path, want: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError, naming the first tensor that differs, unless names and shapes agree."""
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


def _to_vit_tensors(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return {name in a ViTModel: tensor} of a timm tensor. A fused qkv tensor becomes three entries."""
    if match := re.fullmatch(r"blocks\.(\d+)\.attn\.qkv\.(weight|bias)", name):
        layer, kind = match.groups()
        return {f"layers.{layer}.attention.{p}_proj.{kind}": t for p, t in zip("qkv", tensor.chunk(3), strict=True)}
    for pattern, replacement in _TIMM:
        if match := re.match(rf"{pattern}(?=\.|$)", name):
            return {match.expand(replacement) + name[match.end() :]: tensor}
    return {name: tensor}
