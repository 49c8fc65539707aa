"""Numbers that a paper printed. They stand beside what was measured, never in a mean or a test with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from consilium.report.compare.groups import Group


@dataclass(frozen=True)
class Published:
    """One printed number: of the cells whose labels are these."""

    labels: Mapping[str, str]
    metric: str
    value: float


def published_for(numbers: Sequence[Published], group: Group, method: str, metric: str) -> float | None:
    """Return what was printed for a method's cells of a group, None where nothing was.

    A number belongs to a cell if all its labels are the cell's; with several the one with the most labels counts.
    """
    cells = [run.labels for (name, _), run in group.runs.items() if name == method]
    fitting = [
        one
        for one in numbers
        if one.metric == metric and one.labels and any(one.labels.items() <= dict(labels).items() for labels in cells)
    ]
    return max(fitting, key=lambda one: len(one.labels)).value if fitting else None
