"""DP-SGD (Abadi et al. 2016) on adapter parameters by records or patients.

One record or one patient goes through the model at a time. Autograd then gives its gradient, whatever the layers are, and
float32 cannot round it by the records beside it: a server can choose weights that make that rounding larger than the clip.
Clipping, sum and noise are in integers (distributed_noise.py). All draws come from randomness.py.

The gradient of a patient is that of the mean loss over some of the samples.

Noise is made for a sum that one unit moves by the clip at most, so nothing may tie units together. Dropout would: one
generator, with a seed that the server knows, draws all masks, so one record more changes those of all others. Batch statistics
and rounding to bf16 do so within a patient's samples, where nothing is gained by allowing them. They are refused. Dropout as a
function and DropPath are not modules of a known class, so any draw during a pass is found by the states of the generators.

A unit whose reading, loss or gradient fails, for whatever reason, counts as zero: an error instead would tell, without noise,
what the unit holds. The failure is logged at the site only. What fails for all data alike (a model that draws, a step too
large for the device) is refused before any data are read, see `rehearse`.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from consilium.config.privacy import SiteLevelDpConfig
from consilium.core.errors import STOPS, ConfigError, ConsiliumError, Reason
from consilium.privacy.distributed_noise import clipped_sum, discrete_gaussian, rounding, share_deviation
from consilium.privacy.plan import Plan, per_patient
from consilium.privacy.randomness import Randomness
from consilium.privacy.secagg.arithmetic import UNIT

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DpSgd:
    """`noise_multiplier` over `clip` (norm of one unit's gradient); `seed` None is secret randomness, a number is not private.

    `patients`: every patient's samples by their place in the training split, where patients are drawn and not records;
    `per_patient`: of so many of them at most a step takes the mean.

    A step's augmentation follows from one seed of the same randomness and from each sample's place in the list. A claim is
    about a unit against an empty one in its place (zero-out), so no other sample's place, and nothing of its augmentation,
    depends on which units are in. So one unit moves the sum by the clip at most, whatever the seed is, and no promise rests
    on its secrecy: generators of numpy and torch may expand its 63 bits. It is secret all the same, for lists in which a unit
    less shifts the places of those behind it. Dropout and other draws in the model are refused, see `_refuse_ties`.
    """

    noise_multiplier: float
    clip: float
    sample_rate: float
    seed: int | None = None
    patients: tuple[tuple[int, ...], ...] = ()
    per_patient: int = 0

    @property
    def unit(self) -> str:
        """What is drawn: records or patients."""
        return "patient" if self.per_patient else "record"

    def count(self, num_samples: int) -> int:
        """Return how many units there are, of a site with so many training samples."""
        return len(self.patients) if self.per_patient else num_samples

    def randomness(self) -> Randomness:
        """Return the source of randomness for all draws of a training."""
        return Randomness.of(self.seed)

    def samples(self, drawn: Sequence[int], randomness: Randomness) -> Iterator[list[int]]:
        """Yield the samples of each drawn unit: one record, or a patient's, of too many a random choice."""
        for number in drawn:
            samples = list(self.patients[number]) if self.per_patient else [number]
            yield samples if len(samples) <= max(1, self.per_patient) else randomness.choice(samples, self.per_patient)


def dpsgd(plan: Plan | None, seed: int | None, patients: tuple[tuple[int, ...], ...] = ()) -> DpSgd | None:
    """Return how to train by DP-SGD, None under any other plan. Noise on a step over all sites is not training's to add.

    `patients`: every patient's samples, where they are the unit.
    """
    if plan is None or isinstance(plan.config, SiteLevelDpConfig):
        return None
    noise = 0.0 if plan.by_step else plan.noise_multiplier
    return DpSgd(noise, plan.config.clip, plan.event.sample_rate, seed, patients, per_patient(plan.config))


class ClippedSum:
    """The sum of clipped gradients of the `trained` parameters of `model`, int64 on the grid, one unit at a time.

    Raises ConfigError for a model that ties units together.
    """

    def __init__(self, model: nn.Module, trained: Mapping[str, nn.Parameter], dp: DpSgd) -> None:
        self.trained = dict(trained)
        _refuse_ties(model, dp.unit)
        self._dp = dp
        self._sum: Tensor | None = None

    @contextmanager
    def unit(self) -> Iterator[None]:
        """Add the clipped gradient that the block's backward pass of one unit's mean loss leaves; zero if the block fails."""
        try:
            with _without_draws(self.trained, self._dp.unit):
                yield
        except STOPS:
            raise
        except BaseException as error:  # a library's panic is not an Exception
            if isinstance(error, ConsiliumError) and error.reason is Reason.STOPPED:
                raise
            log_failure(self._dp.unit, error)
            for parameter in self.trained.values():
                parameter.grad = None
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.trained.items()}
        alone = {name: gradient.detach().float().unsqueeze(0) for name, gradient in gradients.items()}
        self._sum = clipped_sum(alone, self._dp.clip, self._sum)
        for parameter in self.trained.values():
            parameter.grad = None

    def take(self) -> Tensor:
        """Return the sum of all units since the last call, (d,) on the CPU, and begin another; zeros if there was no unit."""
        found, self._sum = self._sum, None
        numbers = sum(parameter.numel() for parameter in self.trained.values())
        return torch.zeros(numbers, dtype=torch.int64) if found is None else found


def log_failure(unit: str, error: BaseException) -> None:
    """Log, at the site alone, why a unit counts as zero."""
    _log.warning(f"a {unit} counts as zero: {type(error).__name__}: {error}")


def rehearse(model: nn.Module, trained: Mapping[str, nn.Parameter], unit: str, loss: Callable[[], Tensor]) -> None:
    """Take the `loss` of one unit of zeros, of full size, back through the model, and forget it.

    Raises ConfigError for a model that ties units together, and ConsiliumError for a step that this machine cannot take.
    """
    _refuse_ties(model, unit)
    gpus = sorted({parameter.device.index for parameter in trained.values() if parameter.is_cuda})
    was, training = {name: parameter.requires_grad for name, parameter in trained.items()}, model.training
    model.train()
    try:
        with torch.random.fork_rng(devices=gpus), _without_draws(trained, unit):
            for parameter in trained.values():
                parameter.requires_grad_(True)
            loss().backward()
    except (MemoryError, RuntimeError) as error:
        what = f"a step on one {unit} of full size fails here ({type(error).__name__}: {error})"
        raise ConsiliumError(f"training: {what}; lower model.image_size or model.max_length", Reason.TRAINING) from error
    finally:
        model.train(training)
        for name, parameter in trained.items():
            parameter.requires_grad_(was[name]).grad = None


def _refuse_ties(model: nn.Module, unit: str) -> None:
    """Raise ConfigError for a module through which one record of a batch acts on another."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) or (isinstance(module, _DropoutNd) and module.p > 0):
            what = f"{name!r} ({type(module).__name__}) ties the records of a batch together"
            raise ConfigError(f"privacy.unit: {unit!r}: {what}; use a model without it, or dropout 0")


@contextmanager
def _without_draws(trained: Mapping[str, nn.Parameter], unit: str) -> Iterator[None]:
    """Raise ConfigError where what is computed inside the block drew random numbers, which one record more would shift."""
    before = _states(trained)
    yield
    if not all(map(torch.equal, before, _states(trained))):
        what = "the model draws random numbers in training (dropout, DropPath), which ties the records of a batch together"
        raise ConfigError(f"privacy.unit: {unit!r}: {what}; use a model without it, or set its rate to 0")


def _states(trained: Mapping[str, nn.Parameter]) -> list[Tensor]:
    """Return the states of the generators that layers draw from: of the CPU, and of the GPU that holds parameters."""
    gpus = {parameter.device for parameter in trained.values() if parameter.is_cuda}
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in gpus)]


class PrivateSteps:
    """Poisson batches and private optimizer steps over the `trained` parameters of `model`. Use as a context manager.

    Each unit's gradient is clipped and rounded on its own to the grid of distributed_noise.py. The sum gets one exact discrete
    Gaussian, made on the CPU whatever the device. One thread makes the next step's noise while the model computes gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        trained: Mapping[str, nn.Parameter],
        num_units: int,
        dp: DpSgd,
    ) -> None:
        self.sum, self.optimizer = ClippedSum(model, trained, dp), optimizer
        self._dp, self._num_units = dp, num_units
        self._numbers = sum(parameter.numel() for parameter in trained.values())
        self._deviation = share_deviation(dp.noise_multiplier, dp.clip + rounding(self._numbers), 1)
        source = dp.randomness()
        self._draws, self._noise = source.apart("draws"), source.apart("noise")
        self._ahead = ThreadPoolExecutor(1, "consilium-noise")
        self._next: Future[Tensor] | None = None

    def __enter__(self) -> "PrivateSteps":
        return self

    def __exit__(self, *error: object) -> None:
        self._ahead.shutdown(cancel_futures=True)
        for parameter in self.sum.trained.values():
            parameter.grad = None

    def draw(self) -> list[int]:
        """Return the units of the next step: each on its own with the sample rate, so there may be none."""
        self._begin_noise()
        return self._draws.coins(self._num_units, self._dp.sample_rate)

    def samples(self, drawn: Sequence[int]) -> list[list[int]]:
        """Return the samples of each drawn unit."""
        return list(self._dp.samples(drawn, self._draws))

    def seed(self) -> int:
        """Return what the augmentation of a step is drawn with, see `DpSgd`."""
        return self._draws.seed()

    def step(self, penalty: Mapping[str, Tensor]) -> None:
        """Clip, sum, add noise, average, then add `penalty`, a gradient that touches no data, and take the step.

        The divisor is the batch's expected size, which tells nothing of what was drawn.
        """
        noisy = self.sum.take() + self._begin_noise().result()
        self._next = None
        mean = noisy.double() * (UNIT / (self._num_units * self._dp.sample_rate))
        trained = self.sum.trained
        for (name, parameter), part in zip(trained.items(), mean.split([p.numel() for p in trained.values()]), strict=True):
            parameter.grad = part.reshape(parameter.shape).to(parameter)
            if name in penalty:
                parameter.grad += penalty[name]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _begin_noise(self) -> Future[Tensor]:
        """Return the noise of the step at hand, begun now unless it has been."""
        if self._next is None:
            self._next = self._ahead.submit(self._drawn_noise)
        return self._next

    def _drawn_noise(self) -> Tensor:
        if self._deviation == 0:
            return torch.zeros(self._numbers, dtype=torch.int64)
        return torch.from_numpy(discrete_gaussian(self._numbers, self._deviation, self._noise))
