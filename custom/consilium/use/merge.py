"""Merging an adapter into its base's weights, and checking that an exported model has the same logits as ours."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from consilium.adapters import adapter_state
from consilium.adapters.strategy_modules import merge_shift
from consilium.config.job import JobConfig
from consilium.core.errors import CheckpointError, ConfigError
from consilium.models.model_writer import WEIGHTS, save_weights
from consilium.models.registry import MODELS
from consilium.tasks.segmentation import prompt_kind_of

# probe -----------------------------------------------------------------------------------------------------------------
# Checks that an exported model has the logits of ours: the inputs, and the rounding errors that are allowed.

ROUNDING = 2.0**-24
"""The relative rounding error of one operation in float32."""
SAMPLES, TOKENS = 2, 16
Inputs = dict[str, Tensor]


def random_inputs(config: JobConfig, tokenizer: Any) -> Inputs:
    """Return random inputs by name, the same in every process: pictures, with prompts if the task has them; or token ids."""
    generator = torch.Generator().manual_seed(0)
    if tokenizer is not None:
        ids = torch.randint(len(tokenizer), (SAMPLES, TOKENS), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    side = config.model.image_side
    images = torch.randint(256, (SAMPLES, 3, side, side), generator=generator).float()
    if (kind := prompt_kind_of(config.task)) is None:
        return {"images": images}
    shape = SAMPLES, len(config.task.classes), len(kind.numbers) // 2, 2  # type: ignore[attr-defined]
    corners = torch.rand(shape, generator=generator).sort(2).values * (side - 1)
    return {"images": images, "prompts": corners.flatten(2)}


@torch.no_grad()
def logits_of(model: Callable[..., Any], inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the model's logits as float32 on the CPU."""
    found = model(**inputs)
    return getattr(found, "logits", found).detach().float().cpu()


def tolerance(model: nn.Module, wanted: Tensor) -> float:
    """Return by how much an export's logits may differ from `wanted`, the model's logits.

    The rounding error of a sum of n products is about sqrt(n) x 2^-24 of its size, in any order. The errors of successive
    layers add up. So the tolerance is: layers x sqrt(widest layer) x 2^-24 x the largest logit (at least 1).
    """
    widths = [parameter[0].numel() for parameter in model.parameters() if parameter.ndim > 1]
    return len(widths) * sqrt(max(widths, default=1)) * ROUNDING * max(1.0, float(wanted.abs().max()))


def require_equal(what: str, model: nn.Module, wanted: Tensor, found: Tensor) -> float:
    """Return the largest difference of the logits. Raises CheckpointError if it is more than rounding, see `tolerance`."""
    difference, most = float((found - wanted).abs().max()), tolerance(model, wanted)
    if found.shape != wanted.shape or not difference <= most:
        raise CheckpointError(
            f"--format {what}: its logits differ by {difference:.2g} from the model's, over {most:.2g}, so nothing was "
            "written; please report this with the job.yaml"
        )
    return difference


# merge -----------------------------------------------------------------------------------------------------------------


def check(config: JobConfig) -> None:
    """Raise ConfigError for an adapter that cannot be merged into its base's weights."""
    if config.adapter_kind.merge is None:
        raise ConfigError(
            f"--format merged: adapter.kind {config.adapter.kind!r} adds layers that the base does not have, so there is "
            "nothing to merge into; use bundle or onnx"
        )


def merge(model: nn.Module, config: JobConfig) -> None:
    """Merge the adapter into the base's layers and remove it, in place. Raises ConfigError if that is not possible."""
    check(config)
    if blocks := adapter_state.left_out_modules(model):
        raise ConfigError(
            f"--format merged: the model runs without {blocks[0]!r}, which the base's own code would run; use bundle or onnx"
        )
    if found := adapter_state.shared_weight(model, (name.rpartition(".")[0] for name in adapter_state.tensors(model))):
        raise ConfigError(
            f"--format merged: {found[0]!r} shares its weight with {found[1]!r}, which a merge would change too; use peft"
        )
    merge_shift(model, MODELS[config.model.name])  # it may refuse, so it comes first
    assert config.adapter_kind.merge is not None  # as `check` has found
    config.adapter_kind.merge(model)


def merge_if_possible(model: nn.Module, config: JobConfig) -> None:
    """Merge the adapter in place if that is possible; otherwise leave the model unchanged. The logits do not change."""
    with suppress(ConfigError):
        merge(model, config)


def merge_and_write(folder: Path, model: nn.Module, config: JobConfig, tokenizer: Any) -> tuple[str, float]:
    """Merge the model in place and write it. Return (how to load it, in Markdown; largest difference from the model's logits).

    Raises ConfigError, CheckpointError.
    """
    inputs, base = random_inputs(config, tokenizer), MODELS[config.model.name]
    wanted = logits_of(model, inputs)
    merge(model, config)
    difference = require_equal("merged", model, wanted, logits_of(model, inputs))
    if base.save is not None:
        return base.save(folder, model, config.model, config.task, tokenizer), difference
    save_weights(folder, model)
    return f"{WEIGHTS} is the state dict of model {config.model.name!r}, by its own names.", difference
