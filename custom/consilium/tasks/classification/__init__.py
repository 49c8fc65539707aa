"""The classification task: settings, metric names and registration. One class per image or text, scored by accuracy."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, Field, model_validator

from consilium.core.lazy import lazy
from consilium.core.schema import MOST_CLASSES, ClassName, Section, check_unique
from consilium.data.check_report import Findings
from consilium.data.datalist import DataList, read_datalist
from consilium.data.settings import PictureSettings
from consilium.data.text import has_texts, read_texts
from consilium.tasks import picture_lists
from consilium.tasks.registry import Change, Scores, TaskConfig, TaskKind, uncertainty_names

F1Classes = Literal["all", "present"]


class ClassificationScoresConfig(Section):
    """The unit that is scored, and the classes over which macro F1 is the mean."""

    per: Annotated[
        Literal["image", "patient"],
        Field(description="the scored unit: each `image`, or each `patient` by the mean probability over its images"),
    ] = "image"
    f1: Annotated[
        F1Classes,
        Field(
            description="macro F1 is the mean over `all` classes that the split contains or the model predicts (scikit-learn's "
            '`average="macro"`), or over the classes `present` in the split'
        ),
    ] = "all"


class ClassificationConfig(PictureSettings, TaskConfig):
    """One class per image, or per text for a text encoder. Fields about pictures have no effect on texts."""

    name: Literal["classification"]
    classes: Annotated[
        list[ClassName],
        Field(
            min_length=2,
            max_length=MOST_CLASSES,
            description="the classes' names, in the order of the model's outputs; integer labels count from 0. Names are "
            "printable, without /",
        ),
        AfterValidator(check_unique),
    ]
    augment: Annotated[bool, Field(description="random flips, quarter turns and mild changes of intensity in training")] = True
    balance: Annotated[
        Literal["none", "weights", "prior"],
        Field(
            description="how the loss corrects for a site's mix of classes: `weights`: every class of the site has the same "
            "total weight; `prior`: the log of each class's share at the site is added to its logit, so that a class without "
            "samples gets no gradient"
        ),
    ] = "none"
    scores: Annotated[ClassificationScoresConfig, Field(description="how scores are computed")] = ClassificationScoresConfig()

    @property
    def outputs(self) -> int:
        """See TaskConfig."""
        return len(self.classes)

    def check_per_sample_gradients(self) -> None:
        """See TaskConfig. With `balance` the site's class counts influence every record's gradient."""
        if self.balance != "none":
            raise ValueError(
                f"task.balance: {self.balance!r}: counts a site's classes, so one record is in the gradients of all: no "
                "privacy.unit record; write none"
            )

    @model_validator(mode="after")
    def _check_keeps_empty(self) -> Self:
        for name, part in (("slices", self.slices), ("tiles", self.tiles)):
            if part is not None and part.empty != "keep":
                raise ValueError(
                    f"{name}.empty: {part.empty!r}: only masks show which parts are empty, and classification has none; "
                    "write keep"
                )
        return self


NAMES = ("accuracy", "f1")


def metric_names(config: ClassificationConfig) -> frozenset[str]:
    """Return the names of all metrics that a classification task can report."""
    classes = config.classes
    pairs = (f"confusion/{true}/{predicted}" for true in classes for predicted in classes)
    return frozenset({"loss", *NAMES, *uncertainty_names(NAMES), *(f"recall/{c}" for c in classes), *pairs})


def scores(config: ClassificationConfig) -> Scores:
    """Return the names, headings and order with which the scores are shown."""
    f1, unit = config.scores.f1, "image or text" if config.scores.per == "image" else config.scores.per
    headings = {"accuracy": "Accuracy", "f1": "Macro F1" if f1 == "all" else "Macro F1, present", "loss": "Loss"}
    return Scores(("accuracy",), ("f1",), headings, f", per {unit}", meanings={"f1": MEANINGS[f1]})


MEANINGS: dict[F1Classes, str] = {
    "all": "Macro F1: over the classes that are there or answered, as in scikit-learn",
    "present": "Macro F1: over the classes that are there; scikit-learn counts those answered too",
}
FORMER = {"scores": {"f1": "present"}}
"""The meaning of macro F1 in runs whose job.yaml does not have the field."""
_TASK = "consilium.tasks.classification.task"
_check_texts = lazy("consilium.data.check:check_texts")
_class_index = lazy(f"{_TASK}:class_index")
_token_ids = lazy("consilium.tasks.classification.text_samples:token_ids")
_pictures, _usable_pictures = partial(read_datalist, labels_are_classes=True), picture_lists.usable_reader(classes=True)


def _is_texts(path: Path) -> bool:
    return has_texts(path) or path.suffix == ".jsonl"


def _read(path: Path) -> DataList:
    return read_texts(path) if _is_texts(path) else _pictures(path)


def _prepare(config: ClassificationConfig, data: DataList) -> DataList:
    return data if _is_texts(data.path) else picture_lists.expand_to_slices_and_tiles(config, data)


def _check(
    path: Path, config: Any = None, tokenizer: Any = None, input_size: int = 0, prepare_list: Change | None = None
) -> Findings:
    """Return the findings of the check of a list of pictures or a folder of texts."""
    if not _is_texts(path):
        return picture_lists.check(path, config, tokenizer, input_size, prepare_list)
    length = (lambda text, split: len(_token_ids(tokenizer, text))) if tokenizer is not None else None
    return cast(Findings, _check_texts(path, length, input_size, config and (lambda text: _class_index(text, config.classes))))


CLASSIFICATION = TaskKind(
    ClassificationConfig,
    scores,
    metric_names,
    _read,
    lazy(f"{_TASK}:build"),
    _check,
    prepare=_prepare,
    look=lazy(f"{_TASK}:check_item"),
    usable=lambda path, lost: read_texts(path) if _is_texts(path) else _usable_pictures(path, lost),
    rehearse=lazy(f"{_TASK}:rehearse"),
    former=FORMER,
    undigested=FORMER,
)
