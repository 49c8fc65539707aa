"""How sites differ, by the statistics they gave: a table of 80 columns and a picture."""

from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from consilium.report.clean import line, shown

WIDTH = 80
Answers = Mapping[str, Mapping[str, Any]]
"""By site what it told, see privacy/statistics.py, or {"refused": why}."""


def text(job: str, sites: Answers) -> str:
    """Return the table as plain text of at most 80 columns."""
    console = Console(file=(file := StringIO()), width=WIDTH, force_terminal=False, color_system=None)
    console.print(table(job, sites))
    return file.getvalue()


def table(job: str, sites: Answers) -> Table:
    """Return a row for everything a site told, the samples first."""
    found = Table(title=line(f"{job}: the sites' data"), title_justify="left", box=SIMPLE, pad_edge=False)
    for heading, most in (("site", 20), ("what", None), ("counts", None)):
        found.add_column(heading, max_width=most, overflow="fold", no_wrap=heading == "what")
    for name, told in sites.items():
        for number, (what, said) in enumerate(_rows(told)):
            found.add_row(line(name) if number == 0 else "", what, line(said, limit=2000))
    return found


def _rows(told: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "refused" in told:
        yield "refuses", str(told["refused"])
        return
    few = f"under {told['minimum']} patients"
    splits = ((split, one) for split, one in told["splits"].items())
    yield "samples", ", ".join(f"{split} {_samples(one) if one else few}" for split, one in splits)
    training = told["splits"]["training"] or {"classes": []}
    areas = {part["names"][0]: part["share"] for part in told["areas"]}
    if classes := [_group(one) + _area(areas.get(one["names"][0])) for one in training["classes"]]:
        yield "classes", ", ".join(classes)
    for what in ("sizes", "spacing", "lengths"):
        if groups := [_group(one) for one in told[what] if one["samples"]]:
            yield what, ", ".join(groups)
    if told["greys"]:
        yield "greys", ", ".join(f"{share:g} % at {where(told['greys'], share / 100)}" for share in (5, 50, 95))


def _samples(split: Mapping[str, Any]) -> str:
    patients = split["patients"]
    return str(split["samples"]) if patients is None else f"{split['samples']} of {patients} patients"


def _group(group: Mapping[str, Any]) -> str:
    return f"{_joined(group['names'])}: {group['samples']}"


def _joined(names: list[str]) -> str:
    """Return the names of merged cells: all of a few, the ends of many."""
    told = [shown(name, 64) for name in names]
    return " + ".join(told) if len(told) < 4 else f"{told[0]} ... {told[-1]}"


def _area(share: float | None) -> str:
    return "" if share is None else f" ({share:.1%} of a picture)"


def where(portions: list[Mapping[str, Any]], share: float) -> str:
    """Return the cells in which this share of the whole, counted from the first cell on, is reached."""
    total = 0.0
    for portion in portions:
        total += portion["share"]
        if total >= share - 1e-9:
            break
    first, last = portion["names"][0], portion["names"][-1]
    return first if first == last else f"{first.split()[0]} to {last.split()[-1]}"


def plot(path: Path, sites: Answers) -> None:
    """Draw the classes, sizes and grey levels of all sites that told them, the others named as refusing."""
    from matplotlib.figure import Figure

    told = {shown(name, 30): one for name, one in sites.items()}
    figure = Figure(figsize=(12, max(3.0, 1.6 + 0.35 * len(told))), layout="constrained")
    classes, sizes, greys = figure.subplots(1, 3)
    _bars(classes, {name: _classes(one) for name, one in told.items()}, "samples of each class")
    _bars(sizes, {name: one.get("sizes") for name, one in told.items()}, "longest side in pixels")
    _lines(greys, {name: one["greys"] for name, one in told.items() if one.get("greys")})
    figure.savefig(path, dpi=110)


def _classes(told: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    return None if "refused" in told else (told["splits"]["training"] or {}).get("classes")


def _bars(axis: Any, rows: Mapping[str, list[Mapping[str, Any]] | None], title: str) -> None:
    """Draw a bar a site, a colour a group of cells."""
    from matplotlib import colormaps

    axis.set_title(title, fontsize=9)
    axis.set_yticks(range(len(rows)), [name if groups else f"{name} (not told)" for name, groups in rows.items()], fontsize=7)
    axis.invert_yaxis()
    labels = list(dict.fromkeys(_joined(one["names"]) for groups in rows.values() for one in groups or () if one["samples"]))
    for row, groups in enumerate(rows.values()):
        left = 0
        for one in (one for one in groups or () if one["samples"]):
            number = labels.index(_joined(one["names"]))
            axis.barh(row, one["samples"], left=left, color=colormaps["tab20"](number % 20), edgecolor="white")
            left += one["samples"]
    for number, label in enumerate(labels[:12]):
        axis.plot([], [], "s", color=colormaps["tab20"](number % 20), label=label)
    if labels:
        axis.legend(fontsize=6)


def _lines(axis: Any, rows: Mapping[str, list[Mapping[str, Any]]]) -> None:
    """Draw a site's share of each grey level; merged cells share theirs equally."""
    axis.set_title("grey levels", fontsize=9)
    for name, portions in rows.items():
        names = [one for portion in portions for one in portion["names"]]
        shares = [portion["share"] / len(portion["names"]) for portion in portions for _ in portion["names"]]
        axis.step([int(one.split()[0]) for one in names], shares, where="post", label=name)
    if rows:
        axis.legend(fontsize=6)
