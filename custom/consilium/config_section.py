"""The base of every section of job.yaml and site.yaml."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", description="64 hex digits; `consilium doctor` prints a checkpoint's")]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values cannot change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)
