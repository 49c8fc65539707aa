"""When a job scores the validation split, and whether these scores end it."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from consilium.core.schema import Section


class ValidateConfig(Section):
    """When the validation split is scored: in rounds `every`, 2 `every` and so on, counted from 1, and by which models.

    The closing evaluation comes in any case.
    """

    every: Annotated[int, Field(ge=1, le=100000, description="score in every so many rounds")] = 1
    stages: Annotated[
        tuple[Literal["global", "personalized"], ...],
        Field(max_length=2, description="the model as it comes from the server, and after the site's training; [] for none"),
    ] = ("global", "personalized")
    full: Annotated[bool, Field(description="score as at the end: written answers, distances, intervals")] = False
    patience: Annotated[
        int,
        Field(
            ge=0,
            le=100_000,
            exclude_if=lambda value: not value,
            description="the run ends when the mean over sites of the global model's leading score has not improved in so "
            "many validations in a row; the closing evaluation follows. 0 runs all rounds",
        ),
    ] = 0
    """Written into a job only where it is on, so that no other job's digest tells of it."""

    @model_validator(mode="after")
    def _sees_the_global_model(self) -> Self:
        if self.patience and "global" not in self.stages:
            raise ValueError(
                f"patience: {self.patience}: goes by the global model's score; add global to stages, or leave it out"
            )
        return self
