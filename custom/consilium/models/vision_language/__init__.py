"""Vision-language models of `transformers` by local folder: a picture and a text in, a text out."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from consilium.models.architecture import PictureFolderConfig, named_sets
from consilium.models.registry import Cut, ModelKind

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

TOWER = "language_model"


class VisionLanguageConfig(PictureFolderConfig):
    """A frozen vision-language model, for answers about pictures: Qwen-VL, PaliGemma, Gemma 3 and MedGemma, LLaVA.

    Adapters go into its language tower.
    """

    name: Literal["vision_language"]
    variant: Annotated[Literal["folder"], Field(description="a `folder` of `transformers`")]
    max_length: Annotated[
        int, Field(ge=8, le=131072, description="tokens of picture, prompt and answer together; tokens, the picture's included")
    ] = 1024

    def keep_apart(self) -> None:
        """See ModelConfig. Raises ValueError."""
        what = "is not known to keep records apart for privacy.unit record; use unit site"
        raise ValueError(f"model.name: 'vision_language' {what}")


def _build(
    config: VisionLanguageConfig, task: Any, checkpoint: Path | None, weights: bool, use_checkpointing: bool
) -> "nn.Module":
    from consilium.models.folder import require_positions
    from consilium.models.vision_language.network import build_vision_language

    model = build_vision_language(config, checkpoint, weights, use_checkpointing)
    require_positions(model, config.max_length, getattr(task, "max_new_tokens", 0))  # another task may write nothing
    return model


def _tokenizer(config: VisionLanguageConfig, checkpoint: Path | None) -> "PreTrainedTokenizerBase":
    from consilium.models.folder import load_tokenizer

    return load_tokenizer(checkpoint, config.config)


def _cut(model: Any) -> Cut:
    """Return the cut behind the language tower's last norm, before the output embedding (N, T, D)."""
    return Cut(model.model.language_model.norm, model.get_output_embeddings().in_features, -1)


def _save(folder: Path, model: Any, config: VisionLanguageConfig, task: Any, tokenizer: Any) -> str:
    from consilium.models.vision_language.network import save

    return save(folder, model, tokenizer)


VISION_LANGUAGE = ModelKind(VisionLanguageConfig, "report", _build, named_sets(TOWER), _tokenizer, _cut, _save)
