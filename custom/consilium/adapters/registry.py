"""The kinds of adapters. A new one: a file with an AdapterKind, and its line in ADAPTERS."""

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
"""What becomes of SAM's mask decoder: it trains and is shared, it trains and stays at its site, or it does not train."""


class AdapterConfig(Section):
    """Base of every `adapter:` section. `start`: an adapter folder at the server, which all sites go on from.

    It may begin with ${SITE}, the server's checkpoint folder, outside of which a federation's server opens none. Model, kind,
    shapes and alpha / rank must be as there.
    """

    kind: str
    start: Annotated[
        str | None,
        Field(
            description="an adapter folder at the server, which all sites go on from. It may begin with ${SITE}, the "
            "server's checkpoint folder, outside of which a federation's server opens none. Model, kind, "
            "shapes and alpha / rank must be as there"
        ),
    ] = None

    @property
    def product_scaling(self) -> float:
        """What multiplies a product of factors in the forward pass; 1 for an adapter without any."""
        return 1.0

    def keep_apart(self) -> None:
        """Raise ValueError, naming field, value and remedy, where a record's gradient would depend on those beside it."""


def _no_base(model: "nn.Module", config: Any) -> list[str]:
    return []


@dataclass(frozen=True)
class AdapterKind:
    """What the rest must know of an adapter.

    `shapes(model, config, base)`: its tensors' names and shapes, in the order of the model's modules, on a base without it (a
    head not counted); `inject(model, config, base)` puts it in; `export(folder, values, config, base, name)` writes a whole
    one for others; `trainable_base(model, config)`: the tensors that are changes of the base's parameters (names.is_base);
    `start(name, shape, seed)`: a tensor's first value (default: layers.start); `scale(model, config, factor)` multiplies the
    adapter's part of the forward pass. `add_local(model, config)` puts a second, local adapter into the same layers, and
    `mix(model, config, share, cut_global)` makes them W x + (1 - share) global + share local, with one share or one a sample
    (N,); `cut_global`: no gradient passes through a global part that is beside a local one.
    `merge(model)` writes what it does into the base's own layers and takes it out, in place; None where it adds layers that a
    base cannot hold. `unequal_ranks`: whether ranks may differ by site; `tailed`: the same adapter with room for
    frozen tails, for strategies that send such.
    """

    config: type[AdapterConfig]
    shapes: "Callable[[nn.Module, Any, ModelKind], Shapes]"
    inject: "Callable[[nn.Module, Any, ModelKind], None]"
    export: "Callable[[Path, Mapping[str, Tensor], Any, ModelKind, str], None]"
    trainable_base: "Callable[[nn.Module, Any], list[str]]" = _no_base
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
