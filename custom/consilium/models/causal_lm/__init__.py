"""Causal language models of `transformers`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from consilium.models.architecture import FolderConfig, named_sets
from consilium.models.registry import Cut, ModelKind

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase


class CausalLmConfig(FolderConfig):
    """A frozen causal language model: the tiny one, or `folder`, any of `transformers` by local path."""

    name: Literal["causal_lm"]
    variant: Annotated[
        Literal["tiny", "folder"],
        Field(description="the `tiny` one that ships with the package, or a `folder` of `transformers`"),
    ]
    max_length: Annotated[
        int, Field(ge=8, le=131072, description="tokens of prompt and answer together; longer prompts lose their middle")
    ] = 512

    apart: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2", "qwen3")

    @field_validator("checkpoint")
    @classmethod
    def _ships(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("variant") == "tiny":
            raise ValueError("none: the tiny model ships with the package; remove it, or use variant folder")
        return value

    def packs(self) -> bool:
        """See ModelConfig. A sliding window is its own mask, which one for several texts replaces."""
        shape = self.config or {"model_type": "llama"}
        window = shape.get("sliding_window") if shape.get("use_sliding_window", True) else None
        known = shape.get("model_type") in self.apart and not self.follows_longest
        return known and (window is None or window >= self.max_length)


def _build(config: CausalLmConfig, task: Any, checkpoint: Path | None, weights: bool, use_checkpointing: bool) -> "nn.Module":
    from consilium.models.causal_lm.network import build_causal_lm
    from consilium.models.folder import require_positions

    model = build_causal_lm(config.variant, checkpoint, config.config, weights, use_checkpointing)
    require_positions(model, config.max_length, getattr(task, "max_new_tokens", 0))  # another task may write nothing
    return model


def _tokenizer(config: CausalLmConfig, checkpoint: Path | None) -> "PreTrainedTokenizerBase":
    from consilium.models.causal_lm.network import load_tokenizer

    return load_tokenizer(config.variant, checkpoint, config.config)


def _cut(model: Any) -> Cut:
    """Return the cut behind the last norm, before the output embedding (N, T, D)."""
    return Cut(model.model.norm, model.get_output_embeddings().in_features, -1)


def _save(folder: Path, model: Any, config: CausalLmConfig, task: Any, tokenizer: Any) -> str:
    from consilium.models.causal_lm.export import save

    return save(folder, model, tokenizer)


CAUSAL_LM = ModelKind(CausalLmConfig, "language", _build, named_sets(), _tokenizer, _cut, _save)
