"""Text encoders of `transformers` by local folder, such as BERT, with a trained head, for classification."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from consilium.core.lazy import lazy
from consilium.models.architecture import FolderConfig, named_sets
from consilium.models.registry import ModelKind, head_feature_point

PAD = -1
"""The token id of padding after the end of a text."""


class TextEncoderConfig(FolderConfig):
    """A frozen text encoder with a trained head, for classification of reports: BERT, RoBERTa, DistilBERT and the like.

    The encoder's own dropout is 0, as record-level privacy requires. `adapter.dropout` is the adapter's.
    """

    name: Literal["text_encoder"]
    variant: Annotated[Literal["folder"], Field(description="a `folder` of `transformers`")]
    max_length: Annotated[int, Field(ge=8, le=8192, description="the most tokens of a text; longer texts lose their end")] = 256
    features: Annotated[
        Literal["pooled", "mean", "first"],
        Field(
            description="the features for the head: the encoder's pooled output, the `mean` over tokens, or the `first` token"
        ),
    ] = "pooled"

    apart: ClassVar[tuple[str, ...]] = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra")

    @field_validator("config")
    @classmethod
    def _set_dropout_to_zero(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        return value and {key: 0.0 if "drop" in key and one else one for key, one in value.items()}


_NETWORK = "consilium.models.text_encoder.network"
TEXT_ENCODER = ModelKind(
    TextEncoderConfig,
    "classification",
    lazy(f"{_NETWORK}:build"),
    named_sets(),
    lazy(f"{_NETWORK}:tokenizer_of"),
    head_feature_point,
    lazy(f"{_NETWORK}:save"),
    head_apart=True,
)
