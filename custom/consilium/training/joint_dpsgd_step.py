"""One step of DP-SGD over all sites' data: a site's contribution to the sum of clipped gradients.

Every site draws its units (records or patients) independently with the same probability, with the system's random generator.
Each unit's gradient is clipped and rounded to the grid separately. So a unit changes the sum by at most its clip and the
rounding of one gradient, for any other drawn units and any order. The guard adds the site's share of noise. An empty batch
gives zeros, and so does a unit whose loss or gradient is not finite: an error would reveal without noise that the unit was
drawn.

Source: M. Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1, its sum taken over hospitals.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from consilium.config.job import TrainingConfig
from consilium.core.messages import Tensors
from consilium.privacy.dpsgd import ClippedSum, DpSgd
from consilium.tasks.base import Task
from consilium.training.device import autocast
from consilium.training.loop import check_scalar_loss, read_units, set_requires_grad


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
    active, randomness = set_requires_grad(params, trained), dp.randomness()
    config = config.model_copy(update={"precision": "fp32"})  # in bf16 rounding depends on the rest of the batch
    drawn = randomness.poisson_sample(dp.count(task.num_samples), dp.sample_rate)
    clipped = ClippedSum(model, active, dp)
    model.train()
    try:
        for _, batch in read_units(model, task, list(dp.samples(drawn, randomness)), randomness.seed()):
            with clipped.add_unit():
                with autocast(next(model.parameters()).device, config.precision):
                    loss = check_scalar_loss(task.loss(model, batch))
                if loss.requires_grad:
                    loss.backward()
    finally:
        model.eval()
    parted = (-clipped.take()).split([p.numel() for p in active.values()])
    return {name: part.reshape(p.shape) for (name, p), part in zip(active.items(), parted, strict=True)}
