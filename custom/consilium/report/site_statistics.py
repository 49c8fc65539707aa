"""The result of a statistics job: a table of 80 columns and a picture that compare the sites' data."""

from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from consilium.core.lazy import figure, matplotlib
from consilium.core.sanitize import shown
from consilium.core.storage import write_figure
from consilium.report.tables import Column, Table, terminal_table

WIDTH = 80
Answers = Mapping[str, Mapping[str, Any]]
"""By site its statistics, see privacy/disclosure_control.py, or {"refused": why}."""


def statistics_text(job: str, sites: Answers) -> str:
    """Return a table as plain text of at most 80 columns: per site a row for each statistic, the numbers of samples first."""
    rows = [
        [name if number == 0 else "", *pair] for name, told in sites.items() for number, pair in enumerate(_rows_of_site(told))
    ]
    table = Table(f"{job}: the sites' data", [Column(one, right=False) for one in ("site", "what", "counts")], rows)
    console = Console(file=(file := StringIO()), width=WIDTH, force_terminal=False, color_system=None)
    console.print(terminal_table(table, WIDTH))
    return file.getvalue()


def _rows_of_site(site_answer: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (statistic, its counts in words) for one site, or its refusal."""
    if "refused" in site_answer:
        yield "refuses", str(site_answer["refused"])
        return
    counts = []
    for split, one in site_answer["splits"].items():
        of = f" of {one['patients']} patients" if one and one["patients"] is not None else ""
        counts.append(f"{split} {one['samples']}{of}" if one else f"{split} under {site_answer['minimum']} patients")
    yield "samples", ", ".join(counts)
    training = site_answer["splits"]["training"] or {"classes": []}
    areas = {part["names"][0]: f" ({part['share']:.1%} of a picture)" for part in site_answer["areas"]}
    groups = {"classes": training["classes"]} | {what: site_answer[what] for what in ("sizes", "spacing", "lengths")}
    for what, cells in groups.items():
        there = [one for one in cells if one["samples"] or what == "classes"]
        area = areas if what == "classes" else {}
        if there:
            yield (
                what,
                ", ".join(
                    f"{_join_cell_names(one['names'])}: {one['samples']}{area.get(one['names'][0], '')}" for one in there
                ),
            )
    if site_answer["greys"]:
        yield "greys", ", ".join(f"{share:g} % at {quantile_cells(site_answer['greys'], share / 100)}" for share in (5, 50, 95))


def _join_cell_names(names: list[str]) -> str:
    """Return the names of merged cells in one text: all names if there are under four, else the first and the last."""
    told = [shown(name, 64) for name in names]
    return " + ".join(told) if len(told) < 4 else f"{told[0]} ... {told[-1]}"


def quantile_cells(portions: list[Mapping[str, Any]], quantile: float) -> str:
    """Return the name of the cell, or cells, in which the cumulative share reaches `quantile` (0 to 1)."""
    total = 0.0
    for portion in portions:
        total += portion["share"]
        if total >= quantile - 1e-9:
            break
    first, last = portion["names"][0], portion["names"][-1]
    return first if first == last else f"{first.split()[0]} to {last.split()[-1]}"


def plot(path: Path, sites: Answers) -> None:
    """Draw the classes, sizes and grey levels of each site. Sites that did not report a measure are marked as "not told"."""
    told, colours = {shown(name, 30): one for name, one in sites.items()}, matplotlib.colormaps["tab20"]
    picture = figure.Figure(figsize=(12, max(3.0, 1.6 + 0.35 * len(told))), layout="constrained")
    *bars, greys = picture.subplots(1, 3)
    classes = {
        name: None if "refused" in one else (one["splits"]["training"] or {}).get("classes") for name, one in told.items()
    }
    measures = {
        "samples of each class": classes,
        "longest side in pixels": {name: one.get("sizes") for name, one in told.items()},
    }
    for axis, (title, rows) in zip(bars, measures.items(), strict=True):
        cells = {
            name: [(_join_cell_names(one["names"]), one["samples"]) for one in groups or ()] for name, groups in rows.items()
        }
        labels = list(dict.fromkeys(label for row in cells.values() for label, count in row if count))
        axis.set_title(title, fontsize=9)
        axis.set_yticks(range(len(rows)), [name if rows[name] else f"{name} (not told)" for name in rows], fontsize=7)
        axis.invert_yaxis()
        for place, row in enumerate(cells.values()):
            left = 0
            for label, count in ((label, count) for label, count in row if count):
                axis.barh(place, count, left=left, color=colours(labels.index(label) % 20), edgecolor="white")
                left += count
        for number, label in enumerate(labels[:12]):
            axis.plot([], [], "s", color=colours(number % 20), label=label)
        if labels:
            axis.legend(fontsize=6)
    greys.set_title("grey levels", fontsize=9)
    for name, portions in ((name, one["greys"]) for name, one in told.items() if one.get("greys")):
        names = [one for portion in portions for one in portion["names"]]
        shares = [portion["share"] / len(portion["names"]) for portion in portions for _ in portion["names"]]
        greys.step([int(one.split()[0]) for one in names], shares, where="post", label=name)  # merged cells share equally
    if greys.lines:
        greys.legend(fontsize=6)
    write_figure(path, picture, dpi=110)
