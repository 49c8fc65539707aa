"""One step of DP-SGD over all sites' data: what a site adds to the sum of clipped gradients.

Every site draws its own units (records or patients) with the same rate, by coins of the system's generator. Each unit's
gradient is clipped and put on the grid on its own, so a unit moves the sum by its clip and the rounding of one gradient,
whatever else was drawn and in whichever order. The guard adds the share of noise. An empty batch is a sum of zeros. So is a
unit whose loss or gradient is not finite: an error instead would tell, without noise, that it was drawn.

Source: M. Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1, its sum taken over hospitals.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from consilium.config.job import TrainingConfig
from consilium.core.messages import Tensors
from consilium.privacy.dpsgd import ClippedSum, DpSgd
from consilium.tasks.base import Task
from consilium.training.device import autocast
from consilium.training.loop import read, scalar, set_requires_grad


def clipped_sum(
    model: nn.Module,
    task: Task,
    params: Mapping[str, Tensor],
    trained: set[str],
    config: TrainingConfig,
    dp: DpSgd,
) -> Tensors:
    """Return minus the sum of the drawn units' clipped gradients of the tensors `trained`, int64 in units of the grid.

    `params`: the model's adapter tensors by name; they stay as they are. All that is drawn is secret, or of `dp.seed`. Models
    draw nothing: one that does is refused. Raises ConsiliumError for a task whose loss is not one number.
    """
    active, randomness = set_requires_grad(params, trained), dp.randomness()
    config = config.model_copy(update={"precision": "fp32"})  # bf16 rounds by who else is in the batch
    drawn = randomness.poisson_sample(dp.count(task.num_samples), dp.sample_rate)
    clipped = ClippedSum(model, active, dp)
    model.train()
    try:
        for _, batch in read(model, task, list(dp.samples(drawn, randomness)), randomness.seed()):
            with clipped.unit():
                with autocast(next(model.parameters()).device, config.precision):
                    loss = scalar(task.loss(model, batch))
                if loss.requires_grad:
                    loss.backward()
    finally:
        model.eval()
    parted = (-clipped.take()).split([p.numel() for p in active.values()])
    return {name: part.reshape(p.shape) for (name, p), part in zip(active.items(), parted, strict=True)}
