"""Exports a SAM: weights with Meta's names, the code that loads them by `segment_anything`, and graphs of its two parts."""

from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from consilium.core.lazy import lazy
from consilium.models.registry import Graph
from consilium.models.sam import SamConfig, med2d
from consilium.models.sam.attention import join_qkv
from consilium.models.sam.network import FOLDER_MODELS, SHAPES, PromptedSam
from consilium.models.weight_files import page, save_weights

_CLASSES = """from functools import partial

import torch
from safetensors.torch import load_file
from segment_anything.modeling import ImageEncoderViT, MaskDecoder, PromptEncoder, Sam, TwoWayTransformer

sam = Sam(
    ImageEncoderViT(
        depth={depth}, embed_dim={width}, img_size={size}, mlp_ratio=4, num_heads={heads}, patch_size={patch},
        norm_layer=partial(torch.nn.LayerNorm, eps=1e-6), qkv_bias=True, use_rel_pos=True,
        global_attn_indexes={blocks}, window_size={window}, out_chans={prompt},
    ),
    PromptEncoder(
        embed_dim={prompt}, image_embedding_size=({grid}, {grid}), input_image_size=({size}, {size}), mask_in_chans=16
    ),
    MaskDecoder(
        num_multimask_outputs={masks}, transformer_dim={prompt}, iou_head_depth=3, iou_head_hidden_dim={prompt},
        transformer=TwoWayTransformer(depth=2, embedding_dim={prompt}, mlp_dim={mlp}, num_heads={decoder_heads}),
    ),
    pixel_mean=[123.675, 116.28, 103.53], pixel_std=[58.395, 57.12, 57.375],
)
"""
_LOADED = """sam.load_state_dict(load_file("model.safetensors"))
sam.eval()


def logits(images):
    \"\"\"Map RGB pictures (N, 3, {size}, {size}) in 0..255 to mask logits (N, {classes}, {size}, {size}).\"\"\"
    records = [{{"image": image, "original_size": ({size}, {size})}} for image in images]
    low = torch.cat([answer["low_res_logits"] for answer in sam(records, multimask_output={several})])
    return sam.postprocess_masks(low[:, :{classes}], ({size}, {size}), ({size}, {size}))
"""
_BOXED = """sam.load_state_dict(load_file("model.safetensors"))
sam.eval()


def logits(images, prompts):
    \"\"\"Map RGB pictures (N, 3, {size}, {size}) in 0..255 and boxes (N, C, 4) to logits (N, C, {size}, {size}).\"\"\"
    records = [{{"image": image, "original_size": ({size}, {size}), "boxes": own}} for image, own in zip(images, prompts)]
    low = torch.stack([answer["low_res_logits"][:, 0] for answer in sam(records, multimask_output=False)])
    return sam.postprocess_masks(low, ({size}, {size}), ({size}, {size}))
"""
_POINTED = """sam.load_state_dict(load_file("model.safetensors"))
sam.eval()


def logits(images, prompts):
    \"\"\"Map RGB pictures (N, 3, {size}, {size}) in 0..255 and points (N, C, 2) to logits (N, C, {size}, {size}).\"\"\"
    one = torch.ones({classes}, 1)
    records = [
        {{"image": image, "original_size": ({size}, {size}), "point_coords": own[:, None], "point_labels": one}}
        for image, own in zip(images, prompts)
    ]
    low = torch.stack([answer["low_res_logits"] for answer in sam(records, multimask_output={several})])
    own = low.diagonal(dim1=1, dim2=2).movedim(-1, 1)
    return sam.postprocess_masks(own, ({size}, {size}), ({size}, {size}))
"""


def save(folder: Path, model: Any, config: SamConfig, task: Any, tokenizer: Any) -> str:
    """See registry.Saved. The position embeddings are those of the job's image size."""
    if config.variant == "folder":
        written: str = lazy(f"{FOLDER_MODELS}:save")(folder, model, config)
        return written
    join_qkv(model)
    save_weights(folder, model)
    return loading_page(model, config)


def loading_page(model: PromptedSam, config: SamConfig) -> str:
    """Return the page that says how `segment_anything` loads the model."""
    shape, size = SHAPES[config.variant], config.image_size
    begin = _CLASSES.format(
        depth=shape.depth, width=shape.width, size=size, heads=shape.heads, patch=shape.patch, blocks=shape.global_blocks,
        window=shape.window, prompt=shape.prompt, grid=size // shape.patch, mlp=shape.decoder_mlp,
        masks=model.mask_decoder.num_multimask_outputs,
        decoder_heads=shape.decoder_heads,
    )  # fmt: skip
    begin += med2d.adapter_source_code() if shape.adapted else ""
    loaded = {"none": _LOADED, "box": _BOXED, "point": _POINTED}[model.prompt]
    code = begin + loaded.format(size=size, classes=len(model.mask_tokens), several=model.mask_tokens != [0])
    given = {"none": "", "box": "with a box for every class, ", "point": "with a point in every class, each "}[model.prompt]
    tokens = f"{given}by mask token{' 0' if model.prompt == 'box' else f's {model.mask_tokens}'}"
    whose = "SAM-Med2D's" if shape.adapted else "Meta's"
    layout = f"model.safetensors has the names of {whose} .pth. `segment_anything` loads it; that package needs torchvision."
    return page(f"{layout} The classes are decoded {tokens}.", code)


class Encoder(nn.Module):
    """The image encoder, with the normalization before it."""

    def __init__(self, sam: PromptedSam) -> None:
        super().__init__()
        self.sam = sam

    def forward(self, images: Tensor) -> Tensor:
        """Map RGB pictures (N, 3, S, S) in 0..255 to embeddings (N, C, h, w)."""
        return self.sam.encode_normalized((images - self.sam.pixel_mean) / self.sam.pixel_std)


class Decoder(nn.Module):
    """Prompt encoder and mask decoder, for pictures without a prompt, or with a box or a point for every class."""

    def __init__(self, sam: PromptedSam) -> None:
        super().__init__()
        self.sam, self.size = sam, sam.prompt_encoder.input_image_size

    def forward(self, embedding: Tensor, prompts: Tensor | None = None) -> Tensor:
        """Map embeddings (N, C, h, w) and boxes (N, classes, 4) or points (N, classes, 2) to mask logits (N, classes, S, S)."""
        low = self.sam.decode_prompts(embedding, prompts)
        return F.interpolate(low, self.size, mode="bilinear", align_corners=False)


def graphs(model: Any) -> dict[str, Graph]:
    """Return the encoder, which is large and runs once per picture, and the decoder; a folder's model is one graph."""
    prompts = () if model.prompt == "none" else ("prompts",)
    if not hasattr(model, "image_encoder"):
        return {"model": Graph(model, ("images", *prompts), "logits")}
    encoder, decoder = Graph(Encoder(model), ("images",), "embedding"), Graph(Decoder(model), ("embedding", *prompts), "logits")
    return {"image_encoder": encoder, "mask_decoder": decoder}
