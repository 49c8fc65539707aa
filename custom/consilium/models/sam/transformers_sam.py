"""SAM and its successors (SAM 2, SAM 3's tracker, SAM-HQ) by `transformers`' classes for mask generation, from a folder.

All of them have the same names for pictures, boxes and points and the same form of masks, so one forward serves them all. Layer
names are those of `transformers`, so plain PEFT loads exported adapters.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForMaskGeneration, PreTrainedModel

from consilium.core.errors import ConfigError
from consilium.models import transformers_folder
from consilium.models.architecture import require_multiple
from consilium.models.registry import pattern_of
from consilium.models.sam import SamConfig
from consilium.models.sam.network import (
    Prompt,
    absolute_positions,
    fill_missing_boxes,
    fill_missing_points,
    relative_positions,
    require_prompts,
)
from consilium.models.targets import layers_of
from consilium.models.weight_files import page, save_pretrained

KNOWN = transformers_folder.Known("promptable segmentation model", "sam, sam2, sam_hq, sam3_tracker")
RESIZED = ("sam", "sam_hq")
"""Architectures whose position embeddings are interpolated for pictures of another size."""
MOST_CLASSES = 3
"""Masks that a published SAM has without a box: whole, part, sub-part."""
_DECODER_ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj", "o_proj")
_LOAD = """import torch
import torch.nn.functional as F
from transformers import AutoModelForMaskGeneration

sam = AutoModelForMaskGeneration.from_pretrained(".", dtype=torch.float32).eval()
mean = 255 * torch.tensor({mean}).view(3, 1, 1)
std = 255 * torch.tensor({std}).view(3, 1, 1)


@torch.no_grad()
def logits(images{argument}):
    \"\"\"Map RGB pictures (N, 3, {size}, {size}) in 0..255{about} to mask logits (N, {classes}, {size}, {size}).\"\"\"
    masks = sam(pixel_values=(images - mean) / std, {more}multimask_output={several}).pred_masks
    return F.interpolate({part}, ({size}, {size}), mode="bilinear", align_corners=False)
"""
_GIVEN = {
    "none": ("", ""),
    "box": (" and boxes (N, C, 4)", "input_boxes=prompts, "),
    "point": (
        " and points (N, C, 2)",
        "input_points=prompts[:, :, None], input_labels=torch.ones_like(prompts[:, :, :1], dtype=torch.int64), ",
    ),
}
"""An exported page's words about prompts, and its arguments for them."""
_OWN = "masks.diagonal(dim1=1, dim2=2).movedim(-1, 1)"


class Promptable(PreTrainedModel):
    """Methods that `build_promptable` adds to the model's own class: pictures and prompts in, mask logits out."""

    pixel_mean: Tensor
    pixel_std: Tensor
    count: int
    prompt: Prompt

    def forward(self, images: Tensor, prompts: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Map RGB images (N, 3, S, S) in 0..255 to mask logits (N, C, S, S).

        `prompts`, in pixels, are needed if the model was built for them. Boxes are (N, C, 4), xyxy; a NaN row means the whole
        image. Points are (N, C, 2), xy; a NaN row means no point. Without boxes, one class uses the model's single mask; two or
        three classes use the first of its several masks. Raises ConfigError if prompts are missing.
        """
        given: dict[str, Any] = {"pixel_values": (images - self.pixel_mean) / self.pixel_std}
        if self.prompt == "box":
            given["input_boxes"] = fill_missing_boxes(require_prompts(prompts, "box"), images.shape[-1])
        if self.prompt == "point":
            points, labels = fill_missing_points(require_prompts(prompts, "point"))
            given |= {"input_points": points[:, :, None], "input_labels": labels[:, :, None]}
        several = self.prompt != "box" and self.count > 1
        masks, own = super().forward(**given, multimask_output=several).pred_masks, torch.arange(self.count)
        low = masks[:, 0, : self.count] if self.prompt == "none" else masks[:, own, own if several else 0]
        return F.interpolate(low, images.shape[-2:], mode="bilinear", align_corners=False)


def build_promptable(
    config: SamConfig, checkpoint: Path | None, classes: int, prompt: Prompt, weights: bool, use_checkpointing: bool
) -> PreTrainedModel:
    """Return the folder's model, in evaluation mode; `weights=False` lays it out only.

    Raises CheckpointError for a missing, damaged or other checkpoint, ConfigError for an architecture, a size or a number of
    classes that does not fit.
    """
    attention = {"original": "eager", "fused": "sdpa"}[config.attention]
    model: Any = transformers_folder.build(
        AutoModelForMaskGeneration, checkpoint, config.config, weights, KNOWN, attn_implementation=attention
    )
    transformers_folder.require_no_running_means(model, model.config.model_type)
    transformers_folder.require_normalization(checkpoint if weights else None, *config.pixel_normalization)
    most = 1 if model.config.model_type == "sam_hq" else MOST_CLASSES
    if classes > most and prompt != "box":
        raise ConfigError(
            f"task.classes: {classes} without boxes; model_type {model.config.model_type!r} has {most} at most; use "
            "task.prompt: box, or one of Meta's variants"
        )
    if config.image_size != model.prompt_encoder.input_image_size:
        _resize(model, config.image_size)
    if hasattr(model.mask_decoder, "dynamic_multimask_via_stability"):  # it would choose another mask picture by picture
        model.config.mask_decoder_config.dynamic_multimask_via_stability = False
        model.mask_decoder.dynamic_multimask_via_stability = False
    transformers_folder.register_normalization(model, config.pixel_normalization)
    model.count, model.prompt = classes, prompt
    transformers_folder.extend_class(model, Promptable)
    return transformers_folder.set_evaluation_mode(model, use_checkpointing)


def _resize(model: Any, side: int) -> None:
    """Let a SAM take pictures of another size, in place: its position embeddings are interpolated.

    Raises ConfigError for a size that is not a multiple of its patch, and for SAM 2 and 3.
    """
    native, kind = model.prompt_encoder.input_image_size, model.config.model_type
    if kind not in RESIZED:
        raise ConfigError(
            f"model.image_size: {side}: this folder's model ({kind}) takes pictures of {native} pixels; use {native}"
        )
    vision, prompts = model.config.vision_config, model.config.prompt_encoder_config
    patch = vision.patch_size
    require_multiple(side, patch, f"the patch size {patch}")
    encoder, grid = model.vision_encoder, side // patch
    with torch.no_grad():
        if encoder.pos_embed is not None:
            encoder.pos_embed = nn.Parameter(absolute_positions(encoder.pos_embed, (grid, grid)))
        for index in vision.global_attn_indexes if vision.use_rel_pos else ():
            attention = encoder.layers[index].attn
            for name in ("rel_pos_h", "rel_pos_w"):
                setattr(attention, name, nn.Parameter(relative_positions(getattr(attention, name), 2 * grid - 1)))
    encoder.image_size = vision.image_size = prompts.image_size = side
    encoder.patch_embed.image_size, encoder.patch_embed.num_patches = (side, side), grid**2
    prompts.image_embedding_size = grid
    model.prompt_encoder.input_image_size, model.prompt_encoder.image_embedding_size = side, (grid, grid)


def pattern(name: str, model: nn.Module) -> str:
    """Return the pattern of a named set of layers: encoder and mask decoder by what layers do. Raises ConfigError."""
    encoder = layers_of(model, "vision_encoder")
    decoder = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith("mask_decoder.transformer.")]
    attention = [layer for layer in decoder if layer.rpartition(".")[2] in _DECODER_ATTENTION]
    if name == "qv":
        apart = [n for n in encoder.inputs if n.endswith((".q_proj", ".v_proj"))]
        if not apart:
            raise ConfigError(
                "adapter.targets: 'qv': query and value have no layers of their own in this folder's encoder; use paper, "
                "encoder-qkv or all-linear"
            )
        return pattern_of(apart + [n for n in attention if n.endswith((".q_proj", ".v_proj"))])
    sets = {
        "paper": encoder.inputs + attention,
        "encoder-qkv": encoder.inputs,
        "all-linear": encoder.attention + encoder.mlp + decoder,
    }
    return pattern_of(sets[name])


def save(target: Path, model: Any, config: SamConfig) -> str:
    """See registry.Saved."""
    prompt, several = model.prompt, model.prompt != "box" and model.count > 1
    about, more = _GIVEN[prompt]
    part = f"masks[:, 0, :{model.count}]" if prompt == "none" else _OWN if several else "masks[:, :, 0]"
    mean, deviation = config.pixel_normalization
    code = _LOAD.format(
        mean=list(mean), std=list(deviation), size=config.image_size, classes=model.count, several=several,
        argument=", prompts" if about else "", about=about, more=more, part=part,
    )  # fmt: skip
    transformers_folder.restore_class(model)
    save_pretrained(target, model)
    return page("A `transformers` folder: `AutoModelForMaskGeneration` loads it.", code)
