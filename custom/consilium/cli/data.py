"""The commands `consilium data`: import published sets, look at data lists, share them out, generate phantoms."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from consilium.cli.cache import data_cache
from consilium.cli.data_check import data_check
from consilium.cli.data_split import data_split
from consilium.cli.data_stats import data_stats
from consilium.cli.options import Format, FormatOption, check_finite
from consilium.core.errors import ConfigError
from consilium.core.sanitize import line, shown
from consilium.core.storage import undone
from consilium.federation.sites import MOST_SITES

app = typer.Typer(no_args_is_help=True, help="Import published sets, look at data lists, share them out, generate phantoms.")
app.command("check")(data_check)
app.command("split")(data_split)
app.command("stats")(data_stats)


@app.command("import")
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
    size: Annotated[str, typer.Option(help="which of several training sets (winogrande: xl, l, m, s, xs, debiased)")] = "",
    only: Annotated[list[str] | None, typer.Option(metavar="SITE", help="take this site; may be repeated")] = None,
    rename: Annotated[list[str] | None, typer.Option(metavar="OLD=NEW", help="name a site otherwise; may be repeated")] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=NAME", help="csv: the heading of image, label, site, patient or split; may be repeated"),
    ] = None,
    add: Annotated[bool, typer.Option("--add", help="put the sites beside those that DEST has from other imports")] = False,
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
        taken, names = tuple(only or ()), _pairs("--rename: {!r}: expected OLD=NEW", rename)
        columns = _pairs("--column: {!r}: expected FIELD=NAME", column)
        options = Options(validation, test, seed, sites, minimum, types, resplit, size, taken, names, columns)
        _print_sites(import_set(name, source, dest, options, add), dest, format)


def _pairs(wrong: str, pairs: list[str] | None) -> dict[str, str]:
    """Return what stands before and behind each =. Raises ConfigError."""
    for pair in pairs or []:
        if not all(pair.partition("=")):
            raise ConfigError(wrong.format(pair))
    return dict(pair.split("=", 1) for pair in pairs or [])


def _print_layouts(layouts: dict[str, str], format: Format) -> None:
    if format is Format.JSON:
        print(json.dumps(layouts, indent=1))
        return
    for name, layout in layouts.items():
        typer.echo(f"{name}: {layout}")


def _print_sites(summary: dict[str, Any], dest: Path, format: Format) -> None:
    if format is Format.JSON:
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
    if summary["classes"] is not None:
        typer.echo(f"task.classes: {json.dumps(summary['classes'])}")
    files = "JSONL files" if summary["classes"] is None else "datalist.json"
    typer.echo(f"{dest}: a folder with {files} per site, and import.json")


app.command("cache")(data_cache)


@app.command("phantoms")
def data_phantoms(
    folder: Annotated[Path, typer.Argument(help="receives a folder per site")],
    kind: Annotated[str, typer.Option(help="fundus, nuclei, organ, cells, sentences or codes")] = "fundus",
    sites: Annotated[int, typer.Option(min=1, max=MOST_SITES)] = 3,
    volumes: Annotated[bool, typer.Option("--volumes", help="studies of a lesion in an organ, as --kind organ")] = False,
    files: Annotated[
        Literal["nifti", "dicom", "png"] | None,
        typer.Option(help="what volumes are written as; png: every slice"),
    ] = None,
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
    from consilium.data.synthetic.phantoms import KINDS, check_own, make_phantoms

    check_finite(appearance=appearance, annotation=annotation)
    if kind not in KINDS:
        raise ConfigError(f"--kind: {kind!r} is not one of {', '.join(KINDS)}")
    if volumes and kind not in ("fundus", "organ"):
        raise ConfigError(f"--volumes: there are none of {kind!r}; take --kind organ")
    kind = "organ" if volumes else kind
    if files and kind != "organ":
        raise ConfigError("--files: only volumes are written in several ways; add --volumes")
    names = [f"site-{i}" for i in range(1, sites + 1)]
    for name in names:
        check_own(folder / name)
    shifts = (appearance, annotation)
    lists = [
        make_phantoms(folder / n, kind, n, seed, training, validation, test, size, *shifts, files or "nifti") for n in names
    ]
    print(json.dumps([str(p) for p in lists]) if format is Format.JSON else "\n".join(map(str, lists)))


@app.command("partition")
def data_partition(
    source: Annotated[
        Path, typer.Argument(help="a folder per class, with or without train/ and test/, a datalist.json, or JSONL")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DEST", help="receives a folder per site, partition.json, partition.png")],
    sites: Annotated[int, typer.Option(min=1, max=MOST_SITES)] = 12,
    beta: Annotated[
        float, typer.Option(min=0.001, max=1e6, help="Dirichlet concentration: 0.1 very uneven, 100 nearly even")
    ] = 0.1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    minimum: Annotated[int, typer.Option(min=1, help="training samples every site gets at least")] = 8,
    iid: Annotated[bool, typer.Option("--iid", help="give all sites even shares; --beta is not used")] = False,
    by: Annotated[str, typer.Option(metavar="KEY", help="texts: the key of the records that sites are uneven by")] = "",
    clusters: Annotated[
        int, typer.Option(min=0, max=1000, help="texts: make sites uneven by so many K-means clusters of the instructions")
    ] = 0,
    model: Annotated[
        Path | None,
        typer.Option(help="texts: the transformers folder for --clusters; default: the tiny one"),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="texts: every site cuts its own share 0.8 / 0.1 / 0.1")] = False,
    exclude: Annotated[list[str] | None, typer.Option(help="leave this class out; may be repeated")] = None,
    no_test: Annotated[bool, typer.Option("--no-test", help="pictures: no test split, for runs that choose settings")] = False,
    format: FormatOption = Format.TXT,
) -> None:
    """Share a classification set, or texts, out among sites with uneven labels or sizes; all sites test alike."""
    from consilium.data.partition import partition, partition_texts
    from consilium.data.text import has_texts

    check_finite(beta=beta)
    shares, left_out = None if iid else beta, exclude or []
    with undone(folder):
        if has_texts(source) or source.suffix == ".jsonl":
            if no_test:
                raise ConfigError("--no-test: is for pictures; with --local every site tests on its own texts")
            if clusters == 1 or (clusters and by):
                raise ConfigError("--clusters: take 2 or more, and without --by")
            kinds = partial(_kinds, clusters, model, seed) if clusters else None
            found = partition_texts(source, folder, sites, shares, seed, minimum, by, left_out, kinds, local)
        elif by or clusters:
            what = f"--by {by}" if by else f"--clusters {clusters}"
            raise ConfigError(f"{what}: is for texts; pictures are uneven by their class; leave it out")
        elif local:
            raise ConfigError("--local: is for texts; cut a site's pictures by patient with consilium data split")
        else:
            found = partition(source, folder, sites, shares, seed, minimum, left_out, not no_test)
    if format is Format.JSON:
        print(json.dumps(found, indent=1))
        return
    for site, counts in found["training"].items():
        parts = ", ".join(f"{n} {shown(name)}" for name, n in counts.items() if n)
        typer.echo(f"{site}: {sum(counts.values())} training samples: {parts}")
    for note in found.get("notes", []):
        typer.echo(f"note: {note}")
    typer.echo(f"{folder}: a data list or JSONL files per site, partition.json and partition.png")


def _kinds(count: int, folder: Path | None, seed: int, texts: Sequence[str]) -> list[str]:
    """Return each text's cluster by the hidden states of a language model."""
    from consilium.data.clusters import clusters
    from consilium.models.causal_lm.embedding import embeddings
    from consilium.models.causal_lm.network import build_causal_lm, load_tokenizer

    variant: Literal["tiny", "folder"] = "folder" if folder else "tiny"
    points = embeddings(build_causal_lm(variant, folder), load_tokenizer(variant, folder), texts)
    return clusters(points, count, seed)
