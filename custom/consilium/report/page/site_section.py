"""The part of a page on one site: its figures, and the cases in its cases.json and cases/.

The files there are checked, and never read through a link. Pictures are decoded and encoded again.
"""

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
from consilium.report.figures import ROUNDS
from consilium.report.page.html import INK, PAPER, SERIES, SOFT, data_url, inline_svg, page_figure_style
from consilium.report.predictions import CASES, FOLDER, PICTURE, QUALITY, REFERENCE, case_file_name, colours
from consilium.report.run_record import Curve, Results, finite_score, split_of, unit_of
from consilium.report.tables import shorten_names
from consilium.report.untrusted_files import Number, is_folder, read_plain
from consilium.tasks.registry import HIGH, LOW, Scores, task_scores

# figures ---------------------------------------------------------------------------------------------------------------
# The figures of a run's page: learning curves, the scores of the three models, and the scores of single units.

WIDTH = 4.4
"""Width of a figure in inches. A page shows it at 96 pixels per inch or fewer."""
COLOURED = 8
"""Sites with a colour of their own, at most. More sites are thin lines, and their mean is a thick line."""
MARKERS, LINES = "osD^vPX*", ("-", "--", "-.", ":")
LOOKS = {
    Stage.PRETRAINED: (SERIES[7], "D", -0.18), Stage.GLOBAL: (SERIES[0], "o", 0.0), Stage.PERSONALIZED: (SERIES[1], "s", 0.18)
}  # fmt: skip
"""The colour, the marker and the vertical shift of each model, in all figures."""
POINTS = 300
"""Points of a distribution, at most. For more units, this many quantiles are drawn."""
MOST_ROWS = 60


def curve_figure(name: str, found: Mapping[str, Curve], label: str, what: str) -> Markup | None:
    """Draw one measure by round, with a line per site. None if no site has it in two rounds.

    `name`: a prefix of the figure's ids. `label`: of the y axis. `what`: the beginning of the alt text.
    """
    lines = {site: curve for site, curve in sorted(found.items()) if curve}
    if max(map(len, lines.values()), default=0) < 2:
        return None
    with page_figure_style():
        figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
        axis, crowd = figure.subplots(), len(lines) > COLOURED
        named = shorten_names([shown(site) for site in lines], 24)
        for index, (site, curve) in enumerate(lines.items()):
            rounds = sorted(curve)
            look: dict[str, Any] = {
                "color": SERIES[index % 8],
                "marker": MARKERS[index % 8],
                "linestyle": LINES[index % 4],
                "linewidth": 1.6,
                "markersize": 4,
                "markevery": max(1, len(rounds) // 10),
                "label": named[shown(site)],
            }
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
        return inline_svg(figure, name, f"{what}. By site, first to last round: {_join_site_texts(ends)}")


def _join_site_texts(site_texts: Mapping[str, str]) -> str:
    """Join the texts of the first sites, for the alt text of a figure."""
    texts = [f"{shown(site, 40)} {text}" for site, text in site_texts.items()]
    return "; ".join(texts[:COLOURED]) + (f"; and {len(texts) - COLOURED} more sites." if len(texts) > COLOURED else ".")


def score_intervals_figure(results: Results, metric: str, label: str) -> Markup | None:
    """Draw the scores of the three models side by side, with 95 % intervals, in a row per site. None without scores."""
    keys = {stage: str(MetricKey(split_of(results) or "", stage, metric)) for stage in Stage}
    found = {
        site: {s: one[key] for s, key in keys.items() if finite_score(one.get(key)) is not None}
        for site, one in results.items()
    }
    rows = dict([(site, found[site]) for site in sorted(found) if found[site]][:MOST_ROWS])
    if not rows:
        return None
    with page_figure_style():
        figure = Figure(figsize=(WIDTH, 1.0 + 0.36 * len(rows)), layout="constrained")
        axis = figure.subplots()
        for stage, (colour, marker, shift) in LOOKS.items():
            points = [(place + shift, site) for place, site in enumerate(rows) if stage in rows[site]]
            for place, site in points:
                ends = [finite_score(results[site].get(keys[stage] + end)) for end in (LOW, HIGH)]
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
        named = shorten_names([shown(site) for site in rows], 20)
        axis.set_yticks(range(len(rows)), [named[shown(site)] for site in rows])
        axis.set(ylim=(len(rows) - 0.5, -0.5), xlabel=shown(label, 60))
        axis.grid(False, axis="y")
        axis.legend(fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, columnspacing=1.0, handletextpad=0.3)
        told = {site: ", ".join(f"{stage} {value:.3g}" for stage, value in values.items()) for site, values in rows.items()}
        return inline_svg(figure, "models", f"{label} of the three models at each site. {_join_site_texts(told)}")


def distribution_figure(name: str, values: Mapping[Stage, Sequence[float]], label: str, units: str, site: str) -> Markup | None:
    """Draw the scores of single units in a row per model: points, and a box of median and quartiles. None without scores."""
    rows = {stage: sorted(values[stage]) for stage in Stage if values.get(stage)}
    if not rows:
        return None
    with page_figure_style():
        figure = Figure(figsize=(WIDTH, 0.75 + 0.55 * len(rows)), layout="constrained")
        axis, told = figure.subplots(), []
        for place, (stage, found) in enumerate(rows.items()):
            colour, marker, _ = LOOKS[stage]
            low, middle, high = np.quantile(found, [0.25, 0.5, 0.75])
            axis.fill_between([low, high], place - 0.28, place + 0.28, color=colour, alpha=0.18, linewidth=0)
            axis.plot([middle, middle], [place - 0.28, place + 0.28], color=INK, linewidth=2)
            points = found if len(found) <= POINTS else np.quantile(found, np.linspace(0, 1, POINTS))
            heights = [
                place + 0.22 * math.sin(2.4 * index) for index in range(len(points))
            ]  # not random, so that the page is the same each time
            look: dict[str, Any] = {"marker": marker, "color": colour, "markersize": 3.5, "alpha": 0.8, "markeredgewidth": 0}
            axis.plot(points, heights, linestyle="", **look)
            told.append(f"{stage}: median {middle:.3g}, from {found[0]:.3g} to {found[-1]:.3g}")
        axis.set_yticks(range(len(rows)), list(map(str, rows)))
        axis.set(ylim=(len(rows) - 0.5, -0.5), xlabel=shown(label, 60))
        axis.grid(False, axis="y")
        return inline_svg(figure, name, f"{label} of each {units} at {shown(site, 60)}, by model. {'; '.join(told)}.")


# cases -----------------------------------------------------------------------------------------------------------------

MOST_PICTURE, MOST_SIDE = 4 * 1024**2, 2048
"""Bytes, and pixels per side, of a picture at most. A run's pictures are much smaller."""
MOST_CLASSES = 24
MEANT: dict[str, str] = {
    PICTURE: "the picture",
    REFERENCE: "the picture with the reference's masks",
    **{s: f"the picture with the {s} model's masks, the reference's outlines in white" for s in Stage},
}


class Case(BaseModel):
    """The best, the median or the worst unit of a site.

    `unit`: its index in `Cases.units`. `said`: each model's written answer, or its classes with probabilities.
    """

    which: Literal["best", "median", "worst"]
    unit: Annotated[int, Field(ge=0)]
    said: dict[Stage, str | list[tuple[str, Annotated[float, Field(ge=0, le=1)]]] | None] = {}
    reference: str = ""
    prompt: str = ""


class Cases(BaseModel):
    """The contents of a site's cases.json.

    `units`: names of the units. `values`: the units' scores, by model. `by`: the model whose scores selected the best, the
    median and the worst unit, which is the first model that the final evaluation scored.
    """

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
        """The word for a unit: image, volume, patient or record."""
        return unit_of(self.task)

    @property
    def scores(self) -> Scores | None:
        """The names of the task's scores; None for a task that is not installed here."""
        return task_scores(self.task)

    @property
    def score_heading(self) -> str:
        """The heading of the values: the score's name, with the grid of the masks if there is one."""
        grid = self.scores.grid if self.scores else ""
        return f"{self.score}, {grid}" if grid else self.score

    @property
    def known_values(self) -> dict[Stage, list[float]]:
        """The finite scores of the units, by model."""
        found = {
            stage: [v for v in values if v is not None and finite_score(v) is not None] for stage, values in self.values.items()
        }
        return {stage: values for stage, values in found.items() if values}


def read_cases(folder: Path) -> Cases | None:
    """Return the cases in a site's folder; None if there is no cases.json or it is not as a site writes it."""
    try:
        found = Cases.model_validate_json(read_plain(folder / CASES) or b"")
        _ = found.unit
    except (ValidationError, ValueError, TypeError):
        return None
    whole = all(len(values) == len(found.units) for values in found.values.values())
    return found if whole and all(case.unit < len(found.units) for case in found.cases) else None


def site_section(name: str, site: str, folder: Path, cases: Cases) -> dict[str, Any]:
    """Return a site's scores and cases as values for the template. `name`: a prefix of its figures' ids."""
    shown = []
    for case in cases.cases:
        there = {s: v for s, values in cases.values.items() if (v := finite_score(values[case.unit])) is not None}
        said = {stage: one or "(nothing)" for stage, one in case.said.items() if one is not None}
        case_pictures = pictures(folder, case.which)
        shown.append(dict(case) | {"name": cases.units[case.unit], "scores": there, "said": said, "pictures": case_pictures})
    key = zip(cases.classes[:MOST_CLASSES], colours(MOST_CLASSES), strict=False)
    return {
        "name": site,
        "found": cases,
        "cases": shown,
        "key": [(one, "#{:02x}{:02x}{:02x}".format(*colour)) for one, colour in key],
        "distribution": distribution_figure(name, cases.known_values, cases.score_heading, cases.unit, site),
    }


def pictures(folder: Path, which: str) -> list[tuple[str, str, str]]:
    """Return (heading, data URL, alt text) of each picture of one case. The plain picture is left out if there are masks."""
    if not is_folder(folder / FOLDER):
        return []
    sources: Mapping[str, str | None] = {what: _picture(folder / FOLDER / case_file_name(which, what)) for what in MEANT}
    found = [(str(what), source, MEANT[what]) for what, source in sources.items() if source]
    return [one for one in found if one[0] != PICTURE or len(found) == 1]


def _picture(path: Path) -> str | None:
    """Return a JPEG as a data URL, decoded and encoded again; None for any other file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(read_plain(path, MOST_PICTURE) or b""), formats=("JPEG",)) as opened:
                fits = max(opened.size) <= MOST_SIDE
                return data_url(opened.convert("RGB"), "JPEG", quality=QUALITY, subsampling=0) if fits else None
    except (OSError, ValueError, SyntaxError, Warning, Image.DecompressionBombError):
        return None
