"""DP-SGD (Abadi et al. 2016) on adapter parameters, per record or per patient. A record or a patient is called a unit.

One unit at a time goes through the model, so autograd gives its gradient for any kind of layer. In a larger batch, the other
records would influence how float32 rounds a record's gradient, and a server can choose weights for which that influence
exceeds the clip. Clipping, summing and noise use integers (discrete_gaussian.py). All random draws come from randomness.py.

The gradient of a patient is the gradient of the mean loss over at most `per_patient` samples.

The noise assumes that one unit moves the sum by at most the clip, so one unit may not influence the gradient of another.
Dropout would let it: one generator, whose seed the server knows, draws all masks, so one record more changes the masks of all
others. Batch statistics and rounding to bf16 couple only a patient's own samples, but allowing them would gain nothing. All
three are refused. Functional dropout and DropPath are not modules of a known class. So any random draw during a pass is
detected by comparing the states of the generators.

A unit counts as zero if reading it, its loss or its gradient fails. An error instead would reveal, without noise, what the unit
contains. The failure is logged at the site only. A failure that does not depend on the data (a model that draws random numbers,
a step too large for the device) is refused before any data are read, see `rehearse`.
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
from consilium.privacy.discrete_gaussian import clipped_sum, discrete_gaussian, rounding, share_deviation
from consilium.privacy.plan import Plan, max_samples_per_patient
from consilium.privacy.randomness import Randomness
from consilium.privacy.secagg.arithmetic import UNIT

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DpSgd:
    """The settings of DP-SGD at one site. `clip`: the largest norm of a unit's gradient; `noise_multiplier`: in clips.

    `seed`: None draws secret randomness; a number makes the run reproducible and not private. `patients`: if patients are the
    unit, the indices of each patient's samples in the training split. `per_patient`: how many of them a step uses at most; 0 if
    records are the unit.

    The augmentation of a step follows from one seed, drawn from the same randomness, and from each sample's index in the list.
    A claim compares a unit with an empty unit in the same place (zero-out). So the index and the augmentation of every other
    sample stay the same, and one unit moves the sum by at most the clip, whatever the seed is. No promise depends on the
    secrecy of this seed, so NumPy's and PyTorch's generators may expand its 63 bits. It is secret nevertheless, for lists in
    which removing a unit shifts the later ones. Dropout and other draws are refused, see `_refuse_coupled_records`.
    """

    noise_multiplier: float
    clip: float
    sample_rate: float
    seed: int | None = None
    patients: tuple[tuple[int, ...], ...] = ()
    per_patient: int = 0

    @property
    def unit(self) -> str:
        """The unit that is drawn: "record" or "patient"."""
        return "patient" if self.per_patient else "record"

    def unit_count(self, num_samples: int) -> int:
        """Return the number of units at a site with `num_samples` training samples."""
        return len(self.patients) if self.per_patient else num_samples

    def samples(self, drawn: Sequence[int], randomness: Randomness) -> Iterator[list[int]]:
        """Yield the sample indices of each drawn unit: one record, or a patient's samples (a random `per_patient` of more)."""
        for number in drawn:
            samples = list(self.patients[number]) if self.per_patient else [number]
            yield samples if len(samples) <= max(1, self.per_patient) else randomness.choice(samples, self.per_patient)


def dpsgd(plan: Plan | None, seed: int | None, patients: tuple[tuple[int, ...], ...] = ()) -> DpSgd | None:
    """Return the settings of DP-SGD for local training, None for a plan without DP-SGD.

    For a step over all sites the noise is 0, because the guard adds it later. `patients`: the sample indices of each patient,
    if patients are the unit.
    """
    if plan is None or isinstance(plan.config, SiteLevelDpConfig):
        return None
    noise = 0.0 if plan.is_distributed_dpsgd else plan.noise_multiplier
    return DpSgd(noise, plan.config.clip, plan.event.sample_rate, seed, patients, max_samples_per_patient(plan.config))


class ClippedSum:
    """Adds up the units' clipped gradients of the `trained` parameters of `model`, one unit at a time; int64 on the grid.

    Raises ConfigError for a model in which one record influences another.
    """

    def __init__(self, model: nn.Module, trained: Mapping[str, nn.Parameter], dp: DpSgd) -> None:
        self.trained = dict(trained)
        _refuse_coupled_records(model, dp.unit)
        self._dp = dp
        self._sum: Tensor | None = None

    @contextmanager
    def add_unit(self) -> Iterator[None]:
        """Add one unit's clipped gradient, which the block computes by backward(); zero if the block fails."""
        try:
            with _refuse_random_draws(self.trained, self._dp.unit):
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
        """Return the sum of all units since the last call, (d,) on the CPU, and start a new one; zeros if there was none."""
        found, self._sum = self._sum, None
        numbers = sum(parameter.numel() for parameter in self.trained.values())
        return torch.zeros(numbers, dtype=torch.int64) if found is None else found


def log_failure(unit: str, error: BaseException) -> None:
    """Log at the site why a unit counts as zero. The reason does not leave the site."""
    _log.warning(f"a {unit} counts as zero: {type(error).__name__}: {error}")


def rehearse(model: nn.Module, trained: Mapping[str, nn.Parameter], unit: str, loss: Callable[[], Tensor]) -> None:
    """Run one backward pass of `loss`, the loss of a full-size unit of zeros, and discard the gradients.

    Raises ConfigError for a model in which one record influences another, and ConsiliumError if the pass fails on this machine.
    """
    _refuse_coupled_records(model, unit)
    gpus = sorted({parameter.device.index for parameter in trained.values() if parameter.is_cuda})
    was, training = {name: parameter.requires_grad for name, parameter in trained.items()}, model.training
    model.train()
    try:
        with torch.random.fork_rng(devices=gpus), _refuse_random_draws(trained, unit):
            for parameter in trained.values():
                parameter.requires_grad_(True)
            loss().backward()
    except (MemoryError, RuntimeError) as error:
        raise ConsiliumError(
            f"training: a step on one {unit} of full size fails here ({type(error).__name__}: {error}); "
            "lower model.image_size or model.max_length",
            Reason.TRAINING,
        ) from error
    finally:
        model.train(training)
        for name, parameter in trained.items():
            parameter.requires_grad_(was[name]).grad = None


def _refuse_coupled_records(model: nn.Module, unit: str) -> None:
    """Raise ConfigError for a module through which one record of a batch influences another."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) or (isinstance(module, _DropoutNd) and module.p > 0):
            raise ConfigError(
                f"privacy.unit: {unit!r}: {name!r} ({type(module).__name__}) ties the records of a batch together; "
                "use a model without it, or dropout 0"
            )


@contextmanager
def _refuse_random_draws(trained: Mapping[str, nn.Parameter], unit: str) -> Iterator[None]:
    """Raise ConfigError if the block drew random numbers: one record more would shift the draws for all others."""
    before = _generator_states(trained)
    yield
    if not all(map(torch.equal, before, _generator_states(trained))):
        raise ConfigError(
            f"privacy.unit: {unit!r}: the model draws random numbers in training (dropout, DropPath), "
            "which ties the records of a batch together; use a model without it, or set its rate to 0"
        )


def _generator_states(trained: Mapping[str, nn.Parameter]) -> list[Tensor]:
    """Return the states of the random generators that layers use: the CPU's, and that of each GPU with parameters."""
    gpus = {parameter.device for parameter in trained.values() if parameter.is_cuda}
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in gpus)]


class PrivateSteps:
    """Poisson batches and private optimizer steps over the `trained` parameters of `model`. Use as a context manager.

    Each unit's gradient is clipped and rounded on its own to the grid of discrete_gaussian.py. An exact discrete Gaussian,
    always drawn on the CPU, is added to the sum. A thread draws the step's noise while the model computes gradients.
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
        source = Randomness.of(dp.seed)
        self._draws, self._noise = source.derive_stream("draws"), source.derive_stream("noise")
        self._ahead = ThreadPoolExecutor(1, "consilium-noise")
        self._next: Future[Tensor] | None = None

    def __enter__(self) -> "PrivateSteps":
        return self

    def __exit__(self, *error: object) -> None:
        self._ahead.shutdown(cancel_futures=True)
        for parameter in self.sum.trained.values():
            parameter.grad = None

    def draw(self) -> list[int]:
        """Return the units of the next step. Each takes part independently with the sample rate, so there may be none."""
        self._begin_noise()
        return self._draws.poisson_sample(self._num_units, self._dp.sample_rate)

    def samples(self, drawn: Sequence[int]) -> list[list[int]]:
        """Return the sample indices of each drawn unit."""
        return list(self._dp.samples(drawn, self._draws))

    def seed(self) -> int:
        """Return the seed of a step's augmentation, see `DpSgd`."""
        return self._draws.seed()

    def step(self, penalty: Mapping[str, Tensor]) -> None:
        """Add noise to the sum of clipped gradients, average, add `penalty`, and take the optimizer step.

        `penalty` is a gradient that depends on no data. The divisor is the batch's expected size, which does not depend on the
        draw.
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
        """Return the future of this step's noise, started now unless it already was."""
        if self._next is None:
            self._next = self._ahead.submit(self._draw_noise)
        return self._next

    def _draw_noise(self) -> Tensor:
        if self._deviation == 0:
            return torch.zeros(self._numbers, dtype=torch.int64)
        return torch.from_numpy(discrete_gaussian(self._numbers, self._deviation, self._noise))
