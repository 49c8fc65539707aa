"""Image classifiers on a vision encoder of `transformers`, under the encoder's own names: plain PEFT loads what is exported."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from consilium.core.errors import ConfigError
from consilium.models import transformers_folder
from consilium.models.architecture import require_multiple
from consilium.models.vision import VisionConfig
from consilium.models.weight_files import HEAD_FILE, page, save_pretrained, save_tensors

KNOWN = transformers_folder.Known("vision encoder", "clip, siglip, siglip2, dinov2, dinov3_vit, vit")
OURS = ("head", "pooled", "dense")
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
    return F.linear(features, behind["head.weight"], behind["head.bias"])
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
    dense: bool

    def forward(self, images: Tensor) -> Tensor:  # type: ignore[override]
        """Map RGB images (N, 3, S, S) in 0..255 to class logits (N, C)."""
        output = self.encoded((images - self.pixel_mean) / self.pixel_std)
        patches = self.patch_count(images.shape[-1])
        features = output.last_hidden_state[:, -patches:].mean(1) if self.dense else output.get("pooler_output")
        return self.head(self.pooled(features))  # type: ignore[no-any-return]

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
    transformers_folder.require_normalization(checkpoint if weights else None, *config.pixel_normalization)
    own = get_vision_config(model.config)
    patch = getattr(own, "patch_size", None)
    if not isinstance(patch, int) or not hasattr(own, "hidden_size"):
        raise ConfigError(
            f"model.config: model_type {model.config.model_type!r} is not a {KNOWN.what} of patches; known are {KNOWN.examples}"
        )
    require_multiple(config.image_size, patch, f"the patch size {patch}")
    for name in TEXT_PARTS:
        if hasattr(model, name):
            delattr(model, name)
    projection = getattr(model, "visual_projection", None)  # of a model with two towers, after the pooled output
    width = own.hidden_size
    if config.features != "dense" and isinstance(projection, nn.Linear):
        width = projection.out_features
    transformers_folder.add_head(model, OURS, width, task.outputs, KNOWN)
    model.dense = config.features == "dense"
    transformers_folder.register_normalization(model, config.pixel_normalization)
    transformers_folder.extend_class(model, Classifier)
    if not weights and model.config.model_type not in config.apart:
        _check_features(copy.deepcopy(model).to("meta"), config, width)
    return transformers_folder.set_evaluation_mode(model, use_checkpointing)


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


def save(target: Path, model: Any, config: VisionConfig, task: Any, tokenizer: Any) -> str:
    """See registry.Saved. Of a model with two towers only the vision tower is written. Head and projection get a file."""
    interpolates, kind = model.has_interpolation_argument, model.config.model_type
    own = get_vision_config(model.config)
    side = config.image_size // own.patch_size
    head, projection = model.head, getattr(model, "visual_projection", None)
    transformers_folder.restore_class(model, "head", "pooled")
    save_pretrained(target, getattr(model, "vision_model", model))
    behind = {} if projection is None else {"projection": projection.weight}
    save_tensors(target / HEAD_FILE, {"head.weight": head.weight, "head.bias": head.bias, **behind})
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
    )
    return page(f"`AutoModel` loads the encoder; what stands behind it is {HEAD_FILE}.", code)
