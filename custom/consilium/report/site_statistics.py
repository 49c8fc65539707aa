"""The result of a statistics job: a table of 80 columns that compares the sites' data."""

from collections.abc import Iterator, Mapping
from io import StringIO
from typing import Any

from rich.console import Console

from consilium.core.sanitize import shown
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
