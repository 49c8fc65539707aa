"""Published numbers from papers, and a study's floors. Tables show them beside measured numbers. Means and tests omit them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from consilium.report.compare import DIAGNOSED, HELD_OUT
from consilium.report.compare.comparability import Group
from consilium.report.compare.score_statistics import GroupScores, diagnostic_series, mean, scores_of
from consilium.report.tables import Column, Table, difference_text, number_text, only_true

SITE = "site"
"""Name in a row of `published` that says for which site its numbers were printed."""


@dataclass(frozen=True)
class Published:
    """One number that a paper printed for the cells with these labels: of one `site`, or "" for the mean over sites.

    `floor`: if not "", the number belongs to no method. It is the score that is reached without learning the task, and this
    text says how.
    """

    labels: Mapping[str, str]
    metric: str
    value: float
    site: str = ""
    floor: str = ""


def read_published(
    rows: Sequence[Mapping[str, str | float]], axes: Sequence[str], floor: Mapping[str, str | float] | None = None
) -> list[Published]:
    """Return the published numbers of a study. `rows`: each has labels and metrics. `floor`: the study's floor, if any."""
    found = []
    for row in rows:
        labels = {axis: str(row[axis]) for axis in axes if axis in row}
        numbers = {k: v for k, v in row.items() if k not in labels and isinstance(v, int | float)}
        found += [Published(labels, metric, float(value), str(row.get(SITE, ""))) for metric, value in numbers.items()]
    values = {name: float(value) for name, value in (floor or {}).items() if not isinstance(value, str)}
    return found + [Published({}, metric, value, floor=str((floor or {})["about"])) for metric, value in values.items()]


def method_of(number: Published, group: Group) -> str | None:
    """Return the only method of a group whose cells have a number's labels; None if there is none or several."""
    wanted = number.labels.items()
    methods = {method for (method, _), run in group.runs.items() if not number.floor and wanted <= dict(run.labels).items()}
    return methods.pop() if len(methods) == 1 else None


def published_for(numbers: Sequence[Published], group: Group, method: str, metric: str) -> float | None:
    """Return the published mean over sites of a method; None without one."""
    fitting = [one for one in numbers if one.metric == metric and not one.site and method_of(one, group) == method]
    return fitting[-1].value if fitting else None


def published_table(scores: GroupScores, numbers: Sequence[Published]) -> list[Table]:
    """Return a table of the published numbers that the table of scores lacks: of one site or of another metric. [] for none."""
    rows = []
    for one in numbers:
        method = method_of(one, scores.group)
        if method is None or (one.metric == scores.metric and not one.site):
            continue
        runs = scores.group.runs_of(method)
        if one.metric in DIAGNOSED:
            values = [] if one.site else [values[-1] for values in diagnostic_series(runs, DIAGNOSED[one.metric])]
        elif one.metric.startswith(HELD_OUT):
            held_out = (run.held_out_score(one.metric.removeprefix(HELD_OUT)) for run in runs)
            values = [value for value in held_out if value is not None]
        else:
            other = scores_of(scores.group, scores.stage, one.metric)
            values = other.scores_at_site(method, one.site) if one.site else other.means(method)
        ours = mean(values)
        gap = "-" if ours is None else difference_text(ours - one.value)
        rows.append([method, one.site or "mean", one.metric, number_text(ours), number_text(one.value), gap])
    columns = [
        Column("method", right=False),
        Column("site", 1, False),
        Column("metric", 1, False),
        Column("measured here"),
        Column("published"),
        Column("difference"),
    ]
    told, grid = [row[2] for row in rows], scores.group.first.scores.grid
    last = [name for name in DIAGNOSED if name in told]
    notes = {
        "published: the paper's own number, not measured here": True,
        f"{', '.join(last)}: ours is the last round's": last,
        f"{HELD_OUT}: sites not asked to train, before the last round": any(one.startswith(HELD_OUT) for one in told),
        f"measured here on the {grid}": grid,
    }
    title = scores.group.with_group_name(f"Other published numbers beside ours, {scores.stage} model")
    return [Table(title, columns, rows, only_true(notes))] if rows else []
