"""The registry of adapter kinds. A new kind needs a file with an AdapterKind, and a line in ADAPTERS."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from consilium.core.lazy import Tensor, nn
from consilium.core.registry import Registry
from consilium.core.schema import Section
from consilium.models.registry import ModelKind

Shapes = dict[str, tuple[int, ...]]
Decoder = Literal["share", "keep", "freeze"]
"""SAM's mask decoder trains and is shared (share), trains and stays at its site (keep), or does not train (freeze)."""


class AdapterConfig(Section):
    """Base of every `adapter:` section. `start`: an adapter folder at the server, from which all sites start.

    It may begin with ${SITE}, the server's checkpoint folder. A federation's server opens no folder outside of it. The job's
    model, kind, shapes and alpha / rank must equal those of the folder.
    """

    kind: str
    start: Annotated[
        str | None,
        Field(
            description="an adapter folder at the server, from which all sites start. It may begin with ${SITE}, the "
            "server's checkpoint folder; a federation's server opens no folder outside of it. The job's model, kind, "
            "shapes and alpha / rank must equal those of the folder"
        ),
    ] = None

    @property
    def product_scaling(self) -> float:
        """The factor on a product B A in the forward pass; 1 for an adapter without such products."""
        return 1.0

    def check_per_sample_gradients(self) -> None:
        """Raise ValueError if a record's gradient would depend on other records of its batch (DP-SGD clips each record's).

        That is so with a field `dropout` over 0. The message names field, value and remedy. It is called under record-level
        privacy.
        """
        if dropout := getattr(self, "dropout", 0.0):
            raise ValueError(
                f"adapter.dropout: {dropout} draws all masks of a batch at once, which ties records together under "
                "privacy.unit record; use 0"
            )


@dataclass(frozen=True)
class AdapterKind:
    """The functions and properties of one kind of adapter.

    - `shapes(model, config, base)` returns the names and shapes of its tensors, without the head's, in the order of the model's
      modules; `model` has no adapter yet.
    - `inject(model, config, base)` adds the adapter to the model.
    - `export(folder, values, config, base, name)` writes a whole adapter for use by other programs.
    - `trainable_base(model, config)` returns the names of tensors that are changes of base parameters (names.is_base).
    - `start(name, shape, seed)` returns a tensor's initial value (default: adapter_state.initial_tensor).
    - `scale(model, config, factor)` multiplies the adapter's part of the forward pass.
    - `add_local(model, config)` adds a second, local adapter to the same layers.
    - `mix(model, config, share, cut_global)` makes these layers W x + (1 - share) global + share local. `share` is one number,
      or (N,) with one per sample. `cut_global`: no gradient passes through the global part beside a local one.
    - `merge(model)` adds the adapter to the base's own layers and removes it, in place; None if a base cannot hold it.
    - `unequal_ranks`: whether ranks may differ by site.
    - `tailed`: the same adapter with room for frozen tails, for strategies that send them.
    """

    config: type[AdapterConfig]
    shapes: "Callable[[nn.Module, Any, ModelKind], Shapes]"
    inject: "Callable[[nn.Module, Any, ModelKind], None]"
    export: "Callable[[Path, Mapping[str, Tensor], Any, ModelKind, str], None]"
    trainable_base: "Callable[[nn.Module, Any], list[str]]" = lambda model, config: []
    start: "Callable[[str, tuple[int, ...], int], Tensor] | None" = None
    scale: "Callable[[nn.Module, Any, float], None] | None" = None
    add_local: "Callable[[nn.Module, Any], None] | None" = None
    mix: "Callable[[nn.Module, Any, float | Tensor, bool], None] | None" = None
    merge: "Callable[[nn.Module], None] | None" = None
    unequal_ranks: bool = False
    tailed: "AdapterKind | None" = None


ADAPTERS: Registry[AdapterKind] = Registry(
    "adapter",
    {
        "lora": "consilium.adapters.kinds:LORA",
        "dual_rank": "consilium.adapters.kinds:DUAL_RANK",
        "bottleneck": "consilium.adapters.kinds:BOTTLENECK",
        "full": "consilium.adapters.kinds:FULL",
    },
    "consilium.adapters",
    "consilium.adapters.registry:AdapterKind",
)
