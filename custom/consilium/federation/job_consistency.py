"""Checks of a job: whether its model, adapter, strategy and sections fit together; and descriptions of its trained tensors."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor, nn

from consilium.adapters import adapter_state
from consilium.adapters.names import (
    CHANGE,
    FEATURE_SHIFT,
    LOCAL_ADAPTER,
    WHOLE_BASE,
    bottleneck_count,
    bottleneck_position,
    factor,
    is_base,
    is_head,
    is_local_adapter,
    is_magnitude,
)
from consilium.adapters.registry import AdapterConfig, Decoder, Shapes
from consilium.adapters.strategy_modules import feature_point_of
from consilium.config.job import JobConfig
from consilium.core.errors import ConfigError, raise_first
from consilium.core.messages import Tensors
from consilium.federation.saved_model import keeps_local
from consilium.models.low_precision import QUANTIZED
from consilium.models.registry import ModelKind
from consilium.strategies.strategy import Role, Strategy

ROLES: dict[Decoder, Role] = {"share": Role.SHARED, "keep": Role.LOCAL}


def trained_base_shapes(model: nn.Module, names: Iterable[str]) -> Shapes:
    """Return the shapes of the base's trained parameters, by their adapter tensor names."""
    parameters = dict(model.named_parameters())
    return {name: tuple(parameters[name.partition(".")[2]].shape) for name in names}


def check_adapter(config: JobConfig, trained_base: list[str], source: Path | str) -> None:
    """Raise ConfigError if the kind of adapter or its settings lack what the model's dtype or the strategy needs.

    `trained_base`: the adapter tensors that are changes of the base's own parameters.
    """
    kind, dtype, adapter, traits = config.adapter.kind, config.model.dtype, config.adapter_kind, config.strategy.traits
    what, who = f"adapter.kind: {kind!r}: strategy {config.strategy.name!r}", f"strategy {config.strategy.name!r}"
    wanted: Decoder = getattr(config.adapter, "decoder", "freeze")
    rule, where = decoder_rule(config.strategy, trained_base), f"adapter.decoder: {wanted!r}"
    does = "shares it" if rule == "share" else "keeps it at its site"
    has_decoder = bool(trained_base) and wanted != "freeze"
    one_rank = traits.one_rank and kind == "lora"
    problems = {
        f"model.dtype: {dtype!r} is for frozen layers only, and adapter.kind 'full' trains all layers; use dtype fp32, or "
        "adapter.kind lora": kind == "full" and dtype in QUANTIZED,
        f"{what} gives sites unequal ranks; use dual_rank": traits.ranks_differ and not (adapter.unequal_ranks or one_rank),
        f"{what} sends frozen ranks; use lora": traits.sends_frozen_ranks and not (adapter.unequal_ranks or kind == "lora"),
        f"{what} scales the adapter by the round, which this kind cannot; use lora": (
            traits.scales_adapter and adapter.scale is None
        ),
        f"{what} puts a second, local adapter beside the first, which this kind cannot; use lora": (
            LOCAL_ADAPTER in traits.parts and adapter.add_local is None
        ),
        f"adapter.dora: true: {who} works on factors and has no rule for the lengths of rows; use fedit, fedprox, scaffold, "
        "centralized or local_only": getattr(config.adapter, "dora", False) and not traits.elementwise,
        f"{where}: {who} has no rule for a decoder that trains; use freeze": has_decoder and rule is None,
        f"{where}: {who} {does}; use {rule} or freeze": has_decoder and rule != wanted,
    }
    raise_first(problems, source=source)


def check_adapter_start(config: JobConfig, names: Iterable[str], source: Path | str) -> None:
    """Raise ConfigError if the job sets `adapter.start` and its strategy or adapter cannot start from an adapter folder."""
    if config.adapter.start is None:
        return
    strategy, places = config.strategy, config.strategy.traits.phase_schedule()
    kept = [n for n in names if is_base(n) and any(strategy.role(n, *place) is Role.LOCAL for place in places)]
    problems = {
        f"strategy {strategy.name!r} starts from the base's own directions; leave it out": strategy.traits.needs_base_weights,
        f"kind {config.adapter.kind!r} has other ranks at every site; use lora, or leave it out": (
            config.adapter_kind.unequal_ranks
        ),
        f"sites keep {next(iter(kept), '')!r} and start it from the base; share or freeze the decoder": kept,
    }
    raise_first(problems, source=f"{source}: adapter.start: {config.adapter.start!r}")


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


def check_privacy(config: JobConfig, strategy: Strategy, initial: Tensors, source: Path | str) -> None:
    """Raise ConfigError if the job's privacy section does not cover what its strategy or task does with the data."""
    privacy, traits, who = config.privacy, strategy.traits, f"strategy {strategy.name!r}"
    if privacy is None:
        return
    parts = [(name, getattr(config.task, name, None)) for name in ("slices", "tiles")]
    thinned = [name for name, part in parts if config.dpsgd and part and part.empty != "keep"]
    uncharged = undone = ""
    if config.dpsgd:
        own = type(strategy).local_update is not Strategy.local_update
        reads = traits.probe_fraction or traits.fits_after_last_round or FEATURE_SHIFT in traits.parts
        compares = traits.interpolation and traits.interpolation.examples
        if traits.refuses_records:
            uncharged = traits.refuses_records
        elif reads or compares:
            more = "more with records than privacy.unit record or patient charges"
            uncharged = f"strategy.name: {strategy.name!r} does {more}; use fedit"
        elif own and not traits.fits_only:
            uncharged = (
                f"strategy.name: {strategy.name!r} has a local_update of its own, and privacy.unit record or patient charges "
                "calls of fit alone; use fedit, or declare fits_only=True and the number of `fits` in its traits"
            )
    if config.dpsgd and config.dpsgd.trust != "local":
        halves = ("receive", "local_update", "aggregate")
        changed = [half for half in halves if getattr(type(strategy), half) is not getattr(Strategy, half)]
        sums_more = traits.parts or traits.ranks_differ or traits.scales_adapter or traits.fits != 1 or traits.needs == "sites"
        if keeps_local(strategy, initial):
            undone = "keeps tensors at their sites, and DP-SGD over all sites trains shared ones only"
        elif changed or sums_more:
            what = f"({changed[0]}) " if changed else ""
            undone = f"does more {what}than to sum gradients, which is all that DP-SGD over all sites does"
    problems = {
        f"privacy: {who} pools all sites' data; remove the section": traits.pools_data,
        uncharged: uncharged,
        f"strategy.name: {strategy.name!r} {undone}; use fedit": undone,
        f"task.{next(iter(thinned), '')}.empty: the number of {privacy.unit}s leaves without noise, and must not tell how many "
        "of them show a label; write keep": thinned,
        f"privacy.trust: {privacy.trust!r}: {who} compares single sites' updates, so noise on their sum protects nothing; use "
        "local": privacy.unit == "site" and traits.needs == "sites" and privacy.trust != "local",
    }
    raise_first(problems, source=source)


def check_server_step_and_state(config: JobConfig, strategy: Strategy, initial: Tensors, source: Path | str) -> None:
    """Raise ConfigError for a `server:` section, a kept optimizer state or a deviation that the strategy cannot use."""
    server, who, traits = config.server, f"strategy {strategy.name!r}", strategy.traits
    optimizer, is_robust = (server.optimizer, server.is_robust) if server else (None, False)
    uploads = any(strategy.names(initial, Role.SHARED, *place) for place in traits.phase_schedule())
    problems = {
        f"server: {who} merges sites' results one by one, not their mean; remove the section": (
            server is not None and traits.needs == "sites"
        ),
        f"server.optimizer: {optimizer!r}: {who} changes what a tensor's numbers mean between rounds; leave it out": (
            optimizer and not traits.fixed_basis
        ),
        f"server: {who} sends the server nothing that it could merge; remove the section": (
            (optimizer or is_robust) and not uploads
        ),
        f"training.optimizer_state: 'kept': {who} changes between rounds what a site trains; use fresh": (
            config.training.optimizer_state == "kept" and (traits.scales_adapter or not traits.fixed_basis)
        ),
        f"diagnostics.deviation: true: {who} sends sites factors of unequal shapes, which have no mean; remove it": (
            config.diagnostics.deviation and (config.adapter_kind.unequal_ranks or traits.skips_blocks)
        ),
    }
    raise_first(problems, source=source)


def decoder_rule(strategy: Strategy, names: list[str]) -> Decoder | None:
    """Return "share" or "keep" if the strategy treats all tensors `names` so in every phase; None if it has no single rule."""
    try:
        roles = {strategy.role(name, *place) for name in names for place in strategy.traits.phase_schedule()}
    except ConfigError:
        return None
    return next((decoder for decoder, role in ROLES.items() if roles == {role}), None)


def describe_trained_tensors(adapter: AdapterConfig, initial: Mapping[str, Tensor]) -> str:
    """Return a description of the trained tensors with their counts. A comparison of methods is fair if this is equal."""
    whole = {n for n in initial if n.startswith(f"{WHOLE_BASE}.")}
    parts = {
        "LoRA": [n for n in initial if factor(n)],
        "local LoRA": [n for n in initial if is_local_adapter(n)],
        f"{bottleneck_count(initial)} bottlenecks": [n for n in initial if bottleneck_position(n) is not None],
        f"mask decoder ({getattr(adapter, 'decoder', '')})": [
            n for n in initial if is_base(n) and n not in whole and not is_magnitude(n)
        ],
        "lengths of rows": [n for n in initial if is_magnitude(n)],
        "whole model": [n for n in initial if n in whole],
        "head": [n for n in initial if is_head(n)],
    }
    sizes = {part: sum(math.prod(initial[n].shape) for n in names) for part, names in parts.items()}
    return " + ".join(f"{part} {size:,}" for part, size in sizes.items() if size)


def name_base_changes(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `values` for a server's export: changes of base parameters are named "<parameter>.change", as there is no base."""
    return {f"{n.partition('.')[2]}{CHANGE}" if is_base(n) else n: tensor for n, tensor in values.items()}


def shared_weight_warning(model: nn.Module, adapted: Iterable[str]) -> tuple[str, ...]:
    """Return a warning if an adapted layer shares its weight with another module; `adapted`: the adapter tensors' names."""
    found = adapter_state.shared_weight(model, (name.rpartition(".")[0] for name in adapted))
    end = "it trains, but cannot be merged into the base"
    return (f"adapter.targets: {found[0]!r} shares its weight with {found[1]!r}; {end}",) if found else ()
