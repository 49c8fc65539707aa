"""What a job computes: FLOPs of a step and of a whole run, counted on a model that is only laid out (meta device).

A product of matrices counts two FLOPs a pair, forward and back, as PyTorch's own counter does; what is done element by element
counts nothing. Hours are those over a stated throughput: an estimate, not a measurement.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from consilium.adapters import layers
from consilium.adapters.names import is_local
from consilium.config.job import JobConfig
from consilium.core.messages import Stage
from consilium.federation.job import Job, laid_out
from consilium.models.layout import numberless
from consilium.strategies.strategy import trained_names
from consilium.tasks.segmentation import prompts_of

WRITTEN = frozenset({"label", "exact", "generation"})
"""Evaluations of texts that write answers beside the loss: each token once more, if earlier ones are remembered."""


@dataclass(frozen=True)
class Samples:
    """How many sites there are, and how many samples all of them together have in each split."""

    sites: int
    training: int
    validation: int = 0
    test: int = 0


@dataclass(frozen=True)
class Work:
    """FLOPs of one sample: `training` forward and back, of a phase's first pass; `scoring` forward only."""

    training: int
    scoring: int


def work_of(job: Job) -> Work:
    """Return what a sample costs. Raises ConfigError for a model that cannot be laid out."""
    config = job.config
    with torch.device("meta"):
        model = laid_out(config)
        given = _sample(config)
        scoring = _count(lambda: _answer(model, given))
        # Let the tensors require gradients that one fit trains. A local adapter has a fit of its own, as large as its twin's.
        model.train()
        place = (max(1, job.strategy.traits.warm_up), 0)
        trained = {name for name in trained_names(job.strategy, job.initial, *place) if not is_local(name)}
        for name, tensor in layers.tensors(model).items():
            if isinstance(tensor, nn.Parameter):
                tensor.requires_grad_(name in trained)
        training = _count(lambda: _learn(model, given))
    return Work(training, scoring)


def step_flops(job: Job, work: Work) -> int:
    """Return the FLOPs of an optimizer step at a site: of all its batches."""
    training = job.config.training
    return work.training * training.batch_size * training.accumulate


def run_flops(job: Job, work: Work, samples: Samples) -> float:
    """Return the FLOPs of a whole run: local training of all sites and rounds, validation, the closing evaluation."""
    training, strategy, sites = job.config.training, job.strategy, 1 if job.strategy.traits.pools_data else samples.sites
    federation = job.config.federation
    asked = min(sites, max(federation.min_sites, math.ceil(federation.fraction_train * sites)))
    own = samples.training / sites
    seen = (
        training.local_steps * training.batch_size * training.accumulate
        if training.local_steps
        else own * training.local_epochs
    )
    fits = strategy.traits.phases_of(0) * strategy.traits.fits
    rounds = training.rounds * asked * (fits * seen + strategy.traits.probe_fraction * own) * work.training
    closing = sites * strategy.traits.fits_after_last_round * seen * work.training
    return rounds + closing + _scored(job, samples, sites, asked) * _score(job, work)


def own_samples(config: JobConfig, sites: int) -> Samples | None:
    """Return the samples of a job that brings its data along; None for others."""
    made = config.data.phantoms
    return None if made is None else Samples(sites, *(n * sites for n in (made.training, made.validation, made.test)))


def _scored(job: Job, samples: Samples, sites: int, asked: int) -> float:
    """Return how many samples are scored in a run, as often as they are."""
    config, validation = job.config, samples.validation / sites
    rounds = sum(config.training.validates(r, stage) for r in range(config.training.rounds) for stage in Stage)
    held = math.ceil(config.federation.fraction_evaluate * (sites - asked)) * config.training.rounds
    return (rounds * asked + held) * validation + len(Stage) * (samples.test or samples.validation)


def _score(job: Job, work: Work) -> int:
    writes = getattr(job.config.task, "evaluate", "") in WRITTEN
    return work.scoring * (2 if writes else 1)


def _sample(config: JobConfig) -> dict[str, Tensor]:
    """Return one sample as the model takes it, of the job's size: tokens to the last, a picture, its prompts."""
    if length := getattr(config.model, "max_length", 0):
        ids = torch.zeros(1, length, dtype=torch.long)
        if config.task.outputs:
            return {"text": ids}
        return {
            "input_ids": ids,
            "attention_mask": torch.zeros(1, 1, length, length),
        }  # of two dimensions it would be looked at
    side = config.model.image_side
    found = {"image": torch.zeros(1, 3, side, side)}
    if kind := prompts_of(config.task):
        found["prompt"] = torch.zeros(1, len(getattr(config.task, "classes", ())), len(kind.numbers))
    return found


def _answer(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    if "input_ids" in given:
        read = getattr(model, "read", dict)  # of a model that also sees: its pictures are not counted
        return model(**read(**given), use_cache=False).logits
    return model(*given.values())


def _learn(model: nn.Module, given: dict[str, Tensor]) -> None:
    answer = _answer(model, given).float().sum()
    if answer.requires_grad:
        answer.backward()


def _count(run: Any) -> int:
    with FlopCounterMode(display=False) as counter, numberless():
        run()
    return counter.get_total_flops()
