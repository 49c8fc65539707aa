"""The command `consilium poc`, which runs a real federation with startup kits on this machine."""

import os
import re
import sys
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from consilium.cli.jobs import exit_code, watch_job
from consilium.cli.options import CheckpointsOption, FormatOption, SetOption, emit
from consilium.cli.resume_hint import FULL, disk_full_message, exit_interrupted, stop_on_signals
from consilium.config.deployment import SITE_NAME
from consilium.config.job import load_job, parse_override
from consilium.config.site import Given, find_site
from consilium.core.errors import ConfigError, ConsiliumError, JobError, UnreachableError
from consilium.core.lazy import call
from consilium.core.sanitize import rich_line, shown
from consilium.core.storage import make_private_folder
from consilium.federation.site_names import site_names
from consilium.flare.admin.session import connect
from consilium.flare.admin.submission_folder import check_submission, delete_on_failure, prepare
from consilium.flare.kit.certificates import NO_PROXIES
from consilium.flare.kit.local_federation import LEAD, SERVER, LocalFederation, stop_all
from consilium.flare.kit.processes import is_word
from consilium.flare.kit.provision import root_certificate_sha256

EXISTS = "--workspace: {}: exists; give a new folder"
PATIENCE = 180.0
"""Seconds that server and sites have to connect. On an idle machine they need about ten."""


def poc(
    job: Annotated[Path | None, typer.Argument(help="a job folder, or a job.yaml; without a job give --keep")] = None,
    sites: Annotated[
        str, typer.Option(help="number of sites, or names separated by commas; default: all sites in --data, else 3")
    ] = "",
    workspace: Annotated[
        Path | None, typer.Option(help="new folder for kits, logs and results; default: runs/poc-TIME")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="folder with a folder per site, each with datalist.json or site.yaml")
    ] = None,
    checkpoints: CheckpointsOption = None,
    override: SetOption = None,
    keep: Annotated[bool, typer.Option("--keep", help="leave server and sites running; --stop stops them")] = False,
    stop: Annotated[Path | None, typer.Option(help="stop server and sites that --keep left running in this workspace")] = None,
    format: FormatOption = "txt",
) -> None:
    """Run a job on a real federation on this machine: make kits, start server and sites, submit the job, fetch its results.

    Then server and sites are stopped; Ctrl-C stops them too. Exit codes are those of `status --check`.
    """
    if stop is not None:
        kits = stop / "kits" / "poc" / "prod_00"
        if not kits.is_dir():
            raise ConfigError(f"--stop: {stop}: no workspace of `consilium poc`; give the folder that it printed")
        ran = stop_all(kits)
        text = f"{stop}: {'server and sites are stopped' if ran else 'nothing runs from it'}"
        emit({"workspace": str(stop), "stopped": ran}, text, format)
        return
    if job is None and not keep:
        raise ConfigError("JOB: none; give a job folder, or --keep for a federation without a job")
    folder = workspace or Path("runs", time.strftime("poc-%Y%m%d-%H%M%S"))
    if workspace and folder.exists():
        raise ConfigError(EXISTS.format(folder))
    if not is_word(str(folder.resolve())):
        raise ConfigError(f"--workspace: {folder}: FLARE's jobs need a path without spaces, quotes and #; give another")
    overrides = dict(parse_override(one) for one in override or [])
    config = load_job(job, overrides, plugins=None, author=True) if job else None
    name, names = config.name if config else "", site_names(sites, data)
    if config and config.federation.min_sites > len(names):  # FLARE would wait for more
        raise ConfigError(
            f"--sites: {len(names)}: federation.min_sites of the job is {config.federation.min_sites}; give --sites "
            f"{config.federation.min_sites}"
        )
    if wrong := [one for one in names if not re.fullmatch(SITE_NAME, one) or one == SERVER]:
        raise ConfigError(
            f"--sites: {shown(wrong[0])!r} cannot name a site of a federation; use at most 64 letters, digits, '_' and '-', "
            f"and not {SERVER}"
        )
    given = Given(data and data.resolve(), checkpoints and checkpoints.resolve())
    found = {one: find_site(one, given).model_dump(mode="json", exclude_unset=True) for one in names}
    if job:
        check_submission(job, overrides, name)
    folder = _make_folder(folder, is_named=workspace is not None)
    console = Console(stderr=format == "json", soft_wrap=True, highlight=False)
    try:
        with stop_on_signals(), ExitStack() as stack:
            federation = LocalFederation(folder, found)
            stack.callback(federation.stop)
            console.print(rich_line(f"{federation.kits}: kits of the server and {', '.join(names)}"))
            _start_and_wait(federation)
            console.print(
                rich_line(f"server and {len(names)} sites run and are connected (port {federation.port} of this machine)")
            )
            console.print(rich_line(f"root fingerprint {root_certificate_sha256(federation.kits.parent / 'state')} (SHA-256)"))
            status = _submit_and_watch(federation, job, overrides, name, console) if job else {}
            if keep:
                stack.pop_all()
    except KeyboardInterrupt:
        exit_interrupted("; server and sites are stopped")
    except OSError as error:
        if error.errno not in FULL:
            raise
        where = folder if error.filename is None else error.filename
        hint = "; start it anew, with another --workspace if you give one"
        raise ConsiliumError(disk_full_message(error, where, hint)) from None
    left = f"are stopped; kits, logs and results stay in {folder}"
    if keep:
        left = f"run on; ask them with --kit {federation.kit(LEAD)}; stop them: consilium poc --stop {folder}"
    console.print(rich_line(f"server and sites {left}", limit=1000))
    if job is None:
        return
    if "folder" not in status:
        reason = status.get("reason", f"see the logs in {folder}")
        raise JobError(f"{name}: {status['status']}: {reason}", exit_code(status["status"]))
    call("consilium.cli.print_results:join_pictures_and_print", status["folder"], {}, [], format)
    raise typer.Exit(exit_code(status["status"]))


def _make_folder(folder: Path, is_named: bool) -> Path:
    """Make a new private folder and return it. Its name gets a number if it is taken, unless the user has given it."""
    make_private_folder(folder.parent)
    for number in count(1):
        place = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            place.mkdir(0o700)
        except FileExistsError:  # also if another command has made it in the same moment
            if is_named:
                raise ConfigError(EXISTS.format(folder)) from None
        else:
            break
    return place


def _start_and_wait(federation: LocalFederation) -> None:
    """Start server and sites, and wait until all sites are connected.

    Raises ConsiliumError if a process ends; and after PATIENCE seconds, UnreachableError if the server does not answer.
    """
    # for this process and its children: this Python first in PATH, and no proxy to this machine
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    for name in NO_PROXIES:
        if name == "no_proxy" or name in os.environ:
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost")))
    threads = str(max(1, (os.cpu_count() or 1) // len(federation.sites)))  # sites share the cores, unless it is set
    for name in ("server", *federation.sites):
        federation.start(name, {"OMP_NUM_THREADS": threads} | os.environ)
    ends = time.monotonic() + PATIENCE
    while True:
        federation.check_alive()
        try:
            with connect(federation.kit(LEAD)) as admin:
                missing = admin.await_sites(set(federation.sites), 2)
        except UnreachableError:
            if time.monotonic() > ends:
                raise
            missing = set(federation.sites)
            time.sleep(1)
        if not missing:
            return
        if time.monotonic() > ends:
            raise ConsiliumError(f"{', '.join(sorted(missing))}: not connected after {PATIENCE:.0f} s; see {federation.folder}")


def _submit_and_watch(
    federation: LocalFederation, job: Path, overrides: dict[str, Any], name: str, console: Console
) -> dict[str, Any]:
    """Submit the job as the lead and watch it. Return its last status, with the folder of its results if it completed."""
    with connect(federation.kit(LEAD)) as admin:
        with delete_on_failure(ready := prepare(job, overrides, name, admin.upload_folder)):
            job_id = admin.submit(ready)
        console.print(rich_line(f"submitted as experiment {name}, job {job_id}"))
        status = watch_job(admin, job_id, console)
        if exit_code(status["status"]) == 0:
            status["folder"] = admin.download(job_id, federation.folder / "results")
    return status
