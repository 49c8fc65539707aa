"""Vision-language models of `transformers`, under their own names, with a method that makes their inputs of pictures."""

from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from consilium.models import folder
from consilium.models.export import save_pretrained
from consilium.models.vision_language.layout import LAYOUTS, Picture, picture_of

if TYPE_CHECKING:
    from consilium.models.vision_language import VisionLanguageConfig

KNOWN = folder.Known("vision-language model", ", ".join(LAYOUTS))
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
    """What `build_vision_language` makes of a model, beside the model's own class."""

    pixel_mean: Tensor
    pixel_std: Tensor

    def see(self, input_ids: Tensor, attention_mask: Tensor, images: Tensor, answers: Tensor) -> dict[str, Tensor]:
        """Return the model's inputs of token ids and mask (N, T), RGB images (N, 3, S, S) in 0..255, one a text, and which
        tokens belong to answers (N, T) bool.
        """
        pixels = (images - self.pixel_mean) / self.pixel_std
        inputs = LAYOUTS[self.config.model_type][1](self.config, input_ids, pixels, answers)
        return {"input_ids": input_ids, "attention_mask": attention_mask} | inputs

    def read(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Return the model's inputs of texts alone, with kinds of tokens where training needs them."""
        kinds = (
            {"token_type_ids": torch.zeros_like(input_ids)} if "token_type_ids" in signature(self.forward).parameters else {}
        )
        return {"input_ids": input_ids, "attention_mask": attention_mask} | kinds


def picture(config: "VisionLanguageConfig") -> Picture:
    """Return how the job's model takes a picture. Raises ConfigError."""
    return picture_of(folder.shape_of(config.config or {}, AutoModelForImageTextToText, KNOWN), config.image_size)


def build_vision_language(
    config: "VisionLanguageConfig", checkpoint: Path | None, weights: bool, use_checkpointing: bool
) -> PreTrainedModel:
    """Return the folder's model, in evaluation mode; `weights=False` lays it out only.

    Raises CheckpointError for a missing, damaged or other checkpoint, ConfigError for an architecture or a size that does not
    fit.
    """
    model: Any = folder.build(AutoModelForImageTextToText, checkpoint, config.config, weights, KNOWN)
    picture_of(model.config, config.image_size)
    if weights:
        folder.require_pixels(checkpoint, *config.pixels)
    for name, values in zip(("pixel_mean", "pixel_std"), config.pixels, strict=True):
        model.register_buffer(name, 255 * torch.tensor(values).view(3, 1, 1), persistent=False)
    folder.answer_plainly(model)
    if use_checkpointing:
        folder.use_checkpointing(model)
    model.__class__ = type(f"Seeing{type(model).__name__}", (Seeing, type(model)), {})
    return model.eval()


def save(folder: Path, model: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    """See Saved."""
    end = tokenizer.eos_token_id
    pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    for name in ("pixel_mean", "pixel_std"):
        delattr(model, name)
    model.__class__ = type(model).__mro__[2]
    save_pretrained(folder, model)
    tokenizer.save_pretrained(folder)
    about = "A `transformers` folder with its tokenizer, in 32 bits. The base's preprocessor_config.json belongs beside it."
    return f"{about}\n\n```python\n{_LOAD}```\n"
