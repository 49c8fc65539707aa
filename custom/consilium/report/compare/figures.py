"""Pictures of a comparison: learning curves, sites x methods, scores along an axis, and against bytes.

Colours are those of M. Okabe and K. Ito, "Color Universal Design" (2002), which colour-blind readers can distinguish. Each
method has a marker and a line style too, for prints without colours.
"""

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from matplotlib import rc_context, rcParams
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation
from PIL import ImageChops

from consilium.core.messages import Stage
from consilium.core.sanitize import count_with_noun, first_names_text, shown
from consilium.core.storage import PUBLIC, write_atomic, write_figure
from consilium.report.compare import COLUMN, MARK, PAGE
from consilium.report.compare.comparability import Group, frozen_model
from consilium.report.compare.score_statistics import GroupScores, mean, scores_of
from consilium.report.figures import NUMBERED, ROUNDS, draw_matrix
from consilium.report.predictions import (
    GREY,
    LINE,
    PANEL,
    PICTURE,
    POINTS,
    PREDICTIONS,
    REFERENCE,
    arrange,
    draw_text,
    read_page,
    write_page,
)
from consilium.report.run_record import Curve
from consilium.report.tables import csv_text, escape_tex, number_text, shorten_names, tex_label
from consilium.report.untrusted_files import subfolders

# examples --------------------------------------------------------------------------------------------------------------
# The same test pictures with the predictions of several methods, cut out of the predictions.png of each run and site.
#
# A picture is drawn only if all runs show the same pictures and references, to the pixel. It shows patients, so keep it where
# the runs are.

MOST_METHODS = 8
SHOWN_BY_TASK = {
    "segmentation": "They are the first ones of the split. Below each prediction is the Dice of this picture.",
    "classification": "They are the first ones of each class in the split. A tick marks a right prediction, and the number is "
    "the probability of the predicted class.",
}
"""What a caption says of the chosen pictures and of the texts at the predictions, by task."""


def draw_examples(folder: Path, group: Group, stage: Stage, suffix: str) -> tuple[dict[Path, str], list[str]]:
    """Write examples{suffix}-SITE.png for each site where the runs allow it.

    Return the files with their captions, and notes on missing ones.

    `suffix`: the group's number in file names, as in "-2"; "" if there is one group.
    They show the seed that most methods have; of several such seeds, the first.
    """
    counts = Counter(seed for _, seed in group.runs)
    seed = max(group.seeds, key=lambda seed: counts[seed])
    runs = {m: group.runs[m, seed] for m in group.methods if (m, seed) in group.runs}
    files: dict[Path, str] = {}
    undrawn: dict[str, list[str]] = {}
    places = {m: {one.name: one for one in subfolders(run.folder / "sites")} for m, run in list(runs.items())[:MOST_METHODS]}
    for site in sorted(group.first.sites):  # from another machine's record, a site's name may be ".." or a path
        paths = {method: inside[site] / PREDICTIONS for method, inside in places.items() if site in inside}
        read = {method: read_page(path) for method, path in paths.items()}
        pages = {m: page for m, page in read.items() if page is not None and {PICTURE, REFERENCE, str(stage)} <= page[0].keys()}
        same = [[tile.tobytes() for what in (PICTURE, REFERENCE) for tile in tiles[what]] for tiles, _ in pages.values()]
        if len(pages) < 2:
            unread = any(page is None and paths[method].exists() for method, page in read.items())
            more = "; predictions.png of some is damaged, or of a former version" if unread else ""
            undrawn.setdefault(f"fewer than two methods have pictures of this model there{more}", []).append(site)
        elif any(one != same[0] for one in same):
            undrawn.setdefault("the runs show other pictures or references", []).append(site)
        else:
            path = folder / f"examples{suffix}-{''.join(c if c.isalnum() or c in '._-' else '_' for c in site)}.png"
            first, key = next(iter(pages.values()))
            both = {what: first[what] for what in (PICTURE, REFERENCE, Stage.PRETRAINED) if what in first}
            told = draw_text(f"Seed {seed}, {stage} models", (2 * PANEL, LINE), POINTS, GREY, left=True)
            right = max(ImageChops.invert(key).getbbox() or (0, 0, 1, 1))  # the key is as wide as the page it is cut from
            key = arrange([(0, 0, key.crop((0, 0, max(right, 1), key.height))), (0, key.height, told)])
            # the blank keeps a method called "picture" apart from the column of pictures
            write_page(path, (both | {f"{method} ": tiles[stage] for method, (tiles, _) in pages.items()}, key))
            files[path] = group.with_group_name(
                f"{count_with_noun(len(first[PICTURE]), f'{group.first.split} picture')} of {site}: from left to right "
                f"{', '.join(both)}, and the predictions of the {stage} models of {', '.join(pages)}, seed {seed}. "
                f"{SHOWN_BY_TASK.get(group.first.config.task.name, '')}"
            ).strip()
    notes = [f"no examples of {first_names_text(sites, 3)}: {why}" for why, sites in undrawn.items()]
    lacking = [method for method in group.methods if method not in runs]
    notes += [f"examples show seed {seed}; no run with it: {first_names_text(lacking, 3)}"] if lacking and files else []
    left = len(runs) - MOST_METHODS
    shows = f"examples show the first {MOST_METHODS} methods; {left} more are left out"
    return files, notes + ([shows] if left > 0 and files else [])


# figures ---------------------------------------------------------------------------------------------------------------
# Figures to print, as wide as a column or the page of a two-column paper, with letters of 7 and 8 points.

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#7F7F7F")
MARKERS = "osD^vPX*<>hp"
LINES = ("-", "--", "-.", ":")
CURVES = 6
"""Curves in one panel, at most. The curves of other panels are drawn behind them in grey."""
FEWEST = 2
"""Fewest values that are numbers, for an axis to be drawn along."""
BARS = "Bars are the standard deviation over seeds, as ± in the tables."
FORMATS = {"png": {"Software": None}, "pdf": {"CreationDate": None, "Creator": None, "Producer": None}, "svg": {"Date": None}}
"""File endings of a picture, each with the metadata to remove, so that the same command writes equal files each time."""
STYLE: dict[Any, Any] = {
    "font.size": 8, "axes.labelsize": 8, "legend.fontsize": 7, "xtick.labelsize": 7, "ytick.labelsize": 7, "axes.titlesize": 8,
    "figure.titlesize": 8, "axes.linewidth": 0.6, "lines.markersize": 3.5, "text.parse_math": False, "pdf.fonttype": 42,
    "svg.fonttype": "none", "svg.hashsalt": "consilium",
}  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """A picture, its caption in whole sentences, and a row per number in it."""

    figure: Figure
    caption: str
    rows: Sequence[Mapping[str, Any]]


Drawn = Plot | str
"""A picture, or the reason why there is none."""
INCOMPLETE = "no method has a seed with scores at all sites"


def style(index: int) -> dict[str, Any]:
    """Return the colour, marker and line style of a method by its number. The first 96 are all different."""
    colour, marker = COLOURS[index % len(COLOURS)], MARKERS[(index % len(COLOURS) + index // len(COLOURS)) % len(MARKERS)]
    return {"color": colour, "marker": marker, "linestyle": LINES[index % len(LINES)]}


def wrap_name(text: str, width: int = 34) -> str:
    """Return a name in lines of at most `width` characters, by default those of a legend."""
    return textwrap.fill(shown(text), width)


def draw(
    folder: Path, groups: Sequence[Group], stage: Stage, metric: str | None = None, width: float = COLUMN
) -> tuple[list[Path], list[str]]:
    """Write each picture that the runs allow, in each of FORMATS, with its numbers as CSV; and figures.tex with all captions.

    `width`: in inches. Return the files, and notes on missing pictures.
    """
    files: list[Path] = []
    notes: list[str] = []
    page, labels = ["% needs: graphicx, textcomp, fontenc with T1"], Counter[str]()
    for index, group in enumerate(groups):
        end = f"-{index + 1}" if len(groups) > 1 else ""
        for name, make in PLOTS.items():
            with rc_context(STYLE):
                plot = make(scores_of(group, stage, metric or group.first.metric), width)
                if isinstance(plot, str):
                    notes.append(group.with_group_name(f"no {name}{end}: {plot}"))
                    continue
                caption = group.with_group_name(plot.caption)
                paths = [folder / f"{name}{end}.{ending}" for ending in (*FORMATS, "csv")]
                for path, metadata in zip(paths, FORMATS.values(), strict=False):
                    write_figure(path, plot.figure, dpi=300, mode=PUBLIC, metadata=metadata)
            write_atomic(paths[-1], csv_text(plot.rows).encode(errors="backslashreplace"), PUBLIC)
            files += paths
            place, side = ("figure*", "text") if plot.figure.get_figwidth() > COLUMN else ("figure", "column")
            page += [
                rf"\begin{{{place}}}[t]",
                r"\centering",
                rf"\includegraphics[width=\{side}width]{{{name}{end}.pdf}}",
                rf"\caption{{{escape_tex(caption)}}}{tex_label('fig', f'{name}{end}', labels)}",
                rf"\end{{{place}}}",
            ]
        examples, undrawn = draw_examples(folder, group, stage, end)
        for path, caption in examples.items():
            page += [
                "% Shows patients. Remove the % of the next lines only if the pictures may be published.",
                rf"% \begin{{figure*}}[t]\centering\includegraphics[width=\textwidth]{{{path.name}}}",
                rf"% \caption{{{escape_tex(caption)}}}{tex_label('fig', path.stem, labels)}\end{{figure*}}",
            ]
        files += examples
        notes += map(group.with_group_name, undrawn)
    if len(page) > 1:
        files.append(folder / "figures.tex")
        write_atomic(files[-1], "\n".join([*page, ""]).encode(), PUBLIC)
    return files, notes


def curves(scores: GroupScores, width: float = COLUMN) -> Drawn:
    """Draw validation scores by round, CURVES methods per panel: means over sites and seeds, and single seeds as thin lines."""
    found = {method: _curves_by_seed(scores, method) for method in scores.group.methods}
    drawn = [method for method, seeds in found.items() if seeds and len(next(iter(seeds.values()))) > 1]
    if not drawn:
        return (
            "no run validated this score at all sites in two rounds; name the model in training.validate.stages, and set "
            "training.validate.full: true for scores that only the final evaluation computes"
        )
    rounds = {method: list(next(iter(found[method].values()))) for method in drawn}
    steps = {method: scores.group.runs[method, next(iter(found[method]))].steps for method in drawn}
    by_steps = all(steps.values()) and len({one[-1] / (len(one) - 1) for one in steps.values()}) > 1
    label = "optimizer steps of a site" if by_steps else ROUNDS
    at = {method: [steps[method][r] if by_steps else r for r in rounds[method]] for method in drawn}
    means = {method: [fmean(seeds[r] for seeds in found[method].values()) for r in rounds[method]] for method in drawn}
    panels = [drawn[i : i + CURVES] for i in range(0, len(drawn), CURVES)]
    columns = min(1 if width <= COLUMN else 3, len(panels))
    down = -(-len(panels) // columns)
    figure = Figure(figsize=(width, down * _panel_height(panels[0], width / columns)), layout="constrained")
    axes = figure.subplots(down, columns, squeeze=False, sharex=True, sharey=True).ravel()
    for axis, inside in zip(axes, panels, strict=False):
        for method in drawn if len(panels) > 1 else ():
            axis.plot(at[method], means[method], color="0.88", linewidth=0.8, zorder=1)
        for place, method in enumerate(inside):
            look, every = style(place), max(1, len(rounds[method]) // 10)
            axis.plot(at[method], means[method], label=wrap_name(method), linewidth=1.2, markevery=every, zorder=3, **look)
            for one in found[method].values() if len(found[method]) > 1 else ():
                axis.plot(at[method], list(one.values()), color=look["color"], linewidth=0.4, alpha=0.45, zorder=2)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        _label_axes(axis, scores, label, width / columns, f"validation {scores.group.heading(scores.metric)}, mean over sites")
    for axis in axes[len(panels) :]:
        axis.axis("off")
    rows = [
        {"method": method, "seed": seed, "rounds": round, "steps": dict(enumerate(steps[method])).get(round), "value": value}
        for method in drawn
        for seed, one in found[method].items()
        for round, value in one.items()
    ]
    of_tables = f"not on the {scores.group.first.split} data of the tables"
    what = f"Learning curves: the mean over sites on validation data, {of_tables}, by {label}"
    alike = len({number_text(means[method][0]) if rounds[method][0] == 0 else method for method in drawn}) == 1 < len(drawn)
    pooled = any(run.is_pooled for run in scores.group.runs.values())
    told = ["The curves begin with the model before training."] * alike
    told += ["Pooled data have no curve, because they are validated as one site."] * pooled
    return Plot(figure, _caption(scores, what, "Thin lines are single seeds.", " ".join(told)), rows)


def _curves_by_seed(scores: GroupScores, method: str) -> dict[str, Curve]:
    """Return a method's curves by seed: the validation score by round, as mean over sites.

    The sites are those that any run of the group validated. A seed is left out if it lacks a site, and a round is left out
    unless all seeds have it at all sites. Pooled data have no curve, because they are validated as one site.
    """
    runs = {key: run for key, run in scores.group.runs.items() if not run.is_pooled}
    curves = {key: run.validation_curves(scores.stage, scores.metric) for key, run in runs.items()}
    sites = {site for curve in curves.values() for site in curve}
    whole = {seed: one for (name, seed), one in curves.items() if name == method and one and set(one) == sites}
    rounds = sorted(set.intersection(*(set(curve) for one in whole.values() for curve in one.values()))) if whole else []
    return {seed: {r: math.fsum(c[r] for c in one.values()) / len(sites) for r in rounds} for seed, one in whole.items()}


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def first_numeric_axis(scores: GroupScores) -> str:
    """Return the study's first axis whose values are numbers, except at most one value such as `all`; "" without any."""
    labels = [run.labels for run in scores.group.runs.values()]
    values = {axis: {one.get(axis, "") for one in labels} for axis in dict.fromkeys(axis for one in labels for axis in one)}
    numbers = {axis: sum(map(_is_number, found)) for axis, found in values.items()}
    return next((axis for axis, count in numbers.items() if count >= FEWEST and len(values[axis]) - count <= 1), "")


def axis_figure(scores: GroupScores, width: float = COLUMN) -> Drawn:
    """Draw means over sites and seeds along the study's axis of numbers, with bars of the standard deviation over seeds.

    There is a line for each combination of other labels.
    """
    if not (axis := first_numeric_axis(scores)):
        return "no axis of a study has numbers"
    lines: dict[str, dict[str, list[float]]] = {}
    rows = []
    for method in scores.methods:
        labels = next((run.labels for run in scores.group.runs_of(method)), {})
        if axis not in labels or not (means := scores.means(method)):
            continue
        rest = ", ".join(value for other, value in labels.items() if other != axis)
        lines.setdefault(rest or axis, {})[labels[axis]] = means
        seeds = zip(scores.complete_seeds(method), means, strict=True)
        rows += [{"method": method, axis: labels[axis], "seed": seed, "value": value} for seed, value in seeds]
    if not lines:
        return INCOMPLETE
    figure = Figure(figsize=(width, _panel_height(lines, width)), layout="constrained")
    plot = figure.subplots()
    draw_lines(plot, lines)
    _label_axes(plot, scores, wrap_name(axis), width)
    return Plot(figure, _caption(scores, f"The mean over sites along {axis}, its values at equal distances", BARS), rows)


def sort_axis_values(values: set[str]) -> list[str]:
    """Return an axis's values, sorted as numbers, with a word such as `all` at the end."""
    return sorted(values, key=lambda value: (not _is_number(value), float(value) if _is_number(value) else 0.0))


def draw_lines(plot: Any, lines: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Draw lines of means, with bars of the standard deviation over seeds.

    `lines`: by name and value on the axis the seeds' values. A line without any number on the axis, such as a method without
    privacy on an axis of epsilon, is dashed and horizontal.
    """
    across = {name for name, line in lines.items() if not any(map(_is_number, line))}
    order = sort_axis_values({value for name, line in lines.items() if name not in across for value in line})
    for index, (name, line) in enumerate(lines.items()):
        look = style(index) | {"label": wrap_name(name), "linewidth": 1.2}
        if name in across:
            plot.axhline(fmean(*line.values()), **look | {"linestyle": "--", "marker": ""})
        else:
            points = {order.index(value): line[value] for value in order if value in line}
            _errorbar(plot, list(points), list(points.values()), **look)
    plot.set_xticks(range(len(order)), [wrap_name(value) for value in order])


def _errorbar(plot: Any, places: Sequence[float], values: Sequence[Sequence[float]], **look: Any) -> None:
    """Draw means with bars of the standard deviation over seeds, as ± in the tables."""
    means = list(map(fmean, values))
    plot.plot(places, means, **look)
    ends = [stdev(one) if len(one) > 1 else 0.0 for one in values]
    plot.errorbar(places, means, yerr=ends, capsize=2, fmt="none", ecolor=look["color"], elinewidth=0.8)


def heat_map(scores: GroupScores, width: float = COLUMN) -> Drawn:
    """Draw scores with a row per method and a column per site. Missing scores are hatched. MARK: seeds are missing.

    Colours are differences to the pretrained model, or to the mean over methods if the pretrained model is not scored. The
    figure is as wide as a column of a paper if its numbers fit there, else as a page, whatever `width` is.
    """
    if not scores.cells:
        return "nothing is scored"
    sites, first = scores.sites, scores_of(scores.group, Stage.PRETRAINED, scores.metric)
    models = {frozen_model(run) for run in scores.group.runs.values()}
    frozen = next(
        (m for m in first.scored_methods if len(models) == 1 and all(first.scores_at_site(m, site) for site in sites)), ""
    )
    found = [("pretrained", [first.scores_at_site(frozen, site) for site in sites], 0)] if frozen else []
    found += [(m, [scores.scores_at_site(m, site) for site in sites], len(scores.group.seeds)) for m in scores.methods]
    methods, at = [name for name, *_ in found], [one for _, one, _ in found]
    values = np.array([[mean(one) for one in row] for row in at], dtype=np.float64)
    texts = [[_cell_text(one, MARK if 0 < len(one) < most else "") for one in row] for _, row, most in found]
    gained = values - (values[0] if frozen else np.ma.masked_invalid(values).mean(axis=0).filled(np.nan))
    reach = float(np.nanmax(np.abs(gained))) or 1.0
    rows = [wrap_name(m, 22) for m in methods]
    shortened = shorten_names(list(map(shown, sites)), 24)
    short = [shortened[shown(site)] for site in sites]
    left = max(len(part) for row in rows for part in row.split("\n")) * 0.062
    fits = left + 0.6 + len(sites) * (0.4 if len(sites) <= NUMBERED else 0.12) <= COLUMN
    high = sum(0.12 + 0.14 * max(1 + row.count("\n"), 2) for row in rows)
    size = rcParams["font.size"] - 1  # 7 points on paper, more on a page
    inches = np.array([COLUMN if fits else PAGE, 0.5 + max(high, 0.7) + 0.062 * max(map(len, short))]) * size / 7
    figure = Figure(figsize=tuple(inches), layout="constrained")
    axis = figure.subplots()
    look = {"cmap": "RdBu_r" if scores.lower_is_better else "RdBu", "vmin": -reach, "vmax": reach}
    image = draw_matrix(axis, gained, rows, short, texts, size, **look)
    zero = "the pretrained model" if frozen else "the mean over methods"
    figure.colorbar(image, ax=axis, fraction=0.05, aspect=30).set_label(wrap_name(f"difference to {zero}", 24))
    missing = f" {MARK}: seeds are missing." if any(MARK in text for row in texts for text in row) else ""
    told = [
        {"method": m, "site": site, "seeds": len(one), "value": mean(one)}
        for m, row in zip(methods, at, strict=True)
        for site, one in zip(sites, row, strict=True)
    ]
    what = f"Scores by method and site, on the {scores.group.first.split} split"
    colours = f"Blue is better and red is worse than {zero} at the site."
    return Plot(
        figure,
        _caption(
            scores,
            what,
            f"Numbers are means ± standard deviations over seeds, without deviations that print as 0.000.{missing}",
            colours,
        ),
        told,
    )


def _cell_text(values: Sequence[float], mark: str) -> str:
    """Return a mean and, in a second line, the standard deviation over seeds, without one that prints as zero."""
    spread = f"{stdev(values):.3f}" if len(values) > 1 else "0.000"
    return f"{mean(values):.3f}{mark}" + (f"\n±{spread}" if float(spread) else "") if values else ""


def score_by_bytes_figure(scores: GroupScores, width: float = COLUMN) -> Drawn:
    """Draw mean scores against MiB sent and received, on a logarithmic scale. A method that sends none is a horizontal line.

    A method without a complete seed, or with unknown bytes, is named in the legend only.
    """
    points: dict[str, tuple[float, list[float]]] = {}
    for method in scores.methods:
        runs = [scores.group.runs[method, seed] for seed in scores.complete_seeds(method)]
        sizes = [0.0 if run.is_pooled else run.bytes for run in runs]
        there = [size / 2**20 for size in sizes if size is not None]
        if there and len(there) == len(sizes):
            points[method] = fmean(there), scores.means(method)
    if not any(x > 0 for x, _ in points.values()):
        return "no run sent anything" if any(map(scores.means, scores.methods)) else INCOMPLETE
    figure = Figure(figsize=(width, _panel_height(scores.methods, width)), layout="constrained")
    axis = figure.subplots()
    for index, (method, (x, values)) in enumerate(points.items()):
        look = style(index) | {"linestyle": ""}
        if x > 0:
            _errorbar(axis, [x], [values], **look, markersize=4.5, linewidth=0.8, label=wrap_name(method))
        else:
            text = wrap_name(f"{method} (no place on this scale)")
            axis.axhline(fmean(values), color=look["color"], linestyle="--", linewidth=1, label=text)
    for method in (method for method in scores.methods if method not in points):
        reason = "not known" if scores.means(method) else "see what is missing"
        axis.plot([], [], linestyle="", label=wrap_name(f"{method} (not drawn: {reason})"))
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    _label_axes(axis, scores, "MiB sent and received, log scale", width)
    rows = [
        {"method": method, "MiB sent and received": x, "seed": seed, "value": value}
        for method, (x, values) in points.items()
        for seed, value in zip(scores.complete_seeds(method), values, strict=True)
    ]
    what = "The mean over sites against MiB sent and received, by all sites"
    lines = "A dashed line is a method that sends no updates." if any(x <= 0 for x, _ in points.values()) else ""
    return Plot(figure, _caption(scores, what, BARS, lines), rows)


def _label_axes(axis: Any, scores: GroupScores, label: str, width: float, value: str = "") -> None:
    """Label the axes, and put the legend below, in as many columns as fit into `width` inches. `value`: of the y axis."""
    axis.set(xlabel=label, ylabel=wrap_name(value or f"{scores.group.heading(scores.metric)}, mean over sites", 28))
    axis.grid(color="0.92", linewidth=0.5)
    axis.set_axisbelow(True)
    below = axis.transAxes + ScaledTranslation(0, -0.052 * rcParams["font.size"], axis.figure.dpi_scale_trans)
    columns = _legend_columns([text for _, text in zip(*axis.get_legend_handles_labels(), strict=True)], width)
    axis.legend(
        loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=below, ncols=columns, frameon=False, borderaxespad=0,
        columnspacing=1.0, handlelength=2.2, handletextpad=0.4,
    )  # fmt: skip


def _legend_columns(names: Iterable[str], width: float) -> int:
    """Return how many columns of a legend fit into `width` inches."""
    longest = max(len(part) for name in names for part in wrap_name(name).split("\n"))
    return max(1, int((width - 0.5) / (0.45 + 0.058 * longest)))


def _panel_height(names: Iterable[str], width: float) -> float:
    """Return the height in inches of a panel and its legend. On a page it is larger than on paper, as the font is."""
    written = list(map(wrap_name, names))
    legend = 0.14 * sum(name.count("\n") + 1 for name in written) / _legend_columns(written, width)
    return (2.3 + legend) * rcParams["font.size"] / STYLE["font.size"]


def _caption(scores: GroupScores, text: str, of_seeds: str, more: str = "") -> str:
    """Return a picture's caption in whole sentences, with metric, grid, model and seeds."""
    count, planned = len({seed for _, seed in scores.group.runs}), len(scores.group.seeds)
    seeds = (f"{count} of {planned} seeds" if count < planned else f"{count} seeds") if planned > 1 else "one seed"
    score = f"The score is {scores.group.heading(scores.metric)}, of the {scores.stage} model, over {seeds}."
    return f"{text}. {score} {of_seeds if count > 1 else ''}".strip() + f" {more}" * bool(more)


PLOTS = {"curves": curves, "along": axis_figure, "sites": heat_map, "bytes": score_by_bytes_figure}
"""Functions that draw a picture or return the reason why they cannot, by file name."""
