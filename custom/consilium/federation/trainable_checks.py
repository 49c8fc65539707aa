"""Checks of a job's trained tensors (adapter and base parameters) against its strategy, and descriptions of these tensors."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor, nn

from consilium.adapters import adapter_state
from consilium.adapters.names import (
    CHANGE,
    WHOLE_BASE,
    bottleneck_count,
    bottleneck_position,
    factor,
    is_base,
    is_head,
    is_local,
    is_magnitude,
)
from consilium.adapters.registry import AdapterConfig, Decoder, Shapes
from consilium.adapters.strategy_modules import feature_point_of
from consilium.config.job import JobConfig
from consilium.core.errors import ConfigError
from consilium.core.messages import Tensors
from consilium.models.registry import ModelKind
from consilium.strategies.strategy import Role, Strategy

ROLES: dict[Decoder, Role] = {"share": Role.SHARED, "keep": Role.LOCAL}


def trained_base_shapes(model: nn.Module, names: Iterable[str]) -> Shapes:
    """Return the shapes of the base's trained parameters, by their adapter tensor names."""
    parameters = dict(model.named_parameters())
    return {name: tuple(parameters[name.partition(".")[2]].shape) for name in names}


def check_decoder_and_dora(config: JobConfig, names: list[str], source: Path | str) -> None:
    """Raise ConfigError if the strategy cannot train DoRA's row lengths, or treats a trained decoder in another way."""
    wanted: Decoder = getattr(config.adapter, "decoder", "freeze")
    if getattr(config.adapter, "dora", False) and not config.strategy.traits.elementwise:
        raise ConfigError(
            f"{source}: adapter.dora: true: strategy {config.strategy.name!r} works on factors and has no rule for the "
            "lengths of rows; use fedit, fedprox, scaffold, centralized or local_only"
        )
    if not names or wanted == "freeze":
        return
    where = f"{source}: adapter.decoder: {wanted!r}"
    does = {"keep": "keeps it at its site", "share": "shares it"}
    if (rule := decoder_rule(config.strategy, names)) is None:
        raise ConfigError(f"{where}: strategy {config.strategy.name!r} has no rule for a decoder that trains; use freeze")
    if rule != wanted:
        raise ConfigError(f"{where}: strategy {config.strategy.name!r} {does[rule]}; use {rule} or freeze")


def check_adapter_start(config: JobConfig, names: Iterable[str], source: Path | str) -> None:
    """Raise ConfigError if the job sets `adapter.start` and its strategy or adapter cannot start from an adapter folder."""
    what, strategy = f"{source}: adapter.start: {config.adapter.start!r}", config.strategy
    if config.adapter.start is None:
        return
    if strategy.traits.needs_base_weights:
        raise ConfigError(f"{what}: strategy {strategy.name!r} starts from the base's own directions; leave it out")
    if config.adapter_kind.unequal_ranks:
        raise ConfigError(f"{what}: kind {config.adapter.kind!r} has other ranks at every site; use lora, or leave it out")
    for name in filter(is_base, names):
        if any(strategy.role(name, *place) is Role.LOCAL for place in strategy.traits.phase_schedule()):
            raise ConfigError(f"{what}: sites keep {name!r} and start it from the base; share or freeze the decoder")


def check_interpolation(strategy: Strategy, model: nn.Module, base: ModelKind, source: Path | str) -> None:
    """Raise ConfigError if FedDPA's weighting by similarity is not possible for the model.

    A language model would weigh a text by its answer. Other models need a single point between encoder and head.
    """
    if not (blend := strategy.traits.interpolation) or not blend.examples:
        return
    if base.tokenizer:
        raise ConfigError(
            f"{source}: strategy.weighting: 'similarity' would weigh a text by prompt and answer, which scores must not see; "
            "use fixed"
        )
    try:
        feature_point_of(model, base)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}; or write strategy.weighting: fixed") from None


def decoder_rule(strategy: Strategy, names: list[str]) -> Decoder | None:
    """Return "share" or "keep" if the strategy treats all tensors `names` so in every phase; None if it has no single rule."""
    try:
        roles = {strategy.role(name, *place) for name in names for place in strategy.traits.phase_schedule()}
    except ConfigError:
        return None
    return next((decoder for decoder, role in ROLES.items() if roles == {role}), None)


def describe_trained_tensors(adapter: AdapterConfig, initial: Mapping[str, Tensor]) -> str:
    """Return a description of the trained tensors with their counts. A comparison of methods is fair if this is equal."""
    parts = {
        "LoRA": [n for n in initial if factor(n)],
        "local LoRA": [n for n in initial if is_local(n)],
        f"{bottleneck_count(initial)} bottlenecks": [n for n in initial if bottleneck_position(n) is not None],
        f"mask decoder ({getattr(adapter, 'decoder', '')})": [
            n for n in initial if is_base(n) and not _is_whole_base(n) and not is_magnitude(n)
        ],
        "lengths of rows": [n for n in initial if is_magnitude(n)],
        "whole model": [n for n in initial if _is_whole_base(n)],
        "head": [n for n in initial if is_head(n)],
    }
    sizes = {part: sum(math.prod(initial[n].shape) for n in names) for part, names in parts.items()}
    return " + ".join(f"{part} {size:,}" for part, size in sizes.items() if size)


def _is_whole_base(name: str) -> bool:
    return name.startswith(f"{WHOLE_BASE}.")


def name_base_changes(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `values` for a server's export: changes of base parameters are named "<parameter>.change", as there is no base."""
    return {f"{n.partition('.')[2]}{CHANGE}" if is_base(n) else n: tensor for n, tensor in values.items()}


def shared_weight_warning(model: nn.Module, adapted: Iterable[str]) -> tuple[str, ...]:
    """Return a warning if an adapted layer shares its weight with another module; `adapted`: the adapter tensors' names."""
    found = adapter_state.shared_weight(model, (name.rpartition(".")[0] for name in adapted))
    end = "it trains, but cannot be merged into the base"
    return (f"adapter.targets: {found[0]!r} shares its weight with {found[1]!r}; {end}",) if found else ()


def check_server_step_and_state(config: JobConfig, strategy: Strategy, initial: Tensors, source: Path | str) -> None:
    """Raise ConfigError for a `server:` section or a kept optimizer state that the strategy cannot use."""
    server, who = config.server, f"strategy {strategy.name!r}"
    if server is not None and strategy.traits.needs == "sites":
        raise ConfigError(f"{source}: server: {who} merges sites' results one by one, not their mean; remove the section")
    if server is not None and server.optimizer and not strategy.traits.fixed_basis:
        raise ConfigError(
            f"{source}: server.optimizer: {server.optimizer!r}: {who} changes what a tensor's numbers mean between rounds; "
            "leave it out"
        )
    uploads = any(strategy.names(initial, Role.SHARED, *place) for place in strategy.traits.phase_schedule())
    if server is not None and (server.optimizer or server.is_robust) and not uploads:
        raise ConfigError(f"{source}: server: {who} sends the server nothing that it could merge; remove the section")
    if config.training.optimizer_state == "kept" and (strategy.traits.scales_adapter or not strategy.traits.fixed_basis):
        raise ConfigError(
            f"{source}: training.optimizer_state: 'kept': {who} changes between rounds what a site trains; use fresh"
        )
