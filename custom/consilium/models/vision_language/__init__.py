"""Vision-language models of `transformers` by local folder: a picture and a text in, a text out."""

from typing import Annotated, Any, Literal

from pydantic import Field

from consilium.core.lazy import lazy
from consilium.models.architecture import PictureFolderConfig, named_sets
from consilium.models.registry import Cut, ModelKind

TOWER = "language_model"


class VisionLanguageConfig(PictureFolderConfig):
    """A frozen vision-language model, for answers about pictures: Qwen-VL, PaliGemma, Gemma 3 and MedGemma, LLaVA.

    Adapters go into its language tower.
    """

    name: Literal["vision_language"]
    variant: Annotated[Literal["folder"], Field(description="a `folder` of `transformers`")]
    max_length: Annotated[int, Field(ge=8, le=131072, description="the most tokens of picture, prompt and answer together")] = (
        1024
    )

    def check_per_sample_gradients(self) -> None:
        """See ModelConfig. Raises ValueError."""
        raise ValueError(
            "model.name: 'vision_language' is not known to keep records apart for privacy.unit record; use unit site"
        )


def _feature_point(model: Any) -> Cut:
    """Return the cut after the language tower's last norm, before the output embedding (N, T, D)."""
    return Cut(model.model.language_model.norm, model.get_output_embeddings().in_features, -1)


_NETWORK = "consilium.models.vision_language.network"
VISION_LANGUAGE = ModelKind(
    VisionLanguageConfig,
    "report",
    lazy(f"{_NETWORK}:build"),
    named_sets(TOWER),
    lazy(f"{_NETWORK}:tokenizer_of"),
    _feature_point,
    lazy(f"{_NETWORK}:save"),
)
