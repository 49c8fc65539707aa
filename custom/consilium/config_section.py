"""The base of every section of job.yaml and site.yaml."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values cannot change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)
