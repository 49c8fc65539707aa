"""Scores of a segmentation job: settings, names of metrics, table headings. Loads no torch."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

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
