"""The FLOPs of a step and of a whole run, counted on a model on the meta device.

Matrix products count two FLOPs per multiply-add, forward and backward, as in PyTorch's counter. Elementwise operations are not
counted. Hours are FLOPs divided by a stated throughput: an estimate, not a measurement.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from consilium.adapters import adapter_state
from consilium.adapters.names import is_local
from consilium.config.job import JobConfig
from consilium.core.messages import Stage
from consilium.federation.job import Job, build_meta_model
from consilium.models.meta_device import allow_meta_compute
from consilium.strategies.strategy import trained_names
from consilium.tasks.segmentation import prompt_kind_of

GENERATES = frozenset({"label", "exact", "generation"})
"""Values of `task.evaluate` with which a language model generates answers beside the loss.

With a key-value cache, generating costs about one more forward pass per token.
"""


@dataclass(frozen=True)
class Samples:
    """The number of sites, and the number of samples in each split over all sites together."""

    sites: int
    training: int
    validation: int = 0
    test: int = 0


@dataclass(frozen=True)
class Work:
    """FLOPs per sample. `training`: forward and backward of one fit of the first phase. `scoring`: forward only."""

    training: int
    scoring: int


def flops_per_sample(job: Job) -> Work:
    """Return the FLOPs per sample. Raises ConfigError for a model that cannot be built on the meta device."""
    config = job.config
    with torch.device("meta"):
        model = build_meta_model(config)
        given = _sample_inputs(config)
        scoring = _count_flops(lambda: _run_forward(model, given))
        # Only the tensors that one fit trains require gradients. A local adapter has its own fit, which costs the same.
        model.train()
        place = (max(1, job.strategy.traits.warm_up), 0)
        trained = {name for name in trained_names(job.strategy, job.initial, *place) if not is_local(name)}
        for name, tensor in adapter_state.tensors(model).items():
            if isinstance(tensor, nn.Parameter):
                tensor.requires_grad_(name in trained)

        def run_backward() -> None:
            answer = _run_forward(model, given).float().sum()
            if answer.requires_grad:
                answer.backward()

        training = _count_flops(run_backward)
    return Work(training, scoring)


def step_flops(job: Job, work: Work) -> int:
    """Return the FLOPs of one optimizer step at a site, over all accumulated batches."""
    training = job.config.training
    return work.training * training.batch_size * training.accumulate


def run_flops(job: Job, work: Work, samples: Samples) -> float:
    """Return the FLOPs of a whole run: local training over all sites and rounds, validation and the final evaluation."""
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
    # scored samples: in the rounds, and in the final evaluation; a sample counts each time that it is scored
    scored_rounds = sum(training.validates(r, stage) for r in range(training.rounds) for stage in Stage)
    held = math.ceil(federation.fraction_evaluate * (sites - asked)) * training.rounds
    scored = (scored_rounds * asked + held) * (samples.validation / sites)
    scored += len(Stage) * (samples.test or samples.validation)
    writes = getattr(job.config.task, "evaluate", "") in GENERATES
    return rounds + closing + scored * work.scoring * (2 if writes else 1)


def generated_samples(config: JobConfig, sites: int) -> Samples | None:
    """Return the samples of a job with generated data (`data.phantoms`); None for other jobs."""
    made = config.data.phantoms
    return None if made is None else Samples(sites, *(n * sites for n in (made.training, made.validation, made.test)))


def _sample_inputs(config: JobConfig) -> dict[str, Tensor]:
    """Return the model's inputs for one sample of full size: `max_length` tokens, or a picture with its prompts."""
    if length := getattr(config.model, "max_length", 0):
        ids = torch.zeros(1, length, dtype=torch.long)
        if config.task.outputs:
            return {"text": ids}
        return {
            "input_ids": ids,
            "attention_mask": torch.zeros(1, 1, length, length),
        }  # transformers would read the values of a mask with two dimensions
    side = config.model.image_side
    found = {"image": torch.zeros(1, 3, side, side)}
    if kind := prompt_kind_of(config.task):
        found["prompt"] = torch.zeros(1, len(getattr(config.task, "classes", ())), len(kind.numbers))
    return found


def _run_forward(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    if "input_ids" in given:
        read = getattr(model, "text_inputs", dict)  # a vision-language model's pictures are not counted
        return model(**read(**given), use_cache=False).logits
    return model(*given.values())


def _count_flops(run: Any) -> int:
    with FlopCounterMode(display=False) as counter, allow_meta_compute():
        run()
    return counter.get_total_flops()
