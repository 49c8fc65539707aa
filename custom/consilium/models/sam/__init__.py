"""SAM, a frozen one, for segmentation."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from consilium.models.architecture import PictureFolderConfig
from consilium.models.registry import Cut, Graph, ModelKind, TargetSet

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from consilium.models.sam.prompts import Prompt


class SamConfig(PictureFolderConfig):
    """A frozen SAM, for segmentation: Meta's; SAM-Med2D (`med2d`); or `folder`, what `transformers` has of SAM (MedSAM), SAM 2,
    SAM 3 and SAM-HQ.
    """

    name: Literal["sam"] = "sam"
    variant: Annotated[
        Literal["tiny", "vit_b", "vit_l", "vit_h", "med2d", "folder"],
        Field(description="Meta's; SAM-Med2D's (`med2d`); a `folder` of `transformers`; `tiny`, which ships with the package"),
    ]
    attention: Annotated[
        Literal["fused", "original"],
        Field(description="`original` is Meta's code; `fused` is equal up to rounding and needs less memory"),
    ] = "fused"

    apart: ClassVar[tuple[str, ...]] = ("sam", "sam_hq", "sam2", "sam3_tracker")


def _build(config: SamConfig, task: Any, checkpoint: Path | None, weights: bool, use_checkpointing: bool) -> "nn.Module":
    prompt: Prompt = getattr(task, "prompt", "none")
    if config.variant == "folder":
        from consilium.models.sam.promptable import build_promptable

        return build_promptable(config, checkpoint, len(task.classes), prompt, weights, use_checkpointing)
    from consilium.models.sam.network import build_sam

    kept = {"gradient_checkpointing": use_checkpointing, "weights": weights}
    return build_sam(config.variant, checkpoint, config.image_size, len(task.classes), prompt, config.attention, **kept)


def _split(model: "nn.Module") -> None:
    from consilium.models.sam.attention import split_qkv

    split_qkv(model)


def _fuse(values: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    from consilium.models.sam.attention import fuse_qkv

    return fuse_qkv(values)


def _cut(model: Any) -> Cut:
    """Return the cut behind the encoder's neck, whose output is the image embedding (N, C, h, w).

    Raises AttributeError for SAM 2 and 3, whose neck has several.
    """
    if not hasattr(model, "image_encoder"):
        return Cut(model.vision_encoder.neck, model.config.vision_config.output_channels, 1)
    neck = model.image_encoder.neck
    return Cut(neck, neck[0].out_channels, 1)


def _save(folder: Path, model: Any, config: SamConfig, task: Any, tokenizer: Any) -> str:
    if config.variant == "folder":
        from consilium.models.sam import promptable

        return promptable.save(folder, model, config)
    from consilium.models.sam.export import save

    return save(folder, model, config)


def _graphs(model: Any) -> "dict[str, Graph]":
    if not hasattr(model, "image_encoder"):
        return {"model": Graph(model, ("images",) if model.prompt == "none" else ("images", "prompts"), "logits")}
    from consilium.models.sam.export import graphs

    return graphs(model)


def _set(name: str, pattern: str, split: bool = False) -> TargetSet:
    """Return a set of layers to adapt: of Meta's layout by a pattern, of a folder's by what layers do."""

    def select(model: "nn.Module") -> str:
        if hasattr(model, "image_encoder"):
            return pattern
        from consilium.models.sam import promptable

        return promptable.pattern(name, model)

    return TargetSet(select=select, prepare=_split, fuse=_fuse) if split else TargetSet(select=select)


_ENCODER, _DECODER = r"image_encoder\.blocks\.\d+", r"mask_decoder\.transformer\..*"
TARGETS = {
    "paper": _set("paper", rf"{_ENCODER}\.attn\.qkv|{_DECODER}\.(q_proj|k_proj|v_proj|out_proj)"),
    "encoder-qkv": _set("encoder-qkv", rf"{_ENCODER}\.attn\.qkv"),
    "qv": _set("qv", rf"{_ENCODER}\.attn\.qkv\.(q|v)|{_DECODER}\.(q_proj|v_proj)", split=True),
    "all-linear": _set(
        "all-linear",
        rf"{_ENCODER}\.(attn\.qkv|attn\.proj|mlp\.lin1|mlp\.lin2)"
        rf"|{_DECODER}\.(q_proj|k_proj|v_proj|out_proj|lin1|lin2)",
    ),
}
"""Layers to adapt, by full module names."""

SAM = ModelKind(SamConfig, "segmentation", _build, TARGETS, cut=_cut, save=_save, graphs=_graphs, encoder="image_encoder")
