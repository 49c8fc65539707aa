"""Sections of job.yaml for language models: the model and its task."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from consilium.config_section import Section, Sha256


class CausalLmConfig(Section):
    """A frozen causal language model: the tiny one, or `folder`, any of `transformers` by local path.

    `config` is the contents of the folder's config.json (JSON is valid YAML: paste it), because the server has no weights and
    lays the model out from it. `checkpoint` may start with ${SITE}, the site's checkpoint folder. `max_length`: tokens of
    prompt and answer together; longer prompts lose their beginning.
    """

    name: Literal["causal_lm"]
    variant: Literal["tiny", "folder"]
    checkpoint: Annotated[str | None, Field(validate_default=True)] = None
    checkpoint_sha256: Sha256 | None = None
    config: Annotated[dict[str, Any] | None, Field(validate_default=True)] = None
    max_length: Annotated[int, Field(ge=8, description="tokens")] = 512

    @field_validator("checkpoint", "config")
    @classmethod
    def _belongs_to_folder(cls, value: Any, info: ValidationInfo) -> Any:
        variant = info.data.get("variant")
        if value is None and variant == "folder":
            wanted = {"checkpoint": "the path of a transformers folder", "config": "the contents of its config.json"}
            raise ValueError(f"{wanted[info.field_name]}; variant folder needs both checkpoint and config")
        if value is not None and variant == "tiny":
            raise ValueError("none: the tiny model ships with the package; remove it, or use variant folder")
        return value


class LanguageConfig(Section):
    """Answers to instructions. `evaluate`: loss; label, exact or generation add what their greedily written answers score.

    `labels`: the answers to choose from, in any order, for records that name none of their own.
    """

    name: Literal["language"]
    evaluate: Literal["loss", "label", "exact", "generation"] = "loss"
    labels: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    max_new_tokens: Annotated[int, Field(ge=1, description="of a written answer")] = 128

    @field_validator("labels")
    @classmethod
    def _differ(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if twice := [label for label in value if value.count(label) > 1]:
            raise ValueError(f"every label once; {twice[0]!r} is there twice")
        return value
