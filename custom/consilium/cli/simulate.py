"""The command `consilium simulate`."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer
from rich.console import Console
from rich.status import Status

from consilium.cli.options import CheckpointsOption, FormatOption, JobArgument, SetOption, show
from consilium.cli.resume_hint import print_resume_hint, stoppable
from consilium.config.site import Given, TrackingConfig, find_site
from consilium.core.errors import ConfigError, ConsiliumError
from consilium.core.lazy import call
from consilium.core.sanitize import line, shown
from consilium.core.schema import validate
from consilium.data.site_names import folder_of, renamed_notes
from consilium.federation.sites import check_same, kept_in, site_names, unused_state
from consilium.flare.job.simulator import Simulator
from consilium.report.live_view import LiveView
from consilium.report.tracking import check_installed
from consilium.tasks.registry import Scores

PREPARE = "consilium.cli.simulate_prepare"


Engine = Literal["inprocess", "flare"]
"""What runs a simulation."""


class RunRequest(NamedTuple):
    """The options of a simulation. `workspace`: None for a folder by name and time; `quiet`: without a live view."""

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
    """A run's folder, and what its live view shows of the job."""

    folder: Path
    rounds: int
    title: str
    scores: Scores


def simulate(
    job: JobArgument,
    engine: Annotated[
        Engine, typer.Option(help="inprocess: quick; flare: the FLARE simulator, a process a site")
    ] = "inprocess",
    sites: Annotated[str, typer.Option(help="how many, or names separated by commas; default: all of --data, else 3")] = "",
    rounds: Annotated[int, typer.Option(help="instead of training.rounds; 0 keeps it", min=0)] = 0,
    workspace: Annotated[Path | None, typer.Option(help="result folder; default: runs/NAME-TIME")] = None,
    data: Annotated[
        Path | None, typer.Option(help="folder with a folder per site, each with datalist.json or site.yaml")
    ] = None,
    checkpoints: CheckpointsOption = None,
    override: SetOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the workspace's last finished round (inprocess)")
    ] = False,
    workers: Annotated[
        int,
        typer.Option(help="processes that the sites are dealt out over (inprocess); 0: this one", min=0, max=1024),
    ] = 0,
    together: Annotated[
        int,
        typer.Option(
            help="sites that train side by side, quicker on small batches (inprocess); 1: one by one", min=1, max=1024
        ),
    ] = 1,
    mlflow: Annotated[str, typer.Option(metavar="URI", help="also to MLflow: http://HOST:PORT or file:///PATH")] = "",
    format: FormatOption = "txt",
) -> None:
    """Run a job on this machine: live view, then a table per site."""
    overrides = [*(override or []), *([f"training.rounds={rounds}"] if rounds else [])]
    if workers and engine == "flare":
        raise ConfigError("--workers: only with --engine inprocess; FLARE has a process for every site")
    if together > 1 and (workers or engine == "flare"):
        raise ConfigError("--together: only in one process; leave --workers and --engine out")
    given = Given(data and data.resolve(), checkpoints and checkpoints.resolve(), _tracking(mlflow))
    names = site_names(sites, data)
    for note in renamed_notes({folder_of(data, name).name: name for name in names} if data else {}):
        typer.echo(f"note: {shown(note)}", err=True)
    if resume and workspace:
        names = _again(workspace, names, given, bool(sites))
    request = RunRequest(job, overrides, engine, names, workspace, given, resume, workers, together, format == "json")
    with stoppable(), print_resume_hint(workspace or Path("runs"), engine == "inprocess"):
        if note := unused_state({name: find_site(name, given) for name in names}):
            show([line(note, "yellow")], errors=True)
        folder, losses = _over_flare(request) if engine == "flare" else _in_process(request)
    call("consilium.cli.simulate_prepare:finish", folder, losses, names, format)


def _again(folder: Path, names: list[str], given: Given, chosen: bool) -> list[str]:
    """Return the sites of a resumed run, in its order; `names` for a run of a former version, which stores none.

    Raises ConfigError where the command's sites, or their data, are not the run's; `chosen`: whether it names any.
    """
    was = kept_in(folder)
    generated = given.data is None and all(lists is None for lists in was.sites.values())
    if was.sites and (chosen or not generated):
        check_same(folder, was, {name: find_site(name, given) for name in names})
    return list(was.sites) or names


def _tracking(uri: str) -> TrackingConfig | None:
    """Return the tracking server of `uri`; None for "". Raises ConfigError."""
    if not uri:
        return None
    check_installed()
    return validate(TrackingConfig, {"mlflow": uri}, Path("--mlflow"))


@contextmanager
def removed_if_empty(folder: Path) -> Iterator[None]:
    """Remove a new run's empty folders if it is refused before it begins."""
    was_empty = not any(folder.iterdir())
    try:
        yield
    except ConsiliumError:
        if was_empty and not (folder / "metrics.jsonl").exists():
            for place in sorted([folder, *folder.rglob("*")], reverse=True):
                with suppress(OSError):  # what holds something, or is a file
                    place.rmdir()
        raise


def _in_process(request: RunRequest) -> tuple[Path, dict[str, float]]:
    """Run all sites here; return the run's folder and every site's last training loss."""
    with _waiting():
        job, prepared = call(f"{PREPARE}:prepare", request)
    found = {name: find_site(name, request.given) for name in request.sites}
    with (
        removed_if_empty(prepared.folder),
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


def _over_flare(request: RunRequest) -> tuple[Path, dict[str, float]]:
    """Run a process for every site by FLARE's simulator; return as `_in_process` does.

    The job is checked and exported by another process: this one, which only waits, never loads PyTorch.
    """
    with Simulator(request.sites) as simulator:
        with _waiting():
            exported, prepared = simulator.ask(call, f"{PREPARE}:export", request)
        with _view(request, prepared) as view:
            simulator.run(exported, prepared.folder, view, request.given)
    return prepared.folder, view.losses


def _waiting() -> Status:
    return Console(stderr=True).status("loading PyTorch and the job ...")  # of a terminal, not of a pipe


def _view(request: RunRequest, prepared: PreparedRun) -> LiveView:
    return LiveView(Console(quiet=request.quiet), prepared.rounds, prepared.title, prepared.scores)
