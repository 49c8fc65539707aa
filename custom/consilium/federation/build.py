"""From configuration to objects: jobs, sites and guards. What a kind needs, its registration says."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from consilium.adapters import layers
from consilium.adapters.names import trained_layers
from consilium.adapters.parts import LOCAL_ADAPTER, add_parts, part_shapes
from consilium.adapters.registry import AdapterKind
from consilium.config.job import JobConfig
from consilium.config.secure_aggregation import most_weight
from consilium.config.site import SiteConfig
from consilium.data.datalist import DataList, pool
from consilium.data.patients import warn_of_alike
from consilium.errors import ConfigError
from consilium.federation.diagnostics import check_deviation
from consilium.federation.multi_device import ranks_of
from consilium.federation.privacy_checks import check_privacy
from consilium.federation.samples import of_patients, patients_of, site_data, units_of, watched
from consilium.federation.site import Site
from consilium.federation.speedups import speed_up
from consilium.federation.trained import base_shapes, check_base, check_blend, check_optimizers, check_start, warnings_of
from consilium.linalg.together import norm
from consilium.messages import Observer, Tensors, allowed_metrics, loading
from consilium.models.layout import layout
from consilium.models.registry import MODELS, ModelConfig, ModelKind
from consilium.models.stored import QUANTIZED, require_stored, store
from consilium.privacy.guard import Guard
from consilium.privacy.ledger import Ledger
from consilium.privacy.plan import make_plan
from consilium.privacy.secagg.sum_ledger import GENERATED, SumLedger
from consilium.privacy.statistics import Terms
from consilium.strategies.strategy import Strategy
from consilium.tasks.base import Task
from consilium.tasks.registry import TASKS, TaskKind


@dataclass(frozen=True)
class Job:
    """A validated job: its configuration, its strategy, the adapter tensors every site starts from, what to warn of."""

    config: JobConfig
    initial: Tensors
    warnings: tuple[str, ...] = ()

    @cached_property
    def strategy(self) -> Strategy:
        """The job's algorithm, at the one rank of an adapter that has one. Raises ConfigError where it cannot be."""
        rank = getattr(self.config.adapter, "rank", None)
        if rank is None or self.config.adapter_kind.unequal_ranks:
            return self.config.strategy
        return self.config.strategy.at_rank(rank)

    @cached_property
    def norm(self) -> float:
        """The Euclidean norm of the adapter as every site starts from it."""
        return norm(self.initial)


def kinds_of(config: JobConfig) -> tuple[ModelKind, TaskKind, AdapterKind]:
    """Return what is registered of a job's model, task and adapter."""
    return MODELS[config.model.name], TASKS[config.task.name], config.adapter_kind


def assemble_job(config: JobConfig, source: Path | str = "job.yaml") -> Job:
    """Build what the server needs; the base model is only laid out (meta device), so no weights are read.

    Raises ConfigError where model, adapter and strategy do not fit together.
    """
    base, _, adapter = kinds_of(config)
    with layout():
        model = bare_model(config, checkpoint=None, weights=False)
        own = adapter.shapes(model, config.adapter, base)
        names = adapter.trainable_base(model, config.adapter)
        shapes = own | part_shapes(config.strategy.parts, own, model, base)
        shapes |= base_shapes(model, names) | layers.head_shapes(model)
        warnings = warnings_of(model, own)
        require_stored(model, config.model.dtype, [model.get_parameter(name.partition(".")[2]) for name in names])
    begin, seed = adapter.start or layers.start, config.training.seed
    job = Job(config, {name: begin(name, shape, seed) for name, shape in shapes.items()}, warnings)
    _check_adapter(config, adapter, source)
    check_base(config, names, source)
    for name in job.initial:
        job.strategy.role(name, 0, 0)
    check_blend(job.strategy, base, source)
    check_privacy(job, source)
    check_optimizers(config, job.strategy, job.initial, source)
    check_start(config, job.initial, source)
    check_deviation(config, source)
    make_plan(config, job.strategy, names=job.initial)
    return job


def _check_adapter(config: JobConfig, adapter: AdapterKind, source: Path | str) -> None:
    """Raise ConfigError where the adapter cannot do what model, strategy or privacy ask of it."""
    kind, strategy, dtype = config.adapter.kind, config.strategy, config.model.dtype
    if kind == "full" and dtype in QUANTIZED:
        what = "keeps frozen layers so, and adapter.kind 'full' trains them all"
        raise ConfigError(f"{source}: model.dtype: {dtype!r} {what}; use dtype fp32, or adapter.kind lora")
    if strategy.ranks_differ and not (adapter.unequal_ranks or (strategy.one_rank and kind == "lora")):
        what = f"strategy {strategy.name!r} gives sites unequal ranks"
        raise ConfigError(f"{source}: adapter.kind: {kind!r}: {what}; use dual_rank")
    if strategy.tails and not (adapter.unequal_ranks or kind == "lora"):
        raise ConfigError(f"{source}: adapter.kind: {kind!r}: strategy {strategy.name!r} sends frozen ranks; use lora")
    if type(strategy).scaling is not Strategy.scaling and adapter.scale is None:
        what = f"strategy {strategy.name!r} scales the adapter by the round, which this kind cannot"
        raise ConfigError(f"{source}: adapter.kind: {kind!r}: {what}; use lora")
    if LOCAL_ADAPTER in strategy.parts and adapter.add_local is None:
        what = f"strategy {strategy.name!r} puts a second, local adapter beside the first, which this kind cannot"
        raise ConfigError(f"{source}: adapter.kind: {kind!r}: {what}; use lora")
    if not adapter.per_sample and config.privacy is not None and config.privacy.unit == "record":
        has = "with frozen ranks in its products has" if strategy.tails or adapter.unequal_ranks else "has"
        what = f"{has} no per-sample gradients, which privacy.unit record takes of linear layers only"
        raise ConfigError(f"{source}: adapter.kind: {kind!r}: {what}; use {'fedit on lora' if strategy.tails else 'lora'}")


def build_model(config: JobConfig, site: SiteConfig) -> nn.Module:
    """Return the frozen base with adapters, on the site's device. Raises CheckpointError or ConfigError.

    A base that is to be sharded is on the CPU: it may be too large for one device.
    """
    from consilium.training.device import CPU, pick_device

    model = _adapted(config, bare_model(config, checkpoint_of(config.model, site), weights=True))
    device = CPU if site.base == "sharded" else pick_device(site.main_device)
    return store(model, config.model.dtype, layers.tensors(model).values()).to(device).eval()


def build_task(config: JobConfig, data: DataList, site: SiteConfig | None = None) -> Task:
    """Return the job's task on one site's data; a language task reads its tokenizer from the site. Raises DataError."""
    return kinds_of(config)[1].build(config.task, config.model, data, tokenizer_of(config, site or SiteConfig()))


def tokenizer_of(config: JobConfig, site: SiteConfig) -> Any:
    """Return a language model's tokenizer, None for other models. Raises CheckpointError or ConfigError."""
    made = MODELS[config.model.name].tokenizer
    return made(config.model, checkpoint_of(config.model, site)) if made else None


def metric_names(config: JobConfig) -> frozenset[str]:
    """Return every metric the job's task can report."""
    return TASKS[config.task.name].metric_names(config.task)


def build_site(
    job: Job,
    name: str,
    site: SiteConfig,
    folder: Path,
    observer: Observer,
    model: nn.Module | None = None,
    root: Path | None = None,
    data: DataList | None = None,
) -> Site:
    """Return a ready site; `folder` is its private folder, `root` what outlives jobs there, by default `folder`.

    `model` lets sites of one process share the frozen base. `data`: what its guard counts; by default it is read here.
    """
    if model is not None and site.base == "sharded":
        what = "the sites of a simulation in one process share their base"
        raise ConfigError(f"{name}: site.yaml: base: 'sharded': {what}; use --engine flare, or replicated")
    if site.threads:
        torch.set_num_threads(site.threads)
    observer(loading("data", name))
    data = data or site_data(job.config, name, site, folder, root)
    watch = watched(job.config, data) if job.config.privacy is not None else None
    decoded = replace(data, loading=replace(data.loading, decode=job.config.privacy is not None))  # or it costs, see README
    task = build_task(job.config, decoded, site)
    if warning := of_patients(job.config, data):
        observer({"event": "warning", "text": f"{name}: {warning}"})
    warn_of_alike(data)
    if model is None:
        observer(loading(job.config.model.title, name))
        model = build_model(job.config, site)
    made = _site(job, name, site, folder, observer, model, task, checkpoint_of(job.config.model, site), data)
    made.watch = watch
    return made


def build_guard(
    job: Job,
    name: str,
    site: SiteConfig,
    folder: Path,
    root: Path,
    observer: Observer,
    simulated: bool = False,
    job_id: str = "",
    data: DataList | None = None,
) -> Guard:
    """Return the gate of one site for this job. `root` holds the site's records of all runs and its ledger.

    In a simulation metrics are shared unless the site forbids it; elsewhere a private job shares none unless it allows it.
    `data`: what the site trains on, which the plan must count; by default it is read here.
    """
    data = data or site_data(job.config, name, site, folder, root)
    patients, own = patients_of(job.config, name, site, data), site.dataset(job.config.data.dataset, name)[1]
    shares = site.share_metrics if site.share_metrics is not None else simulated or job.config.privacy is None
    return Guard(
        name,
        job.config,
        job.strategy,
        allowed_metrics(metric_names(job.config)),
        site.privacy,
        shares,
        patients,
        units_of(job.config, data),
        folder,
        root,
        Ledger(site.privacy.ledger_in(root)),
        SumLedger(
            root,
            (patients, str(data.path.resolve())) if own else (GENERATED,),
            trained_layers(job.initial),
            job.config.title,
            "uniform" if job.config.weighting == "uniform" else f"samples, at most {most_weight(job.config)}",
        ),
        observer,
        job_id,
        str(data.path) if site.datasets else "",
        Terms(site.share_statistics, site.statistics_minimum),
        tuple(job.initial),
        site.test_only,
        site.share_personalized,
    )


def build_pooled_site(
    job: Job, name: str, members: dict[str, SiteConfig], folder: Path, observer: Observer, model: nn.Module
) -> Site:
    """Return the one site of a centralized reference run, on the data of all `members`."""
    lists = [site_data(job.config, member, site, folder.parent / member) for member, site in members.items()]
    first = next(iter(members.values()))
    task = build_task(job.config, pool(lists), first)
    return _site(job, name, SiteConfig(), folder, observer, model, task, checkpoint_of(job.config.model, first))


def _site(
    job: Job,
    name: str,
    site: SiteConfig,
    folder: Path,
    observer: Observer,
    model: nn.Module,
    task: Task,
    checkpoint: Path | None,
    data: DataList | None = None,
) -> Site:
    units = units_of(job.config, data) if data else task.num_samples
    plan, seed = make_plan(job.config, job.strategy, units, job.initial), site.privacy.noise_seed
    plan = plan.with_seeded([name]) if plan is not None and seed is not None else plan
    found = Site(name, job.config, job.strategy, model, task, folder, observer, plan, seed, site.capacity, checkpoint, data)
    found.ranks = ranks_of(job.config, site, data, folder)
    if site.base != "sharded":  # whose ranks go through the encoder's blocks together, or not at all
        speed_up(job.config, model, task)
    found.shares_scores = site.share_metrics if site.share_metrics is not None else job.config.privacy is None
    return found


def laid_out(config: JobConfig) -> nn.Module:
    """Return the base with adapters but without numbers (meta device). Raises ConfigError."""
    with layout():
        return _adapted(config, bare_model(config, checkpoint=None, weights=False)).to("meta")


def _adapted(config: JobConfig, model: nn.Module) -> nn.Module:
    base, _, adapter = kinds_of(config)
    adapter.inject(model, config.adapter, base)
    add_parts(config.strategy.parts, model, adapter, config.adapter, base)
    return model


def bare_model(config: JobConfig, checkpoint: Path | None, weights: bool) -> nn.Module:
    """Return the base without an adapter; without `weights` it is laid out only."""
    return MODELS[config.model.name].build(
        config.model, config.task, checkpoint, weights, use_checkpointing=config.training.gradient_checkpointing
    )


def checkpoint_of(config: ModelConfig, site: SiteConfig, whose: str = "the site's") -> Path | None:
    """Return the checkpoint's path with ${SITE} replaced by the site's checkpoint folder."""
    return None if config.checkpoint is None else in_checkpoints("model.checkpoint", config.checkpoint, site, whose)


def in_checkpoints(field: str, path: str, site: SiteConfig, whose: str = "the site's") -> Path:
    """Return a field's path with ${SITE} replaced by the checkpoint folder. Raises ConfigError where there is none."""
    if "${SITE}" in path and site.checkpoints is None:
        what = f"{field}: {path!r} needs {whose} checkpoint folder"
        raise ConfigError(f"{what}; set `checkpoints:` in site.yaml, or simulate with --checkpoints FOLDER")
    return Path(path.replace("${SITE}", str(site.checkpoints)))
