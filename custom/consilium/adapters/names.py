"""What the names of adapter tensors say. Strategies know these names and no model's.

"<layer>.lora_A" (r, in) and "<layer>.lora_B" (out, r), without PEFT's ".default.weight"; "<layer>.tail_A" (k, in), ".tail_B"
(out, k) and ".gate" (1,) of a frozen tail, which may travel as one ".tail_whole" (out, in) where that is smaller;
"<block>.adapter_<place>.down" and ".up" with weight and bias of bottlenecks; "head.weight" and "head.bias" of a classifier's
head, which is trained whole; "base.<parameter>" of a part of the base that trains beside the adapter (a mask decoder),
"whole.<parameter>" where all of the base trains. What stands under these two is the change from the base, 0 at the start. So
the server needs no weights, and the mean of the changes is that of the parameters. What a strategy may ask for beside the
job's adapter: "<layer>.local_A" and ".local_B" of a second, local LoRA; "feature_shift.shift" and ".mean" (C,) between encoder
and head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import re2

from consilium.core.errors import ConfigError
from consilium.core.lazy import nn
from consilium.models.custom_weight_access import architectures, user_of
from consilium.models.registry import TargetSet

HEAD = "head"
"""Module name of a classifier's head; no target set may adapt it."""
BASE, WHOLE_BASE = "base", "whole"
CHANGE = ".change"
"""What ends the name of a base's parameter where a server, which has no base, exports how it has changed."""
MAGNITUDE, OWN = "lora_magnitude_vector", ".default.weight"
"""DoRA's lengths of a layer's rows, as PEFT names the parameter. They are the base's at the start, and so count to it."""
TAIL = ("tail_A", "tail_B")
WHOLE = "tail_whole"
GATE = "gate"
LOCAL = {"lora_A": "local_A", "lora_B": "local_B"}
"""A LoRA factor's name in a layer, and that of its local twin."""
SHIFT, MEAN = "feature_shift.shift", "feature_shift.mean"
LOCAL_ADAPTER, FEATURE_SHIFT = "local adapter", "feature shift"
"""Parts that a strategy may ask for beside the job's adapter; see parts.py."""
PLACES = ("adapter_attention", "adapter_mlp", "adapter_output")
"""The bottlenecks of a block, from its input."""
_BLOCK = re.compile(r"(?!mask_decoder\.)((.+?)\.\d+)\..+")
_BOTTLENECK = re.compile(rf".*\.blocks\.(\d+)\.({'|'.join(PLACES)})\.(down|up)\.(weight|bias)")


def factor(name: str) -> str | None:
    """Return "A" or "B" for a LoRA factor's tensor name, None for any other adapter tensor (a head, a bottleneck)."""
    return {"lora_A": "A", "lora_B": "B"}.get(name.rpartition(".")[2])


def lora_factor(name: str, strategy: str) -> str | None:
    """Return `factor(name)` for a strategy that is about LoRA; None for what trains beside it, a head or a part of the base.

    Raises ConfigError for any other tensor.
    """
    if factor(name) is None and not is_head(name) and not name.startswith(f"{BASE}."):
        raise ConfigError(f"strategy {strategy} cannot place adapter tensor {name!r}; use adapter kind lora")
    return factor(name)


def is_local(name: str) -> bool:
    """Tell whether a tensor belongs to a second, local adapter."""
    return name.rpartition(".")[2] in LOCAL.values()


def local_twin(name: str) -> str:
    """Return the name that a LoRA factor's tensor has in the local adapter."""
    layer, _, own = name.rpartition(".")
    return f"{layer}.{LOCAL[own]}"


def is_part(name: str) -> bool:
    """Tell whether a tensor is there because the job's strategy asks for it, see parts.py."""
    return is_local(name) or name in (SHIFT, MEAN)


def is_head(name: str) -> bool:
    """Tell whether a tensor belongs to a classifier's head."""
    return name.startswith(f"{HEAD}.")


def is_base(name: str) -> bool:
    """Tell whether a tensor is the change of a parameter of the base."""
    return name.startswith((f"{BASE}.", f"{WHOLE_BASE}."))


def is_magnitude(name: str) -> bool:
    """Tell whether a tensor holds DoRA's lengths of a layer's rows (out,), or their change."""
    return name.endswith(f".{MAGNITUDE}{OWN}")


def is_frozen_part(name: str) -> bool:
    """Tell whether a tensor is a frozen tail or its gate, which never train."""
    return name.rpartition(".")[2] in (*TAIL, WHOLE, GATE)


def skippable_block(name: str) -> str | None:
    """Return the block of the base, "<stack>.<number>", that a tensor adapts and a model may run without; else None.

    SAM's decoder blocks are none, because they hand on two streams. A part of the base that trains is in none.
    """
    found = None if is_base(name) else _BLOCK.fullmatch(name)
    return found[1] if found else None


def other_factor(name: str) -> str | None:
    """Return the name of the other LoRA factor of the same layer, None for a tensor that is not a factor."""
    return None if factor(name) is None else name[:-1] + ("A" if factor(name) == "B" else "B")


def bottleneck_position(name: str) -> int | None:
    """Return which bottleneck a tensor belongs to, from 0 at the input; None for any other tensor."""
    found = _BOTTLENECK.fullmatch(name)
    return None if found is None else len(PLACES) * int(found[1]) + PLACES.index(found[2])


def bottleneck_half(name: str) -> str | None:
    """Return "down" or "up" for a bottleneck's tensor, None for any other."""
    found = _BOTTLENECK.fullmatch(name)
    return None if found is None else found[3]


def bottleneck_count(names: Iterable[str]) -> int:
    """Return how many bottlenecks (K) the tensor names belong to."""
    return len({p for name in names if (p := bottleneck_position(name)) is not None})


# targets ---------------------------------------------------------------------------------------------------------------
# Which linear layers of a model an adapter is put into.


def linear_layers(model: nn.Module, target: TargetSet) -> dict[str, nn.Linear]:
    """Return the linear layers, by name, that `target` matches, in the model's order, after its `prepare`.

    Raises ConfigError if nothing matches, for what is not a pattern, or for a layer that an adapter cannot reach.
    """
    if target.prepare:
        target.prepare(model)
    wanted = target.select(model) if target.select else target.pattern
    pattern = _compiled(wanted)
    linear = {
        n: m
        for n, m in model.named_modules()
        if isinstance(m, nn.Linear) and n.partition(".")[0] != HEAD and pattern.fullmatch(n)
    }
    if not any(isinstance(module, nn.Linear) for module in model.modules()):
        raise ConfigError("adapter.kind: the model has no linear layers to adapt; use kind full, which trains it whole")
    if not linear:
        known = f"{', '.join(target.known)}, or " if target.known else ""
        what = "matches no linear layer of the model"
        raise ConfigError(f"adapter.targets: {wanted!r} {what}; use {known}a full regex")
    # Raise ConfigError for a layer whose weight the model's code reads past the layer, so that an adapter does nothing.
    kinds = architectures(model)
    own = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    past = {name: kind for name in own if (kind := user_of(name, kinds))}
    if past:
        rest = "|".join(name for name in own if name not in past)
        remedy = rf"use the regex .*\.({rest})" if rest else "use other layers"
        who = min(past.values())
        raise ConfigError(f"adapter.targets: {', '.join(past)}: {who}'s code reads such weights past an adapter; {remedy}")
    return linear


def _compiled(pattern: str) -> Any:
    """Return a pattern compiled by RE2, which takes linear time for every pattern. Raises ConfigError."""
    quiet = re2.Options()
    quiet.log_errors = False
    try:
        return re2.compile(pattern, quiet)
    except re2.error as error:
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else str(error)
        what = f"is not a valid regular expression of RE2, without look-around and back-references ({reason})"
        raise ConfigError(f"adapter.targets: {pattern!r} {what}; fix it") from None
