"""Pictures of matrices of sites against sites: one for TensorBoard every round, all rounds in a plot at the end."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
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
    for axis in np.ravel(figure.axes)[len(picked) :]:
        axis.axis("off")
    figure.suptitle("rows receive, columns give", fontsize=9)
    figure.savefig(path, dpi=110)


def _draw(axis: Any, event: dict[str, Any]) -> None:
    values, sites = np.asarray(event["values"]), event["sites"]
    axis.imshow(values, vmin=0, vmax=1, cmap="viridis")
    axis.set_title(f"round {event['round'] + 1}", fontsize=9)
    axis.set_xticks(range(len(sites)), sites, fontsize=6, rotation=90)
    axis.set_yticks(range(len(sites)), sites, fontsize=6)
    if len(sites) <= 8:
        for (i, j), value in np.ndenumerate(values):
            axis.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=5, color="white" if value < 0.6 else "black")
