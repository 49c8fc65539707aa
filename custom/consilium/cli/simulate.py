"""The command `consilium simulate`."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from rich.console import Console

from consilium.cli.options import CheckpointsOption, FormatOption, JobArgument, SetOption, load, show
from consilium.cli.resume_hint import print_resume_hint, stop_on_signals
from consilium.config.job import job_file
from consilium.config.site import Given, TrackingConfig, find_site
from consilium.core.errors import ConfigError, ConsiliumError, raise_first
from consilium.core.lazy import call
from consilium.core.sanitize import rich_line, shown
from consilium.core.schema import validate
from consilium.data.folders import describe_renames, folder_of
from consilium.federation.site_names import check_same_sites, read_recorded_sites, site_names, unused_state_warning
from consilium.flare.job.simulator import Simulator
from consilium.flare.kit.processes import is_word
from consilium.report.live_view import LiveView
from consilium.report.tracking import check_installed
from consilium.tasks.registry import TASKS, Scores

LOADING = "loading PyTorch and the job ..."
"""The message while the job is prepared, shown in a terminal only."""
Engine = Literal["inprocess", "flare"]
"""The engines of a simulation."""


class RunRequest(NamedTuple):
    """The options of `consilium simulate`. `workspace`: None for a folder by name and time. `quiet`: show no live view."""

    job: Path
    overrides: list[str]
    engine: Engine
    sites: list[str]
    workspace: Path | None
    given: Given
    resume: bool
    workers: int
    together: int
    quiet: bool


class PreparedRun(NamedTuple):
    """A run's folder, and the values of its job for the live view."""

    folder: Path
    rounds: int
    title: str
    scores: Scores


def simulate(
    job: JobArgument,
    engine: Annotated[
        Engine, typer.Option(help="inprocess: quick; flare: FLARE's simulator, with a process per site")
    ] = "inprocess",
    sites: Annotated[
        str, typer.Option(help="number of sites, or names separated by commas; default: all sites in --data, else 3")
    ] = "",
    rounds: Annotated[int, typer.Option(help="number of rounds, instead of training.rounds; 0: as in the job", min=0)] = 0,
    workspace: Annotated[Path | None, typer.Option(help="folder for the results; default: runs/NAME-TIME")] = None,
    data: Annotated[
        Path | None, typer.Option(help="folder with a folder per site, each with datalist.json or site.yaml")
    ] = None,
    checkpoints: CheckpointsOption = None,
    override: SetOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="continue from the last finished round in the workspace (inprocess)")
    ] = False,
    workers: Annotated[
        int,
        typer.Option(help="processes to distribute the sites over (inprocess); 0: use this process", min=0, max=1024),
    ] = 0,
    together: Annotated[
        int,
        typer.Option(help="sites to train as one batch, quicker for small batches (inprocess); 1: one by one", min=1, max=1024),
    ] = 1,
    mlflow: Annotated[
        str, typer.Option(metavar="URI", help="also send numbers to MLflow: http://HOST:PORT or file:///PATH")
    ] = "",
    format: FormatOption = "txt",
) -> None:
    """Run a job on this machine, show its progress, and print a table of each site's scores."""
    overrides = [*(override or []), *([f"training.rounds={rounds}"] if rounds else [])]
    problems = {
        "--workers: only with --engine inprocess; FLARE has a process for every site": workers and engine == "flare",
        "--together: only in one process; leave --workers and --engine out": together > 1 and (workers or engine == "flare"),
    }
    raise_first(problems)
    tracking = validate(TrackingConfig, {"mlflow": mlflow}, Path("--mlflow")) if mlflow else None
    if tracking:
        check_installed()
    given = Given(data and data.resolve(), checkpoints and checkpoints.resolve(), tracking)
    names = site_names(sites, data)
    for note in describe_renames({folder_of(data, name).name: name for name in names} if data else {}):
        typer.echo(f"note: {shown(note)}", err=True)
    if resume and workspace:
        was = read_recorded_sites(workspace)
        generated = given.data is None and all(lists is None for lists in was.sites.values())
        if was.sites and (sites or not generated):
            check_same_sites(workspace, was, {name: find_site(name, given) for name in names})
        names = list(was.sites) or names  # in the order of the run; a run of a former version stores no sites
    request = RunRequest(job, overrides, engine, names, workspace, given, resume, workers, together, format == "json")
    with stop_on_signals(), print_resume_hint(workspace or Path("runs"), engine == "inprocess"):
        if note := unused_state_warning({name: find_site(name, given) for name in names}):
            show([rich_line(note, "yellow")], errors=True)
        folder, losses = _simulate_over_flare(request) if engine == "flare" else _simulate_in_process(request)
    call("consilium.cli.print_results:join_pictures_and_print", folder, losses, names, format)


@contextmanager
def remove_empty_on_refusal(folder: Path) -> Iterator[None]:
    """Remove a new run's empty folders if it is refused before it begins."""
    was_empty = not any(folder.iterdir())
    try:
        yield
    except ConsiliumError:
        if was_empty and not (folder / "metrics.jsonl").exists():
            for place in sorted([folder, *folder.rglob("*")], reverse=True):
                with suppress(OSError):  # a file, or a folder that is not empty, stays
                    place.rmdir()
        raise


def prepare(request: RunRequest) -> tuple[Any, PreparedRun]:
    """Return the job and its run's folder, which is made for a new run.

    Raises ConfigError, before anything is written, for a job that cannot run, and for a folder that has another run, has no run
    to resume or cannot be written to.
    """
    config, source = load(request.job, request.overrides)
    folder = request.workspace or Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    job = call("consilium.federation.job_assembly:assemble_job", config, source)
    if request.engine == "flare" and not is_word(str(folder.resolve())):
        raise ConfigError(f"--workspace: {folder}: FLARE's simulator needs a path without spaces, quotes and #; give another")
    try:
        if not request.resume:
            folder.mkdir(parents=True, exist_ok=True)
        used = (folder / "metrics.jsonl").exists()
    except OSError as error:
        raise ConfigError(f"--workspace: {shown(folder, 80)}: cannot be made ({error.strerror}); give another folder") from None
    problems = {
        f"--workspace: {folder} holds a run; give another folder, or --resume to go on with it": used and not request.resume,
        f"--resume: {folder} holds no run; give the --workspace of the run to go on with": request.resume and not used,
        "--resume: only with --engine inprocess": request.resume and request.engine == "flare",
        f"--workspace: {folder}: cannot be written to; change its permissions or give another folder": not os.access(
            folder, os.W_OK | os.X_OK
        ),
    }
    raise_first(problems)
    return job, PreparedRun(folder, config.training.rounds, config.title, TASKS[config.task.name].scores(config.task))


def export(request: RunRequest) -> tuple[Path, PreparedRun]:
    """Export the job for FLARE. Return its job folder, and the PreparedRun that `prepare` returns. Raises ConfigError."""
    job, prepared = prepare(request)
    with remove_empty_on_refusal(prepared.folder):
        call("consilium.flare.job.job_context:check_federated", job, job_file(request.job))
        return call("consilium.flare.job.recipe:export_simulation_job", job.config, prepared.folder, request.sites), prepared


def _simulate_in_process(request: RunRequest) -> tuple[Path, dict[str, float]]:
    """Run all sites without FLARE. Return the run's folder and each site's last training loss."""
    with Console(stderr=True).status(LOADING):
        job, prepared = prepare(request)
    found = {name: find_site(name, request.given) for name in request.sites}
    with (
        remove_empty_on_refusal(prepared.folder),
        print_resume_hint(prepared.folder, resumable=True),
        _view(request, prepared) as view,
    ):
        call(
            "consilium.runtime.engine:simulate",
            job,
            found,
            prepared.folder,
            view,
            request.resume,
            request.given.tracking,
            request.workers,
            request.together,
        )
    return prepared.folder, view.losses


def _simulate_over_flare(request: RunRequest) -> tuple[Path, dict[str, float]]:
    """Run all sites by FLARE's simulator, with a process per site. Return what `_simulate_in_process` returns.

    Another process checks and exports the job, so that this process, which only waits, never imports PyTorch.
    """
    with Simulator(request.sites) as simulator:
        with Console(stderr=True).status(LOADING):
            exported, prepared = simulator.run_in_child(export, request)
        with _view(request, prepared) as view:
            simulator.run(exported, prepared.folder, view, request.given)
    return prepared.folder, view.losses


def _view(request: RunRequest, prepared: PreparedRun) -> LiveView:
    """Return the live view of a run."""
    return LiveView(Console(quiet=request.quiet), prepared.rounds, prepared.title, prepared.scores)
