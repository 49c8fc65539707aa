"""A picture of scores along a study's axis of numbers, such as labelled images a site or ranks: a line for each method."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from consilium.report.compare.table import Table

FEWEST = 2
"""Numbers that make a line."""


def axis_of(table: Table) -> str:
    """Return the first axis whose values are numbers, one at most excepted (`all`); "" where there is none."""
    labels = [run.labels for run in table.group.runs.values()]
    axes = dict.fromkeys(axis for one in labels for axis in one)
    return next((axis for axis in axes if _numbers({one.get(axis, "") for one in labels})), "")


def _why_not(table: Table) -> str:
    """Return why a table has no such picture."""
    labels = table.group.first.labels
    if axis := next((axis for axis in labels if axis in table.group.data_axes and _is_number(labels[axis])), ""):
        return f"the values of {axis} are other data, which do not share a picture"
    return "no axis of a study has numbers"


def _numbers(values: set[str]) -> bool:
    words = [value for value in values if not _is_number(value)]
    return len(words) <= 1 and len(values) - len(words) >= FEWEST


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def places(values: set[str]) -> list[str]:
    """Return the values in the order of their numbers, a word last."""
    return sorted(values, key=lambda value: (not _is_number(value), float(value) if _is_number(value) else 0.0))


def lines(table: Table, axis: str) -> dict[str, dict[str, list[float]]]:
    """Return the means over sites by what else a method is called, and by value on the axis, each by seed."""
    found: dict[str, dict[str, list[float]]] = {}
    for method in table.methods:
        labels = next((run.labels for (name, _), run in table.group.runs.items() if name == method), {})
        if axis in labels and (means := table.means(method)):
            rest = ", ".join(value for other, value in labels.items() if other != axis)
            found.setdefault(rest or axis, {})[labels[axis]] = means
    return found


def along(table: Table) -> tuple[Figure | None, str]:
    """Return means over sites and seeds along the axis, bars from the lowest to the highest seed; steps are drawn equal."""
    from consilium.report.compare.pictures import finish, plain

    axis = axis_of(table)
    found = lines(table, axis) if axis else {}
    if not found:
        return None, _why_not(table)
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    plot = figure.subplots()
    draw_lines(plot, found)
    plot.set_xlabel(plain(axis), fontsize=8)
    plot.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    finish(figure, plot, table, f"along {axis}, mean over sites", "bars: lowest to highest seed")
    return figure, ""


def draw_lines(plot: Any, found: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Draw each line of `lines`: means, bars from the lowest to the highest seed, places in equal steps.

    What has the word alone, as a method without privacy on an axis of epsilon, has no place: it goes across, dashed.
    """
    from consilium.report.compare.pictures import plain, style

    order = places({value for line in found.values() for value in line if not _is_across(line)})
    for index, (name, line) in enumerate(found.items()):
        look = style(index)
        if _is_across(line):
            ((_, values),) = line.items()
            plot.axhline(math.fsum(values) / len(values), color=look["color"], linestyle="--", linewidth=1.2, label=plain(name))
        else:
            _draw(plot, [(order.index(value), line[value]) for value in order if value in line], plain(name), look)
    plot.set_xticks(range(len(order)), [plain(value) for value in order])


def _is_across(line: Mapping[str, Sequence[float]]) -> bool:
    return not any(map(_is_number, line))


def _draw(plot: Any, points: list[tuple[int, Sequence[float]]], name: str, look: dict[str, Any]) -> None:
    means = [math.fsum(values) / len(values) for _, values in points]
    below = [mean - min(values) for mean, (_, values) in zip(means, points, strict=True)]
    above = [max(values) - mean for mean, (_, values) in zip(means, points, strict=True)]
    plot.errorbar([x for x, _ in points], means, yerr=[below, above], capsize=2, linewidth=1.6, label=name, **look)
