"""The commands `consilium data`: import published sets, look at data lists, share them out, generate phantoms."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from consilium.cli.data_check import data_check
from consilium.cli.data_split import data_split
from consilium.cli.data_stats import data_stats
from consilium.cli.options import MOST_SITES, Format, FormatOption, check_finite
from consilium.errors import ConfigError
from consilium.report.clean import line, shown

app = typer.Typer(no_args_is_help=True, help="Import published sets, look at data lists, share them out, generate phantoms.")
app.command("check")(data_check)
app.command("split")(data_split)
app.command("stats")(data_stats)


@app.command("import")
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


@app.command("phantoms")
def data_phantoms(
    folder: Annotated[Path, typer.Argument(help="receives a folder per site")],
    kind: Annotated[str, typer.Option(help="fundus, nuclei, cells or sentences")] = "fundus",
    sites: Annotated[int, typer.Option(min=1, max=MOST_SITES)] = 3,
    training: Annotated[int, typer.Option(min=1, max=100_000)] = 24,
    validation: Annotated[int, typer.Option(min=0, max=100_000)] = 8,
    test: Annotated[int, typer.Option(min=0, max=100_000)] = 16,
    size: Annotated[int, typer.Option(min=16, max=4096, help="pixels")] = 128,
    appearance: Annotated[float, typer.Option(min=0, max=1, help="strength of the appearance shift")] = 0.7,
    annotation: Annotated[float, typer.Option(min=0, max=1, help="strength of the shift of labels")] = 0.7,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    format: FormatOption = Format.TXT,
) -> None:
    """Generate sites with set shifts of appearance and annotation; use them with simulate --data FOLDER."""
    from consilium.data.synthetic.phantoms import LABELS, check_own, make_phantoms

    check_finite(appearance=appearance, annotation=annotation)
    if kind not in LABELS:
        raise ConfigError(f"--kind: {kind!r} is not one of {', '.join(LABELS)}")
    names = [f"site-{i}" for i in range(1, sites + 1)]
    for name in names:
        check_own(folder / name)
    shifts = (appearance, annotation)
    lists = [make_phantoms(folder / n, kind, n, seed, training, validation, test, size, *shifts) for n in names]
    print(json.dumps([str(p) for p in lists]) if format is Format.JSON else "\n".join(map(str, lists)))


@app.command("partition")
def data_partition(
    source: Annotated[Path, typer.Argument(help="a folder per class, with or without train/ and test/, or a datalist.json")],
    folder: Annotated[Path, typer.Argument(metavar="DEST", help="receives a folder per site, partition.json, partition.png")],
    sites: Annotated[int, typer.Option(min=1, max=MOST_SITES)] = 12,
    beta: Annotated[
        float, typer.Option(min=0.001, max=1e6, help="Dirichlet concentration: 0.1 very uneven, 100 nearly even")
    ] = 0.1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    minimum: Annotated[int, typer.Option(min=1, help="training samples every site gets at least")] = 8,
    exclude: Annotated[list[str] | None, typer.Option(help="leave this class out; may be repeated")] = None,
    format: FormatOption = Format.TXT,
) -> None:
    """Share a classification set out among sites with uneven labels; pictures stay where they are, all sites test alike."""
    from consilium.data.partition import partition

    check_finite(beta=beta)
    found = partition(source, folder, sites, beta, seed, minimum, exclude or [])
    if format is Format.JSON:
        print(json.dumps(found, indent=1))
        return
    for site, counts in found["training"].items():
        parts = ", ".join(f"{n} {shown(name)}" for name, n in counts.items() if n)
        typer.echo(f"{site}: {sum(counts.values())} training samples: {parts}")
    typer.echo(f"{folder}: a data list per site, partition.json and partition.png")
