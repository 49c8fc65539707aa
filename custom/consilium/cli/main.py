"""The command `consilium`. Exit codes: 0 done, 1 the run failed or problems were found, 2 wrong usage or configuration."""

import io
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from typer.exceptions import TyperException

from consilium.cli.data import data_import
from consilium.cli.deploy import app as deploy_app
from consilium.cli.options import MOST_SITES, Format, FormatOption, JobArgument, check_finite, load
from consilium.cli.privacy import app as privacy_app
from consilium.cli.simulate import simulate
from consilium.cli.submit import app as submit_app
from consilium.errors import CheckpointError, ConfigError, ConsiliumError, DataError
from consilium.report.clean import line, shown

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Federated fine-tuning of medical foundation models.")
data_app = typer.Typer(
    no_args_is_help=True, help="Import published sets, look at data lists, share them out, generate phantoms."
)
app.command()(simulate)
app.add_typer(data_app, name="data")
data_app.command("import")(data_import)
app.add_typer(privacy_app, name="privacy")
app.add_typer(deploy_app)
app.add_typer(submit_app)


MESSAGE = 4000
"""Characters of a line of an error at most."""


def main() -> None:
    """Run the command line; every expected error is one line on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be no text in any encoding
    try:
        code = app(standalone_mode=False, prog_name="consilium")
    except TyperException as error:  # wrong usage; without any words the help was shown
        _fail([_usage(error)] if error.format_message() else [], error.exit_code)
    except ConfigError as error:
        _fail(str(error).split("\n"), 2)
    except ConsiliumError as error:
        _fail([str(error)], 2 if isinstance(error, DataError | CheckpointError) else 1)
    except OSError as error:  # a path that may not be used, a full or broken disk, a server that does not answer
        if error.errno is None:
            raise
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        _fail([f"{where}{error.strerror}; check the paths given, their permissions and the disk"], 2 if where else 1)
    raise SystemExit(code if isinstance(code, int) else 0)


def _fail(problems: list[str], code: int) -> NoReturn:
    """Print problems, each in one line whatever characters the names in it have, and end."""
    console = Console(stderr=True, soft_wrap=True)
    for problem in problems:
        console.print(line(problem, "red", limit=MESSAGE))
    raise SystemExit(code) from None


def _usage(error: TyperException) -> str:
    """Return what was wrong with which command."""
    context, said = getattr(error, "ctx", None), error.format_message().replace("Value error, ", "").rstrip(".")
    return f"{context.command_path}: {said}; see {context.command_path} --help" if context else said


@app.command()
def cost(job: JobArgument, format: FormatOption = Format.TXT) -> None:
    """Show trainable parameters and what a site sends and receives in a round, beside every other strategy."""
    from consilium.federation.build import assemble_job
    from consilium.federation.cost import adapters, compare

    config, source = load(job, [])
    ready = assemble_job(config, source)
    costs, bottlenecks = compare(ready), adapters(ready)
    if format is Format.JSON:
        print(json.dumps([c.to_dict() | (bottlenecks or {} if i == 0 else {}) for i, c in enumerate(costs)], indent=1))
        return
    if bottlenecks:
        k, each, low, saved = bottlenecks.values()
        typer.echo(f"{k} adapters of {each:,} parameters; {low} travel: {saved:g} times fewer bytes than all of them")
    title = f"{config.name}: parameters per site and round; * this job"
    table = Table(title=line(title), title_justify="left", box=SIMPLE, pad_edge=False)
    for heading in ("strategy", "trainable", "up", "down", "up + down", "KiB up", "KiB down"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right", no_wrap=True)
    for index, one in enumerate(costs):
        numbers = (one.trainable, one.up, one.down, one.total, one.bytes_up // 1024, one.bytes_down // 1024)
        table.add_row(one.strategy + (" *" if index == 0 else ""), *(f"{n:,}" for n in numbers))
    Console(width=max(Console().width, 100)).print(table)


@app.command()
def allow(folder: Annotated[Path, typer.Argument(help="workspace of `nvflare simulator`, or a startup kit")]) -> None:
    """Let FLARE run our classes there, and no other name of ours: their list by the kit's role, in local/resources.json.

    It is also how a kit made by an older version is brought up to date; restart the participant after it.
    """
    from consilium.flare.kits import update

    typer.echo(f"{update(folder)}: lists the classes that jobs may name")


@data_app.command("check")
def data_check(
    datalist: Annotated[
        Path, typer.Argument(metavar="LIST", help="a datalist.json, a folder per class, or a folder of JSONL lists")
    ],
    job: Annotated[
        Path | None, typer.Option(help="also check labels against this job's classes, lengths in its tokens")
    ] = None,
    checkpoints: Annotated[Path | None, typer.Option(help="folder that ${SITE} in model.checkpoint stands for")] = None,
    format: FormatOption = Format.TXT,
) -> None:
    """Open every image and label of a data list, or every record of JSONL lists; exit code 1 if there are problems."""
    report = _check(datalist, load(job, [])[0] if job else None, checkpoints)
    if format is Format.JSON:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        _print_report(report.to_dict())
    raise typer.Exit(1 if report.problems else 0)


def _check(path: Path, config: Any, checkpoints: Path | None) -> Any:
    """Return the report on a data list of the kind that the job, or without one the path, says."""
    from consilium.data.text import has_texts

    if not (config.task.name == "language" if config else has_texts(path) or path.suffix == ".jsonl"):
        from consilium.data.check import check_datalist

        return check_datalist(path, config.task.classes if config else None)
    from consilium.data.check_text import check_texts

    if config is None:
        return check_texts(path)
    from consilium.config.site import SiteConfig
    from consilium.federation.build import tokenizer_of

    return check_texts(path, tokenizer_of(config, SiteConfig(checkpoints=checkpoints)), config.model.max_length)


@data_app.command("phantoms")
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


@data_app.command("partition")
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
        console.print(line("sizes: " + ", ".join(f"{size} ({n})" for size, n in sizes.items()), limit=MESSAGE))
    if values := report["images_with_label_value"]:
        console.print(line("images with label value: " + ", ".join(f"{v} ({n})" for v, n in values.items()), limit=MESSAGE))
    for name, by_split in report["images_of_class"].items():
        console.print(line(f"class {shown(name)}: " + ", ".join(f"{n} {split}" for split, n in by_split.items())))
    for kind, style in (("problems", "red"), ("warnings", "yellow")):
        for what, found in report[kind].items():
            console.print(line(f"{found['count']} x {what}", style))
            for name in found["first"]:
                console.print(line(f"    {name}", limit=MESSAGE))
    end = "training would stop at these problems; mend them first" if report["problems"] else "no problems"
    console.print(line(end))
