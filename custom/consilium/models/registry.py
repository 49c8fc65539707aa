"""The registry of frozen base models. A new kind needs a folder (or a file) with a ModelKind, and a line in MODELS."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol

from pydantic import Field

from consilium.core.registry import Registry
from consilium.core.schema import Section, Sha256

if TYPE_CHECKING:
    from torch import Tensor, nn


class ModelConfig(Section):
    """Base of every `model:` section. `checkpoint` may start with ${SITE}, the site's checkpoint folder."""

    name: str
    variant: str
    checkpoint: Annotated[
        str | None,
        Field(
            description="the path of the weights (for a U-Net an earlier run's model.safetensors); may start with `${SITE}`, "
            "the site's checkpoint folder"
        ),
    ] = None
    checkpoint_sha256: Annotated[
        Sha256 | None, Field(description="SHA-256 of the checkpoint (64 hex digits); `consilium doctor` prints it")
    ] = None
    dtype: Annotated[
        Literal["fp32", "bf16", "int8", "nf4"],
        Field(
            description="number type in which the frozen linear layers are stored; bf16 takes a third of the memory with "
            "`precision: bf16`"
        ),
    ] = "fp32"

    @property
    def title(self) -> str:
        """The name that is shown while the model is loaded."""
        return f"model {self.name} {self.variant}"

    @property
    def image_side(self) -> int:
        """The side of the model's pictures in pixels, its `image_size`; 0 for a model without pictures."""
        return int(getattr(self, "image_size", 0))

    @property
    def padding(self) -> tuple[int, int, int]:
        """The 8-bit colour of padding: the model's pixel mean, which becomes 0."""
        return 0, 0, 0

    def supports_packing(self) -> bool:
        """Return whether several texts can be packed into one row without influencing each other."""
        return False

    def check_per_sample_gradients(self) -> None:
        """Raise ValueError if a record's gradient would depend on other records of its batch.

        The message names field, value and remedy. It is called under record-level privacy.
        """


@dataclass(frozen=True)
class TargetSet:
    """Linear layers to adapt, by a `pattern` (RE2) of full names, or by the pattern that `select(model)` returns.

    `prepare` changes the model before layers are looked up (it splits fused layers). `fuse` maps trained tensors back to the
    layers of the unchanged base. `known`: the names of the model's sets, for messages.
    """

    pattern: str = ""
    prepare: "Callable[[nn.Module], None] | None" = None
    fuse: "Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None" = None
    select: "Callable[[nn.Module], str] | None" = None
    known: tuple[str, ...] = ()


def pattern_of(names: Iterable[str]) -> str:
    """Return a pattern that matches these layer names with any block number, and nothing else."""
    return "|".join(dict.fromkeys(re.sub(r"\\\.\d+(?=\\\.)", r"\\.\\d+", re.escape(name)) for name in names))


class Build(Protocol):
    """A function that returns a base in evaluation mode. `task`: the job's task section. Without `weights` no file is read."""

    def __call__(self, config: Any, task: Any, checkpoint: Path | None, weights: bool, use_checkpointing: bool) -> "nn.Module":
        """Raise CheckpointError for weights that do not fit, ConfigError for an impossible size."""
        ...


class Cut(NamedTuple):
    """The cut between encoder and head: after `module`, whose output (N, ...) has `width` features along `axis`."""

    module: "nn.Module"
    width: int
    axis: int


def head_feature_point(model: Any) -> Cut:
    """Return the cut of a classifier before its `head`, after `pooled`, whose features are (N, F)."""
    return Cut(model.pooled, model.head.in_features, -1)


class Saved(Protocol):
    """A function that writes a model without an adapter in its publisher's layout, and returns a Markdown page for loading it.

    The page has one block of Python that runs in the folder and defines a function `logits` of the model's inputs.
    """

    def __call__(self, folder: Path, model: Any, config: Any, task: Any, tokenizer: Any) -> str:
        """Write into the existing `folder`."""
        ...


class Graph(NamedTuple):
    """A part of a model that is exported separately: a module, the names of its inputs, and the name of its one output."""

    module: "nn.Module"
    inputs: tuple[str, ...]
    output: str


@dataclass(frozen=True)
class ModelKind:
    """A kind of model. `task`: the task it is made for; `targets`: sets of layers to adapt, by name.

    - `tokenizer(config, checkpoint)` returns a language model's tokenizer.
    - `cut(model)` returns the point between encoder and head. It raises AttributeError for a model without one.
    - `save`: see Saved; by default a state dict with the model's own names is written.
    - `graphs(model)` returns the parts of a model for export, by name. The output of each is an input of the next, and the
      first takes the model's inputs. By default the model is one part.
    - `head_apart`: an exported head gets its own file, because PEFT would confuse it with encoder layers that are called head.
    - `encoder`: the name of the module that alone computes a picture's embedding. Such a model has a method `embed` that
      returns the embedding, and its forward accepts it as `embedding`.
    """

    config: type[ModelConfig]
    task: str
    build: Build
    targets: Mapping[str, TargetSet] = field(default_factory=dict)
    tokenizer: Callable[[Any, Path | None], Any] | None = None
    cut: "Callable[[Any], Cut] | None" = None
    save: Saved | None = None
    graphs: "Callable[[Any], dict[str, Graph]] | None" = None
    head_apart: bool = False
    encoder: str = ""

    def target(self, name: str) -> TargetSet:
        """Return the set named `name`; any other text is used as a pattern."""
        found = self.targets.get(name, TargetSet(name))
        return replace(found, known=tuple(self.targets))


MODELS: Registry[ModelKind] = Registry(
    "model",
    {
        "sam": "consilium.models.sam:SAM",
        "clip": "consilium.models.clip:CLIP",
        "causal_lm": "consilium.models.causal_lm:CAUSAL_LM",
        "vision": "consilium.models.vision:VISION",
        "text_encoder": "consilium.models.text_encoder:TEXT_ENCODER",
        "vision_language": "consilium.models.vision_language:VISION_LANGUAGE",
        "unet": "consilium.models.unet:UNET",
    },
    "consilium.models",
    "consilium.models.registry:ModelKind",
)
