"""The command `consilium simulate`."""

import json
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console
from rich.status import Status

from consilium.cli.options import Format, FormatOption, JobArgument, SetOption, load
from consilium.cli.results import print_results
from consilium.cli.resume_hint import said_how_to_go_on, stoppable
from consilium.config.job import job_file, load_job
from consilium.config.site import Given, TrackingConfig, find_site
from consilium.core.errors import ConfigError, ConsiliumError
from consilium.core.sanitize import line, shown
from consilium.core.schema import validate
from consilium.federation.sites import check_same, kept_in, site_names, unused_state

if TYPE_CHECKING:
    from consilium.federation.job import Job
    from consilium.report.live_view import LiveView
    from consilium.tasks.registry import Scores


class Engine(StrEnum):
    """What runs a simulation."""

    INPROCESS = "inprocess"
    FLARE = "flare"


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
    override: SetOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the workspace's last finished round (inprocess)")
    ] = False,
    workers: Annotated[
        int,
        typer.Option(help="processes that the sites are dealt out over (inprocess); 0: this one", min=0, max=1024),
    ] = 0,
    mlflow: Annotated[str, typer.Option(metavar="URI", help="also to MLflow: http://HOST:PORT or file:///PATH")] = "",
    format: FormatOption = Format.TXT,
) -> None:
    """Run a job on this machine: live view, then a table per site."""
    overrides = [*(override or []), *([f"training.rounds={rounds}"] if rounds else [])]
    if workers and engine is Engine.FLARE:
        raise ConfigError("--workers: only with --engine inprocess; FLARE has a process for every site")
    given = Given(data and data.resolve(), checkpoints and checkpoints.resolve(), _tracking(mlflow))
    names = site_names(sites, data)
    if resume and workspace:
        names = _again(workspace, names, given, bool(sites))
    wanted = Wanted(job, overrides, engine, names, workspace, given, resume, workers, format is Format.JSON)
    with stoppable(), said_how_to_go_on(workspace or Path("runs"), engine is Engine.INPROCESS):
        _tell_unused_state(wanted)
        folder, losses = _over_flare(wanted) if engine is Engine.FLARE else _in_process(wanted)
    _join_predictions(folder, wanted.sites)
    config = load_job(folder / "job.yaml", plugins=None)  # as it ran, whatever became of the file that was given
    print_results(json.loads((folder / "results.json").read_text()), losses, config, folder, format)


def _again(folder: Path, names: list[str], given: Given, chosen: bool) -> list[str]:
    """Return the sites of a run that goes on, in its own order; `names` in one of a former version, which keeps none.

    Raises ConfigError where the command's sites, or their data, are not the run's; `chosen`: whether it names any.
    """
    was = kept_in(folder)
    generated = given.data is None and all(lists is None for lists in was.sites.values())
    if was.sites and (chosen or not generated):
        check_same(folder, was, {name: find_site(name, given) for name in names})
    return list(was.sites) or names


def _tell_unused_state(wanted: "Wanted") -> None:
    if note := unused_state({name: find_site(name, wanted.given) for name in wanted.sites}):
        Console(stderr=True, soft_wrap=True).print(line(note, "yellow"))


class Wanted(NamedTuple):
    """What the command line says. `workspace`: None for a folder by name and time; `quiet`: without a live view."""

    job: Path
    overrides: list[str]
    engine: Engine
    sites: list[str]
    workspace: Path | None
    given: Given
    resume: bool
    workers: int
    quiet: bool


class Ready(NamedTuple):
    """Where the files of a run go, and what its live view shows of the job."""

    folder: Path
    rounds: int
    title: str
    scores: "Scores"


def _tracking(uri: str) -> TrackingConfig | None:
    """Return where the run's numbers go as well. Raises ConfigError."""
    if not uri:
        return None
    from consilium.report.tracking import check_installed

    check_installed()
    return validate(TrackingConfig, {"mlflow": uri}, Path("--mlflow"))


def _in_process(wanted: Wanted) -> tuple[Path, dict[str, float]]:
    """Run all sites here; return the run's folder and every site's last training loss."""
    with _waiting():
        job, ready = _prepared(wanted)
    from consilium.runtime.engine import simulate as run

    found = {name: find_site(name, wanted.given) for name in wanted.sites}
    with _removed_if_empty(ready.folder), said_how_to_go_on(ready.folder, resumable=True), _view(wanted, ready) as view:
        run(job, found, ready.folder, view, wanted.resume, wanted.given.tracking, wanted.workers)
    return ready.folder, view.losses


@contextmanager
def _removed_if_empty(folder: Path) -> Iterator[None]:
    """Leave no folder without a file in it, where a run is refused before it began; what held anything before stays so."""
    was_empty = not any(folder.iterdir())
    try:
        yield
    except ConsiliumError:
        if was_empty and not (folder / "metrics.jsonl").exists():
            for place in sorted([folder, *folder.rglob("*")], reverse=True):
                with suppress(OSError):  # what holds something, or is a file
                    place.rmdir()
        raise


def _over_flare(wanted: Wanted) -> tuple[Path, dict[str, float]]:
    """Run a process for every site by FLARE's simulator; return as `_in_process` does.

    The job is checked and exported by another process: this one, which only waits, never loads PyTorch.
    """
    from consilium.flare.job.simulator import Simulator

    with Simulator(wanted.sites) as simulator:
        with _waiting():
            exported, ready = simulator.ask(_exported, wanted)
        with _view(wanted, ready) as view:
            simulator.run(exported, ready.folder, view, wanted.given)
    return ready.folder, view.losses


def _exported(wanted: Wanted) -> tuple[Path, Ready]:
    """Return FLARE's folder of the job, and what else `_prepared` returns. Raises ConfigError."""
    from consilium.flare.job.job_context import check_federated
    from consilium.flare.job.recipe import export_job

    job, ready = _prepared(wanted)
    with _removed_if_empty(ready.folder):
        check_federated(job, job_file(wanted.job))
        return export_job(job.config, ready.folder, wanted.sites), ready


def _prepared(wanted: Wanted) -> tuple["Job", Ready]:
    """Return the job, with a folder for its run. Raises ConfigError for what cannot run, before anything is written."""
    from consilium.federation.job import assemble_job
    from consilium.tasks.registry import TASKS

    config, source = load(wanted.job, wanted.overrides)
    folder = wanted.workspace or Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    job = assemble_job(config, source)
    _check_workspace(folder, wanted.resume, wanted.engine)
    return job, Ready(folder, config.training.rounds, config.title, TASKS[config.task.name].scores(config.task))


def _waiting() -> Status:
    return Console(stderr=True).status("loading PyTorch and the job ...")  # of a terminal, not of a pipe


def _view(wanted: Wanted, ready: Ready) -> "LiveView":
    from consilium.report.live_view import LiveView

    return LiveView(Console(quiet=wanted.quiet), ready.rounds, ready.title, ready.scores)


def _join_predictions(folder: Path, sites: list[str]) -> None:
    """Put the sites' pictures into one; what goes wrong with it costs no score."""
    from consilium.report.predictions import PREDICTIONS, join_predictions

    try:
        join_predictions({name: folder / "sites" / name / PREDICTIONS for name in sites}, folder / PREDICTIONS)
    except OSError as error:  # a damaged picture, a full disk
        Console(stderr=True, soft_wrap=True).print(line(f"no {PREDICTIONS}: {error}", "yellow"))


def _check_workspace(folder: Path, resume: bool, engine: Engine) -> None:
    """Make the folder, or find the run to go on with in it. Raises ConfigError before anything starts."""
    if engine is Engine.FLARE and not _is_word(str(folder.resolve())):
        raise ConfigError(f"--workspace: {folder}: FLARE's simulator needs a path without spaces, quotes and #; give another")
    try:
        if not resume:
            folder.mkdir(parents=True, exist_ok=True)
        used = (folder / "metrics.jsonl").exists()
    except OSError as error:
        where = shown(folder, 80)
        raise ConfigError(f"--workspace: {where}: cannot be made ({error.strerror}); give another folder") from None
    if used and not resume:
        raise ConfigError(f"--workspace: {folder} holds a run; give another folder, or --resume to go on with it")
    if resume and not used:
        raise ConfigError(f"--resume: {folder} holds no run; give the --workspace of the run to go on with")
    if resume and engine is Engine.FLARE:
        raise ConfigError("--resume: only with --engine inprocess")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--workspace: {folder}: cannot be written to; change its permissions or give another folder")


def _is_word(path: str) -> bool:
    """Tell whether FLARE's simulator, which puts paths into command lines unquoted, finds a path again."""
    try:
        return shlex.split(path, comments=True) == [path]
    except ValueError:
        return False
