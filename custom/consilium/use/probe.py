"""Whether a model handed on answers as ours: the same inputs, and how far apart two ways of adding up may lie."""

from collections.abc import Callable, Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from consilium.config.job import JobConfig
from consilium.core.errors import CheckpointError
from consilium.tasks.segmentation import prompts_of

ROUNDING = 2.0**-24
"""The relative error of one operation in 32 bits."""
SAMPLES, TOKENS = 2, 16
Inputs = dict[str, Tensor]


def inputs_of(config: JobConfig, tokenizer: Any) -> Inputs:
    """Return inputs by name, the same in every process: noise as pictures, prompts where the task has them; else token ids."""
    generator = torch.Generator().manual_seed(0)
    if tokenizer is not None:
        ids = torch.randint(len(tokenizer), (SAMPLES, TOKENS), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    side = config.model.image_side
    images = torch.randint(256, (SAMPLES, 3, side, side), generator=generator).float()
    if (kind := prompts_of(config.task)) is None:
        return {"images": images}
    shape = SAMPLES, len(config.task.classes), len(kind.numbers) // 2, 2  # type: ignore[attr-defined]
    corners = torch.rand(shape, generator=generator).sort(2).values * (side - 1)
    return {"images": images, "prompts": corners.flatten(2)}


@torch.no_grad()
def answer(model: Callable[..., Any], inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the model's logits, in 32 bits on the CPU."""
    found = model(**inputs)
    return getattr(found, "logits", found).detach().float().cpu()


def tolerance(model: nn.Module, wanted: Tensor) -> float:
    """Return by how much logits may differ from those `wanted`, which are the model's.

    A sum of n products is off by about sqrt(n) roundings of its size, whatever the order; those of the layers, which stand
    one behind the other, add up. So: layers x sqrt(widest) x 2^-24 x the largest logit.
    """
    widths = [parameter[0].numel() for parameter in model.parameters() if parameter.ndim > 1]
    return len(widths) * sqrt(max(widths, default=1)) * ROUNDING * max(1.0, float(wanted.abs().max()))


def require_equal(what: str, model: nn.Module, wanted: Tensor, found: Tensor) -> float:
    """Return the largest difference of logits. Raises CheckpointError where it is no rounding."""
    difference, most = float((found - wanted).abs().max()), tolerance(model, wanted)
    if found.shape != wanted.shape or not difference <= most:
        why = f"its logits differ by {difference:.2g} from the model's, over {most:.2g}"
        raise CheckpointError(f"--format {what}: {why}, so nothing was written; please report this with the job.yaml")
    return difference
