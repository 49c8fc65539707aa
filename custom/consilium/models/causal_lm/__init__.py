"""Causal language models of `transformers`."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from consilium.core.lazy import lazy
from consilium.models.architecture import FolderConfig, named_sets
from consilium.models.registry import Cut, ModelKind


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
    def _check_checkpoint(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("variant") == "tiny":
            raise ValueError("none: the tiny model ships with the package; remove it, or use variant folder")
        return value

    def supports_packing(self) -> bool:
        """See ModelConfig. Packing replaces the attention mask, so a sliding window shorter than max_length forbids it."""
        shape = self.config or {"model_type": "llama"}
        window = shape.get("sliding_window") if shape.get("use_sliding_window", True) else None
        known = shape.get("model_type") in self.apart and not self.rope_depends_on_batch
        return known and (window is None or window >= self.max_length)


def _feature_point(model: Any) -> Cut:
    """Return the cut after the last norm, before the output embedding (N, T, D)."""
    return Cut(model.model.norm, model.get_output_embeddings().in_features, -1)


_NETWORK = "consilium.models.causal_lm.network"
CAUSAL_LM = ModelKind(
    CausalLmConfig,
    "language",
    lazy(f"{_NETWORK}:build"),
    named_sets(),
    lazy(f"{_NETWORK}:tokenizer_of"),
    _feature_point,
    lazy(f"{_NETWORK}:save"),
)
