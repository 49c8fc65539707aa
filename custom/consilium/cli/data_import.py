"""The command `consilium data import`."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from consilium.cli.options import FormatOption, check_finite, emit
from consilium.core.errors import ConfigError
from consilium.core.sanitize import shown
from consilium.data.importers.base import Options
from consilium.data.importers.registry import IMPORTERS, import_sets
from consilium.data.pairs import parse
from consilium.federation.sites import MOST_SITES
from consilium.report.tables import Table, columns


def data_import(
    name: Annotated[str, typer.Argument(help="a data set; --list shows all")] = "",
    source: Annotated[Path | None, typer.Argument(help="the folder it was unpacked into; csv: the file")] = None,
    dest: Annotated[Path | None, typer.Argument(metavar="DEST", help="receives a folder per site and import.json")] = None,
    validation: Annotated[float, typer.Option(help="share of patients, where the publisher has no validation split")] = 0.1,
    test: Annotated[float, typer.Option(help="share of patients, where the publisher has no test split")] = 0.2,
    seed: Annotated[int, typer.Option(min=0, help="decides who goes where")] = 0,
    sites: Annotated[
        int, typer.Option(min=0, max=MOST_SITES, help="pool all and deal patients out to so many sites; 0: the set's own")
    ] = 0,
    minimum: Annotated[int, typer.Option(min=1, help="leave sites with fewer samples out")] = 1,
    types: Annotated[bool, typer.Option("--types", help="label cell classes instead of nuclei (pannuke, monusac)")] = False,
    resplit: Annotated[bool, typer.Option("--resplit", help="pool the publisher's splits and cut anew by patient")] = False,
    size: Annotated[
        str, typer.Option(help="one of several files (winogrande: xl, l, m, s, xs, debiased; careqa: en, es)")
    ] = "",
    only: Annotated[list[str] | None, typer.Option(metavar="SITE", help="take this site; may be repeated")] = None,
    rename: Annotated[list[str] | None, typer.Option(metavar="OLD=NEW", help="name a site otherwise; may be repeated")] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=NAME", help="csv: the heading of image, label, site, patient or split; may be repeated"),
    ] = None,
    mask_pattern: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[IMAGE=]MASK",
            help="own: how masks are called after images, such as '{}_mask' or '{}_0000={}'; may be repeated",
        ),
    ] = None,
    exact_values: Annotated[
        bool, typer.Option("--exact-values", help="own, csv: each value of a mask is a label, on edges alone and over 32 too")
    ] = False,
    patient_folders: Annotated[
        bool | None,
        typer.Option("--patient-folders/--no-patient-folders", help="own: folders are of patients, or of sites; else by name"),
    ] = None,
    add: Annotated[bool, typer.Option("--add", help="put the sites beside those that DEST has from other imports")] = False,
    show: Annotated[bool, typer.Option("--list", help="show the data sets and the folders each expects")] = False,
    format: FormatOption = "txt",
) -> None:
    """Turn a published data set into a data list per site; pictures stay where they are, splits never cut a patient."""
    check_finite(validation=validation, test=test)
    if show or not name:
        layouts = {key: one.layout for key, one in IMPORTERS.items()}
        emit(layouts, (f"{key}: {layout}" for key, layout in layouts.items()), format)
    elif source is None or dest is None:
        raise ConfigError(f"SOURCE and DEST: missing; write consilium data import {name} SOURCE DEST")
    else:
        names = _pairs("--rename: {!r}: expected OLD=NEW", rename)
        fields = _pairs("--column: {!r}: expected FIELD=NAME", column)
        how = (fields, tuple(map(parse, mask_pattern or ())), exact_values, patient_folders)
        options = Options(validation, test, seed, sites, minimum, types, resplit, size, tuple(only or ()), names, *how)
        found = import_sets(name, source, dest, options, add)
        emit(found[dest] if dest in found else {str(place): one for place, one in found.items()}, _lines(found), format)


def _pairs(wrong: str, pairs: list[str] | None) -> dict[str, str]:
    """Return what stands before and behind each =. Raises ConfigError."""
    for pair in pairs or []:
        if not all(pair.partition("=")):
            raise ConfigError(wrong.format(pair))
    return dict(pair.split("=", 1) for pair in pairs or [])


def _lines(found: Mapping[Path, Mapping[str, Any]]) -> Iterator[Table | str]:
    """Yield the samples of each site of the lists made, by folder, for people."""
    for dest, summary in found.items():
        rows = [[site, *map(str, counts.values())] for site, counts in summary["sites"].items()]
        yield Table(f"{summary['name']}: samples per site", columns("site", "training", "validation", "test"), rows)
        yield from (f"note: {shown(note, 1000)}" for note in summary["notes"])
        if summary["classes"] is not None:
            yield f"task.classes: {json.dumps(summary['classes'])}"
        files = "JSONL files" if any(dest.glob("*/*.jsonl")) else "datalist.json"
        yield f"{dest}: a folder with {files} per site, and import.json"
