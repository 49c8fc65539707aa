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
from consilium.federation.simulated_sites import MOST_SITES
from consilium.report.tables import Table, columns


def data_import(
    name: Annotated[str, typer.Argument(help="name of a data set; --list shows all names")] = "",
    source: Annotated[Path | None, typer.Argument(help="folder with the unpacked data set; csv: the file")] = None,
    dest: Annotated[Path | None, typer.Argument(metavar="DEST", help="folder for a folder per site and import.json")] = None,
    validation: Annotated[float, typer.Option(help="share of patients, if the data set has no validation split")] = 0.1,
    test: Annotated[float, typer.Option(help="share of patients, if the data set has no test split")] = 0.2,
    seed: Annotated[int, typer.Option(min=0, help="seed of the random splits")] = 0,
    sites: Annotated[
        int,
        typer.Option(
            min=0,
            max=MOST_SITES,
            help="pool all patients and distribute them over this many sites; 0: the data set's own sites",
        ),
    ] = 0,
    minimum: Annotated[int, typer.Option(min=1, help="leave out sites with fewer samples")] = 1,
    types: Annotated[
        bool, typer.Option("--types", help="label the classes of cells instead of nuclei (pannuke, monusac)")
    ] = False,
    resplit: Annotated[
        bool, typer.Option("--resplit", help="pool the data set's own splits and split anew by patient")
    ] = False,
    size: Annotated[
        str, typer.Option(help="which of several files to import (winogrande: xl, l, m, s, xs, debiased; careqa: en, es)")
    ] = "",
    only: Annotated[list[str] | None, typer.Option(metavar="SITE", help="import only this site; may be repeated")] = None,
    rename: Annotated[list[str] | None, typer.Option(metavar="OLD=NEW", help="rename a site; may be repeated")] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=NAME", help="csv: heading of the column for image, label, site, patient or split; may be repeated"
        ),
    ] = None,
    mask_pattern: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[IMAGE=]MASK",
            help="own: how a mask's name follows from its image's, as '{}_mask' or '{}_0000={}'; may be repeated",
        ),
    ] = None,
    exact_values: Annotated[
        bool,
        typer.Option(
            "--exact-values", help="own, csv: take each value of a mask as a label, also values on edges only and more than 32"
        ),
    ] = False,
    patient_folders: Annotated[
        bool | None,
        typer.Option(
            "--patient-folders/--no-patient-folders", help="own: folders are patients, or sites; default: decide by their names"
        ),
    ] = None,
    add: Annotated[bool, typer.Option("--add", help="add the sites to those that DEST has from other imports")] = False,
    show: Annotated[bool, typer.Option("--list", help="show all data sets, and the folders that each expects")] = False,
    format: FormatOption = "txt",
) -> None:
    """Write a data list per site for a published data set or your own files. Pictures stay where they are.

    All samples of a patient are in the same split.
    """
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
    """Return the pairs NAME=VALUE as a dict. Raises ConfigError with the message `wrong` for any other text."""
    for pair in pairs or []:
        if not all(pair.partition("=")):
            raise ConfigError(wrong.format(pair))
    return dict(pair.split("=", 1) for pair in pairs or [])


def _lines(found: Mapping[Path, Mapping[str, Any]]) -> Iterator[Table | str]:
    """Yield, per folder of lists, a table with the samples of each site, notes, and the classes."""
    for dest, summary in found.items():
        rows = [[site, *map(str, counts.values())] for site, counts in summary["sites"].items()]
        yield Table(f"{summary['name']}: samples per site", columns("site", "training", "validation", "test"), rows)
        yield from (f"note: {shown(note, 1000)}" for note in summary["notes"])
        if summary["classes"] is not None:
            yield f"task.classes: {json.dumps(summary['classes'])}"
        files = "JSONL files" if any(dest.glob("*/*.jsonl")) else "datalist.json"
        yield f"{dest}: a folder with {files} per site, and import.json"
