"""Pictures of a comparison: learning curves, sites x methods, scores against bytes and epsilon.

Colours are those of M. Okabe and K. Ito, "Color Universal Design" (2002), which colour-blind readers tell apart; a marker and a
line style go with each, so that a print without colours will do.
"""

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from consilium.messages import Stage
from consilium.report.clean import shown
from consilium.report.compare.along import along
from consilium.report.compare.groups import Group
from consilium.report.compare.runs import Run, known
from consilium.report.compare.sheet import MARK
from consilium.report.compare.sheets import heading_of, titled
from consilium.report.compare.table import Table, mean, table_of

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#7F7F7F")
MARKERS = "osD^vPX*<>hp"
LINES = ("-", "--", "-.", ":")
PANEL = 6
"""Curves in one panel, at most; the others stand behind them in grey."""
MOST_VALUES = 14
"""Sites of a heat map up to which its values are written into it."""
WRAP = 34
"""Characters of a line of a legend."""
DPI = 150


def style(index: int) -> dict[str, Any]:
    """Return how a method is drawn: no two of the first 96 alike."""
    colour, marker = COLOURS[index % len(COLOURS)], MARKERS[(index % len(COLOURS) + index // len(COLOURS)) % len(MARKERS)]
    return {"color": colour, "marker": marker, "linestyle": LINES[index % len(LINES)], "markersize": 5}


def plain(text: str, width: int = WRAP) -> str:
    """Return a name in lines of at most `width` characters, nothing in it a formula."""
    return textwrap.fill(shown(text), width).replace("$", r"\$")


def draw(folder: Path, groups: Sequence[Group], stage: Stage, metric: str | None = None) -> tuple[list[Path], list[str]]:
    """Draw what there is to draw; return the files, and what is not drawn and why."""
    from consilium.report.compare.images import draw_examples

    files: list[Path] = []
    notes: list[str] = []
    for index, group in enumerate(groups):
        end = f"-{index + 1}" if len(groups) > 1 else ""
        parts = (
            _draw_plots(folder, table_of(group, stage, metric or group.first.metric), end),
            draw_examples(folder, group, stage, end),
        )
        files += [file for drawn, _ in parts for file in drawn]
        notes += [titled(group, why) for _, undrawn in parts for why in undrawn]
    return files, notes


def _draw_plots(folder: Path, table: Table, end: str) -> tuple[list[Path], list[str]]:
    files, notes = [], []
    for name, make in PLOTS.items():
        figure, why = make(table)
        path = folder / f"{name}{end}.png"
        if figure is None:
            notes.append(f"no {path.name}: {why}")
        else:
            figure.savefig(path, dpi=DPI, metadata={"Software": None})
            files.append(path)
    return files, notes


def curves(table: Table) -> tuple[Figure | None, str]:
    """Return validation scores by round: means over sites and seeds, single seeds thin; methods in panels of PANEL."""
    found = {method: _curve(table, method) for method in table.group.methods}
    drawn = [method for method in table.group.methods if len(found[method]) > 1]
    if not drawn:
        return None, "no run validated this model at all sites in two rounds"
    panels = [drawn[i : i + PANEL] for i in range(0, len(drawn), PANEL)]
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(6.4 * columns, 3.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    for axis, inside in zip(axes, panels, strict=False):
        for method in drawn if len(panels) > 1 else ():
            axis.plot(*_means(found[method]), color="0.88", linewidth=0.8, zorder=1)
        for method in inside:
            _draw_curve(axis, found[method], method, style(inside.index(method)))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
        axis.set_xlabel("rounds done", fontsize=8)
        _axes(axis, table)
    for axis in axes[len(panels) :]:
        axis.axis("off")
    _title(figure, table, "learning curves, validation, mean over sites", "thin: single seeds")
    return figure, ""


def _curve(table: Table, method: str) -> dict[int, list[float]]:
    """Return by round the mean over sites of every seed; a round in which a site is missing is no point of its seed.

    Sites are those that any run of the group validated.
    """
    curves = {key: run.curve(table.stage, table.metric) for key, run in table.group.runs.items()}
    sites = {site for curve in curves.values() for _, site in curve}
    found: dict[int, list[float]] = {}
    for (name, _), curve in curves.items():
        for round in sorted({round for round, _ in curve}) if name == method else ():
            values = [curve.get((round, site)) for site in sites]
            if None not in (numbers := [known(value) for value in values]):
                found.setdefault(round, []).append(math.fsum(cast("list[float]", numbers)) / len(sites))
    seeds = max(map(len, found.values()), default=0)
    return {round: values for round, values in sorted(found.items()) if len(values) == seeds}


def _means(curve: dict[int, list[float]]) -> tuple[list[int], list[float]]:
    return list(curve), [math.fsum(values) / len(values) for values in curve.values()]


def _draw_curve(axis: Any, curve: dict[int, list[float]], method: str, look: dict[str, Any]) -> None:
    rounds, means = _means(curve)
    axis.plot(rounds, means, label=plain(method), linewidth=1.6, markevery=max(1, len(rounds) // 10), zorder=3, **look)
    seeds = list(zip(*curve.values(), strict=True))
    for values in seeds if len(seeds) > 1 else ():
        axis.plot(rounds, values, color=look["color"], linewidth=0.6, alpha=0.45, zorder=2)


def heat_map(table: Table) -> tuple[Figure | None, str]:
    """Return a picture of scores, a row a method, a column a site; what is missing is hatched, and MARK says that seeds are."""
    if not table.cells:
        return None, "nothing is scored"
    methods, sites = table.methods, table.sites
    values = np.array([[mean(table.at(m, site)) for site in sites] for m in methods], dtype=np.float64)
    written = len(sites) <= MOST_VALUES
    left = max(len(part) for m in methods for part in plain(m).split("\n")) * 0.075
    size = max(4.5, left + 1.2 + len(sites) * (0.62 if written else 0.2)), 1.6 + max(0.42 * len(methods), 0.8)
    figure = Figure(figsize=(size[0], size[1] + 0.07 * min(24, max(map(len, sites)))), layout="constrained")
    axis = figure.subplots()
    colours = colormaps["cividis_r" if table.lower else "cividis"]
    image = axis.imshow(np.ma.masked_invalid(values), cmap=colours, aspect="auto")
    axis.set_facecolor("white")
    axis.set_xticks(range(len(sites)), [plain(_cut(s), 99) for s in sites], rotation=90 if _crowded(sites) else 0, fontsize=7)
    axis.set_yticks(range(len(methods)), [plain(m) for m in methods], fontsize=7)
    marks = [[_mark(table, m, site) for site in sites] for m in methods]
    _write_values(axis, values, marks if written else None, colours)
    figure.colorbar(image, ax=axis, fraction=0.05, aspect=30).ax.tick_params(labelsize=7)
    missing = f"; {MARK} seeds are missing" if any(map(any, marks)) else ""
    _title(figure, table, f"{table.group.first.split} split{missing}", "mean over seeds")
    return figure, ""


def _mark(table: Table, method: str, site: str) -> str:
    """Return MARK for a mean of some of a method's seeds only."""
    return MARK if 0 < len(table.at(method, site)) < len(table.group.expected(method)) else ""


def _crowded(sites: Sequence[str]) -> bool:
    return len(sites) > MOST_VALUES or max(map(len, sites)) > 8


def _cut(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:13]}…{name[-10:]}"


def _write_values(axis: Any, values: np.ndarray, marks: Sequence[Sequence[str]] | None, colours: Any) -> None:
    """Write the values into their fields with their marks, None where there is no room; hatch fields without one."""
    low, high = np.nanmin(values), np.nanmax(values)
    for (row, column), value in np.ndenumerate(values):
        if np.isnan(value):
            axis.add_patch(_hatch(row, column))
        elif marks is not None:
            red, green, blue, _ = colours((value - low) / (high - low) if high > low else 0.0)
            ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
            axis.text(column, row, f"{value:.3f}{marks[row][column]}", ha="center", va="center", fontsize=6.5, color=ink)


def _hatch(row: int, column: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor="white", edgecolor="0.6", hatch="////", linewidth=0)


def against_bytes(table: Table) -> tuple[Figure | None, str]:
    """Return mean scores against MiB sent and received."""
    return _scatter(
        table,
        lambda run: None if run.bytes is None and not run.pooled else (run.bytes or 0.0) / 2**20,
        "MiB up and down, all sites and rounds",
        "no run sent anything",
    )


def against_epsilon(table: Table) -> tuple[Figure | None, str]:
    """Return mean scores against epsilon; units of privacy are never mixed."""
    units = {run.settings["privacy.unit"] for run in table.group.runs.values() if run.epsilon is not None}
    if len(units) > 1:
        return None, "epsilon of sites and of records are no one scale"
    label = f"epsilon at the job's delta ({next(iter(units), '')} level)"
    return _scatter(table, lambda run: run.epsilon if run.private else 0.0, label, "no run is private")


def _scatter(table: Table, measure: Callable[[Run], float | None], label: str, why: str) -> tuple[Figure | None, str]:
    """Return a picture of means against a positive measure, on a logarithmic scale; methods of which it is 0 as lines.

    One whose measure nobody knows is not drawn.
    """
    places = {m: _place(table, m, measure) for m in table.methods}
    points = {m: place for m, place in places.items() if place is not None}
    if not any(x > 0 for x, _ in points.values()):
        return None, why
    per_column = 22
    figure = Figure(figsize=(6.4 + 2.4 * ((len(places) - 1) // per_column), max(3.8, 0.4 + 0.3 * min(len(places), per_column))))
    figure.set_layout_engine("constrained")
    axis = figure.subplots()
    handles = [_point(axis, m, x, values, style(i)) for i, (m, (x, values)) in enumerate(points.items())]
    handles += [
        Line2D(
            [], [], linestyle="", label=plain(f"{m} (not drawn: {'not known' if table.means(m) else 'see what is missing'})")
        )
        for m in places
        if m not in points
    ]
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel(label, fontsize=8)
    _axes(axis, table)
    axis.legend(
        handles=handles,
        fontsize=7,
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
        ncols=-(-len(places) // per_column),
    )
    _title(figure, table, "mean over sites", "bars: lowest to highest seed")
    return figure, ""


def _place(table: Table, method: str, measure: Callable[[Run], float | None]) -> tuple[float, list[float]] | None:
    """Return a method's measure and scores over its whole seeds, None where it has none or the measure is unknown."""
    values = table.means(method)
    sizes = [measure(table.group.runs[method, seed]) for seed in table.whole_seeds(method)]
    known_sizes = [size for size in sizes if size is not None]
    return (math.fsum(known_sizes) / len(sizes), values) if values and len(known_sizes) == len(sizes) else None


def _point(axis: Any, method: str, x: float, values: Sequence[float], look: dict[str, Any]) -> Line2D:
    """Draw a mean with its seeds' range, or a line across for a method that has no place on the scale; return its key."""
    middle = math.fsum(values) / len(values)
    if x <= 0:
        axis.axhline(middle, color=look["color"], linestyle="--", linewidth=1)
        return Line2D([], [], color=look["color"], linestyle="--", label=plain(f"{method} (no place on this scale)"))
    axis.errorbar(
        x,
        middle,
        yerr=[[middle - min(values)], [max(values) - middle]],
        color=look["color"],
        marker=look["marker"],
        markersize=7,
        capsize=2,
        linewidth=1,
        markeredgecolor="white",
    )
    return Line2D([], [], color=look["color"], marker=look["marker"], linestyle="", label=plain(method))


def finish(figure: Figure, axis: Any, table: Table, text: str, of_seeds: str) -> None:
    """Write the title, and the score on its axis."""
    _axes(axis, table)
    _title(figure, table, text, of_seeds)


def _axes(axis: Any, table: Table) -> None:
    axis.set_ylabel(plain(heading_of(table.group, table.metric)), fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(color="0.92")


def _title(figure: Figure, table: Table, text: str, of_seeds: str) -> None:
    count, planned = len({seed for _, seed in table.group.runs}), len(table.group.seeds)
    seeds = (f"{count} of {planned} seeds" if count < planned else f"{count} seeds") if planned > 1 else "one seed"
    seeds = f"{seeds}, {of_seeds}" if count > 1 else seeds
    whole = titled(table.group, f"{heading_of(table.group, table.metric)}, {table.stage} model, {text}; {seeds}")
    figure.suptitle(plain(whole, 96), fontsize=9)


PLOTS = {"curves": curves, "along": along, "sites": heat_map, "bytes": against_bytes, "epsilon": against_epsilon}
"""Pictures by file name; each is None with a reason where it cannot be."""
