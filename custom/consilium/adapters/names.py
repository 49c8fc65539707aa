"""The names of adapter tensors. Strategies know these names and no model's.

- "<layer>.lora_A" (r, in), "<layer>.lora_B" (out, r): LoRA's factors, without PEFT's ".default.weight".
- "<layer>.tail_A" (k, in), ".tail_B" (out, k), ".gate" (1,): frozen ranks, a tail. It may be sent as one ".tail_whole" (out,
  in) if that is smaller.
- "<block>.adapter_<place>.down", ".up", with weight and bias: bottlenecks.
- "head.weight", "head.bias": a classifier's head, which trains whole.
- "base.<parameter>": a part of the base that trains beside the adapter (a mask decoder); "whole.<parameter>": the whole base
  trains. Both hold the change from the base, 0 at the start. So the server needs no weights, and the mean of the changes equals
  the change of the mean.
- "<layer>.local_A", ".local_B": a second, local LoRA; "feature_shift.shift", ".mean" (C,): between encoder and head. A strategy
  may request these beside the job's adapter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import re2

from consilium.core.errors import ConfigError
from consilium.core.lazy import nn
from consilium.models.registry import TargetSet

HEAD = "head"
"""Module name of a classifier's head; no target set may adapt it."""
BASE, WHOLE_BASE = "base", "whole"
CHANGE = ".change"
"""Suffix of a base parameter's name in a server's export. A server has no base, so it exports the changes."""
MAGNITUDE, OWN = "lora_magnitude_vector", ".default.weight"
"""PEFT's names for DoRA's row lengths of a layer. They start at the base's values, so they are treated as base parameters."""
TAIL = ("tail_A", "tail_B")
WHOLE = "tail_whole"
GATE = "gate"
LOCAL = {"lora_A": "local_A", "lora_B": "local_B"}
"""The name of a LoRA factor in a layer -> the name of the same factor in the local adapter."""
SHIFT, MEAN = "feature_shift.shift", "feature_shift.mean"
LOCAL_ADAPTER, FEATURE_SHIFT = "local adapter", "feature shift"
"""Parts that a strategy may request beside the job's adapter; see strategy_modules.py."""
PLACES = ("adapter_attention", "adapter_mlp", "adapter_output")
"""The bottlenecks of a block, in order from its input."""
_BLOCK = re.compile(r"(?!mask_decoder\.)((.+?)\.\d+)\..+")
_BOTTLENECK = re.compile(rf".*\.blocks\.(\d+)\.({'|'.join(PLACES)})\.(down|up)\.(weight|bias)")


def factor(name: str) -> str | None:
    """Return "A" or "B" for a LoRA factor's tensor name, None for any other adapter tensor (a head, a bottleneck)."""
    return {"lora_A": "A", "lora_B": "B"}.get(name.rpartition(".")[2])


def checked_lora_factor(name: str, strategy: str) -> str | None:
    """Return `factor(name)` for a strategy that needs LoRA; None for a head or a part of the base that trains beside it.

    Raises ConfigError, with the name of the `strategy`, for any other tensor.
    """
    if factor(name) is None and not is_head(name) and not name.startswith(f"{BASE}."):
        raise ConfigError(f"strategy {strategy} cannot place adapter tensor {name!r}; use adapter kind lora")
    return factor(name)


def is_local_adapter(name: str) -> bool:
    """Return whether a tensor belongs to a second, local adapter."""
    return name.rpartition(".")[2] in LOCAL.values()


def local_factor_name(name: str) -> str:
    """Return the name in the local adapter of the LoRA factor `name`."""
    layer, _, own = name.rpartition(".")
    return f"{layer}.{LOCAL[own]}"


def is_strategy_part(name: str) -> bool:
    """Return whether a tensor belongs to a part that the job's strategy requests, see strategy_modules.py."""
    return is_local_adapter(name) or name in (SHIFT, MEAN)


def is_head(name: str) -> bool:
    """Return whether a tensor belongs to a classifier's head."""
    return name.startswith(f"{HEAD}.")


def is_base(name: str) -> bool:
    """Return whether a tensor is the change of a parameter of the base."""
    return name.startswith((f"{BASE}.", f"{WHOLE_BASE}."))


def is_magnitude(name: str) -> bool:
    """Return whether a tensor holds DoRA's row lengths of a layer (out,), or their change."""
    return name.endswith(f".{MAGNITUDE}{OWN}")


def is_frozen_part(name: str) -> bool:
    """Return whether a tensor is a frozen tail or its gate, which never train."""
    return name.rpartition(".")[2] in (*TAIL, WHOLE, GATE)


def skippable_block(name: str) -> str | None:
    """Return the block "<stack>.<number>" that a tensor adapts and that a model may skip; None if there is none.

    SAM's decoder blocks cannot be skipped, because they return two streams. Trained base parameters give None.
    """
    found = None if is_base(name) else _BLOCK.fullmatch(name)
    return found[1] if found else None


def other_factor(name: str) -> str | None:
    """Return the name of the other LoRA factor of the same layer, None for a tensor that is not a factor."""
    return None if factor(name) is None else name[:-1] + ("A" if factor(name) == "B" else "B")


def bottleneck_position(name: str) -> int | None:
    """Return the number of the bottleneck that a tensor belongs to, from 0 at the input; None for any other tensor."""
    found = _BOTTLENECK.fullmatch(name)
    return None if found is None else len(PLACES) * int(found[1]) + PLACES.index(found[2])


def bottleneck_half(name: str) -> str | None:
    """Return "down" or "up" for a bottleneck's tensor, None for any other."""
    found = _BOTTLENECK.fullmatch(name)
    return None if found is None else found[3]


def bottleneck_count(names: Iterable[str]) -> int:
    """Return the number of bottlenecks (K) among the tensor names."""
    return len({p for name in names if (p := bottleneck_position(name)) is not None})


# targets ---------------------------------------------------------------------------------------------------------------
# The linear layers of a model that an adapter adapts.


def prepare_linear_layers(model: nn.Module, target: TargetSet) -> dict[str, nn.Linear]:
    """Return the linear layers that `target` matches, by name, in the model's order. `target.prepare` is called first.

    Raises ConfigError if no layer matches, or if the pattern is invalid.
    """
    if target.prepare:
        target.prepare(model)
    wanted = target.select(model) if target.select else target.pattern
    options = re2.Options()  # RE2 matches in linear time
    options.log_errors = False
    try:
        pattern = re2.compile(wanted, options)
    except re2.error as error:
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else str(error)
        what = f"is not a valid regular expression of RE2, without look-around and back-references ({reason})"
        raise ConfigError(f"adapter.targets: {wanted!r} {what}; fix it") from None
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
    return linear
