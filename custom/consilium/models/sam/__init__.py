"""SAM, a frozen one, for segmentation."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from consilium.models.registry import Cut, Graph, ModelConfig, ModelKind, TargetSet

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn


class SamConfig(ModelConfig):
    """A frozen SAM, for segmentation. `checkpoint` may start with ${SITE}, the site's checkpoint folder."""

    name: Literal["sam"] = "sam"
    variant: Literal["tiny", "vit_b", "vit_l", "vit_h"]
    image_size: Annotated[int, Field(ge=16, le=4096, description="pixels, a multiple of the variant's patch size")]
    attention: Literal["fused", "original"] = "fused"

    @property
    def image_side(self) -> int:
        """See ModelConfig."""
        return self.image_size

    @property
    def padding(self) -> tuple[int, int, int]:
        """See ModelConfig."""
        return 124, 116, 104  # of 123.675, 116.28, 103.53


def _build(config: SamConfig, task: Any, checkpoint: Path | None, weights: bool, use_checkpointing: bool) -> "nn.Module":
    from consilium.models.sam.network import build_sam

    prompt: Literal["none", "box"] = getattr(task, "prompt", "none")
    kept = {"gradient_checkpointing": use_checkpointing, "weights": weights}
    return build_sam(config.variant, checkpoint, config.image_size, len(task.classes), prompt, config.attention, **kept)


def _split(model: "nn.Module") -> None:
    from consilium.models.sam.attention import split_qkv

    split_qkv(model)


def _fuse(values: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    from consilium.models.sam.attention import fuse_qkv

    return fuse_qkv(values)


def _cut(model: Any) -> Cut:
    """Return the cut behind the encoder's neck, whose output is the image embedding (N, C, h, w)."""
    neck = model.image_encoder.neck
    return Cut(neck, neck[0].out_channels, 1)


def _save(folder: Path, model: Any, config: SamConfig, task: Any, tokenizer: Any) -> str:
    from consilium.models.sam.saving import save

    return save(folder, model, config)


def _graphs(model: Any) -> "dict[str, Graph]":
    from consilium.models.sam.saving import graphs

    return graphs(model)


_ENCODER, _DECODER = r"image_encoder\.blocks\.\d+", r"mask_decoder\.transformer\..*"
_QV_DECODER = rf"{_DECODER}\.(q_proj|v_proj)"
TARGETS = {
    "paper": TargetSet(rf"{_ENCODER}\.attn\.qkv|{_DECODER}\.(q_proj|k_proj|v_proj|out_proj)"),
    "encoder-qkv": TargetSet(rf"{_ENCODER}\.attn\.qkv"),
    "qv": TargetSet(rf"{_ENCODER}\.attn\.qkv\.(q|v)|{_QV_DECODER}", _split, _fuse, rf"{_ENCODER}\.attn\.qkv|{_QV_DECODER}"),
    "all-linear": TargetSet(
        rf"{_ENCODER}\.(attn\.qkv|attn\.proj|mlp\.lin1|mlp\.lin2)"
        rf"|{_DECODER}\.(q_proj|k_proj|v_proj|out_proj|lin1|lin2)"
    ),
}
"""Layers to adapt, by full module names."""

SAM = ModelKind(SamConfig, "segmentation", _build, TARGETS, cut=_cut, save=_save, graphs=_graphs, encoder="image_encoder")
