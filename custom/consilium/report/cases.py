"""cases.json and cases/: what a closing evaluation scored unit by unit, and its best, median and worst unit.

A site writes them in its own folder. They show patients, are the user's alone, and never travel: no message is made of them.
"""

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import singledispatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from consilium.messages import Stage
from consilium.report import predictions
from consilium.report.image_grid import overlay, panel, traced
from consilium.report.predictions import PREDICTIONS
from consilium.report.private_logging import undrawn
from consilium.storage import write_atomic
from consilium.tasks.base import Answered, Classified, Examples, Scored, Segmented, Shown, ShowsUnits, Task

if TYPE_CHECKING:
    from torch import nn

CASES, FOLDER = "cases.json", "cases"
WHICH = ("best", "median", "worst")
PICTURE, REFERENCE = "picture", "reference"
ENDING = ".jpg"
SIDE, QUALITY = 288, 88
"""Pixels of a picture's side, and JPEG's quality."""
LIKELIEST, LONGEST = 5, 4000
"""Classes that are told of a picture, and characters of a text, at most."""
FORM = 1
"""Of cases.json; a reader takes no other."""


class Closing:
    """What a closing evaluation shows, model by model: first samples, and the units that its first model did best and worst.

    `by` is that first model. What goes wrong here is kept in `problems` by its kind, and costs no score.
    """

    def __init__(self) -> None:
        self.first: dict[Stage, Examples] = {}
        self.scored: dict[Stage, Scored] = {}
        self.cases: dict[Stage, Shown] = {}
        self.picked: dict[str, int] = {}
        self.by: Stage | None = None
        self.problems: list[str] = []

    def look(self, stage: Stage, task: Task, model: "nn.Module", split: str) -> None:
        """Keep what the model as it is now says of a few samples; the task has just scored the whole split with it."""
        with self._telling(PREDICTIONS):
            if (found := task.examples(model, split)) is not None:
                self.first[stage] = found
        with self._telling(CASES):
            if isinstance(task, ShowsUnits) and task.scored is not None:
                self._keep(stage, task, task.scored, model, split)

    def write(self, folder: Path, about: Mapping[str, Any], more: Callable[[], None]) -> list[str]:
        """Write predictions.png, cases.json and cases/ into a site's folder, and call `more`; return what went wrong.

        `about`: what else cases.json says.
        """
        with self._telling(PREDICTIONS):
            predictions.write_predictions(folder / PREDICTIONS, self.first)
        with self._telling(CASES):
            if self.by is not None:
                _write(folder, self, self.by, about)
        with self._telling("diagnostics"):
            more()
        return self.problems

    def _keep(self, stage: Stage, task: ShowsUnits, scored: Scored, model: "nn.Module", split: str) -> None:
        if self.by is None:
            self.by, self.picked = stage, pick(scored)
        elif scored.names != self.scored[self.by].names:
            raise ValueError(f"the {stage} model was scored on other samples")  # a file became unreadable meanwhile
        self.scored[stage] = scored
        if self.picked:
            samples = [self.scored[self.by].samples[number] for number in self.picked.values()]
            found = task.show(model, split, samples)
            if found is not None and _length(found) == len(samples):
                self.cases[stage] = found

    @contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.problems.append(undrawn(what, error))


def pick(scored: Scored) -> dict[str, int]:
    """Return the numbers of the best, the median and the worst unit; the first of equal ones, and no unit twice."""
    known = [number for number, value in enumerate(scored.values) if not math.isnan(value)]
    ordered = sorted(known, key=lambda number: scored.values[number], reverse=not scored.lower)
    places = {"best": 0, "median": len(ordered) // 2, "worst": len(ordered) - 1}
    found: dict[str, int] = {}
    for which in ("best", "worst", "median"):
        if ordered and (number := ordered[places[which]]) not in found.values():
            found[which] = number
    return {which: found[which] for which in WHICH if which in found}


def _write(folder: Path, closing: Closing, by: Stage, about: Mapping[str, Any]) -> None:
    first, pictures = closing.scored[by], _pictures(closing)
    for stale in (folder / FOLDER).glob(f"*{ENDING}"):  # of an evaluation before this one
        stale.unlink()
    for name, image in pictures.items():
        write_atomic(folder / FOLDER / name, _jpeg(image))
    values = {str(stage): list(map(_number, scored.values)) for stage, scored in closing.scored.items()}
    found = {"form": FORM, **about, "score": first.score, "lower": first.lower, "by": str(by), "units": first.names}
    found |= {"values": values, "classes": _classes(closing), "cases": _told(closing), "pictures": sorted(pictures)}
    write_atomic(folder / CASES, json.dumps(found, allow_nan=False).encode())


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def _classes(closing: Closing) -> list[str]:
    return next((list(one.classes) for one in closing.cases.values() if isinstance(one, Segmented)), [])


def _told(closing: Closing) -> list[dict[str, Any]]:
    """Return each case with what every model says of it in words and numbers."""
    found = []
    for place, (which, number) in enumerate(closing.picked.items()):
        said = {str(stage): _said(shown, place) for stage, shown in closing.cases.items()}
        shown = next(iter(closing.cases.values()), None)
        found.append({"which": which, "unit": number, "said": said} | ({} if shown is None else _true(shown, place)))
    return found


@singledispatch
def _length(shown: object) -> int:
    """Return how many samples are shown."""
    return len(shown.images)  # type: ignore[attr-defined]


@_length.register
def _(shown: Answered) -> int:
    return len(shown.answers)


@singledispatch
def _said(shown: object, place: int) -> Any:
    """Return what a model says of one sample, in words and numbers; masks are drawn instead."""
    return None


@_said.register
def _(shown: Classified, place: int) -> Any:
    probabilities = shown.predictions[place]
    likeliest = probabilities.argsort(descending=True)[:LIKELIEST].tolist()
    true = int(shown.references[place])
    return [[shown.classes[i], _number(float(probabilities[i]))] for i in [*likeliest, *([true] * (true not in likeliest))]]


@_said.register
def _(shown: Answered, place: int) -> Any:
    return shown.answers[place][:LONGEST]


@singledispatch
def _true(shown: object, place: int) -> dict[str, Any]:
    """Return what one sample's reference is, in words."""
    return {}


@_true.register
def _(shown: Classified, place: int) -> dict[str, Any]:
    return {REFERENCE: shown.classes[int(shown.references[place])]}


@_true.register
def _(shown: Answered, place: int) -> dict[str, Any]:
    return {"prompt": shown.prompts[place][:LONGEST], REFERENCE: shown.references[place][:LONGEST]}


def _pictures(closing: Closing) -> dict[str, Image.Image]:
    """Return the pictures by file name: each case's own, and where masks are its reference's and each model's."""
    found: dict[str, Image.Image] = {}
    shown = next((one for one in closing.cases.values() if not isinstance(one, Answered)), None)
    for place, which in enumerate(closing.picked if shown is not None else ()):
        assert not isinstance(shown, Answered | None)
        found[name_of(which, PICTURE)] = panel(shown.images[place], SIDE)
        if isinstance(shown, Segmented):
            found[name_of(which, REFERENCE)] = overlay(shown.images[place], shown.references[place], SIDE)
            found |= {
                name_of(which, str(s)): _masks(one, place) for s, one in closing.cases.items() if isinstance(one, Segmented)
            }
    return found


def _masks(shown: Segmented, place: int) -> Image.Image:
    """Return a picture with a model's masks, and the reference's outlines as white lines above them."""
    return traced(overlay(shown.images[place], shown.predictions[place], SIDE), shown.references[place])


def name_of(which: str, what: str) -> str:
    """Return a picture's file name."""
    return f"{which}-{what}{ENDING}"


def names(stages: Sequence[str] = tuple(Stage)) -> list[str]:
    """Return every name that a picture can have."""
    return [name_of(which, what) for which in WHICH for what in (PICTURE, REFERENCE, *stages)]


def _jpeg(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=QUALITY, subsampling=0)
    return file.getvalue()
