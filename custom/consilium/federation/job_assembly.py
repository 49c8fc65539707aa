"""Assembles a job from its configuration: checks, initial adapter tensors, model and task.

client/build.py builds sites and their guards.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from consilium.adapters import adapter_state
from consilium.adapters.strategy_modules import add_parts, part_shapes
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError
from consilium.core.messages import Tensors
from consilium.core.norms import norm
from consilium.data.datalist import DataList
from consilium.federation.job_consistency import (
    check_adapter,
    check_adapter_start,
    check_interpolation,
    check_privacy,
    check_server_step_and_state,
    shared_weight_warning,
    trained_base_shapes,
)
from consilium.models.architecture import refuse_gguf
from consilium.models.low_precision import require_storable, store_frozen_as
from consilium.models.meta_device import build_on_meta_device
from consilium.models.registry import MODELS, ModelConfig
from consilium.models.weight_files import refuse_adapter
from consilium.privacy.plan import make_plan
from consilium.strategies.strategy import Strategy
from consilium.strategies.unequal_ranks import at_one_rank
from consilium.tasks.base import Task
from consilium.tasks.registry import TASKS
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


def assemble_job(config: JobConfig, source: Path | str = "job.yaml") -> Job:
    """Return the validated job with its initial tensors. The base model is on the meta device, so no weights are read.

    Raises ConfigError if model, adapter, strategy or privacy do not fit together.
    """
    base, adapter = MODELS[config.model.name], config.adapter_kind
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
    check_adapter(config, names, source)
    for name in job.initial:
        job.strategy.role(name, 0, 0)
    check_interpolation(job.strategy, model, base, source)
    check_privacy(config, job.strategy, job.initial, source)
    check_server_step_and_state(config, job.strategy, job.initial, source)
    check_adapter_start(config, job.initial, source)
    make_plan(config, job.strategy, names=job.initial)
    return job


def build_model(config: JobConfig, site: SiteConfig) -> nn.Module:
    """Return the frozen base with adapters, on the site's device. Raises CheckpointError or ConfigError.

    A base that will be sharded stays on the CPU, because it may be too large for one device.
    """
    model = _add_adapter(config, bare_model(config, checkpoint_of(config.model, site), weights=True))
    device = CPU if site.base == "sharded" else pick_device(site.main_device)
    return store_frozen_as(model, config.model.dtype, adapter_state.tensors(model).values()).to(device).eval()


def build_task(config: JobConfig, data: DataList, site: SiteConfig | None = None) -> Task:
    """Return the job's task on one site's data; a language task reads its tokenizer from the site. Raises DataError."""
    return TASKS[config.task.name].build(config.task, config.model, data, tokenizer_of(config, site or SiteConfig()))


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
    base, adapter = MODELS[config.model.name], config.adapter_kind
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
