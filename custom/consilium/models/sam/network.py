"""SAM (Kirillov et al., ICCV 2023) by the segment-anything package: Meta's names; batches, several classes, boxes, points."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from segment_anything.modeling import ImageEncoderViT, MaskDecoder, PromptEncoder, Sam, TwoWayTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpointed

from consilium.core.errors import CheckpointError, ConfigError
from consilium.core.lazy import lazy
from consilium.models.architecture import refuse_adapter, require_multiple
from consilium.models.sam import SamConfig, med2d
from consilium.models.sam.attention import use_fused
from consilium.models.weight_files import load_tensors

FOLDER_MODELS = "consilium.models.sam.transformers_sam"
"""Loads `transformers`, which Meta's layout does without."""
TINY_WEIGHTS = Path(__file__).parent.parent / "weights" / "tiny_sam.safetensors"
Prompt = Literal["none", "box", "point"]
"""What a SAM is given for every class, in pixels. A row of NaN is a missing prompt."""
MASK_TOKENS = 4  # of every published SAM: one for a single mask, three for whole, part, sub-part


@dataclass(frozen=True)
class Shape:
    """Sizes of a variant: the `patch` in pixels; `prompt` is the decoder's width; `adapted`: see med2d.py."""

    width: int
    depth: int
    heads: int
    global_blocks: tuple[int, ...]
    patch: int = 16
    window: int = 14
    prompt: int = 256
    decoder_mlp: int = 2048
    decoder_heads: int = 8
    adapted: bool = False


SHAPES: dict[str, Shape] = {
    "vit_b": Shape(768, 12, 12, (2, 5, 8, 11)),
    "vit_l": Shape(1024, 24, 16, (5, 11, 17, 23)),
    "vit_h": Shape(1280, 32, 16, (7, 15, 23, 31)),
    "tiny": Shape(128, 4, 4, (1, 3), 8, 8, 64, 256, 4),
    "med2d": Shape(768, 12, 12, (2, 5, 8, 11), adapted=True),
}


class PromptedSam(Sam):
    """Meta's Sam with a differentiable forward for batches.

    `mask_tokens`: the decoder's mask token for each class. One class uses token 0; two or three use tokens 1, 2, 3 (SAM's
    whole, part, sub-part); more use tokens 1 .. C of a decoder that was widened for them.
    """

    mask_tokens: list[int]
    prompt: Prompt
    use_checkpointing: bool

    def forward(self, images: Tensor, prompts: Tensor | None = None, embedding: Tensor | None = None) -> Tensor:
        """Map RGB images (N, 3, S, S) in 0..255 to mask logits (N, C, S, S).

        `embedding`: the images' embeddings, if known. `prompts`, in pixels, are needed if the model was built for them; each
        class is then decoded with its own prompt. Boxes (N, C, 4), xyxy, use token 0 (the SAM-Med2D setting); a NaN row means
        the whole image. Points (N, C, 2), xy, use the class's own token, because a point in a part is also in the whole; a NaN
        row means no point. Raises ConfigError if prompts are missing.
        """
        if embedding is None:
            embedding = self.embed(images)
        low = self.decode_prompts(embedding, prompts)
        return F.interpolate(low, images.shape[-2:], mode="bilinear", align_corners=False)

    def embed(self, images: Tensor) -> Tensor:
        """Map RGB images (N, 3, S, S) in 0..255 to embeddings (N, prompt width, S / patch, S / patch)."""
        return self.encode_normalized((images - self.pixel_mean) / self.pixel_std)

    def encode_normalized(self, images: Tensor) -> Tensor:
        """Map normalized images (N, 3, S, S) to embeddings (N, prompt width, S / patch, S / patch)."""
        encoder = self.image_encoder
        hidden = encoder.patch_embed(images) + encoder.pos_embed
        for block in encoder.blocks:
            saving = self.use_checkpointing and self.training
            hidden = checkpointed(block, hidden, use_reentrant=False) if saving else block(hidden)
        return encoder.neck(hidden.permute(0, 3, 1, 2))

    def decode_prompts(self, embedding: Tensor, prompts: Tensor | None) -> Tensor:
        """Map embeddings (N, C, h, w), and the model's kind of prompts, to low-resolution logits (N, K, 4h, 4w)."""
        if self.prompt == "none":
            return self.decode(embedding, None, self.mask_tokens)
        return self.decode_each_class(embedding, require_prompts(prompts, self.prompt))

    def decode(self, embedding: Tensor, prompts: Tensor | None, tokens: list[int]) -> Tensor:
        """Map embeddings (N, C, h, w) and boxes (N, 4), points (N, 2) or None to low-resolution logits (N, tokens, 4h, 4w).

        SAM's own `predict_masks` for N images with one prompt each; only the asked tokens' heads are computed.
        """
        decoder, count = self.mask_decoder, embedding.shape[0]
        encoder = self.prompt_encoder
        sparse, dense = encoder(points=None, boxes=None, masks=None)  # (N or 1, n, width), (N or 1, width, h, w)
        if prompts is not None and prompts.shape[-1] == 4:
            sparse = encoder(points=None, boxes=fill_missing_boxes(prompts, encoder.input_image_size[0]), masks=None)[0]
        elif prompts is not None:
            points, labels = fill_missing_points(prompts[:, None])
            place = encoder.pe_layer.forward_with_coords(points + 0.5, encoder.input_image_size)
            nothing = encoder.not_a_point_embed.weight[None].expand_as(place)
            point = torch.where(labels[..., None] == 1, place + encoder.point_embeddings[1].weight, nothing)
            sparse = torch.cat([point, nothing], 1)  # SAM's own padding of points without a box
        output = torch.cat([decoder.iou_token.weight, decoder.mask_tokens.weight]).expand(count, -1, -1)
        queries = torch.cat([output, sparse.expand(count, -1, -1)], dim=1)
        positions = self.prompt_encoder.get_dense_pe().expand(count, -1, -1, -1)
        hidden, source = decoder.transformer(embedding + dense, positions, queries)
        upscaled = decoder.output_upscaling(source.transpose(1, 2).view_as(embedding))
        heads = [decoder.output_hypernetworks_mlps[t](hidden[:, 1 + t]) for t in tokens]
        return torch.einsum("ntc,nchw->nthw", torch.stack(heads, dim=1), upscaled)

    def decode_each_class(self, embedding: Tensor, prompts: Tensor) -> Tensor:
        """Map embeddings (N, C, h, w) and a prompt for every class, (N, K, 4) or (N, K, 2), to logits (N, K, 4h, 4w)."""
        count, flat = prompts.shape[1], prompts.flatten(0, 1)
        tokens = self.mask_tokens if self.prompt == "point" else [0]
        low = self.decode(embedding.repeat_interleave(count, 0), flat, tokens).unflatten(0, prompts.shape[:2])
        own = torch.arange(count)
        return low[:, own, own] if self.prompt == "point" else low[:, :, 0]


def require_prompts(prompts: Tensor | None, kind: Prompt) -> Tensor:
    """Return the prompts. Raises ConfigError where there are none."""
    if prompts is None:
        raise ConfigError(f"task.prompt: {kind!r}: the model was given no {kind}; use prompt none, or give masks")
    return prompts


def fill_missing_boxes(boxes: Tensor, size: int) -> Tensor:
    """Return boxes (..., 4), xyxy, with each missing box replaced by the whole picture of `size` pixels."""
    return torch.where(boxes.isnan(), boxes.new_tensor([0, 0, size - 1, size - 1]).expand_as(boxes), boxes)


def fill_missing_points(points: Tensor) -> tuple[Tensor, Tensor]:
    """Return points (..., 2), xy, with 0 for missing ones, and labels (...): 1 for a point, SAM's -1 for a missing one."""
    known = ~points.isnan().any(-1, keepdim=True)
    return torch.where(known, points, torch.zeros_like(points)), torch.where(known[..., 0], 1, -1)


def build_sam(
    variant: Literal["tiny", "vit_b", "vit_l", "vit_h", "med2d"],
    checkpoint: Path | None,
    image_size: int,
    classes: int,
    prompt: Prompt = "none",
    attention: Literal["fused", "original"] = "fused",
    gradient_checkpointing: bool = False,
    weights: bool = True,
) -> PromptedSam:
    """Return a SAM with its published weights, in evaluation mode.

    `checkpoint`: Meta's .pth for vit_*, SAM-Med2D's for med2d; None means the shipped weights and is for tiny only.
    An `image_size` other than the checkpoint's interpolates position embeddings. `weights=False` lays the model out only (also
    under torch.device("meta")).
    Raises CheckpointError for a missing, damaged or other file, ConfigError for an impossible size.
    """
    shape = SHAPES[variant]
    step = shape.patch * (1 + shape.adapted)  # SAM-Med2D's adapters halve the grid of patches
    require_multiple(image_size, step, f"{'twice the patch size,' if shape.adapted else 'the patch size'} {step}")
    state = _read(variant, checkpoint) if weights else None  # before the layout, which takes seconds
    # the numbers that are not in Shape are those of Meta's build_sam
    grid = image_size // shape.patch
    encoder = ImageEncoderViT(
        depth=shape.depth, embed_dim=shape.width, img_size=image_size, mlp_ratio=4, num_heads=shape.heads,
        patch_size=shape.patch, norm_layer=partial(nn.LayerNorm, eps=1e-6), qkv_bias=True, use_rel_pos=True,
        global_attn_indexes=shape.global_blocks, window_size=shape.window, out_chans=shape.prompt,
    )  # fmt: skip
    prompts = PromptEncoder(
        embed_dim=shape.prompt, image_embedding_size=(grid, grid), input_image_size=(image_size, image_size), mask_in_chans=16
    )
    transformer = TwoWayTransformer(
        depth=2, embedding_dim=shape.prompt, mlp_dim=shape.decoder_mlp, num_heads=shape.decoder_heads
    )
    decoder = MaskDecoder(
        num_multimask_outputs=MASK_TOKENS - 1 if prompt == "box" else max(classes, MASK_TOKENS - 1), transformer=transformer,
        transformer_dim=shape.prompt, iou_head_depth=3, iou_head_hidden_dim=shape.prompt,
    )  # fmt: skip
    model = PromptedSam(encoder, prompts, decoder, [123.675, 116.28, 103.53], [58.395, 57.12, 57.375])
    if shape.adapted:
        med2d.add_adapters(model)
    if state is not None:
        _fill(model, state, checkpoint or TINY_WEIGHTS)
    if attention == "fused":
        use_fused(model)
    model.mask_tokens = [0] if classes == 1 else list(range(1, classes + 1))
    model.prompt, model.use_checkpointing = prompt, gradient_checkpointing
    return model.eval()


def build(config: SamConfig, task: Any, checkpoint: Path | None, weights: bool, use_checkpointing: bool) -> nn.Module:
    """See registry.Build."""
    prompt: Prompt = getattr(task, "prompt", "none")
    classes = len(task.classes)
    if config.variant == "folder":
        made: nn.Module = lazy(f"{FOLDER_MODELS}:build_promptable")(
            config, checkpoint, classes, prompt, weights, use_checkpointing
        )
        return made
    return build_sam(
        config.variant, checkpoint, config.image_size, classes, prompt, config.attention, use_checkpointing, weights
    )


def layer_pattern(name: str, pattern: str, model: nn.Module) -> str:
    """Return the pattern of a target set: `pattern` for Meta's layout, else one that finds a folder's layers by function."""
    found: str = pattern if hasattr(model, "image_encoder") else lazy(f"{FOLDER_MODELS}:pattern")(name, model)
    return found


def _read(variant: str, checkpoint: Path | None) -> dict[str, Tensor]:
    """Return the state dict of a variant's checkpoint file."""
    if checkpoint is None and variant != "tiny":
        whose = "SAM-Med2D's sam-med2d_b.pth" if SHAPES[variant].adapted else f"Meta's sam_{variant}_*.pth"
        raise CheckpointError(f"model.checkpoint: missing; {variant} needs {whose} by path")
    path = checkpoint or TINY_WEIGHTS
    refuse_adapter(path)
    if not path.is_file():
        raise CheckpointError(f"model.checkpoint: {path}: no such file; give the path of the {variant} weights")
    state = med2d.unwrap_checkpoint(load_tensors(path))
    if not isinstance(state, dict) or "image_encoder.pos_embed" not in state:
        raise CheckpointError(f"model.checkpoint: {path}: holds no SAM (no image_encoder.pos_embed); give Meta's .pth")
    depth, adapted = sum(name.endswith("attn.qkv.weight") for name in state), med2d.MARK in state
    alike = (name for name, shape in SHAPES.items() if shape.depth == depth and shape.adapted == adapted)
    found = next((n for n in alike if SHAPES[n].width == state["image_encoder.pos_embed"].shape[-1]), "an unknown SAM")
    if found != variant:
        raise CheckpointError(f"model.checkpoint: {path}: looks like {found}, model.variant is {variant}; change one")
    return state


def _fill(model: PromptedSam, state: dict[str, Tensor], path: Path) -> None:
    """Load a state dict, interpolating position embeddings and widening the mask tokens where the model asks for it."""
    want = model.state_dict()
    state = _widen({name: _resize(name, tensor, want.get(name)) for name, tensor in state.items()}, want)
    if wrong := sorted(
        n for n in want.keys() | state.keys() if n not in want or n not in state or want[n].shape != state[n].shape
    ):
        raise CheckpointError(f"model.checkpoint: {path}: {wrong[0]} is missing or of another shape; fetch it again")
    model.load_state_dict(state)


def _resize(name: str, tensor: Tensor, want: Tensor | None) -> Tensor:
    """Interpolate absolute (1, h, w, C) and relative (2h - 1, d) position embeddings to the model's grid, as SAM-Med2D does."""
    if want is None or tensor.shape == want.shape:
        return tensor
    if name == "image_encoder.pos_embed":
        return absolute_positions(tensor, (want.shape[1], want.shape[2]))
    if ".rel_pos_" in name:
        return relative_positions(tensor, want.shape[0])
    return tensor


def absolute_positions(tensor: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return absolute position embeddings (1, h, w, C), interpolated to a grid of patches (h, w), as SAM-Med2D does."""
    return F.interpolate(tensor.float().permute(0, 3, 1, 2), grid, mode="bicubic", antialias=True).permute(0, 2, 3, 1)


def relative_positions(tensor: Tensor, length: int) -> Tensor:
    """Return relative position embeddings (2 h - 1, d), interpolated to another number of distances."""
    return F.interpolate(tensor.float().T[None], length, mode="linear")[0].T


def _widen(state: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state with a token and head for each class beyond the third: copies of tokens 1..3, plus seeded noise."""
    tokens, count = state["mask_decoder.mask_tokens.weight"], len(want["mask_decoder.mask_tokens.weight"])
    if count <= len(tokens):
        return state
    source = [1 + (i - 1) % (MASK_TOKENS - 1) for i in range(len(tokens), count)]
    noise = torch.randn(len(source), tokens.shape[1], generator=torch.Generator().manual_seed(0))
    wide = dict(state)
    wide["mask_decoder.mask_tokens.weight"] = torch.cat([tokens, tokens[source] + 0.5 * tokens.std() * noise])
    for index, origin in zip(range(len(tokens), count), source, strict=True):
        prefix = "mask_decoder.output_hypernetworks_mlps."
        for name in [n for n in state if n.startswith(f"{prefix}{origin}.")]:
            wide[name.replace(f"{prefix}{origin}.", f"{prefix}{index}.")] = state[name].clone()
    last = "mask_decoder.iou_prediction_head.layers.2."  # never used here, but part of the layout
    for part in ("weight", "bias"):
        head = state[last + part]
        wide[last + part] = torch.cat([head, head[source]])
    return wide
