"""SAM by variant: Meta's layout (network.py, export.py), or a folder of `transformers` (transformers_sam.py)."""

from pathlib import Path
from typing import Any

from torch import nn

from consilium.core.lazy import lazy
from consilium.models.registry import Graph
from consilium.models.sam import SamConfig, export
from consilium.models.sam.network import Prompt, build_sam

_PROMPTABLE = "consilium.models.sam.transformers_sam"
"""Loads `transformers`, which Meta's layout does without."""


def build(config: SamConfig, task: Any, checkpoint: Path | None, weights: bool, use_checkpointing: bool) -> nn.Module:
    """See registry.Build."""
    prompt: Prompt = getattr(task, "prompt", "none")
    classes = len(task.classes)
    if config.variant == "folder":
        made: nn.Module = lazy(f"{_PROMPTABLE}:build_promptable")(
            config, checkpoint, classes, prompt, weights, use_checkpointing
        )
        return made
    return build_sam(
        config.variant, checkpoint, config.image_size, classes, prompt, config.attention, use_checkpointing, weights
    )


def save(folder: Path, model: Any, config: SamConfig, task: Any, tokenizer: Any) -> str:
    """See registry.Saved."""
    write = lazy(f"{_PROMPTABLE}:save") if config.variant == "folder" else export.save
    page: str = write(folder, model, config)
    return page


def graphs(model: Any) -> dict[str, Graph]:
    """Return encoder and decoder; a folder's model is one graph."""
    if hasattr(model, "image_encoder"):
        return export.graphs(model)
    return {"model": Graph(model, ("images",) if model.prompt == "none" else ("images", "prompts"), "logits")}


def layer_pattern(name: str, pattern: str, model: nn.Module) -> str:
    """Return the pattern of a target set: `pattern` for Meta's layout, else one that finds a folder's layers by function."""
    found: str = pattern if hasattr(model, "image_encoder") else lazy(f"{_PROMPTABLE}:pattern")(name, model)
    return found
