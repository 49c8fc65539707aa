"""The command `consilium`. Exit codes: 0 done, 1 the run failed or problems were found, 2 wrong usage or configuration."""

import json
import os
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from consilium.cli_deploy import app as deploy_app
from consilium.cli_import import data_import
from consilium.cli_privacy import app as privacy_app
from consilium.cli_privacy import claim_of
from consilium.cli_submit import app as submit_app
from consilium.cli_submit import parse_override
from consilium.errors import CheckpointError, ConfigError, ConsiliumError, DataError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Federated fine-tuning of medical foundation models.")
data_app = typer.Typer(
    no_args_is_help=True, help="Import published sets, look at data lists, share them out, generate phantoms."
)
app.add_typer(data_app, name="data")
data_app.command("import")(data_import)
app.add_typer(privacy_app, name="privacy")
app.add_typer(deploy_app)
app.add_typer(submit_app)


METRICS_NOTE = "Scores above are of a simulation; no noise protects them, and in a deployment they stay at the site."


class Format(StrEnum):
    """How a command prints."""

    TXT = "txt"
    JSON = "json"


class Engine(StrEnum):
    """What runs a simulation."""

    INPROCESS = "inprocess"
    FLARE = "flare"


FormatOption = Annotated[Format, typer.Option("--format", help="txt for people, json for programs")]
JobArgument = Annotated[Path, typer.Argument(help="a job folder, such as jobs/quickstart, or a job.yaml")]


def main() -> None:
    """Run the command line; every expected error is one line on stderr."""
    try:
        app()
    except ConsiliumError as error:
        Console(stderr=True, soft_wrap=True).print(str(error), style="red", highlight=False, markup=False)
        raise SystemExit(2 if isinstance(error, ConfigError | DataError | CheckpointError) else 1) from None


@app.command()
def simulate(
    job: JobArgument,
    engine: Annotated[
        Engine, typer.Option(help="inprocess: quick; flare: the FLARE simulator, a process a site")
    ] = Engine.INPROCESS,
    sites: Annotated[str, typer.Option(help="how many, or names separated by commas; default: all of --data, else 3")] = "",
    rounds: Annotated[int, typer.Option(help="instead of training.rounds; 0 keeps it", min=0)] = 0,
    workspace: Annotated[Path | None, typer.Option(help="result folder; default: runs/NAME-TIME")] = None,
    data: Annotated[
        Path | None, typer.Option(help="folder with a folder per site, each with datalist.json or site.yaml")
    ] = None,
    checkpoints: Annotated[Path | None, typer.Option(help="folder that ${SITE} in model.checkpoint stands for")] = None,
    override: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE of job.yaml, as in strategy.split=M1")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the workspace's last finished round (inprocess)")
    ] = False,
    format: FormatOption = Format.TXT,
) -> None:
    """Run a job on this machine: live view, then a table per site."""
    overrides = [*(override or []), *([f"training.rounds={rounds}"] if rounds else [])]
    config, source = _load(job, overrides)
    folder = workspace or Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    _check_workspace(folder, resume, engine)
    environment = {"CONSILIUM_DATA": data, "CONSILIUM_CHECKPOINTS": checkpoints}
    environment = {key: str(value.resolve()) for key, value in environment.items() if value is not None}
    os.environ |= environment
    results = _run(config, source, engine, _site_names(sites, data), folder, resume, format)
    _print_results(results, config.name, folder, format)


def _run(
    config: Any, source: Path, engine: Engine, names: list[str], folder: Path, resume: bool, format: Format
) -> dict[str, dict[str, float]]:
    from consilium.assemble import assemble_job
    from consilium.config import find_site
    from consilium.view import LiveView

    ready = assemble_job(config, source)
    with LiveView(Console(quiet=format is Format.JSON), config.training.rounds, config.name) as view:
        if engine is Engine.FLARE:
            from consilium.flare.simulator import export_job, run_simulator

            run_simulator(export_job(config, folder), names, folder, view)
        else:
            from consilium.simulate import simulate as run_inprocess

            run_inprocess(ready, {name: find_site(name) for name in names}, folder, view, resume)
    return json.loads((folder / "results.json").read_text())


@app.command()
def cost(job: JobArgument, format: FormatOption = Format.TXT) -> None:
    """Show trainable parameters and what a site sends and receives in a round, beside every other strategy."""
    from consilium.assemble import assemble_job
    from consilium.cost import adapters, compare

    config, source = _load(job, [])
    ready = assemble_job(config, source)
    costs, bottlenecks = compare(ready), adapters(ready)
    if format is Format.JSON:
        print(json.dumps([c.to_dict() | (bottlenecks or {} if i == 0 else {}) for i, c in enumerate(costs)], indent=1))
        return
    if bottlenecks:
        k, each, low, saved = bottlenecks.values()
        typer.echo(f"{k} adapters of {each:,} parameters; {low} travel: {saved:g} times fewer bytes than all of them")
    title = f"{config.name}: parameters per site and round; * this job"
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
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
    report = _check(datalist, _load(job, [])[0] if job else None, checkpoints)
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
    from consilium.assemble import tokenizer_of
    from consilium.config import SiteConfig

    return check_texts(path, tokenizer_of(config, SiteConfig(checkpoints=checkpoints)), config.model.max_length)


@data_app.command("phantoms")
def data_phantoms(
    folder: Annotated[Path, typer.Argument(help="receives a folder per site")],
    kind: Annotated[str, typer.Option(help="fundus, nuclei, cells or sentences")] = "fundus",
    sites: Annotated[int, typer.Option(min=1)] = 3,
    training: Annotated[int, typer.Option(min=1)] = 24,
    validation: Annotated[int, typer.Option(min=0)] = 8,
    test: Annotated[int, typer.Option(min=0)] = 16,
    size: Annotated[int, typer.Option(min=16, help="pixels")] = 128,
    appearance: Annotated[float, typer.Option(min=0, max=1, help="strength of the appearance shift")] = 0.7,
    annotation: Annotated[float, typer.Option(min=0, max=1, help="strength of the shift of labels")] = 0.7,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    format: FormatOption = Format.TXT,
) -> None:
    """Generate sites with set shifts of appearance and annotation; use them with simulate --data FOLDER."""
    from consilium.data.phantoms import LABELS, make_phantoms

    if kind not in LABELS:
        raise ConfigError(f"--kind: {kind!r} is not one of {', '.join(LABELS)}")
    names = [f"site-{i}" for i in range(1, sites + 1)]
    shifts = (appearance, annotation)
    lists = [make_phantoms(folder / n, kind, n, seed, training, validation, test, size, *shifts) for n in names]
    print(json.dumps([str(p) for p in lists]) if format is Format.JSON else "\n".join(map(str, lists)))


@data_app.command("partition")
def data_partition(
    source: Annotated[Path, typer.Argument(help="a folder per class, with or without train/ and test/, or a datalist.json")],
    folder: Annotated[Path, typer.Argument(metavar="DEST", help="receives a folder per site, partition.json, partition.png")],
    sites: Annotated[int, typer.Option(min=1)] = 12,
    beta: Annotated[float, typer.Option(min=0.001, help="Dirichlet concentration: 0.1 very uneven, 100 nearly even")] = 0.1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    minimum: Annotated[int, typer.Option(min=1, help="training samples every site gets at least")] = 8,
    exclude: Annotated[list[str] | None, typer.Option(help="leave this class out; may be repeated")] = None,
    format: FormatOption = Format.TXT,
) -> None:
    """Share a classification set out among sites with uneven labels; pictures stay where they are, all sites test alike."""
    from consilium.data.partition import partition

    found = partition(source, folder, sites, beta, seed, minimum, exclude or [])
    if format is Format.JSON:
        print(json.dumps(found, indent=1))
        return
    for site, counts in found["training"].items():
        parts = ", ".join(f"{n} {name}" for name, n in counts.items() if n)
        typer.echo(f"{site}: {sum(counts.values())} training samples: {parts}")
    typer.echo(f"{folder}: a data list per site, partition.json and partition.png")


def _load(job: Path, overrides: list[str]) -> tuple[Any, Path]:
    """Return (configuration, its file) with KEY=VALUE overrides applied and validated like the file itself."""
    from consilium.config import job_file, load_job

    return load_job(job, dict(parse_override(one) for one in overrides)), job_file(job)


def _site_names(sites: str, data: Path | None) -> list[str]:
    if sites and not sites.isdigit():
        return [name.strip() for name in sites.split(",") if name.strip()]
    from consilium.config import is_site_folder

    if data is None:
        return [f"site-{i}" for i in range(1, int(sites or 3) + 1)]
    if not data.is_dir():
        raise ConfigError(f"--data: {data}: no such folder; give one that holds a folder per site")
    found = sorted(p.name for p in data.iterdir() if p.is_dir() and is_site_folder(p))
    if not found:
        raise ConfigError(f"--data: {data}: no folder in it has a datalist.json, site.yaml or classes; make one per site")
    return found[: int(sites)] if sites else found


def _check_workspace(folder: Path, resume: bool, engine: Engine) -> None:
    used = (folder / "metrics.jsonl").exists()
    if used and not resume:
        raise ConfigError(f"--workspace: {folder} holds a run; give another folder, or --resume to go on with it")
    if resume and not used:
        raise ConfigError(f"--resume: {folder} holds no run; give the --workspace of the run to go on with")
    if resume and engine is Engine.FLARE:
        raise ConfigError("--resume: only with --engine inprocess")


def _print_results(results: dict[str, dict[str, float]], name: str, folder: Path, format: Format) -> None:
    from consilium.view import result_table

    if format is Format.JSON:
        print(json.dumps({"workspace": str(folder), "results": results}, indent=1, sort_keys=True))
        return
    Console().print(result_table(results, name))
    if claim := claim_of(folder):
        Console(soft_wrap=True).print(f"Privacy: {claim}. {METRICS_NOTE}", highlight=False)
    typer.echo(f"Everything of this run: {folder} (metrics.jsonl, tb_events, sites/*/adapter)")


def _print_report(report: dict[str, Any]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{report['path']}: " + ", ".join(f"{n} {split}" for split, n in report["samples"].items()))
    if sizes := report["sizes"]:
        console.print("sizes: " + ", ".join(f"{size} ({n})" for size, n in sizes.items()))
    if values := report["images_with_label_value"]:
        console.print("images with label value: " + ", ".join(f"{v} ({n})" for v, n in values.items()))
    for name, by_split in report["images_of_class"].items():
        console.print(f"class {name}: " + ", ".join(f"{n} {split}" for split, n in by_split.items()), markup=False)
    for kind, style in (("problems", "red"), ("warnings", "yellow")):
        for what, found in report[kind].items():
            console.print(f"{found['count']} x {what}", style=style)
            for name in found["first"]:
                console.print(f"    {name}", markup=False)
    console.print("no problems" if not report["problems"] else "training would stop at these problems; mend them first")
