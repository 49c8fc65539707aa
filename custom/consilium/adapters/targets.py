"""Which linear layers of a model an adapter is put into."""

from collections.abc import Mapping
from typing import Any

import re2
from torch import nn

from consilium.adapters.names import HEAD
from consilium.core.errors import ConfigError
from consilium.models.custom_weight_access import architectures, user_of
from consilium.models.registry import TargetSet


def linear_layers(model: nn.Module, target: TargetSet) -> dict[str, nn.Linear]:
    """Return the linear layers, by name, that `target` matches, in the model's order, after its `prepare`.

    Raises ConfigError if nothing matches, for what is no pattern, or for a layer that an adapter cannot reach.
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
    _require_read(model, linear)
    return linear


def _require_read(model: nn.Module, linear: Mapping[str, nn.Linear]) -> None:
    """Raise ConfigError for a layer whose weight the model's code reads past the layer, so that an adapter does nothing."""
    kinds = architectures(model)
    own = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    past = {name: kind for name in own if (kind := user_of(name, kinds))}
    if past:
        rest = "|".join(name for name in own if name not in past)
        remedy = rf"use the regex .*\.({rest})" if rest else "use other layers"
        who = min(past.values())
        raise ConfigError(f"adapter.targets: {', '.join(past)}: {who}'s code reads such weights past an adapter; {remedy}")


def _compiled(pattern: str) -> Any:
    """Return the compiled RE2 pattern, whose time grows with the text only, whoever wrote it. Raises ConfigError."""
    quiet = re2.Options()
    quiet.log_errors = False
    try:
        return re2.compile(pattern, quiet)
    except re2.error as error:
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else str(error)
        what = f"is no valid regular expression of RE2, without look-around and back-references ({reason})"
        raise ConfigError(f"adapter.targets: {pattern!r} {what}; fix it") from None
