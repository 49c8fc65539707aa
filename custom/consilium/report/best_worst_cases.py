"""cases.json and cases/: the final score of each unit, and pictures or texts of the best, the median and the worst unit.

A unit is what the task scores: an image, a volume, a patient or a text record. A site writes these files into its own folder.
They show patients, so only this user can read them, and no message contains them.
"""

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from consilium.core.messages import Stage
from consilium.core.storage import write_atomic
from consilium.report import predictions
from consilium.report.predictions import PREDICTIONS, draw_outlines, overlay, panel
from consilium.report.private_logging import log_failed_drawing
from consilium.tasks.base import Answered, Classified, Examples, Segmented, Shown, ShowsUnits, Task, UnitScores

CASES, FOLDER = "cases.json", "cases"
WHICH = ("best", "median", "worst")
PICTURE, REFERENCE = "picture", "reference"
ENDING = ".jpg"
SIDE, QUALITY = 288, 88
"""Pixels of a picture's side, and the quality of its JPEG."""
LIKELIEST, LONGEST = 5, 4000
"""Classes listed per picture (the likeliest ones), and characters kept per text, at most."""
FORM = 1
"""Version of the format of cases.json. A reader refuses any other."""


class Closing:
    """Collects, while a final evaluation scores one model after the other, a few predictions and the selected units.

    `first`: predictions of the first samples, by model. `scored`: each unit's score, by model. `cases`: each model's answers
    for the selected units. `picked`: numbers of the best, median and worst unit. `by`: the model whose scores selected them,
    which is the first one scored. `problems`: a line per error in this class; such an error never changes a score.
    """

    def __init__(self) -> None:
        self.first: dict[Stage, Examples] = {}
        self.scored: dict[Stage, UnitScores] = {}
        self.cases: dict[Stage, Shown] = {}
        self.picked: dict[str, int] = {}
        self.by: Stage | None = None
        self.problems: list[str] = []

    def collect_predictions(self, stage: Stage, task: Task, model: Any, split: str) -> None:
        """Collect a model's predictions. Called right after the task scored the whole split with this model."""
        with self._note_errors(PREDICTIONS):
            if (found := task.examples(model, split)) is not None:
                self.first[stage] = found
        with self._note_errors(CASES):
            if not isinstance(task, ShowsUnits) or task.scored is None:
                return
            if self.by is None:
                self.by, self.picked = stage, pick(task.scored)
            elif task.scored.names != self.scored[self.by].names:
                raise ValueError(f"the {stage} model was scored on other samples")  # a file became unreadable
            self.scored[stage] = task.scored
            samples = [self.scored[self.by].samples[number] for number in self.picked.values()]
            if samples and (shown := task.show(model, split, samples)) is not None:
                count = len(shown.answers if isinstance(shown, Answered) else shown.images)
                self.cases |= {stage: shown} if count == len(samples) else {}

    def write(self, folder: Path, about: Mapping[str, Any], more: Callable[[], None]) -> list[str]:
        """Write predictions.png, cases.json and cases/ into a site's folder, then call `more`. Return the problems.

        `about`: further fields of cases.json. `more`: writes the site's diagnostics; its error becomes a problem too.
        """
        with self._note_errors(PREDICTIONS):
            predictions.write_predictions(folder / PREDICTIONS, self.first)
        with self._note_errors(CASES):
            if self.by is not None:
                by = self.by
                first, pictures = self.scored[by], self._pictures()
                for stale in (folder / FOLDER).glob(f"*{ENDING}"):  # of an earlier evaluation
                    stale.unlink()
                for name, image in pictures.items():
                    file = io.BytesIO()
                    image.save(file, "JPEG", quality=QUALITY, subsampling=0)
                    write_atomic(folder / FOLDER / name, file.getvalue())
                values = {str(stage): list(map(_number, scored.values)) for stage, scored in self.scored.items()}
                classes = next((list(one.classes) for one in self.cases.values() if isinstance(one, Segmented)), [])
                found = {"form": FORM, **about, "score": first.score, "lower": first.lower, "by": str(by), "units": first.names}
                cases = [self._case_fields(place, which, number) for place, (which, number) in enumerate(self.picked.items())]
                found |= {"values": values, "classes": classes, "cases": cases, "pictures": sorted(pictures)}
                write_atomic(folder / CASES, json.dumps(found, allow_nan=False).encode())
        with self._note_errors("diagnostics"):
            more()
        return self.problems

    def _case_fields(self, place: int, which: str, number: int) -> dict[str, Any]:
        """Return the fields of one case: its reference and each model's answer as text or probabilities; None for masks.

        `place`: the case's index in `picked`; `which`: best, median or worst; `number`: the unit's number.
        """
        found: dict[str, Any] = {"which": which, "unit": number, "said": {}}
        for stage, shown in self.cases.items():
            found["said"][str(stage)] = None
            if isinstance(shown, Answered):
                found["said"][str(stage)] = shown.answers[place][:LONGEST]
                found |= {"prompt": shown.prompts[place][:LONGEST], REFERENCE: shown.references[place][:LONGEST]}
            elif isinstance(shown, Classified):
                probabilities, true = shown.predictions[place], int(shown.references[place])
                likeliest = probabilities.argsort(descending=True)[:LIKELIEST].tolist()
                named = dict.fromkeys([*likeliest, true])
                found["said"][str(stage)] = [[shown.classes[i], _number(float(probabilities[i]))] for i in named]
                found[REFERENCE] = shown.classes[true]
        return found

    def _pictures(self) -> dict[str, Image.Image]:
        """Return pictures by file name: each case's picture and, for masks, the reference and each model's prediction on it."""
        found: dict[str, Image.Image] = {}
        for stage, shown in self.cases.items():
            for place, which in enumerate(self.picked if not isinstance(shown, Answered) else ()):
                image = shown.images[place]  # type: ignore[union-attr]
                if case_file_name(which, PICTURE) not in found:
                    found[case_file_name(which, PICTURE)] = panel(image, SIDE)
                if isinstance(shown, Segmented):
                    found.setdefault(case_file_name(which, REFERENCE), overlay(image, shown.references[place], SIDE))
                    masks = overlay(image, shown.predictions[place], SIDE)
                    found[case_file_name(which, str(stage))] = draw_outlines(masks, shown.references[place])
        return found

    @contextmanager
    def _note_errors(self, what: str) -> Iterator[None]:
        """Turn an error in the block into a line of `problems`."""
        try:
            yield
        except Exception as error:
            self.problems.append(log_failed_drawing(what, error))


def pick(scored: UnitScores) -> dict[str, int]:
    """Return the numbers of the best, the median and the worst unit that have a score.

    Of units with equal scores the first is taken. No unit is taken twice, so fewer than three units give fewer cases.
    """
    known = [number for number, value in enumerate(scored.values) if not math.isnan(value)]
    ordered = sorted(known, key=lambda number: scored.values[number], reverse=not scored.lower)
    places = {"best": 0, "worst": len(ordered) - 1, "median": len(ordered) // 2}
    found: dict[str, int] = {}
    for which, place in places.items() if ordered else ():
        if ordered[place] not in found.values():
            found[which] = ordered[place]
    return {which: found[which] for which in WHICH if which in found}


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def case_file_name(which: str, what: str) -> str:
    """Return the file name of a case's picture. `what`: PICTURE, REFERENCE or a model."""
    return f"{which}-{what}{ENDING}"
