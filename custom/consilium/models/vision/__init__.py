"""Vision encoders of `transformers` by local folder, with a trained head, for classification."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from consilium.core.lazy import lazy
from consilium.models.architecture import PictureFolderConfig, named_sets
from consilium.models.registry import ModelKind, head_feature_point


class VisionConfig(PictureFolderConfig):
    """A frozen vision encoder with a trained head, for classification: CLIP, SigLIP, DINOv2, DINOv3, RAD-DINO and the like."""

    name: Literal["vision"]
    variant: Annotated[Literal["folder"], Field(description="a `folder` of `transformers`")]
    features: Annotated[
        Literal["pooled", "dense"],
        Field(description="the features for the head: the encoder's own pooled output, or the mean over the picture's patches"),
    ] = "pooled"

    apart: ClassVar[tuple[str, ...]] = (
        "clip", "clip_vision_model", "siglip", "siglip2", "dinov2", "dinov2_with_registers", "dinov3_vit", "vit",
    )  # fmt: skip


_NETWORK = "consilium.models.vision.network"
VISION = ModelKind(
    VisionConfig,
    "classification",
    lazy(f"{_NETWORK}:build"),
    named_sets(),
    cut=head_feature_point,
    save=lazy(f"{_NETWORK}:save"),
    head_apart=True,
)
