"""Assembles a job from its configuration: checks, initial adapter tensors, model and task.

client/build.py builds sites and their guards.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from consilium.adapters import adapter_state
from consilium.adapters.names import FEATURE_SHIFT, LOCAL_ADAPTER
from consilium.adapters.registry import AdapterKind
from consilium.adapters.strategy_modules import add_parts, part_shapes
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError
from consilium.core.messages import Tensors
from consilium.core.norms import norm
from consilium.data.datalist import DataList
from consilium.federation.diagnostics import check_deviation
from consilium.federation.saved_model import keeps_local
from consilium.federation.trainable_checks import (
    check_adapter_start,
    check_decoder_and_dora,
    check_interpolation,
    check_server_step_and_state,
    shared_weight_warning,
    trained_base_shapes,
)
from consilium.models.architecture import refuse_gguf
from consilium.models.base_weights import refuse_adapter
from consilium.models.dtypes import QUANTIZED
from consilium.models.low_precision import require_storable, store_frozen_as
from consilium.models.meta_device import build_on_meta_device
from consilium.models.registry import MODELS, ModelConfig, ModelKind
from consilium.privacy.plan import make_plan
from consilium.strategies.strategy import Strategy
from consilium.strategies.unequal_ranks import at_one_rank
from consilium.tasks.base import Task
from consilium.tasks.registry import TASKS, TaskKind
from consilium.training.device import CPU, pick_device


@dataclass(frozen=True)
class Job:
    """A validated job: its configuration, the adapter tensors that every site starts from, and warnings."""

    config: JobConfig
    initial: Tensors
    warnings: tuple[str, ...] = ()

    @cached_property
    def strategy(self) -> Strategy:
        """The job's algorithm, set to one rank if the adapter has one rank. Raises ConfigError if the job sets tiers then."""
        rank = getattr(self.config.adapter, "rank", None)
        if rank is None or self.config.adapter_kind.unequal_ranks:
            return self.config.strategy
        return at_one_rank(self.config.strategy, rank)

    @cached_property
    def initial_norm(self) -> float:
        """The Euclidean norm of the adapter tensors that every site starts from."""
        return norm(self.initial)


def kinds_of(config: JobConfig) -> tuple[ModelKind, TaskKind, AdapterKind]:
    """Return the registered kinds of a job's model, task and adapter."""
    return MODELS[config.model.name], TASKS[config.task.name], config.adapter_kind


def assemble_job(config: JobConfig, source: Path | str = "job.yaml") -> Job:
    """Return the validated job with its initial tensors. The base model is on the meta device, so no weights are read.

    Raises ConfigError if model, adapter, strategy or privacy do not fit together.
    """
    base, _, adapter = kinds_of(config)
    with build_on_meta_device():
        model = bare_model(config, checkpoint=None, weights=False)
        own = adapter.shapes(model, config.adapter, base)
        names = adapter.trainable_base(model, config.adapter)
        shapes = own | part_shapes(config.strategy.traits.parts, own, model, base)
        shapes |= trained_base_shapes(model, names) | adapter_state.head_shapes(model)
        warnings = [*config.task.warnings(), *shared_weight_warning(model, own)]
        if config.strategy.traits.pools_data and (steps := config.training.local_steps):
            warnings.append(
                f"training.local_steps: {steps}: pooled data get one site's number of steps a round; "
                f"for the same work set training.local_steps to {steps} times the number of sites, or training.local_epochs"
            )
        require_storable(model, config.model.dtype, [model.get_parameter(name.partition(".")[2]) for name in names])
    begin, seed = adapter.start or adapter_state.initial_tensor, config.training.seed
    job = Job(config, {name: begin(name, shape, seed) for name, shape in shapes.items()}, tuple(warnings))
    _check_adapter(config, adapter, source)
    check_decoder_and_dora(config, names, source)
    for name in job.initial:
        job.strategy.role(name, 0, 0)
    check_interpolation(job.strategy, model, base, source)
    _check_privacy(job, source)
    check_server_step_and_state(config, job.strategy, job.initial, source)
    check_adapter_start(config, job.initial, source)
    check_deviation(config, source)
    make_plan(config, job.strategy, names=job.initial)
    return job


def _check_adapter(config: JobConfig, adapter: AdapterKind, source: Path | str) -> None:
    """Raise ConfigError if the kind of adapter lacks a feature that the model's dtype or the strategy needs."""
    kind, strategy, dtype = config.adapter.kind, config.strategy, config.model.dtype
    if kind == "full" and dtype in QUANTIZED:
        raise ConfigError(
            f"{source}: model.dtype: {dtype!r} is for frozen layers only, and adapter.kind 'full' trains all layers; "
            "use dtype fp32, or adapter.kind lora"
        )
    if strategy.traits.ranks_differ and not (adapter.unequal_ranks or (strategy.traits.one_rank and kind == "lora")):
        raise ConfigError(
            f"{source}: adapter.kind: {kind!r}: strategy {strategy.name!r} gives sites unequal ranks; use dual_rank"
        )
    if strategy.traits.sends_frozen_ranks and not (adapter.unequal_ranks or kind == "lora"):
        raise ConfigError(f"{source}: adapter.kind: {kind!r}: strategy {strategy.name!r} sends frozen ranks; use lora")
    if strategy.traits.scales_adapter and adapter.scale is None:
        raise ConfigError(
            f"{source}: adapter.kind: {kind!r}: "
            f"strategy {strategy.name!r} scales the adapter by the round, which this kind cannot; use lora"
        )
    if LOCAL_ADAPTER in strategy.traits.parts and adapter.add_local is None:
        raise ConfigError(
            f"{source}: adapter.kind: {kind!r}: "
            f"strategy {strategy.name!r} puts a second, local adapter beside the first, which this kind cannot; use lora"
        )


def _check_privacy(job: Job, source: Path | str) -> None:
    """Raise ConfigError if the job's privacy section does not cover what its strategy or task does with the data."""
    privacy, strategy = job.config.privacy, job.strategy
    if privacy is None:
        return
    if strategy.traits.pools_data:
        raise ConfigError(f"{source}: privacy: strategy {strategy.name!r} pools all sites' data; remove the section")
    if job.config.dpsgd and (why := _uncharged_work_reason(strategy) or _distributed_dpsgd_refusal_reason(job)):
        raise ConfigError(f"{source}: {why}")
    parts = [(name, getattr(job.config.task, name, None)) for name in ("slices", "tiles")]
    if thinned := [name for name, part in parts if job.config.dpsgd and part and part.empty != "keep"]:
        raise ConfigError(
            f"{source}: task.{thinned[0]}.empty: the number of {privacy.unit}s leaves without noise, "
            "and must not tell how many of them show a label; write keep"
        )
    if privacy.unit == "site" and strategy.traits.needs == "sites" and privacy.trust != "local":
        raise ConfigError(
            f"{source}: privacy.trust: {privacy.trust!r}: strategy {strategy.name!r} compares single sites' updates, so noise "
            "on their sum protects nothing; use local"
        )


def _uncharged_work_reason(strategy: Strategy) -> str | None:
    """Return why record- and patient-level privacy do not cover all of a strategy's work at a site; None if they do."""
    traits, own = strategy.traits, type(strategy).local_update is not Strategy.local_update
    reads = traits.probe_fraction or traits.fits_after_last_round or FEATURE_SHIFT in traits.parts
    compares = traits.interpolation and traits.interpolation.examples
    if traits.refuses_records:
        return traits.refuses_records
    if reads or compares or (own and not traits.fits_only):
        return f"strategy.name: {strategy.name!r} does more with records than privacy.unit record or patient charges; use fedit"
    return None


def _distributed_dpsgd_refusal_reason(job: Job) -> str | None:
    """Return why a strategy cannot train by DP-SGD steps over all sites (`trust: distributed`); None if it can.

    Also None for `trust: local`, where each site takes its own steps.
    """
    strategy, name = job.strategy, f"strategy.name: {job.strategy.name!r}"
    if job.config.dpsgd is None or job.config.dpsgd.trust == "local":
        return None
    if keeps_local(strategy, job.initial):
        return f"{name} keeps tensors at their sites, and DP-SGD over all sites trains shared ones only; use fedit"
    own = [
        half
        for half in ("receive", "local_update", "aggregate")
        if getattr(type(strategy), half) is not getattr(Strategy, half)
    ]
    traits = strategy.traits
    more = traits.parts or traits.ranks_differ or traits.scales_adapter or traits.fits != 1
    if own or more or traits.needs == "sites":
        what = f"({own[0]}) " if own else ""
        return f"{name} does more {what}than to sum gradients, which is all that DP-SGD over all sites does; use fedit"
    return None


def build_model(config: JobConfig, site: SiteConfig) -> nn.Module:
    """Return the frozen base with adapters, on the site's device. Raises CheckpointError or ConfigError.

    A base that will be sharded stays on the CPU, because it may be too large for one device.
    """
    model = _add_adapter(config, bare_model(config, checkpoint_of(config.model, site), weights=True))
    device = CPU if site.base == "sharded" else pick_device(site.main_device)
    return store_frozen_as(model, config.model.dtype, adapter_state.tensors(model).values()).to(device).eval()


def build_task(config: JobConfig, data: DataList, site: SiteConfig | None = None) -> Task:
    """Return the job's task on one site's data; a language task reads its tokenizer from the site. Raises DataError."""
    return kinds_of(config)[1].build(config.task, config.model, data, tokenizer_of(config, site or SiteConfig()))


def tokenizer_of(config: JobConfig, site: SiteConfig) -> Any:
    """Return a language model's tokenizer, None for other models. Raises CheckpointError or ConfigError."""
    made = MODELS[config.model.name].tokenizer
    return made(config.model, checkpoint_of(config.model, site)) if made else None


def metric_names(config: JobConfig) -> frozenset[str]:
    """Return the names of all metrics that the job's task can report."""
    return TASKS[config.task.name].metric_names(config.task)


def build_meta_model(config: JobConfig) -> nn.Module:
    """Return the base with adapters on the meta device, without numbers. Raises ConfigError."""
    with build_on_meta_device():
        return _add_adapter(config, bare_model(config, checkpoint=None, weights=False)).to("meta")


def _add_adapter(config: JobConfig, model: nn.Module) -> nn.Module:
    base, _, adapter = kinds_of(config)
    adapter.inject(model, config.adapter, base)
    add_parts(config.strategy.traits.parts, model, adapter, config.adapter, base)
    return model


def bare_model(config: JobConfig, checkpoint: Path | None, weights: bool) -> nn.Module:
    """Return the base without an adapter; without `weights` it has shapes but no numbers."""
    return MODELS[config.model.name].build(
        config.model, config.task, checkpoint, weights, use_checkpointing=config.training.gradient_checkpointing
    )


def reads_texts(config: JobConfig) -> bool:
    """Return whether a job's records are texts, with or without pictures."""
    return MODELS[config.model.name].tokenizer is not None


def checkpoint_of(config: ModelConfig, site: SiteConfig, whose: str = "the site's") -> Path | None:
    """Return the checkpoint's path with ${SITE} replaced by the site's checkpoint folder.

    Return None if the job names no checkpoint. Raises ConfigError if the site has no checkpoint folder, CheckpointError for an
    adapter or a GGUF file. These checks hold for all kinds of models, also those of plug-ins.
    """
    if config.checkpoint is None:
        return None
    path = resolve_checkpoint_path("model.checkpoint", config.checkpoint, site, whose)
    refuse_adapter(path)
    refuse_gguf(path)
    return path


def resolve_checkpoint_path(field: str, path: str, site: SiteConfig, whose: str = "the site's") -> Path:
    """Return `path` with ${SITE} replaced by the site's checkpoint folder. Raises ConfigError without such a folder."""
    if "${SITE}" in path and site.checkpoints is None:
        raise ConfigError(
            f"{field}: {path!r} needs {whose} checkpoint folder; set `checkpoints:` in site.yaml, or give --checkpoints FOLDER"
        )
    return Path(path.replace("${SITE}", str(site.checkpoints)))
