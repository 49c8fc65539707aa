"""A site's cases.json and cases/ for a page: checked, pictures decoded and encoded anew, never read through a link."""

import base64
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image
from pydantic import BaseModel, Field, ValidationError

from consilium.core.messages import MetricKey, Stage
from consilium.core.sanitize import shown
from consilium.report.best_worst_cases import CASES, FOLDER, PICTURE, QUALITY, REFERENCE, name_of
from consilium.report.figures import ROUNDS
from consilium.report.page.html import INK, PAPER, SERIES, SOFT, drawing, inline
from consilium.report.plain_files import Number, is_folder, read_plain
from consilium.report.predictions import colours
from consilium.report.run_record import Curve, Results, known, split_of
from consilium.report.tables import Table, columns, number, shortened
from consilium.tasks.registry import HIGH, LOW, Scores, task_scores

# figures ---------------------------------------------------------------------------------------------------------------
# The figures of a run's page: learning curves, the three models beside each other, and the scores of each unit.

WIDTH = 4.4
"""Inches of a figure; pages show it at 96 pixels an inch or narrower."""
COLOURED = 8
"""Sites that get a colour of their own; of more, each is a thin line and their mean a thick one."""
MARKERS, LINES = "osD^vPX*", ("-", "--", "-.", ":")
LOOKS = {
    Stage.PRETRAINED: (SERIES[7], "D", -0.18), Stage.GLOBAL: (SERIES[0], "o", 0.0), Stage.PERSONALIZED: (SERIES[1], "s", 0.18)
}  # fmt: skip
"""Each model's colour, marker and place in a row, in all figures."""
POINTS = 300
"""Units of a distribution that are drawn one by one; of more, so many are, evenly spread over their order."""
MOST_ROWS = 60


def curves(name: str, found: Mapping[str, Curve], label: str, what: str) -> Markup | None:
    """Return one measure by round, a line per site; None where no site has it in two rounds. `what` begins the alt text."""
    lines = {site: curve for site, curve in sorted(found.items()) if curve}
    if max(map(len, lines.values()), default=0) < 2:
        return None
    with drawing():
        figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
        axis, crowd = figure.subplots(), len(lines) > COLOURED
        named = shortened([shown(site) for site in lines], 24)
        for index, (site, curve) in enumerate(lines.items()):
            rounds = sorted(curve)
            look: dict[str, Any] = {"color": SERIES[index % 8], "marker": MARKERS[index % 8], "linestyle": LINES[index % 4]}
            look |= {"linewidth": 1.6, "markersize": 4, "markevery": max(1, len(rounds) // 10), "label": named[shown(site)]}
            if crowd:
                look = {
                    "color": SOFT,
                    "linewidth": 0.6,
                    "alpha": 0.5,
                    "label": None if index else f"each of {len(lines)} sites",
                }
            axis.plot(rounds, [curve[r] for r in rounds], **look)
        if crowd:
            every = sorted({round for curve in lines.values() for round in curve})
            means = [float(np.mean([curve[r] for curve in lines.values() if r in curve])) for r in every]
            axis.plot(every, means, color=SERIES[0], linewidth=2.2, label="mean of the sites")
        axis.set(xlabel=ROUNDS, ylabel=shown(label, 60))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        longest = max(len(text.get_text()) for text in axis.legend().get_texts())
        axis.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3 if longest < 12 else 2)
        ends = {site: f"from {curve[min(curve)]:.3g} to {curve[max(curve)]:.3g}" for site, curve in lines.items()}
        return inline(figure, name, f"{what}. By site, first to last round: {_in_words(ends)}")


def _in_words(told: Mapping[str, str]) -> str:
    """Return a text per site, of the first sites; for the alt text of a figure."""
    texts = [f"{shown(site, 40)} {text}" for site, text in told.items()]
    return "; ".join(texts[:COLOURED]) + (f"; and {len(texts) - COLOURED} more sites." if len(texts) > COLOURED else ".")


def models(name: str, results: Results, metric: str, label: str) -> Markup | None:
    """Return the three models' scores beside each other, a row per site, with their 95 % intervals."""
    keys = {stage: str(MetricKey(split_of(results) or "", stage, metric)) for stage in Stage}
    found = {site: {s: one[key] for s, key in keys.items() if known(one.get(key)) is not None} for site, one in results.items()}
    rows = dict([(site, found[site]) for site in sorted(found) if found[site]][:MOST_ROWS])
    if not rows:
        return None
    with drawing():
        figure = Figure(figsize=(WIDTH, 1.0 + 0.36 * len(rows)), layout="constrained")
        axis = figure.subplots()
        for stage, (colour, marker, shift) in LOOKS.items():
            points = [(place + shift, site) for place, site in enumerate(rows) if stage in rows[site]]
            for place, site in points:
                ends = [known(results[site].get(keys[stage] + end)) for end in (LOW, HIGH)]
                if None not in ends:
                    axis.plot(ends, [place, place], color=colour, linewidth=1.6, solid_capstyle="butt")  # type: ignore[arg-type]
            look: dict[str, Any] = {"marker": marker, "color": colour, "markeredgecolor": PAPER, "markersize": 7}
            if points:
                axis.plot(
                    [rows[site][stage] for _, site in points],
                    [place for place, _ in points],
                    linestyle="",
                    label=str(stage),
                    **look,
                )
        named = shortened([shown(site) for site in rows], 20)
        axis.set_yticks(range(len(rows)), [named[shown(site)] for site in rows])
        axis.set(ylim=(len(rows) - 0.5, -0.5), xlabel=shown(label, 60))
        axis.grid(False, axis="y")
        axis.legend(fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, columnspacing=1.0, handletextpad=0.3)
        told = {site: ", ".join(f"{stage} {value:.3g}" for stage, value in values.items()) for site, values in rows.items()}
        return inline(figure, name, f"{label} of the three models at each site. {_in_words(told)}")


def distribution(name: str, values: Mapping[Stage, Sequence[float]], label: str, units: str, site: str) -> Markup | None:
    """Return the scores of each unit, a row per model: points, and their median and quartiles as a box."""
    rows = {stage: sorted(values[stage]) for stage in Stage if values.get(stage)}
    if not rows:
        return None
    with drawing():
        figure = Figure(figsize=(WIDTH, 0.75 + 0.55 * len(rows)), layout="constrained")
        axis, told = figure.subplots(), []
        for place, (stage, found) in enumerate(rows.items()):
            colour, marker, _ = LOOKS[stage]
            low, middle, high = np.quantile(found, [0.25, 0.5, 0.75])
            axis.fill_between([low, high], place - 0.28, place + 0.28, color=colour, alpha=0.18, linewidth=0)
            axis.plot([middle, middle], [place - 0.28, place + 0.28], color=INK, linewidth=2)
            points = found if len(found) <= POINTS else np.quantile(found, np.linspace(0, 1, POINTS))
            heights = [place + 0.22 * math.sin(2.4 * index) for index in range(len(points))]  # the same page every time
            look: dict[str, Any] = {"marker": marker, "color": colour, "markersize": 3.5, "alpha": 0.8, "markeredgewidth": 0}
            axis.plot(points, heights, linestyle="", **look)
            told.append(f"{stage}: median {middle:.3g}, from {found[0]:.3g} to {found[-1]:.3g}")
        axis.set_yticks(range(len(rows)), list(map(str, rows)))
        axis.set(ylim=(len(rows) - 0.5, -0.5), xlabel=shown(label, 60))
        axis.grid(False, axis="y")
        return inline(figure, name, f"{label} of each {units} at {shown(site, 60)}, by model. {'; '.join(told)}.")


# cases -----------------------------------------------------------------------------------------------------------------

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
        return task_scores(self.task)

    @property
    def score_heading(self) -> str:
        """The heading of a case's values: the score's name, with the grid of its masks."""
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
        "distribution": distribution(name, cases.known_values, cases.score_heading, cases.unit, site),
        "spread": Table(f"{cases.score_heading}, of each {cases.unit}, {site}", heads, rows) if rows else None,
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
