"""Confusion tables of a closing evaluation, all sites together: counts out of the results, and their picture.

DEeR (Zhu et al., IEEE TMI 2025), Figure 4, shows such pictures of several methods.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from consilium.messages import MetricKey, Stage

PREFIX = "confusion/"
NUMBERED = 12
"""A table of more classes shows colours only."""


def confusions(results: Mapping[str, Mapping[str, float]], classes: list[str]) -> dict[str, np.ndarray]:
    """Return the counts (C, C), rows true and columns predicted, by stage, summed over the sites; {} where none reports any."""
    pairs = {f"{PREFIX}{true}/{said}": (i, j) for i, true in enumerate(classes) for j, said in enumerate(classes)}
    found: dict[str, np.ndarray] = {}
    for name, count in ((n, c) for metrics in results.values() for n, c in metrics.items()):
        key = MetricKey.parse(name)
        if key is not None and key.metric in pairs:
            found.setdefault(str(key.stage), np.zeros((len(classes), len(classes))))[pairs[key.metric]] += count
    return {str(stage): found[stage] for stage in Stage if stage in found}


def plot_confusions(path: Path, tables: Mapping[str, np.ndarray], classes: list[str]) -> None:
    """Draw a panel per model: each cell the share of its row, so of a true class, and its count where there is room."""
    side = max(3.2, 0.45 * len(classes) + 1.5)
    figure = Figure(figsize=(side * len(tables), side), layout="constrained")
    for axis, (stage, counts) in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables.items(), strict=True):
        shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        axis.imshow(shares, vmin=0, vmax=1, cmap="Blues")
        axis.set_title(stage, fontsize=9)
        axis.set_xticks(range(len(classes)), classes, fontsize=6, rotation=90)
        axis.set_yticks(range(len(classes)), classes, fontsize=6)
        axis.set_xlabel("predicted", fontsize=7)
        axis.set_ylabel("true", fontsize=7)
        for (i, j), count in np.ndenumerate(counts if len(classes) <= NUMBERED else np.zeros((0, 0))):
            axis.text(
                j, i, f"{count:.0f}", ha="center", va="center", fontsize=5, color="white" if shares[i, j] > 0.6 else "black"
            )
    for label in (one for axis in figure.axes for one in [*axis.get_xticklabels(), *axis.get_yticklabels()]):
        label.set_parse_math(False)  # a class may be called $x$
    figure.savefig(path, dpi=150)
