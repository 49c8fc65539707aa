"""Prompts of a SAM: none, or a box or a point for every class, in pixels. A row of NaN is a missing prompt."""

from typing import Literal

import torch
from torch import Tensor

from consilium.core.errors import ConfigError

Prompt = Literal["none", "box", "point"]


def require(prompts: Tensor | None, kind: Prompt) -> Tensor:
    """Return the prompts. Raises ConfigError where there are none."""
    if prompts is None:
        raise ConfigError(f"task.prompt: {kind!r}: the model was given no {kind}; use prompt none, or give masks")
    return prompts


def fill_missing_boxes(boxes: Tensor, size: int) -> Tensor:
    """Return boxes (..., 4), xyxy, with each missing box replaced by the whole picture of `size` pixels."""
    return torch.where(boxes.isnan(), boxes.new_tensor([0, 0, size - 1, size - 1]).expand_as(boxes), boxes)


def fill_missing_points(points: Tensor) -> tuple[Tensor, Tensor]:
    """Return points (..., 2), xy, with 0 for missing ones, and labels (...): 1 for a point, SAM's -1 for a missing one."""
    known = ~points.isnan().any(-1, keepdim=True)
    return torch.where(known, points, torch.zeros_like(points)), torch.where(known[..., 0], 1, -1)
