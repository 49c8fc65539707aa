"""The commands `consilium data`: import published sets, look at data lists, share them out, generate phantoms."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from consilium.cli.options import LONGEST_LINE, MOST_SITES, Format, FormatOption, check_finite
from consilium.errors import ConfigError
from consilium.registry import NO_PLUGINS
from consilium.report.clean import line, shown

if TYPE_CHECKING:
    from consilium.data.check import Findings
    from consilium.tasks.registry import Change, TaskKind

app = typer.Typer(no_args_is_help=True, help="Import published sets, look at data lists, share them out, generate phantoms.")


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


@app.command("check")
def data_check(
    datalist: Annotated[
        Path,
        typer.Argument(metavar="LIST", help="a datalist.json, a folder per class, a folder of JSONL lists, or a site.yaml"),
    ],
    job: Annotated[
        Path | None, typer.Option(help="also check labels against this job's classes, lengths in its tokens")
    ] = None,
    dataset: Annotated[str, typer.Option(help="of a site.yaml with several; default: the one that the job names")] = "",
    checkpoints: Annotated[Path | None, typer.Option(help="folder that ${SITE} in model.checkpoint stands for")] = None,
    kit: Annotated[Path | None, typer.Option(help="the site's startup kit, for jobs that name kinds of its `plugins`")] = None,
    format: FormatOption = Format.TXT,
) -> None:
    """Open every image and label of a data list, or every record of JSONL lists; exit code 1 if there are problems."""
    from consilium.config.job import load_job
    from consilium.config.site import kit_plugins

    config = load_job(job, plugins=kit_plugins(kit / "local") if kit else NO_PLUGINS) if job else None
    report = _check(datalist, config, checkpoints, dataset)
    if format is Format.JSON:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        _print_report(report.to_dict())
    raise typer.Exit(1 if report.problems else 0)


def _check(path: Path, config: Any, checkpoints: Path | None, dataset: str = "") -> "Findings":
    """Return what is found in a data list of the kind that the job, or without one the path, says."""
    if path.suffix in (".yaml", ".yml"):
        return _check_site(path, config, checkpoints, dataset)
    if dataset:
        raise ConfigError(f"--dataset: {dataset!r}: {path} is one data list; give the site.yaml that names several")
    return _check_list(path, config, checkpoints)


def _check_site(path: Path, config: Any, checkpoints: Path | None, dataset: str) -> "Findings":
    """Return what is found in a data set of a site.yaml, under the labels that it gives the set."""
    from consilium.config.site import load_site
    from consilium.data.relabel import relabelled

    site = load_site(path)
    _, own = site.dataset(dataset or (config.data.dataset if config else None), str(path))
    if own is None:
        raise ConfigError(f"{path}: names no data; set `datalist:` or `datasets:`")
    changes = config is not None and (own.labels is not None or own.annotated is not None)
    classes = getattr(config.task, "classes", None) if config else None
    change = (lambda data: relabelled(data, own.labels, own.annotated, classes)) if changes else None
    return _check_list(own.datalist, config, checkpoints or site.checkpoints, change)


def _check_list(path: Path, config: Any, checkpoints: Path | None, change: "Change | None" = None) -> "Findings":
    from consilium.config.site import SiteConfig
    from consilium.data.text import has_texts
    from consilium.federation.build import tokenizer_of
    from consilium.tasks.registry import TASKS

    name = "language" if has_texts(path) or path.suffix == ".jsonl" else "segmentation"
    kind = TASKS[config.task.name if config else name]
    if kind.check is None:
        return _read_only(path, kind)
    more: dict[str, Any] = {"change": change} if change else {}
    if config is None:
        return kind.check(path, **more)
    tokenizer = tokenizer_of(config, SiteConfig(checkpoints=checkpoints))
    return kind.check(path, config.task, tokenizer, getattr(config.model, "max_length", 0), **more)


def _read_only(path: Path, kind: "TaskKind") -> "Findings":
    """Return the counts of a data list whose task comes with no check: it is read, no sample is opened."""
    from consilium.data.check import Findings

    found = Findings.of(path, kind.read(path))
    found.warnings["only the list was read: the job's task has no check of its samples"] = [path.name]
    return found


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


def _print_report(report: dict[str, Any]) -> None:
    console = Console(soft_wrap=True)
    console.print(line(f"{report['path']}: " + ", ".join(f"{n} {split}" for split, n in report["samples"].items())))
    if sizes := report["sizes"]:
        console.print(line("sizes: " + ", ".join(f"{size} ({n})" for size, n in sizes.items()), limit=LONGEST_LINE))
    if values := report["images_with_label_value"]:
        console.print(
            line("images with label value: " + ", ".join(f"{v} ({n})" for v, n in values.items()), limit=LONGEST_LINE)
        )
    for name, by_split in report["images_of_class"].items():
        console.print(line(f"class {shown(name)}: " + ", ".join(f"{n} {split}" for split, n in by_split.items())))
    for kind, style in (("problems", "red"), ("warnings", "yellow")):
        for what, found in report[kind].items():
            console.print(line(f"{found['count']} x {what}", style))
            for name in found["first"]:
                console.print(line(f"    {name}", limit=LONGEST_LINE))
    end = "training would stop at these problems; fix them first" if report["problems"] else "no problems"
    console.print(line(end))
