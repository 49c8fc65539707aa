"""Segmentation: masks, judged by Dice."""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, field_validator

from consilium.core.lazy import lazy
from consilium.core.schema import MOST_CLASSES, ClassName, each_once
from consilium.data.settings import PictureSettings
from consilium.tasks import pictures
from consilium.tasks.registry import Scores, TaskConfig, TaskKind
from consilium.tasks.segmentation import scores
from consilium.tasks.segmentation.scores import SegmentationScoresConfig

LabelValues = Annotated[list[Annotated[int, Field(ge=0, lt=2**16)]], Field(min_length=1, max_length=1024)]


class PromptKind(NamedTuple):
    """A kind of prompt: its plural, and the names of its numbers, in pixels from the left and the top."""

    many: str
    numbers: tuple[str, ...]


PROMPTS = {"box": PromptKind("boxes", ("left", "top", "right", "bottom")), "point": PromptKind("points", ("x", "y"))}


def prompts_of(task: Any) -> PromptKind | None:
    """Return the kind of prompt that a job's task section asks for, None for a task without."""
    return PROMPTS.get(getattr(task, "prompt", "none"))


class SegmentationConfig(PictureSettings, TaskConfig):
    """Masks."""

    name: Literal["segmentation"] = "segmentation"
    classes: Annotated[
        dict[ClassName, LabelValues],
        Field(
            min_length=1,
            max_length=MOST_CLASSES,
            description="a list of names (label values 1, 2, ...) or a map from name to its label values; printable, without /",
        ),
    ]
    prompt: Annotated[
        Literal["none", "box", "point"],
        Field(description="`box` gives the model the box around each class, `point` a point in it"),
    ] = "none"
    augment: Annotated[bool, Field(description="random flips, quarter turns and mild changes of intensity in training")] = True
    loss: Annotated[
        Literal["dice+bce", "bce"],
        Field(description="Dice and binary cross-entropy, or the latter alone, as in FedSCA's Eq. 3"),
    ] = "dice+bce"
    scores: Annotated[SegmentationScoresConfig, Field(description="what a score is taken of")] = SegmentationScoresConfig()

    @field_validator("classes", mode="before")
    @classmethod
    def _number_names(cls, value: Any) -> Any:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            return value
        return {name: [i] for i, name in enumerate(each_once(value), start=1)}


def metric_names(config: SegmentationConfig) -> frozenset[str]:
    """Return every metric a segmentation task can report."""
    return scores.metric_names(config.classes)


def _scores(config: SegmentationConfig) -> Scores:
    return scores.scores(config.scores)


SCORES = scores.scores(SegmentationScoresConfig())
"""How scores are shown by default."""
_TASK = "consilium.tasks.segmentation.task"
SEGMENTATION = TaskKind(
    SegmentationConfig,
    _scores,
    metric_names,
    pictures.reader(classes=False),
    lazy(f"{_TASK}:build"),
    pictures.check,
    prepare=pictures.prepare,
    look=lazy(f"{_TASK}:check_item"),
    usable=pictures.usable(classes=False),
    rehearse=lazy(f"{_TASK}:rehearse"),
    former=scores.FORMER,
)
