"""Scores of a segmentation job: settings, names of metrics, table headings. Loads no torch."""

from collections.abc import Iterable
from typing import Annotated, Literal

import torch
from pydantic import Field
from scipy.ndimage import distance_transform_edt
from torch import Tensor
from torch.nn.functional import pad

from consilium.core.schema import Section
from consilium.data.datalist import SPLITS
from consilium.tasks.registry import Scores, uncertainty_names


class SegmentationScoresConfig(Section):
    """The unit of a score, and its grid."""

    grid: Annotated[
        Literal["resized", "original"],
        Field(
            description="the file's pixels, to which a prediction is enlarged from logits, or the model's without their padding"
        ),
    ] = "original"
    per: Annotated[
        Literal["image", "volume", "patient"],
        Field(description="each picture or plane, all planes of a volume as one, or the mean of a patient's volumes"),
    ] = "image"
    empty_references: Annotated[
        Literal["skip", "count"],
        Field(description="what lacks the class is left out, or Dice and IoU are 1 without a false positive and 0 with one"),
    ] = "skip"
    iou: Annotated[
        Literal["foreground", "both"],
        Field(description="IoU of the class, or the mean of the class's and of the background's, as DEeR prints it"),
    ] = "foreground"


OVERLAPS, DISTANCES = ("dice", "iou"), ("hd95", "assd")
MILLIMETRES = "_mm"
"""Ends the name of a distance in millimetres; without it a distance is in pixels, so that no mean ever mixes them."""
NAMES = (*OVERLAPS, *(f"{name}{unit}" for name in DISTANCES for unit in ("", MILLIMETRES)))
HEADINGS = {
    "dice": "Dice", "iou": "IoU", "hd95": "HD95 px", "hd95_mm": "HD95 mm", "assd": "ASSD px", "assd_mm": "ASSD mm",
    "loss": "Loss",
}  # fmt: skip


MEANINGS = dict.fromkeys(
    ("hd95", f"hd95{MILLIMETRES}"),
    "HD95: the larger of both directions' 95th percentiles, as in MONAI; medpy takes one percentile of both together",
)
TOO_SMALL = "too_small"
"""Counts, by split and class, the pictures in which resizing to the model's size alone leaves nothing of a class."""
GRIDS = {"original": "original grid", "resized": "model grid"}
FORMER = {"scores": {"grid": "resized"}}
"""What runs were scored on whose job.yaml names no grid."""


def metric_names(classes: Iterable[str]) -> frozenset[str]:
    """Return every metric a segmentation task can report."""
    each = (*NAMES, *(f"{TOO_SMALL}/{split}" for split in SPLITS))
    return frozenset({"loss", *NAMES, *uncertainty_names(NAMES), *(f"{name}/{c}" for c in classes for name in each)})


def scores(config: SegmentationScoresConfig) -> Scores:
    """Return how the scores are shown; the closing table's title names their unit and grid."""
    title = f", per {config.per}, {GRIDS[config.grid]}"
    title += "; empty references count" if config.empty_references == "count" else ""
    title += "; IoU of foreground and background" if config.iou == "both" else ""
    return Scores(("dice",), NAMES[1:], HEADINGS, title, GRIDS[config.grid], TOO_SMALL, MEANINGS)


# prompts ---------------------------------------------------------------------------------------------------------------
# Prompts that a reference mask gives: a box or a point for every class, in the pixels that the model sees.


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
    """Return a point (C, 2), xy, in each mask (C, S, S); NaN where a class is absent.

    It is the pixel farthest from the mask's edge, of several the first row by row, as in Sofiiuk et al., "Reviving Iterative
    Training with Mask Guidance for Interactive Segmentation", ICIP 2022; what lies beyond the picture is not a mask. With a
    seed it is any pixel of the mask, all alike.
    """
    found = torch.full((len(label), 2), float("nan"))
    draw = None if seed is None else torch.rand(len(label), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for index, mask in enumerate(label):
        if len(inside := torch.nonzero(mask)):
            row, column = _deepest(mask) if draw is None else inside[int(draw[index] * len(inside))].tolist()
            found[index] = torch.tensor([column, row])
    return found


def _deepest(mask: Tensor) -> tuple[int, int]:
    """Return row and column of the pixel farthest from the mask's outside."""
    depth = torch.from_numpy(distance_transform_edt(pad(mask.bool(), (1, 1, 1, 1)).numpy()))[1:-1, 1:-1]
    row, column = divmod(int(depth.flatten().argmax()), mask.shape[1])
    return row, column


TAKEN = {"box": boxes, "point": points}
"""How each kind of prompt is taken from masks."""
