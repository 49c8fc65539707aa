"""What a site can carry, for algorithms with unequal ranks: the `capacity:` section of site.yaml."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from consilium.core.schema import Positive, Seconds, Section


class CapacityConfig(Section):
    """Either ranks per adapted layer on average (`train`, `download`), or limits from which a short probe finds them."""

    train: Annotated[Positive | None, Field(description="ranks it can train")] = None
    download: Annotated[Positive | None, Field(description="ranks it can download")] = None
    step_seconds: Annotated[
        Annotated[Seconds, Field(gt=0)] | None, Field(description="`step_seconds`, the longest a training step may take")
    ] = None
    memory_bytes: Annotated[
        Annotated[float, Field(gt=0, le=2**60)] | None, Field(description="`memory_bytes`, the most that training may hold")
    ] = None
    download_bytes: Annotated[
        Annotated[float, Field(gt=0, le=2**60)] | None,
        Field(
            description="`download_bytes` in a round. What is not given does not limit; with nothing given the job decides"
            " (its tiers)"
        ),
    ] = None

    @property
    def given(self) -> bool:
        """Whether any field is set."""
        return any(value is not None for value in self.model_dump().values())

    @model_validator(mode="after")
    def _check_one_of(self) -> Self:
        for ranks, limits in (("train", ("step_seconds", "memory_bytes")), ("download", ("download_bytes",))):
            for limit in limits:
                if getattr(self, ranks) is not None and getattr(self, limit) is not None:
                    raise ValueError(f"{ranks} and {limit} both say how much; give one of them")
        return self
