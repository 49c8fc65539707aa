"""Dice loss, and Dice, IoU, HD95 and ASSD of binary masks, in two dimensions or three.

Dice loss and surfaces are those of MONAI, to the bit, without MONAI: it loads itself whole, seconds in every process of a site.
"""

from collections.abc import Sequence

import numpy as np
import torch
from scipy.ndimage import binary_erosion
from scipy.spatial import KDTree
from torch import Tensor

SMOOTH = 1e-5
"""Added above and below the fraction of the Dice loss."""
_MOST_SORTED = 2**24
"""torch.quantile takes no more values."""


def dice_loss(logits: Tensor, label: Tensor) -> Tensor:
    """Return the soft Dice loss (N, C) of logits and labels in 0..1 (N, C, ...): `monai.losses.DiceLoss(sigmoid=True)`."""
    guess, plane = torch.sigmoid(logits), list(range(2, logits.ndim))
    both, all_guess, all_label = (part.sum(plane) for part in (guess * label, guess, label))
    return 1 - (2 * both + SMOOTH) / (2 * (both + 0.5 * (all_guess - both) + 0.5 * (all_label - both)) + SMOOTH)


def counts(guess: Tensor, reference: Tensor) -> Tensor:
    """Return (4, C) whole numbers of masks (C, ...) bool: voxels of both, of the prediction, of the reference, of all."""
    each = [[np.count_nonzero(one) for one in mask.numpy()] for mask in (guess & reference, guess, reference)]
    return torch.tensor([*each, [guess[0].numel()] * len(guess)])  # torch's sum of a mask takes thirty times longer


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
    """Return the IoU (C,) of the background of each class."""
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
    surfaces = [_surface(np.pad(mask[cut], 1), spacing) for mask in (guess, reference)]
    both = [_nearest(*surfaces), _nearest(*reversed(surfaces))]
    return max(map(_percentile, both)), float(torch.cat(both).mean())


def _surface(mask: np.ndarray, spacing: Sequence[float]) -> np.ndarray:
    """Return where the voxels at a mask's border lie, (V, axes) in the unit of `spacing`."""
    return np.argwhere(mask ^ binary_erosion(mask)) * np.asarray(spacing, dtype=np.float64)


def _nearest(these: np.ndarray, others: np.ndarray) -> Tensor:
    """Return how far each of `these` is from the nearest of `others`, float32."""
    return torch.from_numpy(KDTree(others, leafsize=32).query(these)[0]).float()


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
