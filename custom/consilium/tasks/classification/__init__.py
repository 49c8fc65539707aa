"""Classification: one class per image."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from consilium.schema import MOST_CLASSES, ClassName, Section, each_once


class ClassificationConfig(Section):
    """One class per image. `classes`: their names, in the order of the model's outputs; integer labels count from 0."""

    name: Literal["classification"]
    classes: Annotated[list[ClassName], Field(min_length=2, max_length=MOST_CLASSES)]
    augment: bool = True

    @field_validator("classes")
    @classmethod
    def _differ(cls, value: list[str]) -> list[str]:
        return each_once(value)
