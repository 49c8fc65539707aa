"""A task whose loss also has what a strategy asks of the features between encoder and head."""

from typing import Any

from torch import Tensor, nn

from consilium.adapters.parts import FeatureShift
from consilium.strategies.trainer import FeaturePenalty
from consilium.tasks.base import Batch, Task


class WithFeatures:
    """The `task`, its training loss raised by `penalty` of the batch's mean features (C,)."""

    def __init__(self, task: Task, penalty: FeaturePenalty) -> None:
        self.task, self.penalty = task, penalty

    def __getattr__(self, name: str) -> Any:
        """Return what is the task's own."""
        return getattr(self.task, name)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the task's loss and the penalty, in one number."""
        loss, part = self.task.loss(model, batch), model.get_submodule("feature_shift")
        assert isinstance(part, FeatureShift)
        penalty = self.penalty(part.batch_mean())
        return loss if penalty is None else loss + penalty
