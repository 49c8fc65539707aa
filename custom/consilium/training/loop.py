"""The local training loop. It uses tensors, a task and a few callables, and knows no servers, sites or files."""

import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from consilium.config.job import TrainingConfig
from consilium.core.errors import STOPS, ConsiliumError, DataError, Reason
from consilium.core.messages import Tensors
from consilium.core.seeding import seed_for
from consilium.data.cache import AHEAD, prefetch
from consilium.data.datalist import NOTHING_LEFT
from consilium.privacy.dpsgd import ClippedSum, DpSgd, PrivateSteps, log_failure
from consilium.privacy.randomness import Randomness
from consilium.strategies.strategy import LocalStep, Penalty
from consilium.tasks.base import Batch, Task
from consilium.training.device import CPU, autocast, compile_blocks, cuda_devices

# optimizer -------------------------------------------------------------------------------------------------------------
# The optimizer of local training and its learning rate.

FUSED = frozenset({"cpu", "cuda"})
"""Devices with a fused kernel for Adam. On a CPU it is 3 to 7 times faster for adapters and equal up to rounding.

SGD's fused kernel was slower than PyTorch's default on a CPU, so it is not used.
"""


def make_optimizer(parameters: list[nn.Parameter], config: TrainingConfig) -> torch.optim.Optimizer:
    """Return the configured optimizer over `parameters` only."""
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=config.momentum, **common)
    fused = all(parameter.device.type in FUSED for parameter in parameters)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer](parameters, fused=fused, **common)


def learning_rate(config: TrainingConfig, done: int, total: int) -> float:
    """Return the learning rate after `done` of a round's `total` steps. `cosine` and `linear` start again in every round."""
    part = {"constant": 1.0, "cosine": 0.5 * (1 + math.cos(math.pi * done / total)), "linear": 1 - done / total}
    return config.lr * part[config.schedule]


def restore_optimizer(optimizer: torch.optim.Optimizer, names: list[str], kept: Tensors) -> None:
    """Load the state that `state_of` returned into an optimizer. `names`: its parameters, in its order.

    Parameters without a stored state start with an empty one.
    """
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in kept.items():
        name, _, field = key.rpartition("/")
        if name in names:
            state.setdefault(names.index(name), {})[field] = tensor
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def state_of(optimizer: torch.optim.Optimizer, names: list[str]) -> Tensors:
    """Return an optimizer's state by "parameter/field" (Adam: step, exp_avg, exp_avg_sq; momentum: momentum_buffer)."""
    state = optimizer.state_dict()["state"]
    fields = ((names[i], field, value) for i, one in state.items() for field, value in one.items())
    return {f"{name}/{field}": value.detach().cpu().clone() for name, field, value in fields if isinstance(value, Tensor)}


# losses ----------------------------------------------------------------------------------------------------------------
# The losses of a round are read from a GPU rarely, because reading a number waits for all queued work.

AT_ONCE = frozenset({"cpu"})
"""Devices on which reading a number does not wait."""
EVERY = 1.0
"""Seconds between two readings of the losses on other devices."""


@dataclass
class LossAccumulator:
    """Sums the losses of steps. A step's loss is the sum of its batches' losses times their shares. `lr`: for error messages.

    `private`: under record- or patient-level privacy a loss that is not finite counts as 0, as its gradient does. An error
    would end the round and so reveal, without noise, that its record was drawn.
    """

    device: torch.device
    lr: float
    private: bool = False
    total: float = 0.0
    _shares: list[float] = field(default_factory=list)
    _unread: list[Tensor] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)
    _last: float = field(default_factory=time.monotonic)

    def add(self, loss: Tensor, share: float = 1.0) -> None:
        """Add a batch's loss, which stays on its device until it is read."""
        self._unread.append(loss.detach())
        self._shares.append(share)

    def end_step_and_read(self, last: bool) -> bool:
        """End a step. Return whether the unread losses were read: on a CPU, after EVERY seconds, or in the `last` step.

        Then `total` is the sum over all steps so far. Raises ConsiliumError, naming the first loss that is not finite, unless
        `private`.
        """
        self._ends.append(len(self._unread))
        now = time.monotonic()
        if not (last or self.device.type in AT_ONCE or now - self._last >= EVERY):
            return False
        self._last = now
        values: list[float] = torch.stack(self._unread).tolist() if self._unread else []
        wrong = next((value for value in values if not math.isfinite(value)), None)
        if wrong is not None and not self.private:
            what = f"training.lr: {self.lr}: the loss became {wrong}; lower it or check the data"
            raise ConsiliumError(what, Reason.TRAINING)
        products = [share * value if math.isfinite(value) else 0.0 for share, value in zip(self._shares, values, strict=True)]
        # Added step by step, so that the sum does not depend on when the losses are read.
        for begin, end in zip([0, *self._ends], self._ends, strict=False):
            self.total += sum(products[begin:end])
        self._shares, self._unread, self._ends = [], [], []
        return True


# loop ------------------------------------------------------------------------------------------------------------------


class Stopped(ConsiliumError):
    """Training was stopped (job aborted). Nothing was uploaded or saved."""

    reason = Reason.STOPPED


@dataclass(frozen=True)
class Progress:
    """The state after an optimizer step: `step` (from 1) of `steps`, the mean loss so far, and the step's learning rate.

    The loss is None if it was not read: on a GPU it is read once per second, see `LossAccumulator`.
    """

    step: int
    steps: int
    loss: float | None
    lr: float


OnProgress = Callable[[Progress], None]


def train(
    model: nn.Module,
    task: Task,
    params: Mapping[str, Tensor],
    trained: set[str],
    config: TrainingConfig,
    seed: int,
    penalty: Penalty,
    on_progress: OnProgress,
    dp: DpSgd | None = None,
    optimizer_state: Tensors | None = None,
    correction: Mapping[str, Tensor] = MappingProxyType({}),
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> dict[str, float]:
    """Train the tensors named in `trained` in place. Return the mean "loss", the number of "steps" and any mean "penalty".

    `params`: the model's adapter tensors by name; those not in `trained` are frozen. `seed` fixes shuffling, augmentation and
    dropout, so equal inputs give equal results. `optimizer_state`: continued and updated in place; None starts empty.
    `correction`: changes by tensor name that are added over the round, in each step in proportion to its learning rate.
    `backward` computes the gradients of a step's loss. With `dp` the steps are DP-SGD, repeatable only if `dp` has a seed.
    Without samples there are no steps, except with `dp`. Afterwards the model is in evaluation mode. Raises ConsiliumError for
    a loss that is not finite, except with `dp`, see `LossAccumulator`.
    """
    active = set_requires_grad(params, trained)
    if dp is None and not task.num_samples:  # site-level noise hides this; without noise such a site is not asked
        return {"loss": 0.0, "steps": 0.0}
    optimizer = make_optimizer(list(active.values()), config)
    optimizer.zero_grad(set_to_none=True)  # gradients may be left from a step that failed in an earlier round
    if optimizer_state:
        restore_optimizer(optimizer, list(active), optimizer_state)
    anchors = {name: p.detach().clone() if name in trained else p.detach() for name, p in params.items()}
    memory: dict[str, Tensor] = {}
    total = config.steps_per_round(dp.unit_count(task.num_samples) if dp else task.num_samples)
    losses = LossAccumulator(_device(model), config.lr, dp is not None)
    penalties: list[Tensor] = []

    def noted_penalty(step: LocalStep) -> Tensor | None:
        if (value := penalty(step)) is not None:
            penalties.append(value.detach())
        return value

    rates = [learning_rate(config, done, total) for done in range(total)]
    model.train()
    with (
        torch.random.fork_rng(devices=cuda_devices(params)),
        compile_blocks(model, config.compile),
        _step_function(model, task, optimizer, config, seed, active, total, dp, backward) as take_step,
    ):
        torch.manual_seed(seed)
        for step, rate in enumerate(rates, start=1):
            for group in optimizer.param_groups:
                group["lr"] = rate
            known = take_step(LocalStep(params, anchors, memory), noted_penalty, losses, step == total)
            with torch.no_grad():
                for name, whole in correction.items():
                    active[name].add_(whole.to(active[name].device), alpha=rate / sum(rates))
            on_progress(Progress(step, total, losses.total / step if known else None, rate))
    if optimizer_state is not None:
        optimizer_state.update(state_of(optimizer, list(active)))
    model.eval()
    added = {"penalty": float(torch.stack(penalties).mean())} if penalties else {}
    return {"loss": losses.total / total, "steps": float(total)} | added


def set_requires_grad(params: Mapping[str, Tensor], trained: set[str]) -> dict[str, nn.Parameter]:
    """Set requires_grad for the tensors named in `trained` and clear it for the rest of `params`; return the trained ones."""
    for name, parameter in params.items():
        parameter.requires_grad_(name in trained)
    return {name: cast(nn.Parameter, parameter) for name, parameter in params.items() if name in trained}


@contextmanager
def _step_function(
    model: nn.Module,
    task: Task,
    optimizer: torch.optim.Optimizer,
    config: TrainingConfig,
    seed: int,
    trained: Mapping[str, nn.Parameter],
    total: int,
    dp: DpSgd | None,
    backward: Callable[[Tensor], None],
) -> Iterator[Callable[[LocalStep, Penalty, LossAccumulator, bool], bool]]:
    """Yield a function that takes one optimizer step and returns whether all losses so far have been read from the device.

    After the last step it returns True.
    """
    if dp is None:
        with closing(prefetched_batches(task, config, seed, total * config.accumulate, _device(model))) as made:
            yield partial(_optimizer_step, model, task, optimizer, made, config, backward)
        return
    # in bf16 a record's gradient depends on its batch, by up to 1.5e-3 of the clip
    config = config.model_copy(update={"precision": "fp32"})
    with PrivateSteps(model, optimizer, trained, dp.unit_count(task.num_samples), dp) as private:
        yield partial(_private_step, model, task, private, config)


def _optimizer_step(
    model: nn.Module,
    task: Task,
    optimizer: torch.optim.Optimizer,
    stream: Iterator[Batch],
    config: TrainingConfig,
    backward: Callable[[Tensor], None],
    step: LocalStep,
    penalty: Penalty,
    losses: LossAccumulator,
    last: bool,
) -> bool:
    """Take one step over the penalty and up to `accumulate` batches. Return whether the losses were read from the device.

    If the losses are read in this step, one that is not finite raises an error before the optimizer's step.
    """
    value = penalty(step)
    if value is not None and value.requires_grad:
        value.backward()
    for batch in itertools.islice(stream, config.accumulate):
        losses.add(_backward(model, task, batch, config, 1 / config.accumulate, backward))
    losses_read = losses.end_step_and_read(last)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return losses_read


def _private_step(
    model: nn.Module,
    task: Task,
    private: PrivateSteps,
    config: TrainingConfig,
    step: LocalStep,
    penalty: Penalty,
    losses: LossAccumulator,
    last: bool,
) -> bool:
    """Take one step on a Poisson batch, one record or one patient at a time. An empty batch gives noise only.

    A record that cannot be read adds nothing to the sum, as if its gradient were 0. The clip still bounds its influence, it was
    drawn like any other, and the divisor is the batch's expected size. So noise and accounting hold. The augmentation's seed
    belongs to the step, see `DpSgd`. If it depended on the batch, one more record or patient would change the augmentation of
    all later ones, and so change the clipped sum by more than the clip for which the noise is made.
    """
    value, trained = penalty(step), private.sum.trained
    parts = private.samples(private.draw())
    whole = sum(map(len, parts))
    for count, batch in read_units(model, task, parts, private.seed()):
        with private.sum.add_unit():
            losses.add(_backward(model, task, batch, config, 1.0), count / whole)
    losses_read = losses.end_step_and_read(last)
    gradients: list[Tensor | None] = [None] * len(trained)
    if value is not None and value.requires_grad:
        gradients = list(torch.autograd.grad(value, list(trained.values()), allow_unused=True))
    private.step({name: one for name, one in zip(trained, gradients, strict=True) if one is not None})
    return losses_read


def read_units(model: nn.Module, task: Task, parts: Sequence[list[int]], seed: int) -> Iterator[tuple[int, Batch]]:
    """Yield (size, batch) for each unit's samples. A unit that cannot be read is left out; its error is only logged here."""
    calls = (partial(_try_read_unit, task, _device(model), part, seed) for part in parts)
    with closing(prefetch(calls, _count_ahead(task))) as made:
        yield from ((len(next(iter(batch.values()))), batch) for batch in made if batch)


def _try_read_unit(task: Task, device: torch.device, samples: list[int], seed: int) -> Batch:
    """Return a unit's batch; {} if it cannot be read, and then the error is logged."""
    try:
        return _batch(task, device, samples, seed)
    except STOPS:
        raise
    except BaseException as error:  # a panic of a library is not an Exception
        log_failure("unit", error)
        return {}


def _backward(
    model: nn.Module,
    task: Task,
    batch: Batch,
    config: TrainingConfig,
    share: float,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> Tensor:
    """Add the gradients of one batch's loss times `share`; return that loss, on its device."""
    with autocast(_device(model), config.precision):
        loss = check_scalar_loss(task.loss(model, batch)) * share
    if loss.requires_grad:  # false at a site that may train no rank, which takes part without a change
        backward(loss)
    return loss


def check_scalar_loss(loss: Tensor) -> Tensor:
    """Return a task's loss. Raises ConsiliumError unless it is a tensor with one number."""
    if not isinstance(loss, Tensor) or loss.ndim:
        what = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ConsiliumError(f"the task's loss() is {what}; return a tensor with one number, the batch's mean", Reason.TRAINING)
    return loss


def prefetched_batches(
    task: Task, config: TrainingConfig, seed: int, count: int, device: torch.device = CPU
) -> Generator[Batch, None, None]:
    """Yield `count` batches, each epoch shuffled with its own seed. Further ones are prepared meanwhile if the task allows it.

    A batch without a readable sample is skipped. If a whole epoch has none, the stream ends for a task that is `quiet` about
    unfit samples, and DataError is raised for others.
    """
    epochs = (_calls(task, config.batch_size, seed_for(seed, "epoch", epoch), device) for epoch in itertools.count())
    calls, empty, length = itertools.chain.from_iterable(epochs), 0, -(-task.num_samples // config.batch_size)
    while count and length:
        with closing(prefetch(itertools.islice(calls, count), _count_ahead(task))) as made:
            for batch in made:
                if batch:
                    empty, count = 0, count - 1
                    yield batch
                elif (empty := empty + 1) >= length:
                    if getattr(task, "ignores_unfit", False):
                        return
                    raise DataError(NOTHING_LEFT)


def _calls(task: Task, batch_size: int, seed: int, device: torch.device) -> Iterator[Callable[[], Batch]]:
    """Yield a function for each batch of an epoch, shuffled with `seed`, that makes it; the last batch may be smaller."""
    order = torch.randperm(task.num_samples, generator=torch.Generator().manual_seed(seed)).tolist()
    if hasattr(task, "batch_order"):
        order = cast(Any, task).batch_order(order, batch_size)
    for start in range(0, len(order), batch_size):
        yield partial(_batch, task, device, order[start : start + batch_size], seed)


def _batch(task: Task, device: torch.device, indices: list[int], seed: int) -> Batch:
    batch = task.batch(indices, seed)  # pinned for a GPU, so that copying overlaps with computing
    return {key: tensor.pin_memory() for key, tensor in batch.items()} if device.type == "cuda" else batch


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _count_ahead(task: Task) -> int:
    """Return how many batches another thread may prepare ahead: 0 unless the task has `workers`."""
    return AHEAD if getattr(task, "workers", 0) else 0


# step over all sites ---------------------------------------------------------------------------------------------------
# One step of DP-SGD over all sites' data: a site's contribution to the sum of clipped gradients.
#
# Every site draws its units (records or patients) independently with the same probability, with the system's random generator.
# Each unit's gradient is clipped and rounded to the grid separately. So a unit changes the sum by at most its clip and the
# rounding of one gradient, for any other drawn units and any order. The guard adds the site's share of noise. An empty batch
# gives zeros, and so does a unit whose loss or gradient is not finite: an error would reveal without noise that the unit was
# drawn.
#
# Source: M. Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1, its sum taken over hospitals.


def step_update(
    model: nn.Module,
    task: Task,
    params: Mapping[str, Tensor],
    trained: set[str],
    config: TrainingConfig,
    dp: DpSgd,
) -> Tensors:
    """Return minus the sum of the drawn units' clipped gradients for the tensors `trained`, int64 in units of the grid.

    `params`: the model's adapter tensors by name, which are not changed. Draws are secret, or fixed by `dp.seed`. A model that
    draws random numbers itself is refused. Raises ConsiliumError for a task whose loss is not one number.
    """
    active, randomness = set_requires_grad(params, trained), Randomness.of(dp.seed)
    config = config.model_copy(update={"precision": "fp32"})  # in bf16 rounding depends on the rest of the batch
    drawn = randomness.poisson_sample(dp.unit_count(task.num_samples), dp.sample_rate)
    clipped = ClippedSum(model, active, dp)
    model.train()
    try:
        for _, batch in read_units(model, task, list(dp.samples(drawn, randomness)), randomness.seed()):
            with clipped.add_unit():
                _backward(model, task, batch, config, 1.0)
    finally:
        model.eval()
    parted = (-clipped.take()).split([p.numel() for p in active.values()])
    return {name: part.reshape(p.shape) for (name, p), part in zip(active.items(), parted, strict=True)}
