"""The local loop: PyTorch only. It knows tensors, a task and a few callables; nothing of servers, sites or files."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from consilium.config.job import TrainingConfig
from consilium.errors import ConsiliumError, Reason
from consilium.privacy.dpsgd import DpSgd, PrivateSteps
from consilium.seeding import seed_for
from consilium.strategies.strategy import LocalStep
from consilium.tasks.base import Batch, Task
from consilium.training.device import autocast, cuda_devices
from consilium.training.optim import learning_rate, make_optimizer


class Stopped(ConsiliumError):
    """Training was asked to stop (job aborted); nothing was uploaded or saved."""


@dataclass(frozen=True)
class Progress:
    """After an optimizer step: `step` of `steps` (1-based) and the loss averaged so far."""

    step: int
    steps: int
    loss: float


Watch = Callable[[Progress], None]
Regularizer = Callable[[LocalStep], Tensor | None]


def train(
    model: nn.Module,
    task: Task,
    params: Mapping[str, Tensor],
    trained: set[str],
    config: TrainingConfig,
    seed: int,
    regularizer: Regularizer,
    scalars: Mapping[str, float],
    watch: Watch,
    dp: DpSgd | None = None,
) -> dict[str, float]:
    """Train the tensors named in `trained` in place and return {"loss", "steps"}.

    `params` are the model's adapter tensors by name, of which `trained` are parameters; all others are frozen. Equal inputs
    give equal results: `seed` fixes shuffling, augmentation and dropout, and the optimizer starts empty. With `dp` the steps
    are record-level private, and repeatable only with a seed of its own. The model is in evaluation mode afterwards. Raises
    ConsiliumError when the loss is not finite.
    """
    for name, parameter in params.items():
        parameter.requires_grad_(name in trained)
    active = {name: cast(nn.Parameter, parameter) for name, parameter in params.items() if name in trained}
    optimizer = make_optimizer(list(active.values()), config)
    anchors = {name: p.detach().clone() if name in trained else p.detach() for name, p in params.items()}
    memory: dict[str, Tensor] = {}
    total, running = config.steps_per_round(task.num_samples), 0.0
    model.train()
    with (
        torch.random.fork_rng(devices=cuda_devices(params)),
        _steps(model, task, optimizer, config, seed, active, dp) as take_step,
    ):
        torch.manual_seed(seed)
        for step in range(1, total + 1):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step - 1, total)
            running += take_step(LocalStep(params, anchors, scalars, memory), regularizer)
            watch(Progress(step, total, running / step))
    model.eval()
    return {"loss": running / total, "steps": float(total)}


@contextmanager
def _steps(
    model: nn.Module,
    task: Task,
    optimizer: torch.optim.Optimizer,
    config: TrainingConfig,
    seed: int,
    trained: Mapping[str, nn.Parameter],
    dp: DpSgd | None,
) -> Iterator[Callable[[LocalStep, Regularizer], float]]:
    """Yield what takes one optimizer step and returns its task loss."""
    if dp is None:
        stream = _stream(task, config, seed)
        yield lambda step, regularizer: _step(model, task, optimizer, stream, config, regularizer, step)
        return
    config = config.model_copy(update={"precision": "fp32"})  # bf16 rounds by who else is in the batch: 1.5e-3 of the clip
    seeds = (seed_for(seed, "step", number) for number in itertools.count())
    with PrivateSteps(model, optimizer, trained, task.num_samples, dp) as private:
        yield lambda step, regularizer: _private_step(model, task, private, next(seeds), config, regularizer, step)


def _step(
    model: nn.Module,
    task: Task,
    optimizer: torch.optim.Optimizer,
    stream: Iterator[Batch],
    config: TrainingConfig,
    regularizer: Regularizer,
    step: LocalStep,
) -> float:
    """Take one step over `accumulate` batches."""
    penalty = regularizer(step)
    if penalty is not None and penalty.requires_grad:
        penalty.backward()
    total = sum(_backward(model, task, next(stream), config, 1 / config.accumulate) for _ in range(config.accumulate))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def _private_step(
    model: nn.Module,
    task: Task,
    private: PrivateSteps,
    seed: int,
    config: TrainingConfig,
    regularizer: Regularizer,
    step: LocalStep,
) -> float:
    """Take one step on a Poisson batch, at most `batch_size` samples in memory at a time; an empty one is noise only.

    `seed` is the step's: were it the batch's, one more record would change the augmentation of all others, and with it more
    of the clipped sum than the clip, which is what the noise is made for.
    """
    penalty, trained = regularizer(step), private.gradients.trained
    indices, total = private.draw(), 0.0
    for start in range(0, len(indices), config.batch_size):
        part = indices[start : start + config.batch_size]
        with private.gradients.collect(len(part)):
            share = len(part) / len(indices)
            total += share * _backward(model, task, task.batch(part, seed), config, 1.0)
    penalty_gradients = _gradients(penalty, trained) if penalty is not None and penalty.requires_grad else {}
    private.step(penalty_gradients)
    return total


def _gradients(value: Tensor, of: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    found = torch.autograd.grad(value, list(of.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(of, found, strict=True) if gradient is not None}


def _backward(model: nn.Module, task: Task, batch: Batch, config: TrainingConfig, share: float) -> float:
    """Add the gradients of one batch's loss times `share`; return that loss."""
    with autocast(next(model.parameters()).device, config.precision):
        loss = _scalar(task.loss(model, batch)) * share
    if not torch.isfinite(loss):
        raise ConsiliumError(
            f"training.lr: {config.lr}: the loss became {loss.item()}; lower it or check the data", Reason.TRAINING
        )
    loss.backward()
    return loss.item()


def _scalar(loss: Tensor) -> Tensor:
    """Return a task's loss. Raises ConsiliumError for anything but one number as a tensor."""
    if not isinstance(loss, Tensor) or loss.ndim:
        what = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ConsiliumError(f"the task's loss() is {what}; return a tensor with one number, the batch's mean", Reason.TRAINING)
    return loss


def _stream(task: Task, config: TrainingConfig, seed: int) -> Iterator[Batch]:
    """Yield batches for ever, each epoch shuffled by its own seed."""
    epoch = 0
    while True:
        yield from batches(task, config.batch_size, seed_for(seed, "epoch", epoch))
        epoch += 1


def batches(task: Task, batch_size: int, seed: int) -> Iterator[Batch]:
    """Yield one epoch of the training split, shuffled by `seed`; the last batch may be smaller."""
    order = torch.randperm(task.num_samples, generator=torch.Generator().manual_seed(seed)).tolist()
    for start in range(0, len(order), batch_size):
        yield task.batch(order[start : start + batch_size], seed)
