"""DP-SGD (Abadi et al. 2016) on adapter parameters by records or patients, through Opacus' PrivacyEngine.

Opacus clips, adds noise and counts; per-sample gradients are ours, because its hooks take a layer's first dimension for the
sample, and SAM's windowed attention (and one decoding per class) hands layers several rows a sample. Here the rows of a sample
stay together, so a layer's input (N k, ..., in) is read as (N, k ..., in), and a sample's gradient is one product.

Noise is made for a sum that one record moves by the clip at most, so nothing may tie a batch's records together. Dropout would
(one generator, of a seed that the server knows, draws all masks: a record more changes everybody's), and so would batch
statistics and rounding to bf16. So record level has none of them: simpler than a generator a record, and little is lost beside
the noise. Dropout as a function and DropPath are no modules of a known class, so whatever draws in a pass ends the training.

Of a patient the gradient is that of the mean loss over some of the samples, by autograd, one patient at a time. So no layer
needs gradients per sample.
"""

import os
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import TensorDataset

from consilium.errors import ConfigError
from consilium.privacy.discrete import Bits


@dataclass(frozen=True)
class DpSgd:
    """`noise_multiplier` over `clip` (norm of one unit's gradient); `seed` None draws from the system's generator.

    `patients`: every patient's samples by their place in the training split, where patients are drawn and not records;
    `per_patient`: of so many of them at most a step takes the mean.
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

    def chosen(self, drawn: Sequence[int], batch_size: int, bits: Bits) -> Iterator[list[int]]:
        """Yield the samples of the units `drawn`, as they go through the model together: one patient, or `batch_size` records.

        Of a patient with too many samples a random choice, drawn with `bits`.
        """
        if not self.per_patient:
            yield from (list(drawn[start : start + batch_size]) for start in range(0, len(drawn), batch_size))
            return
        source = random.Random(bits(32))
        for number in drawn:
            samples = list(self.patients[number])
            yield samples if len(samples) <= self.per_patient else source.sample(samples, self.per_patient)


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


def _finite(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return gradients (N, *shape) by name, 0 for a unit whose norm over all of them is not finite: noise would not hide it."""
    kept = torch.stack([one.flatten(1).square().sum(1) for one in gradients.values()]).sum(0).isfinite()
    return {name: one.where(kept.reshape(-1, *[1] * (one.ndim - 1)), 0.0) for name, one in gradients.items()}


class PrivateSteps:
    """Poisson batches and private optimizer steps over the `trained` parameters of `model`. Use as a context manager."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        trained: Mapping[str, nn.Parameter],
        num_units: int,
        dp: DpSgd,
    ) -> None:
        from opacus import PrivacyEngine
        from opacus.data_loader import DPDataLoader

        self.gradients, self._dp = gradients_by_unit(model, trained, dp), dp
        seed = int.from_bytes(os.urandom(8)) >> 1 if dp.seed is None else dp.seed
        generator = torch.Generator().manual_seed(seed)
        loader = DPDataLoader(TensorDataset(torch.arange(num_units)), sample_rate=dp.sample_rate, generator=generator)
        device = next(iter(trained.values())).device
        noise = generator if device.type == "cpu" else torch.Generator(device).manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that its secure mode is off: torchcsprng has no release for this torch
            self.engine = PrivacyEngine(accountant="prv")
            wrapped, self.optimizer, _ = self.engine.make_private(
                module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=dp.noise_multiplier,
                max_grad_norm=dp.clip, poisson_sampling=False, grad_sample_mode="no_op", noise_generator=noise,
            )  # fmt: skip
        self.optimizer.expected_batch_size = num_units * dp.sample_rate  # Opacus rounds it down, to 0 even
        self._bits: Bits = os.urandom if dp.seed is None else np.random.default_rng(dp.seed).bytes
        self._wrapped, self._sampler = wrapped, loader.batch_sampler
        self._draws: Iterator[list[int]] = iter(())

    def __enter__(self) -> "PrivateSteps":
        return self

    def __exit__(self, *error: object) -> None:
        self.gradients.close()
        parameters: list[Any] = list(self.gradients.trained.values())  # Opacus keeps its own with them
        for parameter in parameters:
            parameter.grad_sample = parameter.summed_grad = parameter.grad = None

    def draw(self) -> list[int]:
        """Return the units of the next step: each on its own with the sample rate, so there may be none."""
        indices = next(self._draws, None)
        if indices is None:
            self._draws = iter(self._sampler)
            indices = next(self._draws)
        return indices

    def parts(self, drawn: Sequence[int], batch_size: int) -> list[list[int]]:
        """Return the samples of the units `drawn`, as they go through the model together."""
        return list(self._dp.chosen(drawn, batch_size, self._bits))

    def seed(self) -> int:
        """Return what the augmentation of a step is drawn with: a known one goes by place, which a unit more shifts."""
        return int.from_bytes(self._bits(8), "little") >> 1

    def step(self, penalty: Mapping[str, Tensor]) -> None:
        """Clip, sum, add noise, average, then add `penalty`, a gradient that touches no data, and take the step."""
        for name, gradient in _finite(self.gradients.take()).items():
            parameter: Any = self.gradients.trained[name]
            parameter.grad_sample = gradient
        self.optimizer.pre_step()
        for name, gradient in penalty.items():
            trained = self.gradients.trained[name]
            trained.grad = gradient if trained.grad is None else trained.grad + gradient
        self.optimizer.original_optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
