"""DP-SGD (Abadi et al. 2016) on adapter parameters by records or patients.

Per-sample gradients are ours, because Opacus' hooks take a layer's first dimension for the sample, and SAM's windowed attention
(and one decoding per class) hands layers several rows a sample. Here the rows of a sample stay together, so a layer's input
(N k, ..., in) is read as (N, k ..., in), and a sample's gradient is one product. Clipping, sum and noise are in integers, see
distributed_noise.py; all that is drawn comes from randomness.py.

Noise is made for a sum that one record moves by the clip at most, so nothing may tie a batch's records together. Dropout would
(one generator, of a seed that the server knows, draws all masks: a record more changes everybody's), and so would batch
statistics and rounding to bf16. So record level has none of them: simpler than a generator a record, and little is lost beside
the noise. Dropout as a function and DropPath are no modules of a known class, so whatever draws in a pass ends the training.

Of a patient the gradient is that of the mean loss over some of the samples, by autograd, one patient at a time. So no layer
needs gradients per sample.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from consilium.core.errors import ConfigError
from consilium.privacy.discrete_gaussian import discrete_gaussian
from consilium.privacy.distributed_noise import clipped_sum, rounding, share_deviation
from consilium.privacy.randomness import Randomness
from consilium.privacy.secagg.arithmetic import UNIT

ALONE = 1
"""Records at a time: float32 rounds a gradient by the records beside it, and a server can choose weights that amplify that."""


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
        """Return where all draws of a training come from."""
        return Randomness.of(self.seed)

    def chosen(self, drawn: Sequence[int], batch_size: int, randomness: Randomness) -> Iterator[list[int]]:
        """Yield the samples of the units `drawn`, as they go through the model together: one patient, or `batch_size` records.

        Of a patient with too many samples a random choice.
        """
        if not self.per_patient:
            yield from (list(drawn[start : start + batch_size]) for start in range(0, len(drawn), batch_size))
            return
        for number in drawn:
            samples = list(self.patients[number])
            yield samples if len(samples) <= self.per_patient else randomness.choice(samples, self.per_patient)


class UnitGradients:
    """Collects the gradient of a unit's mean loss, (1, *parameter.shape), of one record or patient after another."""

    def __init__(self, model: nn.Module, trained: Mapping[str, nn.Parameter], unit: str) -> None:
        self.trained = dict(trained)
        _refuse_ties(model, unit)
        self._unit = unit
        self._found: list[dict[str, Tensor]] = []

    @contextmanager
    def collect(self, count: int) -> Iterator[None]:
        """Collect from the backward pass of the mean loss over the `count` samples of one unit inside the block."""
        with _without_draws(self.trained, self._unit):
            yield
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.trained.items()}
        self._found.append({name: gradient.detach().unsqueeze(0) for name, gradient in gradients.items()})
        for parameter in self.trained.values():
            parameter.grad = None

    def take(self) -> dict[str, Tensor]:
        """Return the gradients of all units since the last call, (N, *shape) by name, and forget them."""
        found, self._found = self._found, []
        none = {name: torch.zeros(0, *p.shape, device=p.device) for name, p in self.trained.items()}
        return {name: torch.cat([empty, *(one[name] for one in found)]) for name, empty in none.items()}

    def close(self) -> None:
        """Do nothing: there are no hooks."""


class PerSampleGradients:
    """Hooks on the linear layers whose weight or bias is trained; collects a gradient per sample, (N, *parameter.shape)."""

    def __init__(self, model: nn.Module, trained: Mapping[str, nn.Parameter]) -> None:
        self.trained = dict(trained)
        _refuse_ties(model, "record")
        ours = {id(p) for p in trained.values()}
        layers = [m for m in model.modules() if isinstance(m, nn.Linear) and ours & {id(m.weight), id(m.bias)}]
        covered = {id(p) for layer in layers for p in (layer.weight, layer.bias)}
        if missing := [name for name, p in trained.items() if id(p) not in covered]:
            raise ConfigError(f"privacy.unit: 'record': {missing[0]!r} is no part of a linear layer; choose other targets")
        self._handles = [layer.register_forward_hook(self._watch) for layer in layers]
        self._count = 0
        self._found: dict[int, Tensor] = {}
        self._parts: dict[int, list[Tensor]] = {}
        self._clear()

    @contextmanager
    def collect(self, count: int) -> Iterator[None]:
        """Collect from the forward and backward pass of the mean loss over `count` samples inside the block."""
        self._count, self._found = count, {}
        with _without_draws(self.trained, "record"):
            yield
        self._count = 0
        for parameter in self.trained.values():
            missing = torch.zeros(count, *parameter.shape, device=parameter.device)
            self._parts[id(parameter)].append(self._found.get(id(parameter), missing))
            parameter.grad = None

    def take(self) -> dict[str, Tensor]:
        """Return the gradients of all samples since the last call, (N, *shape) by name, and forget them."""
        found = {name: torch.cat(self._parts[id(p)]) for name, p in self.trained.items()}
        self._clear()
        return found

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _clear(self) -> None:
        self._parts = {id(p): [torch.zeros(0, *p.shape, device=p.device)] for p in self.trained.values()}

    def _watch(self, layer: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad and self._count:
            rows = args[0].detach()
            output.register_hook(lambda gradient: self._add(layer, rows, gradient))

    def _add(self, layer: Any, rows: Tensor, gradient: Tensor) -> None:
        if rows.shape[0] % self._count:
            raise ConfigError("privacy.unit: 'record': a layer mixes the records of a batch; choose other targets")
        inputs = rows.reshape(self._count, -1, rows.shape[-1]).float()
        outputs = gradient.reshape(self._count, -1, gradient.shape[-1]).float() * self._count  # the loss is a mean
        if layer.weight.requires_grad:
            self._sum(layer.weight, torch.einsum("nto,nti->noi", outputs, inputs))
        if layer.bias is not None and layer.bias.requires_grad:
            self._sum(layer.bias, outputs.sum(1))

    def _sum(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        before = self._found.get(id(parameter))  # a layer may be used more than once in a pass
        self._found[id(parameter)] = gradient if before is None else before + gradient


def gradients_by_unit(model: nn.Module, trained: Mapping[str, nn.Parameter], dp: DpSgd) -> UnitGradients | PerSampleGradients:
    """Return what collects a gradient of every record, or of every patient. Raises ConfigError where that cannot be."""
    return UnitGradients(model, trained, dp.unit) if dp.per_patient else PerSampleGradients(model, trained)


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
        self.gradients, self.optimizer = gradients_by_unit(model, trained, dp), optimizer
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
        self.gradients.close()
        for parameter in self.gradients.trained.values():
            parameter.grad = None

    def draw(self) -> list[int]:
        """Return the units of the next step: each on its own with the sample rate, so there may be none."""
        self._begin_noise()
        return self._draws.coins(self._num_units, self._dp.sample_rate)

    def parts(self, drawn: Sequence[int], batch_size: int) -> list[list[int]]:
        """Return the samples of the units `drawn`, as they go through the model together."""
        return list(self._dp.chosen(drawn, batch_size, self._draws))

    def seed(self) -> int:
        """Return what the augmentation of a step is drawn with, see `DpSgd`."""
        return self._draws.seed()

    def step(self, penalty: Mapping[str, Tensor]) -> None:
        """Clip, sum, add noise, average, then add `penalty`, a gradient that touches no data, and take the step.

        The divisor is the batch's expected size, which tells nothing of what was drawn.
        """
        noisy = clipped_sum(self.gradients.take(), self._dp.clip) + self._begin_noise().result()
        self._next = None
        mean = noisy.double() * (UNIT / (self._num_units * self._dp.sample_rate))
        trained = self.gradients.trained
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
