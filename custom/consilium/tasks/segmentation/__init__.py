"""The segmentation task (masks, scored by Dice): settings, metric names and registration."""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, field_validator

from consilium.core.lazy import lazy
from consilium.core.schema import MOST_CLASSES, ClassName, check_unique
from consilium.data.settings import PictureSettings
from consilium.tasks import picture_lists
from consilium.tasks.registry import TaskConfig, TaskKind
from consilium.tasks.segmentation import scores
from consilium.tasks.segmentation.scores import SegmentationScoresConfig

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


SCORES = scores.scores(SegmentationScoresConfig())
"""How scores are shown by default."""
_TASK = "consilium.tasks.segmentation.task"
SEGMENTATION = TaskKind(
    SegmentationConfig,
    lambda config: scores.scores(config.scores),
    lambda config: scores.metric_names(config.classes),
    picture_lists.strict_reader(classes=False),
    lazy(f"{_TASK}:build"),
    picture_lists.check,
    prepare=picture_lists.prepare,
    look=lazy(f"{_TASK}:check_item"),
    usable=picture_lists.usable_reader(classes=False),
    rehearse=lazy(f"{_TASK}:rehearse"),
    former=scores.FORMER,
)
