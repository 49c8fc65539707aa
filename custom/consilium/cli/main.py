"""The command `consilium`. Exit codes: 0 done, 1 the run failed or problems were found, 2 wrong usage or configuration."""

import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from typer.exceptions import TyperException

from consilium import __version__
from consilium.cli.bench import bench
from consilium.cli.compare import compare
from consilium.cli.data import app as data_app
from consilium.cli.deploy import app as deploy_app
from consilium.cli.evaluate import evaluate
from consilium.cli.evidence import app as evidence_app
from consilium.cli.export_model import export_model
from consilium.cli.fit import fit
from consilium.cli.install import app as install_app
from consilium.cli.kits import app as kits_app
from consilium.cli.options import (
    ASSUMED,
    LONGEST_LINE,
    TFLOPS,
    Format,
    FormatOption,
    JobArgument,
    SetOption,
    TflopsOption,
    gpu_hours,
    load,
)
from consilium.cli.predict import predict
from consilium.cli.privacy import app as privacy_app
from consilium.cli.rank import rank
from consilium.cli.report import report
from consilium.cli.simulate import simulate
from consilium.cli.sites import sites
from consilium.cli.study import app as study_app
from consilium.cli.submit import app as submit_app
from consilium.errors import CheckpointError, ConfigError, ConsiliumError, DataError
from consilium.report.clean import line

if TYPE_CHECKING:
    from consilium.federation.build import Job

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Federated fine-tuning of medical foundation models.")
app.command()(simulate)
app.add_typer(study_app, name="study")
app.add_typer(data_app, name="data")
app.add_typer(privacy_app, name="privacy")
app.add_typer(deploy_app)
app.add_typer(kits_app)
app.add_typer(install_app)
app.add_typer(evidence_app)
app.add_typer(submit_app)
app.command()(compare)
app.command()(predict)
app.command()(evaluate)
app.command()(export_model)
app.command()(report)
app.command()(fit)
app.command()(bench)
app.command()(sites)
app.command()(rank)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def consilium(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print it and end")] = False,
) -> None:
    """Federated fine-tuning of medical foundation models."""


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
        console.print(line(problem, "red", limit=LONGEST_LINE))
    raise SystemExit(code) from None


def _usage(error: TyperException) -> str:
    """Return what was wrong with which command."""
    context, said = getattr(error, "ctx", None), error.format_message().replace("Value error, ", "").rstrip(".")
    return f"{context.command_path}: {said}; see {context.command_path} --help" if context else said


def _computes(job: "Job", sites: int, samples: int | None, tested: int) -> dict[str, float]:
    """Return FLOPs of a step, of a scored sample, and of the run as far as it is known how many samples there are."""
    from consilium.federation.flops import Samples, own_samples, run_flops, step_flops, work_of

    work = work_of(job)
    given = Samples(sites, samples * sites, 0, tested * sites) if samples else own_samples(job.config, sites)
    if given is None and job.config.training.local_steps:
        given = Samples(sites, sites, 0, tested * sites)
    found = {"step": float(step_flops(job, work)), "scored": float(work.scoring)}
    return found | ({} if given is None else {"run": run_flops(job, work, given)})


def _tell_hours(computes: dict[str, float], sites: int, tflops: float) -> None:
    step, scored = (f"{computes[name] / 1e9:,.4g}" for name in ("step", "scored"))
    typer.echo(f"* a step computes {step} GFLOP, a scored sample {scored}")
    if "run" not in computes:
        typer.echo("  GPU hours of the run need --samples, the training samples of a site")
        return
    hours = gpu_hours(computes["run"], tflops)
    typer.echo(
        f"  the run at {sites}: {computes['run'] / 1e15:,.3g} PFLOP, by estimate {hours:,.2g} GPU hours at {tflops:g} TFLOP/s"
    )
    typer.echo(f"  ({ASSUMED})")


@app.command()
def cost(
    job: JobArgument,
    override: SetOption = None,
    sites: Annotated[int, typer.Option(min=1, max=10_000, help="how many take part, for the whole run's bytes")] = 1,
    samples: Annotated[int | None, typer.Option(min=1, max=10**9, help="training samples of a site, for GPU hours")] = None,
    tested: Annotated[int, typer.Option(min=0, max=10**9, help="test samples of a site, for GPU hours")] = 0,
    tflops: TflopsOption = TFLOPS,
    format: FormatOption = Format.TXT,
) -> None:
    """Show trainable parameters, what a site sends and receives in a round beside every other strategy, and GPU hours."""
    from consilium.federation.build import assemble_job
    from consilium.federation.cost import adapters, whole_run
    from consilium.federation.cost import compare as costs_of
    from consilium.federation.trained import trained_set

    config, source = load(job, override or [])
    ready = assemble_job(config, source)
    costs, bottlenecks, trained = costs_of(ready), adapters(ready), trained_set(config.adapter, ready.initial)
    whole, computes = whole_run(ready, costs[0], sites), _computes(ready, sites, samples, tested)
    if format is Format.JSON:
        hours = {"gpu_hours": gpu_hours(computes["run"], tflops), "tflops": tflops} if "run" in computes else {}
        own = {"trained_set": trained, **(bottlenecks or {}), "bytes": whole, "flops": computes, **hours}
        print(json.dumps([c.to_dict() | (own if i == 0 else {}) for i, c in enumerate(costs)], indent=1))
        return
    typer.echo(f"trains: {trained}")
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
    mib = {name: f"{size / 2**20:,.1f} MiB" for name, size in whole.items()}
    typer.echo(
        f"* trains {mib['trained']}; {config.training.rounds} rounds move {mib['run_site']} up and down at a site, "
        f"{mib['run']} at {sites}"
    )
    _tell_hours(computes, sites, tflops)
    if bottlenecks:
        typer.echo(
            f"* as FedSCA's Table 3 counts (all that trains, one way, decoder included): {mib['one_way']}, over {k} adapters "
            f"{mib['one_way_each']} for each that travels"
        )


@app.command()
def allow(folder: Annotated[Path, typer.Argument(help="workspace of `nvflare simulator`, or a startup kit")]) -> None:
    """Let FLARE run our classes there, and no other name of ours: their list by the kit's role, in local/resources.json.

    It is also how a kit made by an older version is brought up to date; restart the participant after it.
    """
    from consilium.flare.kits import update

    typer.echo(f"{update(folder)}: lists the classes that jobs may name")
