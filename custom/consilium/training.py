"""The local loop: PyTorch only. It knows tensors, a task and a few callables; nothing of servers, sites or files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from consilium.config import TrainingConfig
from consilium.errors import ConsiliumError
from consilium.seeding import seed_for
from consilium.strategy import Step

Batch = dict[str, Tensor]


class Task(Protocol):
    """What the loop needs of a task; see tasks/segmentation.py."""

    num_samples: int
    metric_names: frozenset[str]

    def has(self, split: str) -> bool:
        """Tell whether the split holds any sample."""
        ...

    def batch(self, indices: Sequence[int], seed: int) -> Batch:
        """Return these samples of the training split; `seed` fixes their augmentation. The first dimension is the sample."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the scalar mean loss of a batch."""
        ...

    def evaluate(self, model: nn.Module, split: str, batch_size: int, distances: bool = False) -> dict[str, float]:
        """Return metrics of a split, {} if it is empty."""
        ...


class Stopped(ConsiliumError):
    """Training was asked to stop (job aborted); nothing was uploaded or saved."""


@dataclass(frozen=True)
class Progress:
    """After an optimizer step: `step` of `steps` (1-based) and the loss averaged so far."""

    step: int
    steps: int
    loss: float


Watch = Callable[[Progress], None]


def train(
    model: nn.Module,
    task: Task,
    params: Mapping[str, nn.Parameter],
    trained: set[str],
    config: TrainingConfig,
    seed: int,
    regularizer: Callable[[Step], Tensor | None],
    scalars: Mapping[str, float],
    watch: Watch,
) -> dict[str, float]:
    """Train the tensors named in `trained` in place and return {"loss", "steps"}.

    `params` are the model's adapter parameters by name; all others are frozen. Equal inputs give equal results: `seed` fixes
    shuffling, augmentation and dropout, and the optimizer starts empty. Raises ConsiliumError when the loss is not finite.
    """
    for name, parameter in params.items():
        parameter.requires_grad_(name in trained)
    optimizer = make_optimizer([params[name] for name in params if name in trained], config)
    anchors = {name: parameter.detach().clone() for name, parameter in params.items()}
    memory: dict[str, Tensor] = {}
    total = steps_per_round(task.num_samples, config)
    stream, running = _stream(task, config, seed), 0.0
    model.train()
    with torch.random.fork_rng(devices=_cuda_devices(params)):
        torch.manual_seed(seed)
        for step in range(1, total + 1):
            loss = _step(model, task, stream, config, regularizer, Step(params, anchors, scalars, memory))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            running += loss
            watch(Progress(step, total, running / step))
    return {"loss": running / total, "steps": float(total)}


def _step(
    model: nn.Module,
    task: Task,
    stream: Iterator[Batch],
    config: TrainingConfig,
    regularizer: Callable[[Step], Tensor | None],
    step: Step,
) -> float:
    """Accumulate the gradients of one optimizer step; return its task loss."""
    penalty = regularizer(step)
    if penalty is not None and penalty.requires_grad:
        penalty.backward()
    total = 0.0
    for _ in range(config.accumulate):
        with autocast(next(iter(step.params.values())).device, config.precision):
            loss = task.loss(model, next(stream)) / config.accumulate
        if not torch.isfinite(loss):
            raise ConsiliumError(f"training.lr: {config.lr}: the loss became {loss.item()}; lower it or check the data")
        loss.backward()
        total += loss.item()
    return total


def steps_per_round(num_samples: int, config: TrainingConfig) -> int:
    """Return the optimizer steps of one round at a site with `num_samples` training samples."""
    if config.local_steps:
        return config.local_steps
    batches = -(-num_samples // config.batch_size)
    return config.local_epochs * -(-batches // config.accumulate)


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


def make_optimizer(parameters: list[nn.Parameter], config: TrainingConfig) -> torch.optim.Optimizer:
    """Return the configured optimizer over `parameters` only."""
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=config.momentum, **common)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer](parameters, **common)


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Return bf16 autocast where it is wanted and the device computes in it ("auto" means on GPUs only)."""
    gpu = device.type == "cuda" and torch.cuda.is_bf16_supported()
    if (precision == "bf16" and (gpu or device.type == "cpu")) or (precision == "auto" and gpu):
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def pick_device(wanted: str) -> torch.device:
    """Return the torch device for "auto" (first GPU, else CPU) or a named one. Raises ConsiliumError if it is not there."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise ConsiliumError(f"site.yaml: device: {wanted!r}: no CUDA device here; use cpu or auto")
    return torch.device(wanted)


def _cuda_devices(params: Mapping[str, nn.Parameter]) -> list[torch.device]:
    return list({p.device for p in params.values() if p.device.type == "cuda"})
