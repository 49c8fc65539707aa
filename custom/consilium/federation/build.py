"""From configuration to objects: the one place that knows models, adapters, tasks, strategies and sites."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from consilium.adapters import bottleneck, dual_rank, layers, lora
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.data.datalist import DataList, pool, read_datalist
from consilium.data.synthetic.phantoms import make_phantoms
from consilium.data.text import read_texts
from consilium.errors import ConfigError
from consilium.federation.site import Site
from consilium.messages import Observer, Tensors
from consilium.models.causal_lm import CausalLmConfig
from consilium.models.causal_lm.network import build_causal_lm, load_tokenizer
from consilium.models.clip import ClipConfig
from consilium.models.clip.network import build_clip
from consilium.models.sam import SamConfig
from consilium.models.sam.network import build_sam
from consilium.privacy.guard import Guard
from consilium.privacy.ledger import Ledger
from consilium.privacy.plan import make_plan
from consilium.privacy.release import allowed_metrics
from consilium.strategies import build_strategy
from consilium.strategies.strategy import Role, Strategy
from consilium.tasks.base import Task
from consilium.tasks.classification import task as classification
from consilium.tasks.language import task as language
from consilium.tasks.segmentation import task as segmentation
from consilium.training.device import pick_device


@dataclass(frozen=True)
class Job:
    """A validated job: its configuration, its strategy, and the adapter tensors every site starts from."""

    config: JobConfig
    strategy: Strategy
    initial: Tensors


def assemble_job(config: JobConfig, source: Path | str = "job.yaml") -> Job:
    """Build what the server needs; the base model is only laid out (meta device), so no weights are read.

    Raises ConfigError where model, adapter and strategy do not fit together.
    """
    with torch.device("meta"):
        model = _bare_model(config, checkpoint=None, weights=False)
        _inject(model, config)
    job = Job(config, build_strategy(config.strategy, source), layers.initial(model, config.training.seed))
    _check_adapter(config, job.strategy, source)
    for name in job.initial:
        job.strategy.role(name, 0, 0)
    if shared := [name for name in layers.native(model) if job.strategy.role(name, 0, 0) is not Role.LOCAL]:
        who = f"strategy {job.strategy.name!r} would share {shared[0]!r}"
        raise ConfigError(f"{source}: adapter.decoder: true: {who}, which never leaves a site; use fedsca, or false")
    if config.privacy is not None and config.privacy.unit == "site" and job.strategy.needs == "sites":
        _refuse_central(config.privacy.trust, job.strategy.name, source)
    if config.privacy is not None and job.strategy.pools_data:
        raise ConfigError(f"{source}: privacy: strategy {job.strategy.name!r} pools all sites' data; remove the section")
    make_plan(config, job.strategy)
    return job


def _check_adapter(config: JobConfig, strategy: Strategy, source: Path | str) -> None:
    """Raise ConfigError where the adapter cannot do what strategy or privacy ask of it."""
    dual = config.adapter.kind == "dual_rank"
    if strategy.ranks_differ and not dual:
        what = f"strategy {strategy.name!r} gives sites unequal ranks"
        raise ConfigError(f"{source}: adapter.kind: {config.adapter.kind!r}: {what}; use dual_rank")
    if dual and config.privacy is not None and config.privacy.unit == "record":
        raise ConfigError(f"{source}: adapter.kind: 'dual_rank': has no per-sample gradients for privacy.unit record; use lora")


def _refuse_central(trust: str, strategy: str, source: Path | str) -> None:
    """Raise ConfigError for noise that protects sums only, with a strategy whose server looks at single sites."""
    if trust != "local":
        raise ConfigError(
            f"{source}: privacy.trust: {trust!r}: strategy {strategy!r} compares single sites' updates, so noise on their sum "
            "protects nothing; use local"
        )


def build_model(config: JobConfig, site: SiteConfig) -> nn.Module:
    """Return the frozen base with adapters, on the site's device. Raises CheckpointError or ConfigError."""
    model = _bare_model(config, _checkpoint(config.model, site), weights=True)
    _inject(model, config)
    return model.to(pick_device(site.device)).eval()


def build_task(config: JobConfig, data: DataList, site: SiteConfig | None = None) -> Task:
    """Return the job's task on one site's data; a language task reads its tokenizer from the site. Raises DataError."""
    task, model = config.task, config.model
    if task.name == "language":
        tokenizer = tokenizer_of(config, site or SiteConfig())
        return language.LanguageTask(data, tokenizer, model.max_length, task.evaluate, task.labels, task.max_new_tokens)
    if task.name == "classification":
        return classification.ClassificationTask(data, task.classes, model.image_size, task.augment)
    return segmentation.SegmentationTask(data, task.classes, model.image_size, task.prompt, task.augment)


def tokenizer_of(config: JobConfig, site: SiteConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a language job at a site. Raises CheckpointError or ConfigError."""
    return load_tokenizer(config.model.variant, _checkpoint(config.model, site))


def metric_names(config: JobConfig) -> frozenset[str]:
    """Return every metric the job's task can report."""
    if config.task.name == "language":
        return language.metric_names(config.task.evaluate)
    module = classification if config.task.name == "classification" else segmentation
    return module.metric_names(config.task.classes)


def site_data(config: JobConfig, name: str, site: SiteConfig, folder: Path) -> DataList:
    """Return a site's data list: its own, or phantoms the job describes, generated into `folder`. Raises ConfigError."""
    if site.datalist:
        return _read_data(config, site.datalist)
    phantoms = config.data.phantoms
    if phantoms is None:
        file = "training.jsonl" if config.task.name == "language" else "datalist.json"
        raise ConfigError(
            f"{name}: no data list; set `datalist:` in the site's site.yaml, or simulate with --data FOLDER that holds "
            f"{name}/{file}"
        )
    size = getattr(config.model, "image_size", 0)
    spec = phantoms.model_dump() | {"seed": config.training.seed, "size": size}
    return _read_data(config, make_phantoms(folder / "phantoms", site=name, **spec))


def _read_data(config: JobConfig, path: Path) -> DataList:
    if config.task.name == "language":
        return read_texts(path)
    return read_datalist(path, config.task.name == "classification")


def build_site(job: Job, name: str, site: SiteConfig, folder: Path, observer: Observer, model: nn.Module | None = None) -> Site:
    """Return a ready site; `folder` is its private folder. `model` lets sites of one process share the frozen base."""
    if site.threads:
        torch.set_num_threads(site.threads)
    task = build_task(job.config, site_data(job.config, name, site, folder), site)
    return _site(job, name, site, folder, observer, model, task, _checkpoint(job.config.model, site))


def build_guard(
    job: Job,
    name: str,
    site: SiteConfig,
    folder: Path,
    root: Path,
    observer: Observer,
    simulated: bool = False,
    job_id: str = "",
) -> Guard:
    """Return the gate of one site for this job. `root` holds the site's records of all runs and its ledger.

    In a simulation metrics are shared unless the site forbids it; elsewhere a private job shares none unless it allows it.
    """
    data = site_data(job.config, name, site, folder)
    shares = site.share_metrics if site.share_metrics is not None else simulated or job.config.privacy is None
    return Guard(
        name,
        job.config,
        job.strategy,
        allowed_metrics(metric_names(job.config)),
        site.privacy,
        shares,
        site.privacy.dataset or str(data.path),
        len(data.splits["training"]),
        folder,
        root,
        Ledger(site.privacy.ledger or root / "ledger.sqlite"),
        observer,
        job_id,
    )


def build_pooled_site(
    job: Job, name: str, members: dict[str, SiteConfig], folder: Path, observer: Observer, model: nn.Module
) -> Site:
    """Return the one site of a centralized reference run, on the data of all `members`."""
    lists = [site_data(job.config, member, site, folder.parent / member) for member, site in members.items()]
    first = next(iter(members.values()))
    task = build_task(job.config, pool(lists), first)
    return _site(job, name, SiteConfig(), folder, observer, model, task, _checkpoint(job.config.model, first))


def _site(
    job: Job,
    name: str,
    site: SiteConfig,
    folder: Path,
    observer: Observer,
    model: nn.Module | None,
    task: Task,
    checkpoint: Path | None,
) -> Site:
    model = model if model is not None else build_model(job.config, site)
    plan = make_plan(job.config, job.strategy, task.num_samples)
    seed = site.privacy.noise_seed
    return Site(name, job.config, job.strategy, model, task, folder, observer, plan, seed, site.capacity, checkpoint)


def _bare_model(config: JobConfig, checkpoint: Path | None, weights: bool) -> nn.Module:
    wanted, task, again = config.model, config.task, config.training.gradient_checkpointing
    if wanted.name == "causal_lm":
        return build_causal_lm(wanted.variant, checkpoint, wanted.config, weights, again)
    if wanted.name == "clip":
        return build_clip(wanted.variant, checkpoint, wanted.image_size, len(task.classes), weights, again)
    return build_sam(
        wanted.variant,
        checkpoint,
        wanted.image_size,
        len(task.classes),
        prompt=task.prompt,
        attention=wanted.attention,
        gradient_checkpointing=again,
        weights=weights,
    )


def _inject(model: nn.Module, config: JobConfig) -> None:
    wanted = config.adapter
    if wanted.kind == "dual_rank":
        dual_rank.inject(model, wanted.rank, wanted.scaling, wanted.targets, wanted.dropout)
    elif wanted.kind == "bottleneck":
        bottleneck.inject(model, wanted.width, wanted.decoder)
    else:
        lora.inject(model, wanted.rank, wanted.alpha, wanted.targets, wanted.dropout)


def _checkpoint(config: SamConfig | ClipConfig | CausalLmConfig, site: SiteConfig) -> Path | None:
    """Return the checkpoint's path with ${SITE} replaced by the site's checkpoint folder."""
    if config.checkpoint is None:
        return None
    if "${SITE}" in config.checkpoint and site.checkpoints is None:
        raise ConfigError(
            f"model.checkpoint: {config.checkpoint!r} needs the site's checkpoint folder; set `checkpoints:` in site.yaml, "
            "or simulate with --checkpoints FOLDER"
        )
    return Path(config.checkpoint.replace("${SITE}", str(site.checkpoints)))
