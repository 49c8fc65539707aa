"""The commands `consilium data import`, `partition` and `phantoms`, which make data lists."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from consilium.cli.options import (
    FormatOption,
    emit,
    site_yaml_lines,
)
from consilium.core.errors import ConfigError, raise_first
from consilium.core.lazy import call
from consilium.core.sanitize import first_names_text, shown
from consilium.core.storage import clean_up_on_failure
from consilium.data.check_report import FEW
from consilium.data.importers.base import Options
from consilium.data.importers.registry import IMPORTERS, import_by_label_kind
from consilium.data.pairs import parse
from consilium.data.partition import partition, partition_texts
from consilium.data.synthetic.phantoms import KINDS, make_phantoms, refuse_overwriting_real_data
from consilium.data.text import has_texts
from consilium.federation.site_names import MOST_SITES
from consilium.report.tables import Table, columns


def data_import(
    name: Annotated[str, typer.Argument(help="name of a data set; --list shows all names")] = "",
    source: Annotated[Path | None, typer.Argument(help="folder with the unpacked data set; csv: the file")] = None,
    dest: Annotated[Path | None, typer.Argument(metavar="DEST", help="folder for a folder per site and import.json")] = None,
    validation: Annotated[
        float, typer.Option(min=0, max=1, help="share of patients, if the data set has no validation split")
    ] = 0.1,
    test: Annotated[float, typer.Option(min=0, max=1, help="share of patients, if the data set has no test split")] = 0.2,
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
    if show or not name:
        layouts = {key: one.layout for key, one in IMPORTERS.items()}
        emit(layouts, (f"{key}: {layout}" for key, layout in layouts.items()), format)
    elif source is None or dest is None:
        raise ConfigError(f"SOURCE and DEST: missing; write consilium data import {name} SOURCE DEST")
    else:
        given = [("--rename", "OLD=NEW", one) for one in rename or []] + [
            ("--column", "FIELD=NAME", one) for one in column or []
        ]
        raise_first({f"{option}: {one!r}: expected {form}": not all(one.partition("=")) for option, form, one in given})
        names, fields = (dict(one.split("=", 1) for one in pairs or []) for pairs in (rename, column))
        how = (fields, tuple(map(parse, mask_pattern or ())), exact_values, patient_folders)
        options = Options(validation, test, seed, sites, minimum, types, resplit, size, tuple(only or ()), names, *how)
        found = import_by_label_kind(name, source, dest, options, add)
        emit(found[dest] if dest in found else {str(place): one for place, one in found.items()}, _import_lines(found), format)


def _import_lines(found: Mapping[Path, Mapping[str, Any]]) -> Iterator[Table | str]:
    """Yield, per folder of lists, a table with the samples of each site, notes, and the classes."""
    for dest, summary in found.items():
        yield Table(
            f"{summary['name']}: samples per site",
            columns("site", "training", "validation", "test"),
            [[site, *map(str, counts.values())] for site, counts in summary["sites"].items()],
        )
        yield from (f"note: {shown(note, 1000)}" for note in summary["notes"])
        small = [
            f"{shown(site)} {split} {count}"
            for site, counts in summary["sites"].items()
            for split, count in counts.items()
            if split != "training" and 0 < count < FEW
        ]
        if small:
            yield f"note: small splits, whose scores will say little: {first_names_text(small, 8)}"
        if summary["classes"] is not None:
            yield f"task.classes: {json.dumps(summary['classes'])}"
        files = "JSONL files" if any(dest.glob("*/*.jsonl")) else "datalist.json"
        yield f"{dest}: a folder with {files} per site, and import.json"
        yield from site_yaml_lines([_list_of(dest / site) for site in summary["sites"]])


def _list_of(folder: Path) -> Path:
    """Return the data list in a site's folder: its datalist.json, or the folder itself if it holds JSONL files."""
    return folder / "datalist.json" if (folder / "datalist.json").is_file() else folder


# partition -------------------------------------------------------------------------------------------------------------


def data_partition(
    source: Annotated[
        Path, typer.Argument(help="a folder with a folder per class (also in train/ and test/), a datalist.json, or JSONL")
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="DEST", help="folder for a folder per site, partition.json and partition.png")
    ],
    sites: Annotated[int, typer.Option(min=1, max=MOST_SITES)] = 12,
    beta: Annotated[
        float, typer.Option(min=0.001, max=1e6, help="Dirichlet concentration: 0.1 very uneven, 100 nearly even")
    ] = 0.1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    minimum: Annotated[int, typer.Option(min=1, help="fewest training samples of a site")] = 8,
    iid: Annotated[bool, typer.Option("--iid", help="give all sites equal shares; ignores --beta")] = False,
    by: Annotated[
        str, typer.Option(metavar="KEY", help="texts: key of the records whose values are unevenly distributed over sites")
    ] = "",
    clusters: Annotated[
        int, typer.Option(min=0, max=1000, help="texts: distribute this many K-means clusters of the instructions unevenly")
    ] = 0,
    model: Annotated[
        Path | None,
        typer.Option(help="texts: folder of a transformers language model for --clusters; default: the tiny model"),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="texts: split each site's own texts 0.8 / 0.1 / 0.1")] = False,
    no_test: Annotated[
        bool, typer.Option("--no-test", help="pictures: make no test split, for runs that choose settings")
    ] = False,
    format: FormatOption = "txt",
) -> None:
    """Distribute a classification data set, or texts, unevenly over sites, with one test split for all (except --local)."""
    shares = None if iid else beta
    with clean_up_on_failure(folder):
        if has_texts(source) or source.suffix == ".jsonl":
            raise_first(
                {
                    "--no-test: is for pictures; with --local every site tests on its own texts": no_test,
                    "--clusters: take 2 or more, and without --by": clusters == 1 or (clusters and by),
                }
            )
            kinds = partial(call, "consilium.models.causal_lm.text_embeddings:text_clusters", clusters, model, seed)
            found = partition_texts(source, folder, sites, shares, seed, minimum, by, kinds if clusters else None, local)
        else:
            raise_first(
                {
                    f"--by {by}: is for texts; pictures are uneven by their class; leave it out": by,
                    f"--clusters {clusters}: is for texts; pictures are uneven by their class; leave it out": clusters,
                    "--local: is for texts; cut a site's pictures by patient with consilium data split": local,
                }
            )
            found = partition(source, folder, sites, shares, seed, minimum, not no_test)
    lines = []
    for site, counts in found["training"].items():
        parts = ", ".join(f"{n} {shown(name)}" for name, n in counts.items() if n)
        lines.append(f"{site}: {sum(counts.values())} training samples: {parts}")
    lines += [f"note: {note}" for note in found.get("notes", [])]
    lines.append(f"{folder}: a data list or JSONL files per site, partition.json and partition.png")
    emit(found, [*lines, *site_yaml_lines([_list_of(folder / site) for site in found["training"]])], format)


# phantoms --------------------------------------------------------------------------------------------------------------


def data_phantoms(
    folder: Annotated[Path, typer.Argument(help="folder for a folder per site")],
    kind: Annotated[
        str, typer.Option(help="kind of data: fundus, nuclei, organ (volumes with a lesion), cells, sentences or codes")
    ] = "fundus",
    sites: Annotated[int, typer.Option(min=1, max=MOST_SITES)] = 3,
    files: Annotated[
        Literal["nifti", "dicom"] | None,
        typer.Option(help="file format of volumes"),
    ] = None,
    training: Annotated[int, typer.Option(min=1, max=100_000)] = 24,
    validation: Annotated[int, typer.Option(min=0, max=100_000)] = 8,
    test: Annotated[int, typer.Option(min=0, max=100_000)] = 16,
    size: Annotated[int, typer.Option(min=16, max=4096, help="side of a picture in pixels")] = 128,
    appearance: Annotated[
        float, typer.Option(min=0, max=1, help="how much the pictures' appearance differs between sites")
    ] = 0.7,
    annotation: Annotated[float, typer.Option(min=0, max=1, help="how much the annotation differs between sites")] = 0.7,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    format: FormatOption = "txt",
) -> None:
    """Generate data of sites that differ in appearance and annotation, for `consilium simulate --data FOLDER`."""
    raise_first(
        {
            f"--kind: {kind!r} is not one of {', '.join(KINDS)}": kind not in KINDS,
            "--files: only volumes are written in several ways; add --kind organ": files and kind != "organ",
        }
    )
    names = [f"site-{i}" for i in range(1, sites + 1)]
    for name in names:
        refuse_overwriting_real_data(folder / name)
    how = (seed, training, validation, test, size, appearance, annotation, files or "nifti")
    lists = [make_phantoms(folder / name, kind, name, *how) for name in names]
    emit([str(one) for one in lists], [*map(str, lists), *site_yaml_lines(lists)], format)
