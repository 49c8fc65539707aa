"""The command `consilium data import`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from consilium.cli.options import MOST_SITES, Format, FormatOption, check_finite
from consilium.errors import ConfigError
from consilium.report.clean import line, shown


def data_import(
    name: Annotated[str, typer.Argument(help="a data set; --list shows all")] = "",
    source: Annotated[Path | None, typer.Argument(help="the folder it was unpacked into")] = None,
    dest: Annotated[Path | None, typer.Argument(metavar="DEST", help="receives a folder per site and import.json")] = None,
    validation: Annotated[float, typer.Option(help="share of patients, where the publisher has no validation split")] = 0.1,
    test: Annotated[float, typer.Option(help="share of patients, where the publisher has no test split")] = 0.2,
    seed: Annotated[int, typer.Option(min=0, help="decides who goes where")] = 0,
    sites: Annotated[
        int, typer.Option(min=0, max=MOST_SITES, help="pool all and deal patients out to so many sites; 0: the set's own")
    ] = 0,
    minimum: Annotated[int, typer.Option(min=1, help="leave sites with fewer samples out")] = 1,
    types: Annotated[bool, typer.Option("--types", help="label cell classes instead of nuclei (pannuke, monusac)")] = False,
    show: Annotated[bool, typer.Option("--list", help="show the data sets and the folders each expects")] = False,
    format: FormatOption = Format.TXT,
) -> None:
    """Turn a published data set into a data list per site; pictures stay where they are, splits never cut a patient."""
    from consilium.data.importers.base import Options
    from consilium.data.importers.registry import IMPORTERS, import_set

    check_finite(validation=validation, test=test)
    if show or not name:
        _print_layouts({key: one.layout for key, one in IMPORTERS.items()}, format)
    elif source is None or dest is None:
        raise ConfigError(f"SOURCE and DEST: missing; write consilium data import {name} SOURCE DEST")
    else:
        _print_sites(import_set(name, source, dest, Options(validation, test, seed, sites, minimum, types)), dest, format)


def _print_layouts(layouts: dict[str, str], format: str) -> None:
    if format == "json":
        print(json.dumps(layouts, indent=1))
        return
    for name, layout in layouts.items():
        typer.echo(f"{name}: {layout}")


def _print_sites(summary: dict[str, Any], dest: Path, format: str) -> None:
    if format == "json":
        print(json.dumps(summary, indent=1))
        return
    table = Table(title=f"{summary['name']}: samples per site", title_justify="left", box=SIMPLE, pad_edge=False)
    for heading in ("site", "training", "validation", "test"):
        table.add_column(heading, justify="left" if heading == "site" else "right", no_wrap=True)
    for site, counts in summary["sites"].items():
        table.add_row(line(site), *(str(n) for n in counts.values()))
    Console().print(table)
    for note in summary["notes"]:
        typer.echo(f"note: {shown(note, 1000)}")
    typer.echo(f"task.classes: {json.dumps(summary['classes'])}")
    typer.echo(f"{dest}: a folder with datalist.json per site, and import.json")
