"""Image classifiers on a vision encoder of `transformers`, under the encoder's own names: plain PEFT loads what is exported."""

import copy
import math
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from consilium.core.errors import CheckpointError, ConfigError
from consilium.models import transformers_folder
from consilium.models.architecture import require_multiple
from consilium.models.model_writer import HEAD_FILE, page, save_head, save_pretrained
from consilium.models.vision import VisionConfig

KNOWN = transformers_folder.Known("vision encoder", "clip, siglip, siglip2, dinov2, dinov3_vit, vit")
TEXTS = ("texts", "text_scale")
"""Buffers: the embeddings of the classes' texts (C, F), and the factor on their cosines with a picture."""
OURS = ("head", "pooled", "dense", "texts")
"""Attributes that a classifier adds to its encoder."""
FIRST = 2
"""The most tokens before a picture's patches, without registers: a class token and a distillation token."""
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
_PIXELS = "(images - mean) / std"
TEXT_PARTS = ("text_model", "text_projection")
"""Parts of a model with two towers that pictures do not need."""


class Classifier(PreTrainedModel):
    """Methods that `build` adds to the encoder's own class: pictures in, class logits out."""

    pixel_mean: Tensor
    pixel_std: Tensor
    texts: Tensor
    text_scale: Tensor
    dense: bool

    def forward(self, images: Tensor) -> Tensor:  # type: ignore[override]
        """Map RGB images (N, 3, S, S) in 0..255 to class logits (N, C)."""
        output = self.encoded((images - self.pixel_mean) / self.pixel_std)
        pooled, patches = output.get("pooler_output"), self.patch_count(images.shape[-1])
        features = output.last_hidden_state[:, -patches:].mean(1) if self.dense else pooled
        logits = self.head(self.pooled(features))
        if not len(self.texts):
            return logits
        return logits + self.text_scale * F.normalize(pooled, dim=-1) @ self.texts.T

    def encoded(self, pixels: Tensor) -> Any:
        """Return the encoder's output of normalized pictures (N, 3, S, S)."""
        encode: Any = self.get_image_features if hasattr(self, "get_image_features") else super().forward
        if self.config.model_type == "siglip2":  # it takes patches, of any grid
            patch, count = self.config.vision_config.patch_size, len(pixels)
            side = pixels.shape[-1] // patch
            grid = pixels.view(count, 3, side, patch, side, patch).permute(0, 2, 4, 3, 5, 1)
            return encode(
                pixel_values=grid.reshape(count, side * side, patch * patch * 3),  # row by row
                pixel_attention_mask=torch.ones(count, side * side, dtype=torch.int, device=pixels.device),
                spatial_shapes=torch.tensor([[side, side]] * count),
            )
        own = get_vision_config(self.config)
        more = (
            {"interpolate_pos_encoding": True} if pixels.shape[-1] != own.image_size and self.has_interpolation_argument else {}
        )
        return encode(pixel_values=pixels, **more)

    @property
    def has_interpolation_argument(self) -> bool:
        """Whether the encoder needs an argument for pictures of another size than its own."""
        return self.config.model_type in ("clip", "clip_vision_model", "siglip", "vit")

    def patch_count(self, side: int) -> int:
        """Return how many patches a picture of `side` pixels has."""
        return (side // get_vision_config(self.config).patch_size) ** 2


def get_vision_config(config: Any) -> Any:
    """Return the configuration of the vision tower: `vision_config` of a model with two towers, else all of `config`."""
    return getattr(config, "vision_config", config)


def build(config: VisionConfig, task: Any, checkpoint: Path | None, weights: bool, use_checkpointing: bool) -> PreTrainedModel:
    """See registry.Build: a classifier with the folder's weights and a zero head."""
    model: Any = transformers_folder.build(AutoModel, checkpoint, config.config, weights, KNOWN)
    transformers_folder.require_no_running_means(model, model.config.model_type)
    if taken := next((name for name in OURS if hasattr(model, name)), None):
        raise ConfigError(
            f"model.config: model_type {model.config.model_type!r} has a {taken!r} of its own, where ours would stand; known "
            f"are {KNOWN.examples}"
        )
    transformers_folder.require_normalization(checkpoint if weights else None, *config.pixel_normalization)
    own = _checked_vision_config(model, config.image_size)
    texts = _class_text_embeddings(model, config, list(getattr(task, "classes", ())), checkpoint, weights)
    for name in TEXT_PARTS:
        if hasattr(model, name):
            delattr(model, name)
    width = own.hidden_size if config.features == "dense" else _pooled_width(model, own)
    model.head, model.pooled, model.dense = nn.Linear(width, task.outputs), nn.Identity(), config.features == "dense"
    for tensor in model.head.parameters():
        nn.init.zeros_(tensor)
    transformers_folder.register_normalization(model, config.pixel_normalization)
    for name, tensor in zip(TEXTS, texts, strict=True):
        model.register_buffer(name, tensor, persistent=False)
    transformers_folder.extend_class(model, Classifier)
    if not weights and model.config.model_type not in config.apart:
        _check_features(copy.deepcopy(model).to("meta"), config, width)
    return transformers_folder.set_evaluation_mode(model, use_checkpointing)


def _checked_vision_config(model: Any, side: int) -> Any:
    """Return the vision tower's config. Raises ConfigError for a model without one, or a picture size it cannot take."""
    own = get_vision_config(model.config)
    patch = getattr(own, "patch_size", None)
    if not isinstance(patch, int) or not hasattr(own, "hidden_size"):
        raise ConfigError(
            f"model.config: model_type {model.config.model_type!r} is not a {KNOWN.what} of patches; known are {KNOWN.examples}"
        )
    require_multiple(side, patch, f"the patch size {patch}")
    return own


def _pooled_width(model: Any, own: Any) -> int:
    """Return the number of features of the encoder's pooled output, after the projection of a model with two towers."""
    projection = getattr(model, "visual_projection", None)
    return projection.out_features if isinstance(projection, nn.Linear) else own.hidden_size


def _check_features(model: Classifier, config: VisionConfig, width: int) -> None:
    """Raise ConfigError if an unknown encoder lacks the features that the job asks for. One forward pass shows it."""
    kind, side = f"model_type {model.config.model_type!r}", config.image_size
    try:
        output = model.encoded(torch.zeros(2, 3, side, side, device="meta"))
    except Exception as error:  # each architecture fails in its own way
        raise ConfigError(
            f"model.config: {kind} does not take pictures of {side} pixels ({transformers_folder.shorten_error(error)}); "
            f"known are {KNOWN.examples}"
        ) from None
    tokens, pooled = output.last_hidden_state, output.get("pooler_output")
    first = tokens.shape[1] - model.patch_count(side)
    found = {
        "pooled": pooled is not None and pooled.shape == (2, width),
        "dense": tokens.ndim == 3
        and len(tokens) == 2
        and 0 <= first <= FIRST + getattr(get_vision_config(model.config), "num_register_tokens", 0),
    }
    if not found[config.features]:
        other = next((f"use {name}" for name, has in found.items() if has), f"known are {KNOWN.examples}")
        raise ConfigError(f"model.features: {config.features!r}: {kind} has no such features of each picture; {other}")


@torch.no_grad()
def _class_text_embeddings(
    model: Any, config: VisionConfig, classes: list[str], checkpoint: Path | None, weights: bool
) -> tuple[Tensor, Tensor]:
    """Return the classes' text embeddings (C, F), of length 1, and the factor of their cosines with a picture.

    Without `zero_shot` in the job: tensors of shapes (0, 0) and (). Raises ConfigError for a folder without a text tower,
    CheckpointError without a tokenizer.
    """
    if config.zero_shot is None:
        return torch.zeros(0, 0), torch.zeros(())
    if not hasattr(model, "text_model") or not hasattr(model, "logit_scale"):
        raise ConfigError(
            f"model.zero_shot: {config.zero_shot!r}: {model.config.model_type} has no text tower; leave it out, and a head of "
            "its own is trained"
        )
    if not weights:
        return torch.zeros(len(classes), _pooled_width(model, model.config.vision_config)), torch.zeros(())
    tokenizer = cast(Any, transformers_folder.load_tokenizer(checkpoint))
    longest = model.config.text_config.max_position_embeddings
    asked = [config.zero_shot.replace("{}", name) for name in classes]
    padding: Any = "max_length" if model.config.model_type.startswith("siglip") else "longest"  # as SigLIP was trained
    ids = tokenizer(asked, padding=padding, truncation=True, max_length=longest, return_tensors="pt")
    mask = {} if padding == "max_length" else {"attention_mask": ids.attention_mask}
    found = model.eval().get_text_features(input_ids=ids.input_ids, **mask).pooler_output
    if not torch.isfinite(found).all():
        raise CheckpointError(f"model.checkpoint: {checkpoint}: its text tower gives NaN or Inf; fetch it again")
    return F.normalize(found, dim=-1), model.logit_scale.exp().clamp(max=math.exp(10))


def save(target: Path, model: Any, config: VisionConfig, task: Any, tokenizer: Any) -> str:
    """See registry.Saved. Of a model with two towers only the vision tower is written.

    Head, projection and text embeddings are saved in a separate file.
    """
    asks, interpolates, kind = bool(len(model.texts)), model.has_interpolation_argument, model.config.model_type
    own = get_vision_config(model.config)
    side = config.image_size // own.patch_size
    head, texts, scale = model.head, model.texts, model.text_scale
    transformers_folder.restore_class(model, "head", "pooled", *TEXTS)
    projection = getattr(model, "visual_projection", None)
    behind = {
        "head.weight": head.weight,
        "head.bias": head.bias,
        **({"projection": projection.weight} if projection is not None else {}),
        **({"texts": scale * texts} if asks else {}),
    }
    save_pretrained(target, getattr(model, "vision_model", model))
    save_head(target, behind)
    more = ", interpolate_pos_encoding=True" if interpolates and own.image_size != config.image_size else ""
    code = _LOAD.format(
        file=HEAD_FILE,
        mean=list(config.pixel_normalization[0]),
        std=list(config.pixel_normalization[1]),
        patches=_PATCHES.format(side=side, patch=own.patch_size) if kind == "siglip2" else "",
        size=config.image_size,
        outputs=head.out_features,
        inputs=f"**inputs({_PIXELS})" if kind == "siglip2" else f"pixel_values={_PIXELS}{more}",
        pooled="pooled = output.pooler_output" + (' @ behind["projection"].T' if projection is not None else ""),
        features=f"output.last_hidden_state[:, -{side**2}:].mean(1)" if config.features == "dense" else "pooled",
        answer='F.linear(features, behind["head.weight"], behind["head.bias"])'
        + (' + F.normalize(pooled, dim=-1) @ behind["texts"].T' if asks else ""),
    )
    return page(f"`AutoModel` loads the encoder; what stands behind it is {HEAD_FILE}.", code)
