"""Prompts computed from reference masks: a box or a point for every class, in pixels of the model's input."""

import torch
from scipy.ndimage import distance_transform_edt
from torch import Tensor
from torch.nn.functional import pad


def boxes(label: Tensor, seed: int | None = None) -> Tensor:
    """Return the boxes (C, 4), xyxy, around masks (C, S, S); NaN where a class is absent.

    With a seed every side moves by up to 10 % of the box, as SAM-Med2D's training prompts do.
    """
    found = torch.full((len(label), 4), float("nan"))
    for index, mask in enumerate(label):
        rows, cols = torch.nonzero(mask, as_tuple=True)
        if len(rows):
            found[index] = torch.stack([cols.min(), rows.min(), cols.max(), rows.max()]).float()
    if seed is None:
        return found
    side = (found[:, 2:] - found[:, :2]).repeat(1, 2)
    draw = torch.rand(found.shape, generator=torch.Generator().manual_seed(seed)) * 0.2 - 0.1
    return (found + draw * side).clamp(0, label.shape[-1] - 1)


def points(label: Tensor, seed: int | None = None) -> Tensor:
    """Return a point (C, 2), xy, inside each mask (C, S, S); NaN where a class is absent.

    It is the pixel farthest from the mask's outside (of several the first, row by row), as in Sofiiuk et al., "Reviving
    Iterative Training with Mask Guidance for Interactive Segmentation", ICIP 2022. Pixels beyond the picture are outside. With
    a seed it is a random pixel of the mask, all with equal probability.
    """
    found = torch.full((len(label), 2), float("nan"))
    draw = None if seed is None else torch.rand(len(label), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for index, mask in enumerate(label):
        if len(inside := torch.nonzero(mask)):
            if draw is None:
                depth = torch.from_numpy(distance_transform_edt(pad(mask.bool(), (1, 1, 1, 1)).numpy()))[1:-1, 1:-1]
                row, column = divmod(int(depth.flatten().argmax()), mask.shape[1])
            else:
                row, column = inside[int(draw[index] * len(inside))].tolist()
            found[index] = torch.tensor([column, row])
    return found


TAKEN = {"box": boxes, "point": points}
"""The function that computes each kind of prompt from masks."""
