"""The figures of a run's page: learning curves, the three models beside each other, and what each unit scored."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from consilium.messages import Stage
from consilium.report.clean import shown
from consilium.report.page.record import Curve
from consilium.report.page.svg import INK, PAPER, SERIES, SOFT, drawing, inline
from consilium.report.tables import shortened

WIDTH = 4.4
"""Inches of a figure; pages show it at 96 pixels an inch or narrower."""
COLOURED = 8
"""Sites that get a colour of their own; of more, each is a thin line and their mean a thick one."""
MARKERS = "osD^vPX*"
LINES = ("-", "--", "-.", ":")
LOOKS = {Stage.PRETRAINED: (SERIES[7], "D"), Stage.GLOBAL: (SERIES[0], "o"), Stage.PERSONALIZED: (SERIES[1], "s")}
"""Each model's colour and marker, in all figures."""
POINTS = 300
"""Units of a distribution that are drawn one by one; of more, so many are, evenly spread over their order."""
MOST_ROWS = 60


def curves(name: str, found: Mapping[str, Curve], label: str, what: str) -> Markup | None:
    """Return one measure by round, a line per site; None where no site has it in two rounds. `what` begins the alt text."""
    lines = {site: curve for site, curve in sorted(found.items()) if curve}
    if max((len(curve) for curve in lines.values()), default=0) < 2:
        return None
    with drawing():
        figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
        axis = figure.subplots()
        (_coloured if len(lines) <= COLOURED else _crowd)(axis, lines)
        axis.set_xlabel("rounds done")
        axis.set_ylabel(shown(label, 60))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        longest = max(len(text.get_text()) for text in axis.legend().get_texts())
        axis.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3 if longest < 12 else 2)
        return inline(figure, name, f"{what}. {_in_words(lines)}")


def _coloured(axis: Any, lines: Mapping[str, Curve]) -> None:
    named = shortened([shown(site) for site in lines], 24)
    for index, (site, curve) in enumerate(lines.items()):
        rounds = sorted(curve)
        look = {"color": SERIES[index % 8], "marker": MARKERS[index % 8], "linestyle": LINES[index % 4], "markersize": 4}
        every = max(1, len(rounds) // 10)
        axis.plot(rounds, [curve[r] for r in rounds], label=named[shown(site)], linewidth=1.6, markevery=every, **look)


def _crowd(axis: Any, lines: Mapping[str, Curve]) -> None:
    for index, curve in enumerate(lines.values()):
        label = f"each of {len(lines)} sites" if index == 0 else None
        axis.plot(sorted(curve), [curve[r] for r in sorted(curve)], color=SOFT, linewidth=0.6, alpha=0.5, label=label)
    rounds = sorted({round for curve in lines.values() for round in curve})
    means = [float(np.mean([curve[r] for curve in lines.values() if r in curve])) for r in rounds]
    axis.plot(rounds, means, color=SERIES[0], linewidth=2.2, label="mean of the sites")


def _in_words(lines: Mapping[str, Curve]) -> str:
    """Return from what to what each line goes, of the first sites; the alt text of a figure of curves."""
    told = [
        f"{shown(site, 40)} from {_short(curve[min(curve)])} to {_short(curve[max(curve)])}" for site, curve in lines.items()
    ]
    more = f", and {len(told) - COLOURED} more sites" if len(told) > COLOURED else ""
    return f"By site, first to last round: {'; '.join(told[:COLOURED])}{more}."


def _short(value: float) -> str:
    return f"{value:.3g}"


def models(
    name: str, rows: Sequence[tuple[str, Mapping[Stage, tuple[float, float | None, float | None]]]], label: str
) -> Markup | None:
    """Return the three models' scores beside each other, a row per site, with their 95 % intervals (value, low, high)."""
    rows = [(site, values) for site, values in rows if values][:MOST_ROWS]
    if not rows:
        return None
    with drawing():
        figure = Figure(figsize=(WIDTH, 1.0 + 0.36 * len(rows)), layout="constrained")
        axis = figure.subplots()
        for stage, (colour, marker) in LOOKS.items():
            shift = {Stage.PRETRAINED: -0.18, Stage.GLOBAL: 0.0, Stage.PERSONALIZED: 0.18}[stage]
            points = [(place + shift, *values[stage]) for place, (_, values) in enumerate(rows) if stage in values]
            _with_intervals(axis, points, str(stage), colour, marker)
        named = shortened([shown(site) for site, _ in rows], 20)
        axis.set_yticks(range(len(rows)), [named[shown(site)] for site, _ in rows])
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.grid(False, axis="y")
        axis.set_xlabel(shown(label, 60))
        axis.legend(fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, columnspacing=1.0, handletextpad=0.3)
        return inline(figure, name, f"{label} of the three models at each site. {_models_in_words(rows)}")


def _with_intervals(axis: Any, points: Sequence[tuple], label: str, colour: str, marker: str) -> None:
    for place, _, low, high in points:
        if low is not None and high is not None:
            axis.plot([low, high], [place, place], color=colour, linewidth=1.6, solid_capstyle="butt")
    places, values = [point[0] for point in points], [point[1] for point in points]
    if points:
        axis.plot(values, places, linestyle="", marker=marker, color=colour, markeredgecolor=PAPER, markersize=7, label=label)


def _models_in_words(rows: Sequence[tuple[str, Mapping[Stage, tuple]]]) -> str:
    told = [
        f"{shown(site, 40)}: " + ", ".join(f"{stage} {_short(found[0])}" for stage, found in values.items())
        for site, values in rows[:COLOURED]
    ]
    return "; ".join(told) + (f"; and {len(rows) - COLOURED} more sites." if len(rows) > COLOURED else ".")


def distribution(name: str, values: Mapping[Stage, Sequence[float]], label: str, units: str, site: str) -> Markup | None:
    """Return what each unit scored, a row per model: its points, and their median and quartiles as a box."""
    rows = {stage: sorted(v for v in values[stage] if not math.isnan(v)) for stage in Stage if stage in values}
    rows = {stage: found for stage, found in rows.items() if found}
    if not rows:
        return None
    with drawing():
        figure = Figure(figsize=(WIDTH, 0.75 + 0.55 * len(rows)), layout="constrained")
        axis = figure.subplots()
        for place, (stage, found) in enumerate(rows.items()):
            _row(axis, place, found, *LOOKS[stage])
        axis.set_yticks(range(len(rows)), list(map(str, rows)))
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.grid(False, axis="y")
        axis.set_xlabel(shown(label, 60))
        told = "; ".join(
            f"{stage}: median {_short(float(np.median(v)))}, from {_short(v[0])} to {_short(v[-1])}"
            for stage, v in rows.items()
        )
        return inline(figure, name, f"{label} of each {units} at {shown(site, 60)}, by model. {told}.")


def _row(axis: Any, place: int, values: Sequence[float], colour: str, marker: str) -> None:
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    axis.fill_between([low, high], place - 0.28, place + 0.28, color=colour, alpha=0.18, linewidth=0)
    axis.plot([middle, middle], [place - 0.28, place + 0.28], color=INK, linewidth=2)
    drawn = values if len(values) <= POINTS else np.quantile(values, np.linspace(0, 1, POINTS))
    spread = [place + 0.22 * math.sin(2.4 * index) for index in range(len(drawn))]  # no chance: the same page every time
    axis.plot(drawn, spread, linestyle="", marker=marker, markersize=3.5, color=colour, alpha=0.8, markeredgewidth=0)
