"""Scores of a segmentation job: settings, metric names, table headings. Nothing here imports torch."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from consilium.core.schema import Section
from consilium.data.datalist import SPLITS
from consilium.tasks.registry import Scores, uncertainty_names


class SegmentationScoresConfig(Section):
    """The unit that is scored, the pixel grid, and the treatment of empty references."""

    grid: Annotated[
        Literal["resized", "original"],
        Field(
            description="the scored pixels: those of the file (`original`), to which the logits are enlarged, or those of the "
            "model's input without padding (`resized`)"
        ),
    ] = "original"
    per: Annotated[
        Literal["image", "volume", "patient"],
        Field(
            description="the scored unit: each picture or plane (`image`), all planes of a `volume` together, or a "
            "`patient` as "
            "the mean over its volumes"
        ),
    ] = "image"
    empty_references: Annotated[
        Literal["skip", "count"],
        Field(
            description="for units whose reference lacks the class: `skip` leaves them out; `count` gives Dice and IoU "
            "1 without "
            "a false positive and 0 with one"
        ),
    ] = "skip"
    iou: Annotated[
        Literal["foreground", "both"],
        Field(
            description="IoU of the class (`foreground`), or the mean of the class's and the background's (`both`, as in DEeR)"
        ),
    ] = "foreground"


OVERLAPS, DISTANCES = ("dice", "iou"), ("hd95", "assd")
MILLIMETRES = "_mm"
"""Suffix of a distance in millimetres. Without it a distance is in pixels, so a mean never mixes both."""
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
"""Metric that counts, by split and class, the pictures in which resizing to the model's size removes a class completely."""
GRIDS = {"original": "original grid", "resized": "model grid"}
FORMER = {"scores": {"grid": "resized"}}
"""The grid of runs whose job.yaml does not have the field."""


def metric_names(classes: Iterable[str]) -> frozenset[str]:
    """Return the names of all metrics that a segmentation task can report."""
    each = (*NAMES, *(f"{TOO_SMALL}/{split}" for split in SPLITS))
    return frozenset({"loss", *NAMES, *uncertainty_names(NAMES), *(f"{name}/{c}" for c in classes for name in each)})


def scores(config: SegmentationScoresConfig) -> Scores:
    """Return the names, headings and order with which the scores are shown. The table's title names their unit and grid."""
    title = f", per {config.per}, {GRIDS[config.grid]}"
    title += "; empty references count" if config.empty_references == "count" else ""
    title += "; IoU of foreground and background" if config.iou == "both" else ""
    return Scores(("dice",), NAMES[1:], HEADINGS, title, GRIDS[config.grid], TOO_SMALL, MEANINGS)
