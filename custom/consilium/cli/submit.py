"""The commands `consilium export`, `submit` and `resume`: a job for a federation, and its runs there."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from consilium.cli.jobs import KitOption, exit_code, status_lines, watch_job
from consilium.cli.options import Format, FormatOption, JobArgument, SetOption, emit, show
from consilium.config.job import load_job, parse_override
from consilium.core.errors import JobError
from consilium.core.sanitize import rich_line
from consilium.flare.admin.session import Admin, connect
from consilium.flare.admin.submission_folder import delete_on_failure, prepare, prepare_resume
from consilium.flare.job.recipe import export as write_job_folder

WaitOption = Annotated[bool, typer.Option("--wait", help="watch the job until it ends; exit code 1 if it fails")]
PATIENCE = 120.0
"""Seconds to wait for an experiment's former sites before it is resumed."""


def export(
    job: JobArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="folder in which to make a folder with the job's name")],
    bundle: Annotated[
        bool, typer.Option("--bundle", help="copy this package into app/custom, for sites that allow custom code (BYOC)")
    ] = False,
    format: FormatOption = "txt",
) -> None:
    """Write a job as a FLARE job folder to submit: configuration only, or with the package for sites that lack it."""
    folder = write_job_folder(job, output, bundle)
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    what = "with the package, so sites need BYOC allowed" if bundle else "configuration only, no code"
    emit({"job": str(folder), "bytes": size, "bundle": bundle}, [f"{folder}: {size / 1024:,.0f} KiB, {what}"], format)


def submit(
    job: JobArgument,
    kit: KitOption,
    experiment: Annotated[str, typer.Option(help="name of this run; default: NAME-TIME")] = "",
    override: SetOption = None,
    wait: WaitOption = False,
    format: FormatOption = "txt",
) -> None:
    """Send a job to the federation. Each submission is a new run with its own files, named by its experiment."""
    overrides = dict(parse_override(one) for one in override or [])
    name = experiment or f"{load_job(job, overrides, plugins=None, author=True).name}-{time.strftime('%Y%m%d-%H%M%S')}"
    with connect(kit) as admin:
        with delete_on_failure(folder := prepare(job, overrides, name, admin.upload_folder)):
            job_id = admin.submit(folder)
        _report_submission(admin, job_id, name, wait, format)


def resume(
    experiment: Annotated[str, typer.Argument(help="the run's name, as `consilium status` lists it")],
    job: Annotated[Path | None, typer.Argument(help="the job of the run, if it was not submitted with this kit")] = None,
    *,
    kit: KitOption,
    override: SetOption = None,
    wait: WaitOption = False,
    format: FormatOption = "txt",
) -> None:
    """Continue an interrupted run from its last finished round. On CPU the result equals an uninterrupted run's to the bit.

    All settings must be as they were submitted, except training.rounds. Give JOB with the `--set` of its submission.
    """
    overrides = dict(parse_override(one) for one in override or [])
    with connect(kit) as admin:
        sites, planned = admin.former_plan(experiment)
        with prepare_resume(experiment, admin.upload_folder, job, overrides, planned) as folder:
            for site in sorted(admin.await_sites(sites, PATIENCE)):
                said = f"{site} took part before and is not connected: the run is resumed without it"
                show([rich_line(said, "yellow")], errors=True)
            job_id = admin.submit(folder)
        _report_submission(admin, job_id, experiment, wait, format)


def _report_submission(admin: Admin, job_id: str, experiment: str, wait: bool, format: Format) -> None:
    console = Console(stderr=format == "json", soft_wrap=True, highlight=False)
    console.print(rich_line(f"submitted as experiment {experiment}, job {job_id}"))
    found: dict[str, Any] = {"job_id": job_id, "experiment": experiment}
    if wait:
        found = watch_job(admin, job_id, console)
    emit(found, status_lines(found) if wait else (), format)
    if wait and not found["status"].endswith(":COMPLETED"):
        reason = found.get("reason", "see `consilium status` and the logs")
        raise JobError(f"{experiment}: {found['status']}: {reason}", exit_code(found["status"]))
