"""Pictures of a comparison: learning curves, sites x methods, scores along an axis and against bytes and epsilon.

Colours are those of M. Okabe and K. Ito, "Color Universal Design" (2002), which colour-blind readers tell apart; a marker and a
line style go with each, so that a print without colours will do.
"""

import io
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from PIL import Image
from rich.cells import cell_len

from consilium.core.messages import Stage
from consilium.core.sanitize import shown
from consilium.core.storage import PUBLIC, write_atomic, write_figure
from consilium.report.compare.comparability import Group
from consilium.report.compare.scores import GroupScores, mean, scores_of
from consilium.report.compare.tables import MARK
from consilium.report.figures import NUMBERED, draw_matrix
from consilium.report.plain_files import subfolders
from consilium.report.predictions import (
    GAP,
    LINE,
    MARGIN,
    PANEL,
    POINTS,
    PREDICTIONS,
    REFERENCE,
    Page,
    arrange,
    fit,
    font,
    read_page,
    words,
)
from consilium.report.run_record import RunRecord
from consilium.report.tables import few, shortened

# examples --------------------------------------------------------------------------------------------------------------
# The same test pictures with the predictions of several methods, cut out of each run's predictions.png of a site.
#
# Only where all runs show the same pictures and references, to the pixel. They show patients, so the result stays where the
# runs are.

MOST_METHODS = 8


def draw_examples(folder: Path, group: Group, stage: Stage, end: str) -> tuple[list[Path], list[str]]:
    """Write examples-SITE.png for every site where it can be; return the files, and which are missing and why.

    They are of the seed that most methods have, the first of several.
    """
    counts = Counter(seed for _, seed in group.runs)
    seed = max(group.seeds, key=lambda seed: counts[seed])
    runs = {m: group.runs[m, seed] for m in group.methods if (m, seed) in group.runs}
    files: list[Path] = []
    undrawn: dict[str, list[str]] = {}
    places = {m: {one.name: one for one in subfolders(run.folder / "sites")} for m, run in list(runs.items())[:MOST_METHODS]}
    for site in sorted(group.first.sites):  # a stranger's record may name a site "..", or with a path
        paths = {method: inside[site] / PREDICTIONS for method, inside in places.items() if site in inside}
        read = {method: read_page(path) for method, path in paths.items()}
        pages = {method: page for method, page in read.items() if page is not None and page[1].boxes.get(stage)}
        parts = [[(part.size, part.tobytes()) for part in _parts(page, REFERENCE)] for page in pages.values()]
        if len(pages) < 2:
            unread = any(page is None and paths[method].exists() for method, page in read.items())
            more = "; predictions.png of some is damaged, or of a former version" if unread else ""
            undrawn.setdefault(f"fewer than two methods have pictures of this model there{more}", []).append(site)
        elif any(one != parts[0] for one in parts):
            undrawn.setdefault("the runs show other pictures or references", []).append(site)
        else:
            files.append(folder / f"examples{end}-{''.join(c if c.isalnum() or c in '._-' else '_' for c in site)}.png")
            _draw(files[-1], pages, stage)
    notes = [f"no examples of {few(sites, 3)}: {why}" for why, sites in undrawn.items()]
    lacking = [method for method in group.methods if method not in runs]
    notes += [f"examples show seed {seed}; no run with it: {few(lacking, 3)}"] if lacking and files else []
    left = len(runs) - MOST_METHODS
    shows = f"examples show the first {MOST_METHODS} methods; {left} more are left out"
    return files, notes + ([shows] if left > 0 and files else [])


def _parts(page: Page, what: str) -> list[Image.Image]:
    return [page[0].crop(box) for box in page[1].boxes.get(what, ())]


def _draw(path: Path, pages: Mapping[str, Page], stage: Stage) -> None:
    """Draw a row per picture: itself with its reference, and each method's prediction."""
    body, layout = next(iter(pages.values()))
    columns = [_parts((body, layout), REFERENCE), *(_parts(page, stage) for page in pages.values())]
    top, parts, x = 2 * LINE, list[tuple[int, int, Image.Image]](), 0
    width, points = (PANEL, POINTS) if layout.side == PANEL else (layout.side, POINTS - 6)
    for name, column in zip(["picture, reference", *_written(pages, width, points)], columns, strict=True):
        for number, text in enumerate(_two_lines(name)):
            parts.append((x, number * LINE, words(text, (column[0].width, LINE), points, bold=True)))
        for index, part in enumerate(column):
            parts.append((x, top + index * (columns[0][0].height + LINE + GAP), part))
        x += column[0].width + GAP
    bottom = top + len(columns[0]) * (columns[0][0].height + LINE + GAP)
    parts.append((0, bottom, body.crop((0, layout.rows[-1], body.width, body.height))))
    page, file = arrange(parts), io.BytesIO()
    arrange([(MARGIN, MARGIN, page)], (page.width + 2 * MARGIN, page.height + 2 * MARGIN)).save(file, "PNG", compress_level=3)
    write_atomic(path, file.getvalue())


def _two_lines(name: str) -> list[str]:
    """Return a name in two lines; the second is empty where it needs one."""
    half = name if len(name) <= 20 else name[:20].rpartition(" ")[0] or name[:20]
    return [half, name[len(half) :].strip()]


def _written(names: Iterable[str], width: int, points: int) -> Sequence[str]:
    """Return names, shortened in the middle until both lines of each fit into `width` pixels, different ones different."""
    whole, face = list(names), font(points, True)
    for cells in range(max(map(cell_len, whole)), 0, -1):
        found = shortened(whole, cells)
        if all(fit(text, width, face) == shown(text) for name in found.values() for text in _two_lines(name)):
            break
    return [found[name] for name in whole]


# figures ---------------------------------------------------------------------------------------------------------------

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#7F7F7F")
MARKERS = "osD^vPX*<>hp"
LINES = ("-", "--", "-.", ":")
CURVES = 6
"""Curves in one panel, at most; the others stand behind them in grey."""
FEWEST = 2
"""Numbers that make an axis."""
WRAP = 34
"""Characters of a line of a legend."""
DPI = 150
Drawn = tuple[Figure | None, str]
"""A picture, or None and why there is none."""


def style(index: int) -> dict[str, Any]:
    """Return a method's colour, marker and line: no two of the first 96 alike."""
    colour, marker = COLOURS[index % len(COLOURS)], MARKERS[(index % len(COLOURS) + index // len(COLOURS)) % len(MARKERS)]
    return {"color": colour, "marker": marker, "linestyle": LINES[index % len(LINES)], "markersize": 5}


def plain(text: str, width: int = WRAP) -> str:
    """Return a name in lines of at most `width` characters, nothing in it a formula."""
    return textwrap.fill(shown(text), width).replace("$", r"\$")


def draw(folder: Path, groups: Sequence[Group], stage: Stage, metric: str | None = None) -> tuple[list[Path], list[str]]:
    """Draw all pictures that can be; return the files, and which are missing and why."""
    files: list[Path] = []
    notes: list[str] = []
    for index, group in enumerate(groups):
        end = f"-{index + 1}" if len(groups) > 1 else ""
        for name, make in PLOTS.items():
            figure, why = make(scores_of(group, stage, metric or group.first.metric))
            if figure is None:
                notes.append(group.titled(f"no {name}{end}.png: {why}"))
            else:
                files.append(folder / f"{name}{end}.png")
                write_figure(files[-1], figure, dpi=DPI, mode=PUBLIC, metadata={"Software": None})
        examples, undrawn = draw_examples(folder, group, stage, end)
        files += examples
        notes += map(group.titled, undrawn)
    return files, notes


def curves(scores: GroupScores) -> Drawn:
    """Return validation scores by round: means over sites and seeds, single seeds thin; methods in panels of CURVES."""
    found = {method: _curve(scores, method) for method in scores.group.methods}
    drawn = [method for method in scores.group.methods if len(found[method]) > 1]
    if not drawn:
        return None, "no run validated this model at all sites in two rounds"
    panels = [drawn[i : i + CURVES] for i in range(0, len(drawn), CURVES)]
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(6.4 * columns, 3.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    for axis, inside in zip(axes, panels, strict=False):
        for method in drawn if len(panels) > 1 else ():
            axis.plot(list(found[method]), _means(found[method].values()), color="0.88", linewidth=0.8, zorder=1)
        for place, method in enumerate(inside):
            rounds, look = list(found[method]), style(place)
            every = max(1, len(rounds) // 10)
            means = _means(found[method].values())
            axis.plot(rounds, means, label=plain(method), linewidth=1.6, markevery=every, zorder=3, **look)
            seeds = list(zip(*found[method].values(), strict=True))
            for values in seeds if len(seeds) > 1 else ():
                axis.plot(rounds, values, color=look["color"], linewidth=0.6, alpha=0.45, zorder=2)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        _finish(axis, scores, "rounds done")
    for axis in axes[len(panels) :]:
        axis.axis("off")
    _title(figure, scores, "learning curves, validation, mean over sites", "thin: single seeds")
    return figure, ""


def _curve(scores: GroupScores, method: str) -> dict[int, list[float]]:
    """Return by round the mean over sites of every seed; a round in which a site is missing is no point of its seed.

    Sites are those that any run of the group validated.
    """
    curves = {key: run.validation(scores.stage, scores.metric) for key, run in scores.group.runs.items()}
    sites = {site for curve in curves.values() for site in curve}
    found: dict[int, list[float]] = {}
    for curve in (curve for (name, _), curve in curves.items() if name == method and set(curve) == sites):
        for round in sorted(set.intersection(*map(set, curve.values())) if curve else ()):
            found.setdefault(round, []).append(math.fsum(one[round] for one in curve.values()) / len(sites))
    seeds = max(map(len, found.values()), default=0)
    return {round: values for round, values in sorted(found.items()) if len(values) == seeds}


def _means(values: Any) -> list[float]:
    return [math.fsum(one) / len(one) for one in values]


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def axis_of(scores: GroupScores) -> str:
    """Return the first axis whose values are numbers, one at most excepted (`all`); "" where there is none."""
    labels = [run.labels for run in scores.group.runs.values()]
    values = {axis: {one.get(axis, "") for one in labels} for axis in dict.fromkeys(axis for one in labels for axis in one)}
    numbers = {axis: sum(map(_is_number, found)) for axis, found in values.items()}
    return next((axis for axis, count in numbers.items() if count >= FEWEST and len(values[axis]) - count <= 1), "")


def ticks(values: set[str]) -> list[str]:
    """Return the values in the order of their numbers, a word last."""
    return sorted(values, key=lambda value: (not _is_number(value), float(value) if _is_number(value) else 0.0))


def lines_along(scores: GroupScores, axis: str) -> dict[str, dict[str, list[float]]]:
    """Return the means over sites by a method's other labels, and by value on the axis, each by seed."""
    found: dict[str, dict[str, list[float]]] = {}
    for method in scores.methods:
        labels = next((run.labels for run in scores.group.of(method)), {})
        if axis in labels and (means := scores.means(method)):
            rest = ", ".join(value for other, value in labels.items() if other != axis)
            found.setdefault(rest or axis, {})[labels[axis]] = means
    return found


def axis_figure(scores: GroupScores) -> Drawn:
    """Draw means over sites and seeds along the study's axis of numbers, bars from lowest to highest seed, at equal steps."""
    axis, labels = axis_of(scores), scores.group.first.labels
    found = lines_along(scores, axis) if axis else {}
    if not found:
        chooses = (axis for axis in labels if axis in scores.group.data_axes and _is_number(labels[axis]))
        data = next((f"the values of {axis} are other data, which do not share a picture" for axis in chooses), "")
        return None, data or "no axis of a study has numbers"
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    plot = figure.subplots()
    draw_lines(plot, found)
    _finish(plot, scores, plain(axis))
    _title(figure, scores, f"along {axis}, mean over sites", "bars: lowest to highest seed")
    return figure, ""


def draw_lines(plot: Any, found: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Draw each line of `lines_along`: means, bars from the lowest to the highest seed, places in equal steps.

    A line with a word alone, as a method without privacy on an axis of epsilon, has no place: it goes across, dashed.
    """
    across = {name for name, line in found.items() if not any(map(_is_number, line))}
    order = ticks({value for name, line in found.items() if name not in across for value in line})
    for index, (name, line) in enumerate(found.items()):
        look = style(index)
        if name in across:
            (middle,) = _means(line.values())
            plot.axhline(middle, color=look["color"], linestyle="--", linewidth=1.2, label=plain(name))
            continue
        points = {order.index(value): line[value] for value in order if value in line}
        _errorbar(plot, list(points), list(points.values()), label=plain(name), linewidth=1.6, **look)
    plot.set_xticks(range(len(order)), [plain(value) for value in order])


def _errorbar(plot: Any, places: Sequence[float], values: Sequence[Sequence[float]], **look: Any) -> None:
    """Draw means with bars from the lowest to the highest seed."""
    means = _means(values)
    ends = [[mean - min(one), max(one) - mean] for mean, one in zip(means, values, strict=True)]
    plot.errorbar(places, means, yerr=np.transpose(ends), capsize=2, **look)


def heat_map(scores: GroupScores) -> Drawn:
    """Return a row a method, a column a site; a missing score is hatched, and MARK says that seeds are missing."""
    if not scores.cells:
        return None, "nothing is scored"
    methods, sites = scores.methods, scores.sites
    at = {m: [scores.at(m, site) for site in sites] for m in methods}
    values = np.array([[mean(one) for one in at[m]] for m in methods], dtype=np.float64)
    marks = [[MARK if 0 < len(one) < len(scores.group.expected(m)) else "" for one in at[m]] for m in methods]
    texts = [[f"{value:.3f}{mark}" for value, mark in zip(*row, strict=True)] for row in zip(values, marks, strict=True)]
    written = len(sites) <= NUMBERED
    left = max(len(part) for m in methods for part in plain(m).split("\n")) * 0.075
    size = max(4.5, left + 1.2 + len(sites) * (0.62 if written else 0.2)), 1.6 + max(0.42 * len(methods), 0.8)
    figure = Figure(figsize=(size[0], size[1] + 0.07 * min(24, max(map(len, sites)))), layout="constrained")
    axis = figure.subplots()
    short = [shown(site if len(site) <= 24 else f"{site[:13]}…{site[-10:]}") for site in sites]
    rows = [textwrap.fill(shown(m), WRAP) for m in methods]
    image = draw_matrix(axis, values, rows, short, texts, cmap="cividis_r" if scores.lower else "cividis")
    figure.colorbar(image, ax=axis, fraction=0.05, aspect=30).ax.tick_params(labelsize=7)
    missing = f"; {MARK} seeds are missing" if any(map(any, marks)) else ""
    _title(figure, scores, f"{scores.group.first.split} split{missing}", "mean over seeds")
    return figure, ""


def against_bytes(scores: GroupScores) -> Drawn:
    """Return mean scores against MiB sent and received."""

    def size(run: RunRecord) -> float | None:
        return None if run.bytes is None and not run.pooled else (run.bytes or 0.0) / 2**20

    return _scatter(scores, size, "MiB up and down, all sites and rounds", "no run sent anything")


def against_epsilon(scores: GroupScores) -> Drawn:
    """Return mean scores against epsilon; units of privacy are never mixed."""
    units = {run.settings["privacy.unit"] for run in scores.group.runs.values() if run.epsilon is not None}
    if len(units) > 1:
        return None, "epsilon of sites and of records are no one scale"
    label = f"epsilon at the job's delta ({next(iter(units), '')} level)"
    return _scatter(scores, lambda run: run.epsilon if run.private else 0.0, label, "no run is private")


def _scatter(scores: GroupScores, measure: Callable[[RunRecord], float | None], label: str, why: str) -> Drawn:
    """Return a picture of means against a positive measure, on a logarithmic scale; methods of which it is 0 as lines.

    A method without a whole seed, or with an unknown measure, is named in the legend and not drawn.
    """
    points: dict[str, tuple[float, list[float]]] = {}
    for method in scores.methods:
        sizes = [measure(scores.group.runs[method, seed]) for seed in scores.whole_seeds(method)]
        there = [size for size in sizes if size is not None]
        if there and len(there) == len(sizes):
            points[method] = math.fsum(there) / len(there), scores.means(method)
    if not any(x > 0 for x, _ in points.values()):
        return None, why
    columns = -(-len(scores.methods) // 22)
    figure = Figure(
        figsize=(6.4 + 2.4 * (columns - 1), max(3.8, 0.4 + 0.3 * min(len(scores.methods), 22))), layout="constrained"
    )
    axis = figure.subplots()
    handles = []
    for index, (method, (x, values)) in enumerate(points.items()):
        look = style(index)
        key = {"color": look["color"], "marker": look["marker"]}
        if x > 0:
            _errorbar(axis, [x], [values], **key, markersize=7, linewidth=1, markeredgecolor="white")
            handles.append(Line2D([], [], **key, linestyle="", label=plain(method)))
        else:
            axis.axhline(_means([values])[0], color=look["color"], linestyle="--", linewidth=1)
            text = plain(f"{method} (no place on this scale)")
            handles.append(Line2D([], [], color=look["color"], linestyle="--", label=text))
    for method in (method for method in scores.methods if method not in points):
        reason = "not known" if scores.means(method) else "see what is missing"
        handles.append(Line2D([], [], linestyle="", label=plain(f"{method} (not drawn: {reason})")))
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    _finish(axis, scores, label, handles=handles, ncols=columns)
    _title(figure, scores, "mean over sites", "bars: lowest to highest seed")
    return figure, ""


def _finish(axis: Any, scores: GroupScores, label: str, **legend: Any) -> None:
    axis.set_xlabel(label, fontsize=8)
    axis.set_ylabel(plain(scores.group.heading(scores.metric)), fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(color="0.92")
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, **legend)


def _title(figure: Figure, scores: GroupScores, text: str, of_seeds: str) -> None:
    count, planned = len({seed for _, seed in scores.group.runs}), len(scores.group.seeds)
    seeds = (f"{count} of {planned} seeds" if count < planned else f"{count} seeds") if planned > 1 else "one seed"
    seeds = f"{seeds}, {of_seeds}" if count > 1 else seeds
    whole = f"{scores.group.heading(scores.metric)}, {scores.stage} model, {text}; {seeds}"
    figure.suptitle(plain(scores.group.titled(whole), int(14 * figure.get_figwidth())), fontsize=9)  # all of it fits


PLOTS = {"curves": curves, "along": axis_figure, "sites": heat_map, "bytes": against_bytes, "epsilon": against_epsilon}
"""Pictures by file name; each is None with a reason where it cannot be."""
