"""The kinds of frozen base models. A new one: a folder (or a file) with a ModelKind, and its line in MODELS."""

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
            description="weights, for a U-Net an earlier run's model.safetensors; may start with `${SITE}`, the site's "
            "checkpoint folder"
        ),
    ] = None
    checkpoint_sha256: Annotated[
        Sha256 | None, Field(description="64 hex digits; `consilium doctor` prints a checkpoint's")
    ] = None
    dtype: Annotated[
        Literal["fp32", "bf16", "int8", "nf4"],
        Field(description="how the frozen linear layers are kept; bf16 takes a third of the memory under `precision: bf16`"),
    ] = "fp32"

    @property
    def title(self) -> str:
        """The name that is shown while it is loaded."""
        return f"model {self.name} {self.variant}"

    @property
    def image_side(self) -> int:
        """Pixels a side of the pictures it takes, its `image_size`; 0 for a model without pictures."""
        return int(getattr(self, "image_size", 0))

    @property
    def padding(self) -> tuple[int, int, int]:
        """The 8-bit colour of padding: the model's pixel mean, which becomes 0."""
        return 0, 0, 0

    def packs(self) -> bool:
        """Tell whether several texts can be packed into one row without influence on each other."""
        return False

    def keep_apart(self) -> None:
        """Raise ValueError, naming field, value and remedy, where a record's gradient would depend on those beside it."""


@dataclass(frozen=True)
class TargetSet:
    """Linear layers to adapt, by a `pattern` (RE2) of full names, or by the pattern that `select(model)` returns.

    `prepare` changes the model before names are looked up, `fuse` maps trained tensors back to layers that the unchanged base
    has. `known`: the model's own sets, for messages.
    """

    pattern: str = ""
    prepare: "Callable[[nn.Module], None] | None" = None
    fuse: "Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None" = None
    select: "Callable[[nn.Module], str] | None" = None
    known: tuple[str, ...] = ()


def pattern_of(names: Iterable[str]) -> str:
    """Return the pattern that matches these names of layers in whatever block they stand, and nothing else."""
    return "|".join(dict.fromkeys(re.sub(r"\\\.\d+(?=\\\.)", r"\\.\\d+", re.escape(name)) for name in names))


class Build(Protocol):
    """Returns a base in evaluation mode. `task` is the job's task section; `weights` False lays it out only (meta device)."""

    def __call__(self, config: Any, task: Any, checkpoint: Path | None, weights: bool, use_checkpointing: bool) -> "nn.Module":
        """Raise CheckpointError for weights that do not fit, ConfigError for an impossible size."""
        ...


class Cut(NamedTuple):
    """The cut between encoder and head: after `module`, whose output (N, ...) has `width` features along `axis`."""

    module: "nn.Module"
    width: int
    axis: int


def before_head(model: Any) -> Cut:
    """Return the cut of a classifier before its `head`, after `pooled`, whose features are (N, F)."""
    return Cut(model.pooled, model.head.in_features, -1)


class Saved(Protocol):
    """Writes a model without an adapter in its publishers' layout; returns a page in Markdown that says how to load it.

    The Markdown holds one block of Python that runs in the folder and leaves a function `logits` of the model's inputs.
    """

    def __call__(self, folder: Path, model: Any, config: Any, task: Any, tokenizer: Any) -> str:
        """Write into `folder`, which is there."""
        ...


class Graph(NamedTuple):
    """A part of a model that runs by itself: a module, the names of its inputs, and that of its one output."""

    module: "nn.Module"
    inputs: tuple[str, ...]
    output: str


@dataclass(frozen=True)
class ModelKind:
    """A kind of model. `task`: the task it is made for; `targets`: sets of layers to adapt, by name.

    `tokenizer(config, checkpoint)` returns a language model's tokenizer. `cut(model)` returns the cut before its head; it
    raises AttributeError for a model laid out otherwise. `save`: see Saved; by default a state dict by the model's own names.
    `graphs(model)` parts a model, by name: the outputs of one are inputs of the next, whose first inputs are the model's. By
    default it is one. `head_apart`: an exported head gets a file of its own, because PEFT would take layers of the encoder that
    are called head too for it. `encoder`: the name of the module that alone makes of a picture what the rest goes on from; the
    model has `embed`, which returns that, and its forward takes it as `embedding`.
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
        """Return the set of that name; any other name is a pattern."""
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
