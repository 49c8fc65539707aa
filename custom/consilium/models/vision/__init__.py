"""Vision encoders of `transformers` by local folder, with a trained head, for classification."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

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
    zero_shot: Annotated[
        Annotated[str, Field(max_length=256)] | None,
        Field(
            description='a text with {} for the class name, such as "a picture of {}", for a folder with a text tower and a '
            "tokenizer: the frozen model's zero-shot logits are then added to those of the head, which starts at zero"
        ),
    ] = None

    apart: ClassVar[tuple[str, ...]] = (
        "clip", "clip_vision_model", "siglip", "siglip2", "dinov2", "dinov2_with_registers", "dinov3_vit", "vit",
    )  # fmt: skip

    @field_validator("zero_shot")
    @classmethod
    def _check_zero_shot(cls, value: str | None) -> str | None:
        if value is not None and value.count("{}") != 1:
            raise ValueError("a text with {} once, in whose place the class stands")
        return value


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
