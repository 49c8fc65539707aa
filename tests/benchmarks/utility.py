"""The table of scores under privacy from a study's measured cells, and the picture of accuracy against epsilon."""

import statistics
from collections.abc import Mapping

from matplotlib.figure import Figure

from consilium.report.compare.figures import draw_lines, sort_axis_values
from tests.benchmarks.effects import ACCURACY, DICE, LOSS
from tests.benchmarks.measured import MEASURE, NOISE, Rows

PICTURES = {"privacy_utility_rbc12": "privacy_utility.png"}
"""The picture's file beside RESULTS.md, by study. A picture shows the uneven mix of classes."""
SCORES = {"privacy_utility_rbc12": ACCURACY, "privacy_smears_rbc12": ACCURACY, "privacy_medquad": LOSS, "privacy_nuclei": DICE}
"""The score that each study of private training measures."""
SURROUNDINGS, CHANCE = (0.29, 0.31), 1 / 11
"""Accuracy of a small CNN that sees only the cells' surroundings (two seeds), and of guessing."""
SHOWN = ("0.1", "one site")
"""The mixes in the picture: Dirichlet(0.1), and pooled data."""


def by_place(rows: Rows, measure: str) -> dict[tuple[str, str, str], list[float]]:
    """Return a measure's values by mix, method and epsilon: one value per seed, in the order of the seeds."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for key, value in sorted(rows.items()):
        labels = dict(key)
        if labels[MEASURE] == measure:
            place = (labels.get("mix", "-"), labels["method"], labels.get("epsilon", "-"))
            found.setdefault(place, []).append(value)
    return found


def table(rows: Rows, score: str = ACCURACY) -> str:
    """Return the table of mean scores, with noise / signal: a row per mix and method, the best first, a column per epsilon."""
    noise, found = by_place(rows, NOISE), by_place(rows, score)
    columns = [*reversed(sort_axis_values({epsilon for *_, epsilon in found}))]
    cells = {place: _cell(statistics.mean(values), statistics.mean(noise[place])) for place, values in found.items()}
    sign = 1 if score == LOSS else -1
    order = sorted({place[:2] for place in found}, key=lambda one: (one[0], _best(found, one, sign), one[1]))
    name = score.rpartition("/")[-1]
    headings = [f"{name}, no privacy" if one == "none" else f"{name}, epsilon {one}" for one in columns]
    lines = [["mix", "method", *headings], ["---"] * (2 + len(columns))]
    lines += [[*one, *(cells.get((*one, epsilon), "-") for epsilon in columns)] for one in order]
    if len({mix for mix, _ in order}) == 1:
        lines = [line[1:] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) if found else "No cell has run.\n"


def _cell(score: float, noise: float) -> str:
    return f"{score:.3f} ({noise:.3g})" if noise else f"{score:.3f}"


def _best(found: Mapping[tuple[str, str, str], list[float]], method: tuple[str, str], sign: int) -> float:
    """Return the best mean score of a method in a mix, times `sign`, so that the smallest is best."""
    return min(sign * statistics.mean(values) for other, values in found.items() if other[:2] == method)


def picture(rows: Rows) -> Figure:
    """Return the plot of accuracy against epsilon, one line per method. Methods without privacy are horizontal lines."""
    lines: dict[str, dict[str, list[float]]] = {}
    for (mix, method, epsilon), values in by_place(rows, ACCURACY).items():
        if mix in SHOWN:
            lines.setdefault(method if epsilon != "none" else f"{method}, no privacy", {})[epsilon] = values
    figure = Figure(figsize=(4.8, 5.2), layout="constrained")
    plot = figure.subplots()
    plot.axhspan(*SURROUNDINGS, color="0.85", label="the cells' surroundings alone")
    plot.axhline(CHANCE, color="0.6", linewidth=1, linestyle=":", label="chance")
    draw_lines(plot, dict(sorted(lines.items(), key=lambda one: -max(map(statistics.mean, one[1].values())))))
    plot.set_xlabel("epsilon, delta 1e-5 (smaller: more private)")
    plot.set_ylabel("accuracy, 11 kinds of cells")
    plot.grid(color="0.92")
    figure.legend(loc="outside lower center", fontsize=9, frameon=False)
    return figure
