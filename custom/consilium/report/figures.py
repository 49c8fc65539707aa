"""Pictures of a run: matrices of sites against sites, and curves over the rounds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

SHOWN = 12
"""A plot shows at most this many rounds, evenly spread, the first and the last among them."""


def heat(matrix: Tensor, cell: int = 16) -> np.ndarray:
    """Return a picture (N cell, N cell, 3) uint8 of a matrix (N, N); dark is 0, bright its largest value."""
    values = matrix.double().numpy() / max(float(matrix.max()), 1e-12)
    picture = (colormaps["viridis"](values)[..., :3] * 255).astype(np.uint8)
    return picture.repeat(cell, 0).repeat(cell, 1)


def plot_matrices(path: Path, rounds: list[dict[str, Any]]) -> None:
    """Draw one matrix per round: rows receive, columns give. `rounds` are events with round, sites and values."""
    picked = [rounds[i] for i in sorted({round(i) for i in np.linspace(0, len(rounds) - 1, min(SHOWN, len(rounds)))})]
    columns = min(4, len(picked))
    rows = -(-len(picked) // columns)
    figure = Figure(figsize=(3.2 * columns, 3.0 * rows), layout="constrained")
    for axis, event in zip(np.ravel(figure.subplots(rows, columns, squeeze=False)), picked, strict=False):
        _draw(axis, event)
    for axis in figure.axes[len(picked) :]:
        axis.axis("off")
    figure.suptitle("rows receive, columns give", fontsize=9)
    figure.savefig(path, dpi=110)


def plot_curves(path: Path, rounds: list[dict[str, float]], from_zero: bool = False) -> None:
    """Draw one panel per group ("<group>/<name>") of the rounds' values; a large group (layers) as mean and range.

    `from_zero`: of values that are sizes, so that twice as high is twice as much.
    """
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for one in rounds for name in one):
        groups.setdefault(name.rpartition("/")[0], []).append(name)
    figure = Figure(figsize=(4.2 * len(groups), 3.2), layout="constrained")
    for axis, (group, names) in zip(np.ravel(figure.subplots(1, len(groups), squeeze=False)), groups.items(), strict=True):
        values = np.array([[one.get(name, np.nan) for name in names] for one in rounds])
        _curves(axis, values, [name.rpartition("/")[2] for name in names])
        if from_zero:
            axis.set_ylim(bottom=0)
        axis.set_title(group, fontsize=9)
        axis.set_xlabel("round", fontsize=8)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=110)


def plot_drift(path: Path, rounds: list[tuple[tuple[int, int], dict[str, float]]]) -> None:
    """Draw how far each adapter moved in local training, from the input on; a line per round and phase, at most SHOWN."""
    phased = any(phase for (_, phase), _ in rounds)
    picked = [rounds[i] for i in sorted({round(i) for i in np.linspace(0, len(rounds) - 1, min(SHOWN, len(rounds)))})]
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axis = figure.subplots()
    for place, ((number, phase), values) in enumerate(picked):
        colour = colormaps["viridis"](place / max(len(picked) - 1, 1))
        label = f"round {number + 1}" + (f", phase {phase + 1}" if phased else "")
        axis.plot(range(1, len(values) + 1), list(values.values()), marker=".", color=colour, label=label)
    axis.set_xlabel("adapter, from the input on", fontsize=8)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylabel("change / its size before", fontsize=8)
    axis.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=110)


def plot_cross_sites(file: BinaryIO, values: np.ndarray, models: Sequence[str], sites: Sequence[str], title: str) -> None:
    """Draw a score of every site's model (rows) on every site's data (columns); grey where there is none."""
    figure = Figure(figsize=(2.6 + 0.55 * len(sites), 2.0 + 0.45 * len(models)), layout="constrained")
    axis = figure.subplots()
    known = values[~np.isnan(values)]
    middle = float(known.min() + 0.6 * (known.max() - known.min())) if known.size else 0.0
    drawn = axis.imshow(np.ma.masked_invalid(values), cmap="viridis")
    axis.set_facecolor("lightgrey")
    axis.set_title(title, fontsize=9)
    axis.set_xticks(range(len(sites)), sites, fontsize=7, rotation=45, ha="right")
    axis.set_yticks(range(len(models)), models, fontsize=7)
    axis.set_xlabel("tested on", fontsize=8)
    axis.set_ylabel("model of", fontsize=8)
    for (i, j), value in np.ndenumerate(values if values.size <= 144 else np.zeros((0, 0))):
        dark = bool(value < middle)
        axis.text(
            j,
            i,
            "-" if np.isnan(value) else f"{value:.2f}",
            ha="center",
            va="center",
            fontsize=6,
            color="white" if dark else "black",
        )
    figure.colorbar(drawn, ax=axis, shrink=0.8)
    for label in [*axis.get_xticklabels(), *axis.get_yticklabels()]:
        label.set_parse_math(False)  # a site may be called $x$
    figure.savefig(file, dpi=150)


def _curves(axis: Any, values: np.ndarray, labels: list[str]) -> None:
    known = ~np.isnan(values).all(1)
    steps, values = np.arange(1, len(values) + 1)[known], values[known]
    if len(labels) <= 4:
        for label, column in zip(labels, values.T, strict=True):
            axis.plot(steps, column, marker=".", label=label)
    else:
        known = ~np.isnan(values).all(1)  # the first round has no update whose energy could be retained
        steps, values = steps[known], values[known]
        axis.plot(steps, np.nanmean(values, 1), marker=".", label=f"mean of {len(labels)} layers")
        axis.fill_between(steps, np.nanmin(values, 1), np.nanmax(values, 1), alpha=0.25, label="lowest to highest")
    axis.legend(fontsize=7)


def _draw(axis: Any, event: dict[str, Any]) -> None:
    values, sites = np.asarray(event["values"]), event["sites"]
    axis.imshow(values, vmin=0, vmax=1, cmap="viridis")
    axis.set_title(f"round {event['round'] + 1}", fontsize=9)
    axis.set_xticks(range(len(sites)), sites, fontsize=6, rotation=90)
    axis.set_yticks(range(len(sites)), sites, fontsize=6)
    if len(sites) <= 8:
        for (i, j), value in np.ndenumerate(values):
            axis.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=5, color="white" if value < 0.6 else "black")
