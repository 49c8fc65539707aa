"""Pictures of a run: matrices of sites or of classes, and curves over the rounds.

matplotlib is imported when the first picture is drawn, because the import takes long.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from consilium.core.grouping import group_by_key
from consilium.core.lazy import figure, matplotlib, ticker
from consilium.core.storage import write_figure

ROUNDS = "communication round"
"""Label of the x axis of learning curves. At x, a global model is the aggregate of round x, a personalized one is of it."""
SHOWN = 12
"""Rounds in a plot, at most. They are evenly spread and include the first and the last."""
NUMBERED = 14
"""A matrix with more columns than this has colours only, no numbers."""


def draw_matrix(
    axis: Any, values: np.ndarray, rows: Sequence[str], columns: Sequence[str], texts: Any = None, size: float = 7, **looks: Any
) -> Any:
    """Draw a matrix as colours, with numbers in black or white if there is room; NaN is hatched. Return the image.

    `texts` (rows, columns): texts to write in place of the numbers with two digits. `size`: of the letters at the axes, in
    points. `looks`: cmap, vmin, vmax.
    """
    image = axis.imshow(np.ma.masked_invalid(values), **{"cmap": "viridis", "aspect": "auto"} | looks)
    small = size + 1 if max(values.shape, default=0) <= 4 else size - 0.5
    upright = len(columns) <= NUMBERED and max(map(len, columns), default=0) <= 8
    axis.set_xticks(range(len(columns)), columns, fontsize=size, rotation=0 if upright else 90)
    axis.set_yticks(range(len(rows)), rows, fontsize=size)
    for label in [*axis.get_xticklabels(), *axis.get_yticklabels()]:
        label.set_parse_math(False)  # a site may be called $x$
    for (row, column), value in np.ndenumerate(values):
        if np.isnan(value):
            axis.axhspan(
                row - 0.5,
                row + 0.5,
                column / len(columns),
                (column + 1) / len(columns),
                fc="white",
                ec="0.6",
                hatch="////",
                lw=0,
            )
        elif len(columns) <= NUMBERED:
            red, green, blue, _ = image.cmap(image.norm(value))
            ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
            text = f"{value:.2f}" if texts is None else texts[row][column]
            axis.text(column, row, text, ha="center", va="center", fontsize=small, color=ink)
    return image


def pick_evenly(rounds: Sequence[Any]) -> list[Any]:
    """Return at most SHOWN rounds, evenly spread, with the first and the last."""
    return [rounds[i] for i in sorted({round(i) for i in np.linspace(0, len(rounds) - 1, min(SHOWN, len(rounds)))})]


@dataclass(frozen=True)
class Matrix:
    """A matrix to draw: its values (rows, columns), the names of both, and texts in place of the numbers."""

    title: str
    values: np.ndarray
    rows: Sequence[str]
    columns: Sequence[str]
    texts: Any = None


def plot_matrices(path: Path, found: Sequence[Matrix], across: str, down: str, bar: bool = False, **looks: Any) -> None:
    """Draw matrices, four in a row. `across`, `down`: labels of the axes. `bar`: with a bar of colours.

    Zhu et al., "DEeR" (IEEE TMI 2025), Figure 4, shows confusion tables of several methods so.
    """
    count = min(4, len(found))
    lines = -(-len(found) // count)
    rows, columns = (max(map(len, side)) for side in zip(*((one.rows, one.columns) for one in found), strict=True))
    cell = 0.45 if columns <= NUMBERED else 0.2
    wide, high = max(1.5 + cell * columns, 2.8), max(1.3 + cell * rows, 2.2)
    picture = figure.Figure(figsize=(count * wide, lines * high), layout="constrained")
    axes = picture.subplots(lines, count, squeeze=False)
    for axis, one in zip(axes.flat, found, strict=False):
        image = draw_matrix(axis, one.values, one.rows, one.columns, one.texts, **looks)
        axis.set_title(textwrap.fill(one.title, int(12 * wide)), fontsize=9)
        axis.set_xlabel(across, fontsize=8)
        axis.set_ylabel(down, fontsize=8)
    for axis in axes.flat[len(found) :]:
        axis.axis("off")
    if bar:
        picture.colorbar(image, ax=axes, shrink=0.8)
    write_figure(path, picture, dpi=130)


def plot_curves(path: Path, rounds: Mapping[float, Mapping[str, float]], from_zero: bool = False) -> None:
    """Draw values by the number of rounds done, one panel per group of names "<group>/<name>".

    A group of more than four names, such as layers, is drawn as its mean and range. `from_zero`: let the y axis begin at 0.
    """
    names_of_all = dict.fromkeys(name for one in rounds.values() for name in one)
    groups = group_by_key((name.rpartition("/")[0], name) for name in names_of_all)
    picture = figure.Figure(figsize=(4.2 * len(groups), 3.2), layout="constrained")
    for axis, (group, names) in zip(np.ravel(picture.subplots(1, len(groups), squeeze=False)), groups.items(), strict=True):
        values = np.array([[one.get(name, np.nan) for name in names] for one in rounds.values()])
        there = ~np.isnan(values).all(1)
        steps, values = np.array(list(rounds))[there], values[there]
        if len(names) <= 4:
            for name, column in zip(names, values.T, strict=True):
                axis.plot(steps, column, marker=".", label=name.rpartition("/")[2])
        else:
            axis.plot(steps, np.nanmean(values, 1), marker=".", label=f"mean of {len(names)} layers")
            low, high = np.nanmin(values, 1), np.nanmax(values, 1)
            axis.fill_between(steps, low, high, alpha=0.25, label="lowest to highest")
        axis.legend(fontsize=7)
        if from_zero:
            axis.set_ylim(bottom=0)
        axis.set_title(group, fontsize=9)
        axis.set_xlabel("round", fontsize=8)
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    write_figure(path, picture, dpi=110)


def plot_drift(path: Path, rounds: Sequence[tuple[tuple[int, int], Mapping[str, float]]]) -> None:
    """Draw how far each adapter moved in local training, in the order from the model's input; a line per round and phase."""
    phased, picked = any(phase for (_, phase), _ in rounds), pick_evenly(rounds)
    picture = figure.Figure(figsize=(7, 3.6), layout="constrained")
    axis = picture.subplots()
    for place, ((number, phase), values) in enumerate(picked):
        colour = matplotlib.colormaps["viridis"](place / max(len(picked) - 1, 1))
        label = f"round {number + 1}" + (f", phase {phase + 1}" if phased else "")
        axis.plot(range(1, len(values) + 1), list(values.values()), marker=".", color=colour, label=label)
    axis.set_xlabel("adapter, from the input on", fontsize=8)
    axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axis.set_ylabel("change / its size before", fontsize=8)
    axis.legend(fontsize=7, ncols=2)
    write_figure(path, picture, dpi=110)
