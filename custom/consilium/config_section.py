"""The base of every section of job.yaml and site.yaml. What others write is bounded: every number, text, list and map."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

LONGEST_TEXT = 1024
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, str_max_length=LONGEST_TEXT)
"""What sections and strategies have in common: unknown keys, infinities and endless texts are errors."""

MOST_CLASSES = 256
SMALLEST_NOISE = 0.05
"""Noise multipliers under this protect nothing, and accountants of sampled releases do not come to an end below."""

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", description="64 hex digits; `consilium doctor` prints a checkpoint's")]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Dropout = Annotated[float, Field(ge=0, lt=1)]
Rank = Annotated[int, Field(ge=1, le=1024)]
Share = Annotated[float, Field(ge=0, le=1)]
Factor = Annotated[float, Field(ge=0, le=1e6)]
"""A weight of a loss, a strength, a scale that may be 0."""
Positive = Annotated[float, Field(gt=0, le=1e6)]
Seconds = Annotated[float, Field(ge=0, le=30 * 86400)]
ClassName = Annotated[
    str, Field(min_length=1, max_length=64, pattern=r"^[^/\p{C}\p{Zl}\p{Zp}]+$", description="printable, without /")
]
"""It becomes part of metrics' names."""


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values cannot change after validation."""

    model_config = STRICT | ConfigDict(frozen=True)
