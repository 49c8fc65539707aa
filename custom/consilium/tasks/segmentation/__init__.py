"""Segmentation: masks."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from consilium.schema import MOST_CLASSES, ClassName, Section, each_once

LabelValues = Annotated[list[Annotated[int, Field(ge=0, lt=2**16)]], Field(min_length=1, max_length=1024)]


class SegmentationConfig(Section):
    """Masks. `classes`: a list of names (label values 1, 2, ...) or a map from name to its label values."""

    name: Literal["segmentation"] = "segmentation"
    classes: Annotated[dict[ClassName, LabelValues], Field(min_length=1, max_length=MOST_CLASSES)]
    prompt: Literal["none", "box"] = "none"
    augment: bool = True

    @field_validator("classes", mode="before")
    @classmethod
    def _number_names(cls, value: Any) -> Any:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            return value
        return {name: [i] for i, name in enumerate(each_once(value), start=1)}
