"""One step of DP-SGD over all sites' data: what a site adds to the sum of clipped gradients.

Every site draws its own units (records or patients) with the same rate, by coins of the system's generator. Each unit's
gradient is clipped and put on the grid on its own, so a unit moves the sum by its clip and the rounding of one gradient,
whatever else was drawn and in whichever order. The guard adds the share of noise. An empty batch is a sum of zeros. So is a
unit whose loss or gradient is not finite: an error instead would tell, without noise, that it was drawn.

Source: M. Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1, its sum taken over hospitals.
"""

import os
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from consilium.config.job import TrainingConfig
from consilium.messages import Tensors
from consilium.privacy.discrete import Bits
from consilium.privacy.dpsgd import DpSgd, UnitGradients
from consilium.privacy.secagg.arithmetic import ROOM, quantize
from consilium.privacy.shares import MARGIN
from consilium.tasks.base import Task
from consilium.training.device import autocast, cuda_devices
from consilium.training.loop import read, scalar, switched

ALONE = 1
"""Records at a time: float32 rounds a record's gradient by who is beside it, and a server chooses weights that make it much."""


def clipped_sum(
    model: nn.Module,
    task: Task,
    params: Mapping[str, Tensor],
    trained: set[str],
    config: TrainingConfig,
    dp: DpSgd,
) -> Tensors:
    """Return minus the sum of the drawn units' clipped gradients of the tensors `trained`, int64 in units of the grid.

    `params`: the model's adapter tensors by name; they stay as they are. All that is drawn, augmentation and dropout too, is of
    the system's generator, or of `dp.seed`. Raises ConsiliumError for a task whose loss is no number.
    """
    active = switched(params, trained)
    total = torch.zeros(sum(p.numel() for p in active.values()), dtype=torch.int64)
    bits: Bits = os.urandom if dp.seed is None else np.random.default_rng(dp.seed).bytes
    config = config.model_copy(update={"precision": "fp32"})  # bf16 rounds by who else is in the batch
    parts = list(dp.chosen(drawn(dp.count(task.num_samples), dp.sample_rate, bits), ALONE, bits))
    seed = int.from_bytes(bits(8), "little") >> 1  # augmentation goes by place in the list, which one unit more shifts
    gradients = UnitGradients(model, active, dp.unit)  # alone, so autograd's gradient is the unit's
    model.train()
    try:
        with torch.random.fork_rng(devices=cuda_devices(params)):
            torch.manual_seed(seed)
            for count, batch in read(model, task, parts, seed):
                with gradients.collect(count):
                    with autocast(next(model.parameters()).device, config.precision):
                        loss = scalar(task.loss(model, batch))
                    if loss.requires_grad:
                        loss.backward()
                total = (total - _rounded(gradients.take(), dp.clip)).clamp(-ROOM, ROOM)  # a sum that wraps would leap
    finally:
        gradients.close()
        model.eval()
    parted = total.split([p.numel() for p in active.values()])
    return {name: part.reshape(p.shape) for (name, p), part in zip(active.items(), parted, strict=True)}


def drawn(count: int, rate: float, bits: Bits) -> list[int]:
    """Return which of `count` units take part: each with probability `rate` (to 2^-64), independently."""
    coins = np.frombuffer(bits(8 * count), dtype="<u8")
    found: list[int] = np.flatnonzero(coins < np.uint64(int(rate * 2.0**64))).tolist()
    return found


def _rounded(gradients: Mapping[str, Tensor], clip: float) -> Tensor:
    """Return the sum (d,) of all units' gradients, (N, *shape) by name, clipped and rounded; one that is not finite is none."""
    whole = torch.cat([tensor.flatten(1) for tensor in gradients.values()], 1).double()
    norms = whole.square().sum(1).sqrt()
    factors = (clip / norms).clamp(max=1.0).nan_to_num(1.0) * (1 - MARGIN) * norms.isfinite()
    scaled = whole.nan_to_num(0.0, 0.0, 0.0) * factors[:, None]
    return quantize({"": scaled})[""].sum(0).cpu()
