"""Numbers that a paper printed, or a study holds its own against. They stand beside what was measured, in no mean or test."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from consilium.report.compare import DIAGNOSED, HELD_OUT
from consilium.report.compare.diagnosed import last_values
from consilium.report.compare.groups import Group
from consilium.report.compare.sheet import Column, Sheet, titled
from consilium.report.compare.table import Table, mean, table_of
from consilium.report.means import difference, number

SITE = "site"
"""The label of a number that was printed for one site."""


@dataclass(frozen=True)
class Published:
    """One printed number: of the cells that have these labels, and of one site where there is one; else the mean.

    `floor`: what reaches it without learning what the study is about, in words; it is no method's then.
    """

    labels: Mapping[str, str]
    metric: str
    value: float
    site: str = ""
    floor: str = ""


def read_published(rows: Sequence[Mapping[str, str | float]], axes: Sequence[str]) -> list[Published]:
    """Return the numbers of a study's rows of labels and metrics."""
    found = []
    for row in rows:
        labels = {axis: str(row[axis]) for axis in axes if axis in row}
        numbers = {k: v for k, v in row.items() if k not in labels and isinstance(v, int | float)}
        found += [Published(labels, metric, float(value), str(row.get(SITE, ""))) for metric, value in numbers.items()]
    return found


def read_floor(floor: Mapping[str, str | float]) -> list[Published]:
    """Return a study's floor as numbers of no method."""
    values = {name: float(value) for name, value in floor.items() if not isinstance(value, str)}
    return [Published({}, metric, value, floor=str(floor["about"])) for metric, value in values.items()]


def floor_rows(numbers: Sequence[Published], metric: str, columns: Sequence[Column]) -> list[list[str]]:
    """Return a row for every floor of a metric, which has a mean and nothing else."""
    floors = [one for one in numbers if one.floor and one.metric == metric]
    means = [column.heading == "mean" and column.rank == 0 for column in columns[1:]]  # a site may be called so
    return [[f"floor: {one.floor}", *(number(one.value) if mean else "-" for mean in means)] for one in floors]


def method_of(number: Published, group: Group) -> str | None:
    """Return the method of a group that a number is about: the only one whose cells have its labels; None where none is."""
    wanted = number.labels.items()
    methods = {method for (method, _), run in group.runs.items() if not number.floor and wanted <= dict(run.labels).items()}
    return methods.pop() if len(methods) == 1 else None


def published_for(numbers: Sequence[Published], group: Group, method: str, metric: str) -> float | None:
    """Return what was printed as a method's mean over sites, None where nothing was."""
    fitting = [one for one in numbers if one.metric == metric and not one.site and method_of(one, group) == method]
    return fitting[-1].value if fitting else None


def published_sheet(table: Table, numbers: Sequence[Published]) -> list[Sheet]:
    """Return a row per printed number that is not a method's mean by this table's metric; none where there is none."""
    group, rows = table.group, []
    for one in numbers:
        method = method_of(one, group)
        if method is None or (one.metric == table.metric and not one.site):
            continue
        ours = mean(_measured(table, one, method))
        gap = "-" if ours is None else difference(ours - one.value)
        rows.append([method, one.site or "mean", one.metric, number(ours), number(one.value), gap])
    columns = [Column("method", right=False), Column("site", 1, False), Column("metric", 1, False)]
    columns += [Column("measured here"), Column("published"), Column("difference")]
    title = titled(group, f"Other published numbers beside ours, {table.stage} model")
    notes = ["published: the paper's own number, not measured here"]
    told = [row[2] for row in rows]
    notes += [f"{', '.join(last)}: ours is the last round's"] if (last := [n for n in DIAGNOSED if n in told]) else []
    notes += [f"{HELD_OUT}: sites not asked to train, before the last round"] if any(map(_is_held_out, told)) else []
    return [Sheet(title, columns, rows, notes)] if rows else []


def _measured(table: Table, one: Published, method: str) -> list[float]:
    """Return what was measured here in the place of a printed number, by run."""
    if one.metric in DIAGNOSED:
        return [] if one.site else last_values(table.group, method, DIAGNOSED[one.metric])
    if _is_held_out(one.metric):
        runs = [run for (name, _), run in table.group.runs.items() if name == method]
        return [value for run in runs if (value := run.held_out(one.metric.removeprefix(HELD_OUT))) is not None]
    other = table_of(table.group, table.stage, one.metric)
    return other.at(method, one.site) if one.site else other.means(method)


def _is_held_out(metric: str) -> bool:
    return metric.startswith(HELD_OUT)
