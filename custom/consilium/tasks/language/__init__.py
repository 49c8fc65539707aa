"""Language: answers to instructions."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from consilium.schema import MOST_CLASSES, Section


class LanguageConfig(Section):
    """Answers to instructions. `evaluate`: loss; label, exact or generation add what their greedily written answers score.

    `labels`: the answers to choose from, in any order, for records that name none of their own.
    """

    name: Literal["language"]
    evaluate: Literal["loss", "label", "exact", "generation"] = "loss"
    labels: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Field(max_length=MOST_CLASSES)] = ()
    max_new_tokens: Annotated[int, Field(ge=1, le=4096, description="of a written answer")] = 128

    @field_validator("labels")
    @classmethod
    def _differ(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if twice := [label for label in value if value.count(label) > 1]:
            raise ValueError(f"every label once; {twice[0]!r} is there twice")
        return value
