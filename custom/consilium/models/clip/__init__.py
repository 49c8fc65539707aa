"""CLIP-like vision towers with a trained head, for classification."""

from typing import Annotated, Any, Literal

from pydantic import Field

from consilium.core.lazy import lazy
from consilium.models.architecture import OPENAI, named_sets
from consilium.models.registry import Cut, ModelConfig, ModelKind


class ClipConfig(ModelConfig):
    """A frozen CLIP vision tower with a trained head, for classification."""

    name: Literal["clip"]
    variant: Annotated[
        Literal["tiny", "biomedclip"],
        Field(description="BiomedCLIP's published weights, or the `tiny` ones that ship with the package"),
    ]
    image_size: Annotated[int, Field(ge=16, le=4096, description="pixels, a multiple of the variant's patch size")]

    @property
    def padding(self) -> tuple[int, int, int]:
        """See ModelConfig."""
        red, green, blue = (round(255 * one) for one in OPENAI[0])
        return red, green, blue


def _feature_point(model: Any) -> Cut:
    """Return the point of the model before the classifier's head. Its features are the projected class token (N, F)."""
    return Cut(model.projection, model.head.in_features, -1)


CLIP = ModelKind(
    ClipConfig,
    "classification",
    lazy("consilium.models.clip.network:build"),
    named_sets("vision_model"),
    cut=_feature_point,
    save=lazy("consilium.models.clip.network:save"),
)
