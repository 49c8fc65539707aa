"""Reads CLIP checkpoints of three layouts into the names of ClipClassifier. Other files give an error of one line."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from consilium.core.errors import CheckpointError
from consilium.models.base_weights import load_tensors, refuse_adapter
from consilium.models.untrusted_folder import plain_file, read_json

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
    "clip": "give a transformers CLIP folder with config.json and model.safetensors",
    "tiny": "leave the field out, the tiny weights ship with the package",
}


@dataclass(frozen=True)
class Weights:
    """A checkpoint by ClipClassifier's names, without a head; `activation` as `transformers` names it."""

    path: Path
    tensors: dict[str, Tensor]
    activation: str = "gelu"


def read(variant: str, checkpoint: Path | None) -> Weights:
    """Return a variant's weights. Raises CheckpointError for a missing, damaged or other file."""
    if checkpoint is None:
        raise CheckpointError(f"model.checkpoint: missing; {variant} needs its weights by path: {_WANTED[variant]}")
    if not checkpoint.exists():
        raise CheckpointError(f"model.checkpoint: {checkpoint}: no such file; {_WANTED[variant]}")
    refuse_adapter(checkpoint)
    if variant == "clip":
        return _transformers_weights(checkpoint)
    state = _load(checkpoint)
    if variant == "biomedclip":
        trunk = {name.removeprefix(TRUNK): tensor for name, tensor in state.items() if name.startswith(TRUNK)}
        if "cls_token" not in trunk:
            raise CheckpointError(f"model.checkpoint: {checkpoint}: holds no {TRUNK}cls_token; {_WANTED['biomedclip']}")
        found = {f"vision_model.{n}": t for name, tensor in trunk.items() for n, t in _to_vit_tensors(name, tensor).items()}
        if (projection := state.get("visual.head.proj.weight")) is not None:
            found["projection.weight"] = projection
        return Weights(checkpoint, found)
    if "vision_model.embeddings.cls_token" not in state:
        raise CheckpointError(f"model.checkpoint: {checkpoint}: holds no tiny tower; {_WANTED[variant]}")
    return Weights(checkpoint, state)


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


def _load(path: Path) -> dict[str, Tensor]:
    state = load_tensors(path)
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"model.checkpoint: {path}: holds no tensors by name; fetch it again")
    return state


def _to_vit_tensors(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return {name in a ViTModel: tensor} of a timm tensor. A fused qkv tensor becomes three entries."""
    if match := re.fullmatch(r"blocks\.(\d+)\.attn\.qkv\.(weight|bias)", name):
        layer, kind = match.groups()
        return {f"layers.{layer}.attention.{p}_proj.{kind}": t for p, t in zip("qkv", tensor.chunk(3), strict=True)}
    for pattern, replacement in _TIMM:
        if match := re.match(rf"{pattern}(?=\.|$)", name):
            return {match.expand(replacement) + name[match.end() :]: tensor}
    return {name: tensor}


def _transformers_weights(folder: Path) -> Weights:
    """Return the vision tower of a `transformers` CLIP folder, whole or vision only; its projection is left out."""
    file = next((name for name in ("model.safetensors", "pytorch_model.bin") if (folder / name).is_file()), None)
    if file is None or not (folder / "config.json").is_file():
        raise CheckpointError(f"model.checkpoint: {folder}: no config.json with weights there; {_WANTED['clip']}")
    plain_file(folder, file)
    config = read_json(folder, "config.json")
    state = {name.removeprefix("vision_model."): tensor for name, tensor in _load(folder / file).items()}
    tower = {n: t for n, t in state.items() if n.startswith(("embeddings.", "pre_layrnorm.", "encoder.", "post_layernorm."))}
    if not tower:
        raise CheckpointError(f"model.checkpoint: {folder}: holds no CLIP vision tower; {_WANTED['clip']}")
    activation = config.get("vision_config", config).get("hidden_act", "quick_gelu")
    return Weights(folder, {f"vision_model.{n}": t for n, t in tower.items() if "position_ids" not in n}, activation)
