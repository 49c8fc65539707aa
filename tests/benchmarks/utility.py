"""What private training buys, of a study's measured cells: a table, and a picture of accuracy against epsilon."""

import statistics
from collections.abc import Mapping

from matplotlib.figure import Figure

from consilium.report.compare.figures import draw_lines, ticks
from tests.benchmarks.effects import ACCURACY, DICE, LOSS
from tests.benchmarks.measured import MEASURE, NOISE, Rows

PICTURES = {"privacy_utility_rbc12": "privacy_utility.png"}
"""By study; they show the uneven mix, and stand beside RESULTS.md."""
SCORES = {"privacy_utility_rbc12": ACCURACY, "privacy_smears_rbc12": ACCURACY, "privacy_medquad": LOSS, "privacy_nuclei": DICE}
"""What the studies of private training measure."""
SURROUNDINGS, CHANCE = (0.29, 0.31), 1 / 11
"""What the cells' surroundings alone give (small CNN, two seeds), and guessing."""
SHOWN = ("0.1", "one site")
"""What the picture shows: Dirichlet(0.1), and pooled data."""


def by_place(rows: Rows, measure: str) -> dict[tuple[str, str, str], list[float]]:
    """Return a measure's values by mix, method and epsilon, a value a seed, in the order of the seeds."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for key, value in sorted(rows.items()):
        labels = dict(key)
        if labels[MEASURE] == measure:
            place = (labels.get("mix", "-"), labels["method"], labels.get("epsilon", "-"))
            found.setdefault(place, []).append(value)
    return found


def table(rows: Rows, score: str = ACCURACY) -> str:
    """Return a row for each mix, method and epsilon: noise over signal, and the score with its seeds."""
    noise, found = by_place(rows, NOISE), by_place(rows, score)
    heading = score.rpartition("/")[-1]
    lines = [f"| mix | method | epsilon | noise / signal | {heading} | by seed |", "|---|---|---|---|---|---|"]
    order = ticks({epsilon for *_, epsilon in found})
    sign = 1 if score == LOSS else -1
    for mix, method, epsilon in sorted(found, key=lambda one: (one[0], _best(found, one, sign), one[1], -order.index(one[2]))):
        values, ratio = found[mix, method, epsilon], noise[mix, method, epsilon]
        each = " ".join(f"{value:.3f}" for value in values)
        said = f"{statistics.mean(ratio):.3g}" if any(ratio) else "-"
        lines.append(f"| {mix} | {method} | {epsilon} | {said} | {statistics.mean(values):.3f} | {each} |")
    return "\n".join(lines) + "\n" if found else "No cell has run.\n"


def _best(found: Mapping[tuple[str, str, str], list[float]], place: tuple[str, str, str], sign: int) -> float:
    """Return the best mean of a method, so that its rows stay together; `sign` times it is the smaller the better."""
    return min(sign * statistics.mean(values) for other, values in found.items() if other[:2] == place[:2])


def picture(rows: Rows) -> Figure:
    """Return accuracy against epsilon, a line a method; what has no privacy goes across, and so does what needs no cell."""
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
