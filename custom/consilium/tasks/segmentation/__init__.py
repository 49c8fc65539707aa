"""The segmentation task (masks, scored by Dice): settings, metric names and registration."""

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, field_validator

from consilium.core.lazy import lazy
from consilium.core.schema import MOST_CLASSES, ClassName, Section, check_unique
from consilium.data.datalist import SPLITS, read_datalist
from consilium.data.settings import PictureSettings
from consilium.tasks import picture_lists
from consilium.tasks.registry import Scores, TaskConfig, TaskKind, uncertainty_names


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


LabelValues = Annotated[list[Annotated[int, Field(ge=0, lt=2**16)]], Field(min_length=1, max_length=1024)]


class PromptKind(NamedTuple):
    """A kind of prompt: its plural, and the names of its coordinates, in pixels from the left and the top."""

    many: str
    numbers: tuple[str, ...]


PROMPTS = {"box": PromptKind("boxes", ("left", "top", "right", "bottom")), "point": PromptKind("points", ("x", "y"))}


def prompt_kind_of(task: Any) -> PromptKind | None:
    """Return the kind of prompt in a job's task section, None for a task without prompts."""
    return PROMPTS.get(getattr(task, "prompt", "none"))


class SegmentationConfig(PictureSettings, TaskConfig):
    """Masks for one or more classes, which may overlap."""

    name: Literal["segmentation"] = "segmentation"
    classes: Annotated[
        dict[ClassName, LabelValues],
        Field(
            min_length=1,
            max_length=MOST_CLASSES,
            description="a list of names (label values 1, 2, ...) or a map from name to its label values. Names are printable, "
            "without /",
        ),
    ]
    prompt: Annotated[
        Literal["none", "box", "point"],
        Field(description="`box`: the model is given the box around each class; `point`: a point inside each class"),
    ] = "none"
    augment: Annotated[bool, Field(description="random flips, quarter turns and mild changes of intensity in training")] = True
    loss: Annotated[
        Literal["dice+bce", "bce"],
        Field(description="Dice plus binary cross-entropy, or only the latter, as in FedSCA's Eq. 3"),
    ] = "dice+bce"
    scores: Annotated[SegmentationScoresConfig, Field(description="how scores are computed")] = SegmentationScoresConfig()

    @field_validator("classes", mode="before")
    @classmethod
    def _assign_label_values(cls, value: Any) -> Any:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            return value
        return {name: [i] for i, name in enumerate(check_unique(value), start=1)}


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


_TASK = "consilium.tasks.segmentation.task"
SEGMENTATION = TaskKind(
    SegmentationConfig,
    lambda config: scores(config.scores),
    lambda config: metric_names(config.classes),
    partial(read_datalist, labels_are_classes=False),
    lazy(f"{_TASK}:build"),
    picture_lists.check,
    prepare=picture_lists.expand_to_slices_and_tiles,
    look=lazy(f"{_TASK}:check_item"),
    usable=picture_lists.usable_reader(classes=False),
    rehearse=lazy(f"{_TASK}:rehearse"),
    former=FORMER,
)
