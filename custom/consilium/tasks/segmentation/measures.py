"""Dice, IoU, HD95 and ASSD of binary masks, in two dimensions or three."""

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from monai.metrics.utils import get_edge_surface_distance
from torch import Tensor

_MOST_SORTED = 2**24
"""torch.quantile takes no more values."""


def counts(guess: Tensor, reference: Tensor) -> Tensor:
    """Return (4, C) whole numbers of masks (C, ...) bool: voxels of both, of the prediction, of the reference, of all."""
    found = [mask.flatten(1).sum(1) for mask in (guess & reference, guess, reference)]
    return torch.stack([*found, torch.full_like(found[0], guess[0].numel())])


def overlaps(found: Tensor, count_empty: bool, background: bool = False) -> dict[str, Tensor]:
    """Return Dice and IoU (C,) of `counts`; with `background` IoU is the mean of the class's and of all that is not the class.

    Where the reference is empty they are NaN, or with `count_empty` Dice and the class's IoU are 1 if the prediction is empty
    too, else 0. A picture without any background in both has its IoU of 1.
    """
    both, guess, reference, _ = found.float()
    absent = torch.where(guess == 0, 1.0, 0.0) if count_empty else torch.full_like(guess, float("nan"))
    ratios = {"dice": 2.0 * both / (guess + reference), "iou": both / (guess + reference - both)}
    scores = {name: torch.where(reference == 0, absent, ratio).double() for name, ratio in ratios.items()}
    return scores | {"iou": (scores["iou"] + _outside(found)) / 2} if background else scores


def _outside(found: Tensor) -> Tensor:
    """Return the IoU (C,) of what is not the class."""
    both, guess, reference, whole = found.double()
    return torch.where(both == whole, 1.0, (whole - guess - reference + both) / (whole - both))


def distances(guess: np.ndarray, reference: np.ndarray, spacing: Sequence[float]) -> tuple[float, float]:
    """Return (HD95, ASSD) of two masks of one class, in the unit of `spacing` along each axis.

    HD95: the larger of the 95th percentiles of both directions. ASSD: the mean over both surfaces. Without a reference NaN;
    a prediction without the class lies the grid's diagonal away.
    """
    if not reference.any():
        return float("nan"), float("nan")
    if not guess.any():
        far = float(np.float32(np.sqrt(sum((n * step) ** 2 for n, step in zip(guess.shape, spacing, strict=True)))))
        return far, far
    cut = _box(guess | reference)
    masks = torch.from_numpy(guess[cut]), torch.from_numpy(reference[cut])
    whole = torch.ones_like(masks[0])  # without a mask MONAI looks for the box once more, which takes most of the time
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MONAI warns of its own use of an argument
        _, both, _ = get_edge_surface_distance(*masks, spacing=list(spacing), symmetric=True, mask=whole)
    return max(map(_percentile, both)), float(torch.cat(list(both)).mean())


def _percentile(values: Tensor) -> float:
    if values.numel() > _MOST_SORTED:
        return float(np.quantile(values.numpy(), 0.95))
    return float(torch.quantile(values, 0.95))


def _box(mask: np.ndarray) -> tuple[slice, ...]:
    """Return the smallest box around a mask: nothing of a surface lies outside it, and most of a volume does."""
    found = []
    for axis in range(mask.ndim):
        there = np.flatnonzero(mask.any(axis=tuple(other for other in range(mask.ndim) if other != axis)))
        found.append(slice(there[0], there[-1] + 1))
    return tuple(found)
