"""A site's cases.json and cases/ for a page: checked, pictures decoded and encoded anew, never read through a link."""

import base64
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from PIL import Image
from pydantic import BaseModel, Field, ValidationError

from consilium.core.errors import ConfigError
from consilium.core.messages import Stage
from consilium.report.best_worst_cases import CASES, FOLDER, PICTURE, QUALITY, REFERENCE, name_of
from consilium.report.image_grid import colours
from consilium.report.metrics_file import Number
from consilium.report.page import figures
from consilium.report.plain_files import is_folder, read_plain
from consilium.report.run_record import known
from consilium.report.tables import Table, columns, number
from consilium.tasks.registry import TASKS, Scores

MOST_PICTURE, MOST_SIDE = 4 * 1024**2, 2048
"""Bytes and pixels a side of a picture; one of ours has a fraction of it."""
MOST_CLASSES = 24
MEANT = {PICTURE: "the picture", REFERENCE: "the picture with the reference's masks"}
MEANT |= {s: f"the picture with the {s} model's masks, the reference's outlines in white" for s in Stage}


class Case(BaseModel):
    """The best, the median or the worst unit; `said`: an answer, or classes with probabilities, by model."""

    which: Literal["best", "median", "worst"]
    unit: Annotated[int, Field(ge=0)]
    said: dict[Stage, str | list[tuple[str, Annotated[float, Field(ge=0, le=1)]]] | None] = {}
    reference: str = ""
    prompt: str = ""


class Cases(BaseModel):
    """A site's cases.json. `units`: names of units; `values`: their scores by model; `by`: the model that chose the cases."""

    form: Literal[1]
    site: str = ""
    job: str = ""
    score: str = "score"
    by: Stage = Stage.GLOBAL
    units: list[str]
    values: dict[Stage, list[Number | None]] = {}
    classes: list[str] = []
    cases: Annotated[list[Case], Field(max_length=3)] = []
    metrics: dict[str, Number] = {}
    task: dict[str, Any] = {}
    privacy: dict[str, Any] | None = None

    @property
    def unit(self) -> str:
        """What a unit is, in a word."""
        if (per := dict(self.task.get("scores") or {}).get("per")) in ("image", "volume", "patient"):
            return str(per)
        return "record" if self.task.get("name") in ("language", "report") else "image"

    @property
    def scores(self) -> Scores | None:
        """How the task's scores are shown; None for a task that is not known here."""
        try:
            kind = TASKS[str(self.task.get("name"))]
            return kind.scores(kind.config.model_validate(kind.completed(self.task)))
        except (ConfigError, KeyError, ValueError):
            return None

    @property
    def label(self) -> str:
        """What the values are, with the grid of their masks."""
        grid = self.scores.grid if self.scores else ""
        return f"{self.score}, {grid}" if grid else self.score

    @property
    def known_values(self) -> dict[Stage, list[float]]:
        """The scores of units that have one, by model."""
        found = {stage: [v for v in values if v is not None and known(v) is not None] for stage, values in self.values.items()}
        return {stage: values for stage, values in found.items() if values}


def read_cases(folder: Path) -> Cases | None:
    """Return the cases in a site's folder; None where there are none, or they are not as we write them."""
    try:
        found = Cases.model_validate_json(read_plain(folder / CASES) or b"")
        _ = found.unit
    except (ValidationError, ValueError, TypeError):
        return None
    whole = all(len(values) == len(found.units) for values in found.values.values())
    return found if whole and all(case.unit < len(found.units) for case in found.cases) else None


def site_section(name: str, site: str, folder: Path, cases: Cases) -> dict[str, Any]:
    """Return one site's own scores and cases as the template shows them. `name` tells its figures from others'."""
    rows = []
    for stage, values in cases.known_values.items():
        ends = np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist()
        rows.append([str(stage), str(len(values)), *map(number, ends)])
    heads = columns("model", f"{cases.unit}s", "lowest", "first quarter", "median", "third quarter", "highest")
    shown = []
    for case in cases.cases:
        there = {s: v for s, values in cases.values.items() if (v := known(values[case.unit])) is not None}
        said = {stage: one or "(nothing)" for stage, one in case.said.items() if one is not None}
        case_pictures = pictures(folder, case.which)
        shown.append(dict(case) | {"name": cases.units[case.unit], "scores": there, "said": said, "pictures": case_pictures})
    key = zip(cases.classes[:MOST_CLASSES], colours(MOST_CLASSES), strict=False)
    return {
        "name": site,
        "found": cases,
        "cases": shown,
        "key": [(one, "#{:02x}{:02x}{:02x}".format(*colour)) for one, colour in key],
        "distribution": figures.distribution(name, cases.known_values, cases.label, cases.unit, site),
        "spread": Table(f"{cases.label}, of each {cases.unit}, {site}", heads, rows) if rows else None,
    }


def pictures(folder: Path, which: str) -> list[tuple[str, str, str]]:
    """Return (heading, source, meaning) of the pictures of one case; the plain picture only where there are no masks."""
    if not is_folder(folder / FOLDER):
        return []
    sources: Mapping[str, str | None] = {what: _picture(folder / FOLDER / name_of(which, what)) for what in MEANT}
    found = [(str(what), source, MEANT[what]) for what, source in sources.items() if source]
    return [one for one in found if one[0] != PICTURE or len(found) == 1]


def _picture(path: Path) -> str | None:
    """Return a picture as a source for a page, decoded and encoded anew; None for any other file."""
    if (data := read_plain(path, MOST_PICTURE)) is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=("JPEG",)) as opened:
                if max(opened.size) > MOST_SIDE:
                    return None
                file = io.BytesIO()
                opened.convert("RGB").save(file, "JPEG", quality=QUALITY, subsampling=0)
    except (OSError, ValueError, SyntaxError, Warning):
        return None
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
