"""Causal language models of `transformers`."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from consilium.models.registry import Cut, ModelConfig, ModelKind, TargetSet
from consilium.schema import LONGEST_TEXT

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from transformers import PreTrainedTokenizerBase

APART = ("llama", "mistral", "qwen2", "qwen3")
"""Language models (`model_type`) whose layers are known to keep the rows of a batch apart; experts and recurrences may not."""


class CausalLmConfig(ModelConfig):
    """A frozen causal language model: the tiny one, or `folder`, any of `transformers` by local path.

    `config` is the folder's config.json, because the server has no weights and lays the model out from it: its path, in whose
    place the tool that makes the job puts the contents, or these. `checkpoint` may start with ${SITE}, the site's checkpoint
    folder. `max_length`: tokens of prompt and answer together; longer prompts lose their middle.
    """

    name: Literal["causal_lm"]
    variant: Literal["tiny", "folder"]
    checkpoint: Annotated[str | None, Field(validate_default=True)] = None
    config: Annotated[dict[str, Any] | None, Field(validate_default=True)] = None
    max_length: Annotated[int, Field(ge=8, le=131_072, description="tokens")] = 512

    @field_validator("config", mode="before")
    @classmethod
    def _embedded(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError("a path, which only the tool that makes a job reads; submit the job by `consilium submit`")
        return value

    @field_validator("config")
    @classmethod
    def _bounded(cls, value: Any) -> Any:
        if value is not None:
            _check(value, "")
        return value if value is None else dict(sorted(value.items()))

    @field_validator("checkpoint", "config")
    @classmethod
    def _belongs_to_folder(cls, value: Any, info: ValidationInfo) -> Any:
        variant = info.data.get("variant")
        if value is None and variant == "folder":
            wanted = {
                "checkpoint": "the path of a transformers folder",
                "config": "the path of its config.json",
            }
            raise ValueError(f"{wanted[str(info.field_name)]}; variant folder needs both checkpoint and config")
        if value is not None and variant == "tiny":
            raise ValueError("none: the tiny model ships with the package; remove it, or use variant folder")
        return value

    def packs(self) -> bool:
        """See ModelConfig. A sliding window is its own mask, which one for several texts replaces."""
        shape = self.config or {"model_type": "llama"}
        window = shape.get("sliding_window") if shape.get("use_sliding_window", True) else None
        return shape.get("model_type") in APART and (window is None or window >= self.max_length)

    def keep_apart(self) -> None:
        """See ModelConfig. Raises ValueError."""
        if self.config is None:
            return
        if (kind := self.config.get("model_type")) not in APART:
            what = f"not known to keep records apart for privacy.unit record; use one of {', '.join(APART)}"
            raise ValueError(f"model.config.model_type: {kind!r}: {what}")
        if name := next((key for key, value in self.config.items() if "dropout" in key and value), None):
            what = "draws all masks of a batch at once, which ties records together under privacy.unit record"
            raise ValueError(f"model.config.{name}: {self.config[name]!r} {what}; use 0")


_SIZES = re.compile(r"size|dim|position|token|window|length|ctx|embd|inner|d_ff|d_model")
_COUNTS = re.compile(r"layer|block|expert|head|stage|num_hidden")


def _check(value: Any, key: str, depth: int = 0) -> None:
    """Raise ValueError for a number, text or list in a config.json with which a layout would take minutes or gigabytes.

    The server lays the model out from it: sizes cost nothing there (meta device), but every layer or expert is a module.
    """
    if isinstance(value, dict | list):
        if len(value) > 1024 or depth > 8:
            raise ValueError(f"{key or 'a map'} of at most 1024 entries, nested 8 deep at most")
        pairs = value.items() if isinstance(value, dict) else ((key, item) for item in value)
        for name, item in pairs:
            _check(item, str(name)[:64], depth + 1)
    elif isinstance(value, int | float):
        most = 2**24 if _SIZES.search(key) and not _COUNTS.search(key) else 1024
        most = 2**40 if isinstance(value, float) or "theta" in key else most
        if not abs(value) <= most:  # so that NaN does not pass
            raise ValueError(f"{key} of at most {most}")
    elif isinstance(value, str) and len(value) > LONGEST_TEXT:
        raise ValueError(f"{key} of at most {LONGEST_TEXT} characters")


def _build(config: CausalLmConfig, task: Any, checkpoint: Path | None, weights: bool, use_checkpointing: bool) -> "nn.Module":
    from consilium.models.causal_lm.network import build_causal_lm

    return build_causal_lm(config.variant, checkpoint, config.config, weights, use_checkpointing)


def _tokenizer(config: CausalLmConfig, checkpoint: Path | None) -> "PreTrainedTokenizerBase":
    from consilium.models.causal_lm.network import load_tokenizer

    return load_tokenizer(config.variant, checkpoint)


def _cut(model: Any) -> Cut:
    """Return the cut behind the last norm, before the output embedding (N, T, D)."""
    return Cut(model.model.norm, model.get_output_embeddings().in_features, -1)


def _save(folder: Path, model: Any, config: CausalLmConfig, task: Any, tokenizer: Any) -> str:
    from consilium.models.causal_lm.saving import save

    return save(folder, model, tokenizer)


def _select(name: str) -> "Callable[[nn.Module], str]":
    def select(model: "nn.Module") -> str:
        from consilium.models.causal_lm.targets import pattern

        return pattern(name, model)

    return select


TARGETS = {name: TargetSet(select=_select(name)) for name in ("paper", "qv", "qkv", "attention", "all-linear")}
"""Layers to adapt, looked up in the model by what they do; `paper` is qkv."""

CAUSAL_LM = ModelKind(CausalLmConfig, "language", _build, TARGETS, _tokenizer, _cut, _save)
