"""Sections of job.yaml for language models: the model and its task."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from consilium.config_section import Section


class CausalLmConfig(Section):
    """A frozen causal language model: the tiny one, or `folder`, any of `transformers` by local path.

    `config` is the contents of the folder's config.json (JSON is valid YAML: paste it), because the server has no weights and
    lays the model out from it. `checkpoint` may start with ${SITE}, the site's checkpoint folder. `max_length`: tokens of
    prompt and answer together; longer prompts lose their beginning.
    """

    name: Literal["causal_lm"]
    variant: Literal["tiny", "folder"]
    checkpoint: str | None = None
    config: dict[str, Any] | None = None
    max_length: Annotated[int, Field(ge=8, description="tokens")] = 512

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for field in ("checkpoint", "config"):
            if (getattr(self, field) is None) != (self.variant == "tiny"):
                what = "comes with variant tiny; leave it out" if self.variant == "tiny" else "is missing with variant folder"
                raise ValueError(f"{field} {what}; variant folder needs checkpoint (a path) and config (its config.json)")
        return self


class LanguageConfig(Section):
    """Answers to instructions. `evaluate`: loss; label, exact or generation add what their greedily written answers score.

    `labels`: the answers to choose from, in any order, for records that name none of their own.
    """

    name: Literal["language"]
    evaluate: Literal["loss", "label", "exact", "generation"] = "loss"
    labels: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    max_new_tokens: Annotated[int, Field(ge=1, description="of a written answer")] = 128

    @model_validator(mode="after")
    def _has_labels(self) -> Self:
        if len(set(self.labels)) < len(self.labels):
            raise ValueError("labels: every one once; remove the repeated one")
        return self
