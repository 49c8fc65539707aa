"""An adapter merged into its base's weights, and the base written as its publisher lays it out."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from consilium.adapters import layers
from consilium.adapters.parts import merge_shift
from consilium.config.job import JobConfig
from consilium.core.errors import ConfigError
from consilium.models.export import WEIGHTS, save_weights
from consilium.models.registry import MODELS
from consilium.use.probe import answer, inputs_of, require_equal


def check(config: JobConfig) -> None:
    """Raise ConfigError for an adapter that no base can hold."""
    if config.adapter_kind.merge is None:
        what = f"adapter.kind {config.adapter.kind!r} adds layers that the base does not have"
        raise ConfigError(f"--format merged: {what}, so there is nothing to merge into; use bundle or onnx")


def merge(model: nn.Module, config: JobConfig) -> None:
    """Write what the adapter does into the base's layers and take it out, in place. Raises ConfigError."""
    check(config)
    if blocks := layers.left_out(model):
        what = f"the model runs without {blocks[0]!r}, which the base's own code would run"
        raise ConfigError(f"--format merged: {what}; use bundle or onnx")
    if found := layers.shared_weight(model, (name.rpartition(".")[0] for name in layers.tensors(model))):
        what = f"{found[0]!r} shares its weight with {found[1]!r}, which a merge would change too"
        raise ConfigError(f"--format merged: {what}; use peft")
    merge_shift(model, MODELS[config.model.name])  # it may refuse, so it comes first
    assert config.adapter_kind.merge is not None  # as `check` has found
    config.adapter_kind.merge(model)


def merge_if_possible(model: nn.Module, config: JobConfig) -> None:
    """Merge, in place, where a base can hold what the adapter does; else the model stays as it is, which answers the same."""
    with suppress(ConfigError):
        merge(model, config)


def write(folder: Path, model: nn.Module, config: JobConfig, tokenizer: Any) -> tuple[str, float]:
    """Write the merged model; return how to load it, in Markdown, and how far its logits are from the model's.

    The model is merged in place. Raises ConfigError.
    """
    inputs, base = inputs_of(config, tokenizer), MODELS[config.model.name]
    wanted = answer(model, inputs)
    merge(model, config)
    difference = require_equal("merged", model, wanted, answer(model, inputs))
    if base.save is not None:
        return base.save(folder, model, config.model, config.task, tokenizer), difference
    save_weights(folder, model)
    return f"{WEIGHTS} is the state dict of model {config.model.name!r}, by its own names.", difference
