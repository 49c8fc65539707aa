"""The kind `sam`: frozen SAM models for segmentation, their settings and sets of layers."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from consilium.core.lazy import lazy
from consilium.models.architecture import PictureFolderConfig
from consilium.models.registry import Cut, ModelKind, TargetSet


class SamConfig(PictureFolderConfig):
    """A frozen SAM for segmentation: Meta's, SAM-Med2D (`med2d`), or a `folder` of `transformers`.

    A folder may hold SAM (such as MedSAM), SAM 2, SAM 3 or SAM-HQ.
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


def _feature_point(model: Any) -> Cut:
    """Return the cut after the encoder's neck, whose output is the image embedding (N, C, h, w).

    Raises AttributeError for SAM 2 and 3, whose neck has several.
    """
    if not hasattr(model, "image_encoder"):
        return Cut(model.vision_encoder.neck, model.config.vision_config.output_channels, 1)
    neck = model.image_encoder.neck
    return Cut(neck, neck[0].out_channels, 1)


_NETWORK, _EXPORT, _ATTENTION = (f"consilium.models.sam.{name}" for name in ("network", "export", "attention"))


def _target_set(name: str, pattern: str) -> TargetSet:
    """Return a set of layers to adapt: for Meta's layout by a pattern, for a folder by the layers' function."""
    select = lazy(f"{_NETWORK}:layer_pattern", name, pattern)
    if name != "qv":
        return TargetSet(select=select)
    return TargetSet(select=select, prepare=lazy(f"{_ATTENTION}:split_qkv"), fuse=lazy(f"{_ATTENTION}:fuse_qv_factors"))


_ENCODER, _DECODER = r"image_encoder\.blocks\.\d+", r"mask_decoder\.transformer\..*"
TARGETS = {
    "paper": _target_set("paper", rf"{_ENCODER}\.attn\.qkv|{_DECODER}\.(q_proj|k_proj|v_proj|out_proj)"),
    "encoder-qkv": _target_set("encoder-qkv", rf"{_ENCODER}\.attn\.qkv"),
    "qv": _target_set("qv", rf"{_ENCODER}\.attn\.qkv\.(q|v)|{_DECODER}\.(q_proj|v_proj)"),
    "all-linear": _target_set(
        "all-linear",
        rf"{_ENCODER}\.(attn\.qkv|attn\.proj|mlp\.lin1|mlp\.lin2)"
        rf"|{_DECODER}\.(q_proj|k_proj|v_proj|out_proj|lin1|lin2)",
    ),
}
"""Layers to adapt, by full module names."""

SAM = ModelKind(
    SamConfig,
    "segmentation",
    lazy(f"{_NETWORK}:build"),
    TARGETS,
    cut=_feature_point,
    save=lazy(f"{_EXPORT}:save"),
    graphs=lazy(f"{_EXPORT}:graphs"),
    encoder="image_encoder",
)
