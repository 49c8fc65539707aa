"""What a site's cases.json and cases/ say, for a page: checked, pictures decoded and written anew, never by way of a link."""

import base64
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from consilium.errors import ConfigError
from consilium.messages import Stage
from consilium.report.cases import CASES, FOLDER, FORM, LONGEST, PICTURE, QUALITY, REFERENCE, WHICH, name_of
from consilium.report.clean import shown
from consilium.report.means import number as written
from consilium.report.page.files import is_folder, number, read, read_json
from consilium.report.page.record import metrics_of
from consilium.report.page.scores import Table
from consilium.report.panels import colours
from consilium.tasks.registry import TASKS, Scores

MOST_PICTURE, MOST_SIDE = 4 * 1024**2, 2048
"""Bytes and pixels a side of a picture; one of ours has a fraction of it."""
MOST_CLASSES = 24
PER = {"image": "image", "volume": "volume", "patient": "patient"}


@dataclass(frozen=True)
class Case:
    """The best, the median or the worst unit. `pictures`: (heading, source, what it shows)."""

    which: str
    name: str
    scores: Mapping[Stage, float]
    reference: str
    prompt: str
    said: Mapping[Stage, Any]
    pictures: Sequence[tuple[str, str, str]]

    @property
    def told(self) -> str:
        """Its scores in words."""
        return ", ".join(f"{stage} {written(value)}" for stage, value in self.scores.items())


@dataclass(frozen=True)
class Cases:
    """A site's own file. `units`: what a unit is; `by`: the model that chose the cases; `key`: colours of the classes."""

    site: str
    job: str
    score: str
    by: str
    units: str
    values: Mapping[Stage, Sequence[float]]
    cases: Sequence[Case]
    key: Sequence[tuple[str, str]]
    metrics: Mapping[str, float]
    scores: Scores | None
    privacy: Mapping[str, Any] | None


def read_cases(folder: Path, pictures: bool = True) -> Cases | None:
    """Return what a site's folder has; None for nothing, or nothing that is ours. Without `pictures` none is read."""
    raw = read_json(folder / CASES)
    if not isinstance(raw, dict) or raw.get("form") != FORM or not isinstance(raw.get("units"), list):
        return None
    units, told = [shown(one, 160) for one in raw["units"]], _dict(raw.get("values"))
    values = {stage: _values(told[stage]) for stage in Stage if isinstance(told.get(stage), list)}
    values = {stage: found for stage, found in values.items() if len(found) == len(units)}
    task = _dict(raw.get("task"))
    cases = [_case(folder if pictures else None, one, units, values) for one in _list(raw.get("cases"))[: len(WHICH)]]
    return Cases(
        shown(raw.get("site", ""), 160),
        shown(raw.get("job", ""), 160),
        shown(raw.get("score", "score"), 60),
        str(next((stage for stage in Stage if stage == raw.get("by")), Stage.GLOBAL)),
        PER.get(str(_dict(task.get("scores")).get("per")), "record" if task.get("name") in ("language", "report") else "image"),
        values,
        [case for case in cases if case is not None],
        [(shown(name, 60), "#{:02x}{:02x}{:02x}".format(*colour)) for name, colour in _coloured(_list(raw.get("classes")))],
        metrics_of(raw.get("metrics")),
        _scores(task),
        found if isinstance(found := raw.get("privacy"), dict) else None,
    )


def _dict(raw: Any) -> dict[str, Any]:
    return raw if isinstance(raw, dict) else {}


def _list(raw: Any) -> list[Any]:
    return raw if isinstance(raw, list) else []


def _values(raw: Sequence[Any]) -> list[float]:
    return [math.nan if (value := number(one)) is None else value for one in raw]


def _coloured(classes: Sequence[Any]) -> list[tuple[Any, tuple[int, int, int]]]:
    return list(zip(classes[:MOST_CLASSES], colours(MOST_CLASSES), strict=False))


def _scores(task: dict[str, Any]) -> Scores | None:
    """Return how the task's scores are shown; None for a task that is not known here."""
    try:
        kind = TASKS[str(task.get("name"))]
        return kind.scores(kind.config.model_validate(task))
    except (ConfigError, KeyError, ValueError):
        return None


def _case(folder: Path | None, raw: Any, units: Sequence[str], values: Mapping[Stage, Sequence[float]]) -> Case | None:
    if not isinstance(raw, dict) or raw.get("which") not in WHICH or type(raw.get("unit")) is not int:
        return None
    which, unit = str(raw["which"]), raw["unit"]
    if not 0 <= unit < len(units):
        return None
    scores = {stage: found[unit] for stage, found in values.items() if not math.isnan(found[unit])}
    said = {stage: _said(_dict(raw.get("said")).get(stage)) for stage in Stage}
    pictures = _pictures(folder, which) if folder else []
    reference, prompt = (passage(raw.get(name, "")) for name in (REFERENCE, "prompt"))
    return Case(which, units[unit], scores, reference, prompt, {s: one for s, one in said.items() if one}, pictures)


def _said(raw: Any) -> Any:
    """Return a model's answer, or its classes with their probabilities; None for neither."""
    if isinstance(raw, str):
        return passage(raw) or "(nothing)"
    pairs = [one for one in _list(raw) if isinstance(one, list) and len(one) == 2]
    return [(shown(name, 60), value) for name, one in pairs if (value := number(one)) is not None and 0 <= value <= 1] or None


def passage(text: object) -> str:
    """Return a text in its own lines, each of visible characters."""
    return "\n".join(shown(line, LONGEST) for line in str(text)[:LONGEST].splitlines())


def _pictures(folder: Path, which: str) -> list[tuple[str, str, str]]:
    """Return (heading, source, what it shows) of the pictures of one case."""
    place = folder / FOLDER
    if not is_folder(place):
        return []
    sources = {what: picture(place / name_of(which, what)) for what in (PICTURE, REFERENCE, *Stage)}
    masks = any(sources[what] for what in (REFERENCE, *Stage))
    meant = {PICTURE: "the picture", REFERENCE: "the picture with the reference's masks"}
    meant |= {stage: f"the picture with the {stage} model's masks, the reference's outlines in white" for stage in Stage}
    kept = [what for what in sources if sources[what] and (what != PICTURE or not masks)]
    return [(str(what), str(sources[what]), meant[what]) for what in kept]


def picture(path: Path) -> str | None:
    """Return a picture as a source for a page, decoded and encoded anew; None for what is none."""
    data = read(path, MOST_PICTURE)
    if data is None:
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


def spread(found: Cases, site: str) -> Table | None:
    """Return the quartiles of what the units scored, a row per model."""
    rows = []
    for stage, values in found.values.items():
        known = [value for value in values if not math.isnan(value)]
        if known:
            ends = np.quantile(known, [0, 0.25, 0.5, 0.75, 1])
            rows.append([str(stage), str(len(known)), *(written(float(value)) for value in ends)])
    columns = ["model", f"{found.units}s", "lowest", "first quarter", "median", "third quarter", "highest"]
    return Table(f"{found.score} of each {found.units}, {site}", columns, rows) if rows else None
