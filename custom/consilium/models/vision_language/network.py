"""Vision-language models of `transformers`, with their own layer names and a method that makes inputs from pictures.

The placeholder tokens of a picture in the text and the layout of its pixels differ by architecture. Results equal those of
`transformers`' processors for Qwen2-VL, Qwen2.5-VL, Qwen3-VL, PaliGemma, Gemma 3 and LLaVA, for one picture per text and an
image size fixed by the job. So all pictures have the same number of tokens, and no processor is needed; most need torchvision.
"""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerBase

from consilium.core.errors import ConfigError
from consilium.models import transformers_folder
from consilium.models.architecture import require_multiple
from consilium.models.vision_language import VisionLanguageConfig
from consilium.models.weight_files import page, save_text_model

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class PictureTokens:
    """The tokens of a picture in a text: `ids`, in which `token` repeats, and the texts before and after.

    `leads`: whether the picture precedes the begin token of the text.
    """

    token: int
    ids: tuple[int, ...]
    before: str = ""
    after: str = ""
    leads: bool = False


def _qwen_tokens(config: Any, side: int) -> PictureTokens:
    sees = config.vision_config
    patch = sees.patch_size * sees.spatial_merge_size
    require_multiple(side, patch, f"{patch}, a patch of this model's tokens")
    count = (side // sees.patch_size // sees.spatial_merge_size) ** 2
    inner = (config.image_token_id,) * count
    return PictureTokens(config.image_token_id, (config.vision_start_token_id, *inner, config.vision_end_token_id))


def _paligemma_tokens(config: Any, side: int) -> PictureTokens:
    _require_native(side, config.vision_config)
    token = _token(config)
    return PictureTokens(token, (token,) * (side // config.vision_config.patch_size) ** 2, after="", leads=True)


def _gemma3_tokens(config: Any, side: int) -> PictureTokens:
    _require_native(side, config.vision_config)
    token = _token(config)
    inner = (token,) * config.mm_tokens_per_image
    return PictureTokens(token, (config.boi_token_index, *inner, config.eoi_token_index), "\n\n", "\n\n")


def _llava_tokens(config: Any, side: int) -> PictureTokens:
    _require_native(side, config.vision_config)
    token, whole = _token(config), config.vision_feature_select_strategy == "full"
    return PictureTokens(token, (token,) * ((side // config.vision_config.patch_size) ** 2 + whole), after="\n")


def _token(config: Any) -> int:
    found = getattr(config, "image_token_index", None)
    return config.image_token_id if found is None else found


def _require_native(side: int, vision_config: Any) -> None:
    if side != vision_config.image_size:
        raise ConfigError(
            f"model.image_size: {side}: this folder's model takes pictures of {vision_config.image_size} pixels; "
            f"use {vision_config.image_size}"
        )


def _qwen_vision_inputs(config: Any, ids: Tensor, pixels: Tensor, answers: Tensor) -> Inputs:
    sees = config.vision_config
    count, size = len(pixels), pixels.shape[-1] // sees.patch_size
    grid = torch.tensor([[1, size, size]], device=ids.device).expand(count, -1)
    kinds = (ids == config.image_token_id).int()
    return {"pixel_values": qwen_patches(pixels, sees), "image_grid_thw": grid, "mm_token_type_ids": kinds}


def qwen_patches(pixels: Tensor, vision_config: Any) -> Tensor:
    """Return (N * P, 3 * T * p * p) of pictures (N, 3, S, S): patches by merged block, each repeated as T frames."""
    patch, merge, frames = vision_config.patch_size, vision_config.spatial_merge_size, vision_config.temporal_patch_size
    count, blocks = len(pixels), pixels.shape[-1] // patch // merge
    parts = pixels.view(count, 3, blocks, merge, patch, blocks, merge, patch).permute(0, 2, 5, 3, 6, 1, 4, 7)
    still = parts.unsqueeze(6).expand(*parts.shape[:6], frames, patch, patch)
    return still.reshape(-1, 3 * frames * patch * patch)


def _plain_inputs(config: Any, ids: Tensor, pixels: Tensor, answers: Tensor) -> Inputs:
    if config.model_type == "llava":
        return {"pixel_values": pixels}
    # PaliGemma's picture and prompt see each other both ways
    kinds = answers if config.model_type == "paligemma" else ids == _token(config)
    return {"pixel_values": pixels, "token_type_ids": kinds.long()}


LAYOUTS: dict[str, tuple[Callable[[Any, int], PictureTokens], Callable[[Any, Tensor, Tensor, Tensor], Inputs]]] = {
    "qwen2_vl": (_qwen_tokens, _qwen_vision_inputs),
    "qwen2_5_vl": (_qwen_tokens, _qwen_vision_inputs),
    "qwen3_vl": (_qwen_tokens, _qwen_vision_inputs),
    "paligemma": (_paligemma_tokens, _plain_inputs),
    "gemma3": (_gemma3_tokens, _plain_inputs),
    "llava": (_llava_tokens, _plain_inputs),
}


def picture_tokens(config: Any, side: int) -> PictureTokens:
    """Return the tokens of a picture of `side` pixels for a `transformers` configuration. Raises ConfigError if unknown."""
    if config.model_type not in LAYOUTS:
        known = ", ".join(LAYOUTS)
        raise ConfigError(
            f"model.config: model_type {config.model_type!r} takes pictures in a way of its own; known are {known}"
        )
    return LAYOUTS[config.model_type][0](config, side)


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
