"""Losses and gradients of a model with given values on batches of training data, and penalties on features."""

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from consilium.adapters import adapter_state
from consilium.adapters.strategy_modules import FeatureShift
from consilium.config.job import TrainingConfig
from consilium.core.errors import ConsiliumError, DataError, Reason
from consilium.core.messages import Tensors
from consilium.core.seeding import seed_for
from consilium.data.datalist import NOTHING_LEFT
from consilium.strategies.strategy import FeaturePenalty
from consilium.tasks.base import Batch, Task
from consilium.training.device import autocast, cuda_devices


class BatchGradients:
    """The `GradientProbe` of a strategy: it cycles through a random `share` of the training data in batches of the job's size.

    `seed` fixes the samples and their augmentation. The model is in evaluation mode, so there is no dropout.
    """

    def __init__(self, model: nn.Module, task: Task, config: TrainingConfig, seed: int, share: float) -> None:
        self.model, self.task, self.config, self.seed = model, task, config, seed
        order = torch.randperm(task.num_samples, generator=torch.Generator().manual_seed(seed)).tolist()
        chosen = order[: max(1, int(share * len(order)))]
        parts = [chosen[i : i + config.batch_size] for i in range(0, len(chosen), config.batch_size)]
        self.batches, self._parts = len(parts), itertools.cycle(enumerate(parts))

    def __call__(self, values: Tensors, names: Collection[str]) -> tuple[float, Tensors]:
        """See GradientProbe. Raises DataError if no sample can be read, ConsiliumError for a loss that is not finite.

        If no sample can be read and the task ignores unfit samples, loss and gradients are 0 instead.
        """
        for _ in range(self.batches):  # until a batch has a readable sample
            number, indices = next(self._parts)
            if batch := self.task.batch(indices, seed_for(self.seed, "look", number)):
                break
        else:
            if getattr(self.task, "ignores_unfit", False):
                return 0.0, {name: torch.zeros_like(values[name], device="cpu") for name in names}
            raise DataError(NOTHING_LEFT)
        adapter_state.load(self.model, values)
        params = adapter_state.tensors(self.model)
        for name, parameter in params.items():
            parameter.requires_grad_(name in names)
        device = next(self.model.parameters()).device
        with torch.random.fork_rng(devices=cuda_devices(params)), autocast(device, self.config.precision):
            loss = self.task.loss(self.model, batch)
        if not torch.isfinite(loss):
            what = f"training.lr: {self.config.lr}: the loss became {loss.item()} before training; lower it or check the data"
            raise ConsiliumError(what, Reason.TRAINING)
        return loss.item(), gradients_of(loss, {name: params[name] for name in names})


def gradients_of(loss: Tensor, of: Mapping[str, Tensor]) -> Tensors:
    """Return the gradients of the loss for the tensors `of`, by name, on the CPU; 0 for tensors that it does not depend on."""
    if not loss.requires_grad:  # it depends on none, such as the last layer of SAM's decoder, which produces no mask
        return {name: torch.zeros_like(p, device="cpu") for name, p in of.items()}
    found = torch.autograd.grad(loss, list(of.values()), allow_unused=True)
    given = zip(of.items(), found, strict=True)
    return {name: (torch.zeros_like(p) if g is None else g).detach().cpu() for (name, p), g in given}


# features --------------------------------------------------------------------------------------------------------------
# A task whose loss includes a strategy's penalty on the features between encoder and head.


class WithFeatures:
    """The `task`, with `penalty` of the batch's mean features (C,) added to its training loss."""

    def __init__(self, task: Task, penalty: FeaturePenalty) -> None:
        self.task, self.penalty = task, penalty

    def __getattr__(self, name: str) -> Any:
        """Return the task's attribute."""
        return getattr(self.task, name)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the sum of the task's loss and the penalty."""
        loss, part = self.task.loss(model, batch), model.get_submodule("feature_shift")
        assert isinstance(part, FeatureShift)
        penalty = self.penalty(part.batch_mean())
        return loss if penalty is None else loss + penalty
