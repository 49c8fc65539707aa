"""Vision-language models of `transformers`, with their own layer names and a method that makes inputs from pictures."""

from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerBase

from consilium.models import transformers_folder
from consilium.models.model_writer import page, save_text_model
from consilium.models.vision_language import VisionLanguageConfig
from consilium.models.vision_language.image_inputs import LAYOUTS, PictureTokens, picture_tokens

KNOWN = transformers_folder.Known("vision-language model", ", ".join(LAYOUTS))
_LOAD = """import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForImageTextToText.from_pretrained(".", dtype=torch.float32).eval()


@torch.no_grad()
def logits(input_ids, attention_mask):
    \"\"\"Map token ids and mask (N, T) to logits (N, T, vocabulary). Pictures go to the model as usual.\"\"\"
    return model(input_ids=input_ids, attention_mask=attention_mask).logits
"""


class Seeing(PreTrainedModel):
    """Methods that `build` adds to the model's own class."""

    pixel_mean: Tensor
    pixel_std: Tensor

    def picture_inputs(self, input_ids: Tensor, attention_mask: Tensor, images: Tensor, answers: Tensor) -> dict[str, Tensor]:
        """Return the model's inputs from token ids and mask (N, T), RGB images (N, 3, S, S) in 0..255, one per text, and the
        mask of answer tokens (N, T) bool.
        """
        pixels = (images - self.pixel_mean) / self.pixel_std
        inputs = LAYOUTS[self.config.model_type][1](self.config, input_ids, pixels, answers)
        return {"input_ids": input_ids, "attention_mask": attention_mask} | inputs

    def text_inputs(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Return the model's inputs for texts without pictures, with token types if the model's forward takes them."""
        kinds = (
            {"token_type_ids": torch.zeros_like(input_ids)} if "token_type_ids" in signature(self.forward).parameters else {}
        )
        return {"input_ids": input_ids, "attention_mask": attention_mask} | kinds


def picture_tokens_of(config: VisionLanguageConfig) -> PictureTokens:
    """Return the tokens of a picture for the job's model. Raises ConfigError for an unknown architecture."""
    return picture_tokens(
        transformers_folder.transformers_config(config.config or {}, AutoModelForImageTextToText, KNOWN), config.image_size
    )


def build(
    config: VisionLanguageConfig, task: Any, checkpoint: Path | None, weights: bool, use_checkpointing: bool
) -> PreTrainedModel:
    """See registry.Build."""
    model: Any = transformers_folder.build(AutoModelForImageTextToText, checkpoint, config.config, weights, KNOWN)
    picture_tokens(model.config, config.image_size)
    transformers_folder.require_normalization(checkpoint if weights else None, *config.pixel_normalization)
    transformers_folder.register_normalization(model, config.pixel_normalization)
    transformers_folder.remove_generation_config(model)
    transformers_folder.extend_class(model, Seeing)
    transformers_folder.require_positions(
        model, config.max_length, getattr(task, "max_new_tokens", 0)
    )  # another task may write no answers
    return transformers_folder.set_evaluation_mode(model, use_checkpointing)


def tokenizer_of(config: VisionLanguageConfig, checkpoint: Path | None) -> PreTrainedTokenizerBase:
    """See registry.ModelKind."""
    return transformers_folder.load_tokenizer(checkpoint, config.config)


def save(target: Path, model: Any, config: VisionLanguageConfig, task: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    """See registry.Saved."""
    transformers_folder.restore_class(model)
    save_text_model(target, model, tokenizer)
    about = "A `transformers` folder with its tokenizer, in 32 bits. The base's preprocessor_config.json belongs beside it."
    return page(about, _LOAD)
