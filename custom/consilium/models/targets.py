"""Named sets of layers to adapt, found by the layers' function instead of an architecture's names.

Architectures of `transformers` differ in names (q_proj, Wqkv, c_attn), in fused layers, and in weights outside of linear layers
(experts stored as one tensor). So the sets are found in the model: a block's linear layers below a module named attention are
its attention, all others its MLP. A set that would miss some of its layers is refused, with their names.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from consilium.core.errors import ConfigError
from consilium.core.sanitize import first_names_text
from consilium.models.registry import pattern_of

_ATTENTION = re.compile(r"attn|attention")
_OUT = {
    "o_proj",
    "o_a_proj",
    "o_b_proj",
    "out_proj",
    "dense",
    "c_proj",
    "wo",
    "Wo",
    "proj",
    "output",
    "attention_out",
    "out_lin",
}
"""Names of the output projection of attention."""
_APART = {
    "q_proj": True, "v_proj": True, "query": True, "value": True, "q_lin": True, "v_lin": True,
    "k_proj": False, "key": False, "k_lin": False,
}  # fmt: skip
"""Names of separate input projections of attention, and whether the set `qv` contains them."""
_ROUTERS = {"gate", "router", "shared_expert_gate"}
"""Linear layers that choose experts."""
_CROSS = re.compile(r"(^|\.)(encoder_attn|crossattention|cross_attn)\.")
"""Names of cross-attention, whose layers a decoder without an encoder has but never runs."""
_NO_PROJECTION = re.compile(r"norm|embed|conv|bias")


class Layers(NamedTuple):
    """Full names of a model's linear layers by function, and of its larger weights outside linear layers."""

    inputs: list[str]
    outputs: list[str]
    mlp: list[str]
    others: list[str]

    @property
    def attention(self) -> list[str]:
        """Input and output projections of attention."""
        return self.inputs + self.outputs


def layers_of(model: nn.Module, tower: str = "") -> Layers:
    """Return the layers of the repeated blocks of a model, or of its `tower`, without embeddings and output layer."""
    found, (prefix, blocks) = Layers([], [], [], []), _blocks(model, tower)
    alone = getattr(getattr(model, "config", None), "is_decoder", False)
    for name, module in blocks.named_modules(prefix=prefix):
        own = name.removesuffix(".linear").rpartition(".")[2]
        if isinstance(module, nn.Linear) and own not in _ROUTERS and not (alone and _CROSS.search(name)):
            within = _ATTENTION.search(name.removeprefix(prefix))
            (found.mlp if not within else found.outputs if own in _OUT else found.inputs).append(name)
    linear = {f"{n}.weight" for n, m in blocks.named_modules(prefix=prefix) if isinstance(m, nn.Linear)}
    for name, parameter in blocks.named_parameters(prefix=prefix):
        router = name.removesuffix(".weight").rpartition(".")[2] in _ROUTERS
        if parameter.ndim > 1 and name not in linear and not router and not _NO_PROJECTION.search(name.removeprefix(prefix)):
            found.others.append(name)
    return found


def _blocks(model: nn.Module, tower: str) -> tuple[str, nn.ModuleList]:
    """Return (name, list) of the model's blocks: of the ModuleLists with attention (or of all) the one with most parameters.

    Raises ConfigError if there is no ModuleList.
    """
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and tower in [*n.split("."), ""]]
    if not lists:
        raise ConfigError(
            f"adapter.targets: {type(model).__name__}{'.' if tower else ''}{tower} has no list of blocks; use a full regex"
        )
    attends = [one for one in lists if any(_ATTENTION.search(name) for name, _ in one[1].named_modules())]
    return max(attends or lists, key=lambda one: sum(p.numel() for p in one[1].parameters()))


def pattern(name: str, tower: str, model: nn.Module) -> str:
    """Return the pattern of the layers of a named set in a model, or in its `tower` ("": the whole model).

    Raises ConfigError if the set would miss some: query and value in one fused layer, or weights outside of linear layers.
    """
    found = layers_of(model, tower)
    if name == "all-linear":
        if found.others:
            raise ConfigError(
                f"adapter.targets: 'all-linear' would miss {_shown_layers(found.others)}, which are not linear layers; "
                "use attention, or a full regex of what is meant"
            )
        return _all_of(name, "linear", found.attention + found.mlp)
    if name == "qv":
        if fused := [one for one in found.inputs if one.rpartition(".")[2] not in _APART]:
            raise ConfigError(
                f"adapter.targets: 'qv': query and value have no layers of their own ({_shown_layers(fused)}); use qkv, "
                "attention or all-linear"
            )
        return _all_of(name, "attention", [one for one in found.inputs if _APART[one.rpartition(".")[2]]])
    return _all_of(name, "attention", found.attention if name == "attention" else found.inputs)


def _all_of(name: str, kind: str, layers: list[str]) -> str:
    if not layers:
        raise ConfigError(f"adapter.targets: {name!r}: the model's blocks have no {kind} layers; use a full regex")
    return pattern_of(layers)


def _shown_layers(names: Iterable[str]) -> str:
    """Return names of layers for a message, without block numbers, each once."""
    return first_names_text(list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)))
