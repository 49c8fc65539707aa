"""Picture inputs by architecture: the placeholder tokens of a picture in the text, and the layout of its pixels.

Results equal those of `transformers`' processors for Qwen2-VL, Qwen2.5-VL, Qwen3-VL, PaliGemma, Gemma 3 and LLaVA, for one
picture per text and an image size fixed by the job. So all pictures have the same number of tokens, and no processor is
needed; most need torchvision.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from consilium.core.errors import ConfigError
from consilium.models.architecture import require_multiple

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


def _qwen_inputs(config: Any, ids: Tensor, pixels: Tensor, answers: Tensor) -> Inputs:
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
    "qwen2_vl": (_qwen_tokens, _qwen_inputs),
    "qwen2_5_vl": (_qwen_tokens, _qwen_inputs),
    "qwen3_vl": (_qwen_tokens, _qwen_inputs),
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
