"""What our components need of FLARE's context: the job, folders, and where progress events go."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobReturnCode
from nvflare.apis.workspace import Workspace

from consilium.approval import check_approved
from consilium.assemble import Job, assemble_job
from consilium.config import SiteConfig, find_site, load_job
from consilium.errors import ConfigError
from consilium.site import Observer
from consilium.storage import write_atomic

OUTPUT = "CONSILIUM_OUTPUT"
"""Environment variable of a simulation: the folder that receives the run's files of server and sites."""


def load(fl_ctx: FLContext) -> Job:
    """Return this run's job from app/config/job.yaml. Raises ConfigError."""
    folder = Path(_workspace(fl_ctx).get_app_dir(fl_ctx.get_job_id()))  # kits of `nvflare package` name no config folder
    return federated_job(folder / "config" / "job.yaml")


def check_approval(fl_ctx: FLContext, site: SiteConfig) -> None:
    """Raise RefusedError if the site runs only jobs that its administrator has approved, and this is none."""
    workspace = _workspace(fl_ctx)
    check_approved(Path(workspace.get_app_dir(fl_ctx.get_job_id())), site, Path(workspace.get_site_config_dir()))


def federated_job(path: Path) -> Job:
    """Return the job of a job.yaml. Raises ConfigError if it is wrong, or pools data, which a federation never does."""
    job = assemble_job(load_job(path), path)
    if job.strategy.pools_data:
        raise ConfigError(f"{path}: strategy.name: {job.strategy.name!r} pools all sites' data; only --engine inprocess can")
    return job


def site_config(fl_ctx: FLContext, name: str) -> SiteConfig:
    """Return the site's own configuration, from its kit's local/site.yaml in a deployment. Raises ConfigError."""
    return find_site(name, Path(_workspace(fl_ctx).get_site_config_dir()))


def server_folder(fl_ctx: FLContext, job: Job) -> Path:
    """Return the folder of the server's files, outside FLARE's run folder, which FLARE clears."""
    return _root(fl_ctx, job)


def experiment(fl_ctx: FLContext, job: Job) -> str:
    """Return the name this run's files go by: what the submission says; otherwise every submission is a run of its own."""
    return job.config.experiment or f"{job.config.name}-{fl_ctx.get_job_id()[:8]}"


def leave_to_quorum(fl_ctx: FLContext) -> None:
    """Have this site's process counted as ended, not failed, should it be killed, so that the quorum decides what follows.

    FLARE 2.9 fails the whole job for one site's dead process, whatever `min_clients` says. It believes the exit code that a
    process leaves in its run folder; FLARE itself writes another there for errors it catches.
    """
    if not simulated():
        folder = Path(_workspace(fl_ctx).get_run_dir(fl_ctx.get_job_id()))
        write_atomic(folder / FLMetaKey.PROCESS_RC_FILE, str(JobReturnCode.SUCCESS).encode())


def publish(fl_ctx: FLContext, folder: Path) -> None:
    """Copy what an admin may download into FLARE's run folder: all but the server's state, which has a sampling secret."""
    if not simulated():
        shutil.copytree(folder, _published(fl_ctx), ignore=shutil.ignore_patterns("server"), dirs_exist_ok=True)


def publish_reason(fl_ctx: FLContext, reason: str) -> None:
    """Write why a job ends early to where an admin may download it."""
    write_atomic(_published(fl_ctx) / "stopped.txt", reason.encode())


def _published(fl_ctx: FLContext) -> Path:
    return Path(_workspace(fl_ctx).get_run_dir(fl_ctx.get_job_id())) / "consilium"


def site_folder(fl_ctx: FLContext, job: Job, name: str, site: SiteConfig) -> Path:
    """Return the site's private folder: its own choice (`state:`), else beside FLARE's run folders."""
    if site.state:
        return site.state / experiment(fl_ctx, job)
    return _root(fl_ctx, job) / "sites" / name


def ledger_path(fl_ctx: FLContext, job: Job, name: str, site: SiteConfig) -> Path:
    """Return the site's ledger for all jobs; a simulation has one of its own."""
    if simulated():
        return site_folder(fl_ctx, job, name, site) / "ledger.sqlite"
    return (site.state or Path(_workspace(fl_ctx).get_root_dir()) / "consilium") / "ledger.sqlite"


def simulated() -> bool:
    """Tell whether this is a simulation of ours."""
    return OUTPUT in os.environ


def observer(component: FLComponent, fl_ctx: FLContext, name: str) -> Observer:
    """Return an observer that logs each event and, in a simulation, hands it to the live view through a file."""
    output = os.environ.get(OUTPUT)

    def observe(event: Mapping[str, Any]) -> None:
        if event["event"] != "step":
            component.log_info(fl_ctx, json.dumps(dict(event)))
        if output:
            folder = Path(output) / "events"
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / f"{name}.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(dict(event)) + "\n")

    return observe


def _root(fl_ctx: FLContext, job: Job) -> Path:
    output = os.environ.get(OUTPUT)
    return Path(output) if output else Path(_workspace(fl_ctx).get_root_dir()) / "consilium" / experiment(fl_ctx, job)


def _workspace(fl_ctx: FLContext) -> Workspace:
    return fl_ctx.get_engine().get_workspace()
