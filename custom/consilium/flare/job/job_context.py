"""A running job's settings, folders and observers, found from FLARE's context, at a server, at a site and in a simulation."""

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from cryptography.x509 import Certificate
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, FLMetaKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey
from nvflare.apis.job_launcher_spec import JobReturnCode
from nvflare.apis.workspace import Workspace

from consilium.config.job import load_job
from consilium.config.site import Given, SiteConfig, find_site, load_site, plugins_allowed_by_kit
from consilium.core.errors import ConfigError, Reason, raise_first
from consilium.core.messages import Observer
from consilium.core.registry import NO_PLUGINS, Plugins
from consilium.core.storage import copy_tree, make_private_folder, read_json, sweep, write_atomic, write_json
from consilium.federation.job_assembly import Job, assemble_job
from consilium.federation.run_folders import (
    OWNER,
    REFUSAL,
    RUNS,
    STATE,
    check_run_name,
    claim_run_folder,
    default_run_name,
    known_run,
)
from consilium.flare.job.simulation_settings import IDENTITIES, OUTPUT, is_simulated_process, read_settings
from consilium.flare.kit.revocation import revoked_since, revoked_until
from consilium.privacy.secagg.certificates import SERVER, Identity, read_identity, read_root, read_simulated_identity
from consilium.report.predictions import PREDICTIONS
from consilium.report.private_logging import log_event_privately
from consilium.server.cross_site import former_run

UPLOAD = 300.0
"""FLARE's default timeout for every message, in seconds."""


def load(fl_ctx: FLContext) -> Job:
    """Return this run's job from app/config/job.yaml. Raises ConfigError."""
    # FLARE's get_app_config_dir is wrong in kits made by `nvflare package`
    folder = Path(workspace(fl_ctx).get_app_dir(fl_ctx.get_job_id()))
    # at a server, only `plugins` of its site.yaml counts
    plugins = plugins_allowed_by_kit(Path(workspace(fl_ctx).get_site_config_dir()), is_simulated_process())
    return load_federated_job(folder / "config" / "job.yaml", plugins)


def load_federated_job(path: Path, plugins: Plugins = NO_PLUGINS, author: bool = False) -> Job:
    """Return the job of a job.yaml. `plugins` and `author`: as for load_job. Raises ConfigError, also as `check_federated`."""
    return check_federated(assemble_job(load_job(path, plugins=plugins, author=author), path), path)


def check_federated(job: Job, path: Path) -> Job:
    """Return `job`, which was read from `path`. Raises ConfigError for a job that only the in-process engine can run."""
    problems = {
        f"strategy.name: {job.strategy.name!r} pools all sites' data; only --engine inprocess can": (
            job.strategy.traits.pools_data
        ),
        "diagnostics: leakage and oracle look inside sites, which only --engine inprocess can; remove them": (
            job.config.diagnostics.reads_site_tensors
        ),
    }
    raise_first(problems, source=path)
    return job


def site_config(fl_ctx: FLContext, name: str) -> SiteConfig:
    """Return the site's configuration; in a deployment, from its kit's local/site.yaml. Raises ConfigError.

    In a kit, a missing or empty file is an error too, see `load_kit_site`.
    """
    local = Path(workspace(fl_ctx).get_site_config_dir())
    return find_site(name, _simulation_settings(), local, is_kit=(local.parent / "startup" / "client.crt").is_file())


def secagg_identity(fl_ctx: FLContext, name: str, site: SiteConfig) -> Identity:
    """Return the site's key and certificates for secure aggregation, from its kit or a simulation. Raises ConfigError."""
    if is_simulated_process():
        return read_simulated_identity(Path(os.environ[OUTPUT]) / IDENTITIES, name, site.secure_aggregation)
    startup = Path(workspace(fl_ctx).get_startup_kit_dir())
    try:
        server = str(read_json(startup / "fed_client.json")["servers"][0]["identity"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        raise ConfigError(f"{startup / 'fed_client.json'}: names no server; restore the kit", Reason.POLICY) from None
    return read_identity(startup, name, server, site.secure_aggregation)


def root_certificate_and_server(fl_ctx: FLContext) -> tuple[Certificate, str]:
    """Return (the root certificate, the server's name), from the server's kit or a simulation."""
    if is_simulated_process():
        return read_root(Path(os.environ[OUTPUT]) / IDENTITIES / "rootCA.pem"), SERVER
    return read_root(Path(workspace(fl_ctx).get_startup_kit_dir()) / "rootCA.pem"), fl_ctx.get_identity_name()


def server_config(fl_ctx: FLContext) -> SiteConfig:
    """Return the server's own configuration, of which the checkpoint folder and tracking are used. Raises ConfigError."""
    path = Path(workspace(fl_ctx).get_site_config_dir()) / "site.yaml"
    if is_simulated_process() or not path.is_file():
        settings = _simulation_settings()
        return SiteConfig(checkpoints=settings.checkpoints, tracking=settings.tracking)
    return load_site(path)


def _simulation_settings() -> Given:
    """Return the settings that a simulation has for its sites; in a deployment an empty Given."""
    return read_settings(Path(os.environ[OUTPUT])) if is_simulated_process() else Given()


def open_server_folder(fl_ctx: FLContext, job: Job, resume: bool = False) -> Path:
    """Return the folder of the server's files for this run. It lies outside FLARE's run folder, which FLARE clears.

    Raises ConfigError if the folder belongs to another submitter, and with `resume` if it holds no run.
    """
    state, name = state_folder(fl_ctx), run_folder_name(fl_ctx, job)
    if resume and not (state / RUNS / name / "metrics.jsonl").is_file() and not is_simulated_process():
        raise ConfigError(f"experiment: there is no run {name!r} at this server to go on with; submit it")
    return _claim_and_sweep_folder(fl_ctx, job, state)


def run_folder_name(fl_ctx: FLContext, job: Job) -> str:
    """Return the name of this run's folder: the job's experiment, or else a name made from FLARE's job id."""
    return check_run_name(job.config.experiment or default_run_name(job.config.name, fl_ctx.get_job_id()))


def watch_revocations(fl_ctx: FLContext) -> Callable[[], set[str]]:
    """Return a function that lists the names revoked at this server since this call; see revocation.py. Raises ConfigError."""
    if is_simulated_process():
        return set
    local = Path(workspace(fl_ctx).get_site_config_dir())
    return partial(revoked_since, local, revoked_until(local))


def submitter(fl_ctx: FLContext) -> str:
    """Return the submitter's name, which the server has read from the submitter's certificate; "" in a simulation."""
    try:
        path = Path(workspace(fl_ctx).get_job_meta_path(fl_ctx.get_job_id()))
        return str(read_json(path).get(JobMetaKey.SUBMITTER_NAME.value, ""))
    except FileNotFoundError:
        return ""


def preset_exit_success(fl_ctx: FLContext) -> None:
    """Make FLARE treat this site's process as ended, not as failed, if it is killed. Then the quorum decides about the job.

    FLARE 2.9 fails the whole job if one site's process dies, whatever `min_clients` says. It reads a process's exit code from a
    file in the run folder. This function writes success to that file; for an error that FLARE catches, FLARE overwrites it.
    """
    if not is_simulated_process():
        folder = Path(workspace(fl_ctx).get_run_dir(fl_ctx.get_job_id()))
        write_atomic(folder / FLMetaKey.PROCESS_RC_FILE, str(JobReturnCode.SUCCESS).encode())


def set_upload_timeout(fl_ctx: FLContext, job: Job) -> None:
    """Set the timeout for sending a reply to a twelfth of the round's time, and to at least UPLOAD seconds.

    This time includes the server's download of the reply's tensors. Other timeouts come from the site's resources.json.
    """
    if (runner := fl_ctx.get_prop(FLContextKey.RUNNER)) is not None:
        runner.submit_task_result_timeout = max(UPLOAD, job.config.federation.round_timeout / 12)


def publish(fl_ctx: FLContext, folder: Path) -> None:
    """Copy the run's files into FLARE's run folder for download, except the server's state and pictures of patients."""
    if not is_simulated_process():
        private = shutil.ignore_patterns("*.lock", ".*", OWNER, f"*{PREDICTIONS}*")

        def ignored(place: str, names: list[str]) -> set[str]:
            return private(place, names) | ({"server"} if Path(place) == folder else set())  # but not tb_events/server

        copy_tree(folder, _download_folder(fl_ctx), ignore=ignored, dirs_exist_ok=True)


def publish_reason(fl_ctx: FLContext, reason: str) -> None:
    """Write the reason why a job ends early to stopped.txt among the files for download."""
    write_atomic(_download_folder(fl_ctx) / "stopped.txt", reason.encode())


def _download_folder(fl_ctx: FLContext) -> Path:
    return Path(workspace(fl_ctx).get_run_dir(fl_ctx.get_job_id())) / "consilium"


def open_site_folder(fl_ctx: FLContext, job: Job, name: str, site: SiteConfig) -> Path:
    """Return the site's private folder for this run. It lies under `state` of the site's site.yaml, by default in the kit.

    Raises ConfigError for an invalid name, and if the folder belongs to another submitter or another site.
    """
    if (own := _configured_state_folder(site)) is not None:
        return _claim_and_sweep_folder(fl_ctx, job, own, name)
    return _claim_and_sweep_folder(fl_ctx, job, state_folder(fl_ctx)) / "sites" / name


def former_site_folder(fl_ctx: FLContext, job: Job, name: str, site: SiteConfig) -> Path | None:
    """Return the site's folder of the run that a cross-site job scores; None if the site took no part. Raises ConfigError."""
    own = _configured_state_folder(site)
    former = former_run_folder(fl_ctx, job, own, name if own else "")
    found = former if former is None or own else former / "sites" / name
    return found if found and found.is_dir() else None


def _configured_state_folder(site: SiteConfig) -> Path | None:
    """Return `state` of the site's site.yaml; None in a simulation, which writes into its workspace only."""
    return None if is_simulated_process() else site.state


def former_run_folder(fl_ctx: FLContext, job: Job, own: Path | None = None, site: str = "") -> Path | None:
    """Return the folder of the run that a cross-site job scores, which must be of the same submitter; None if there is none.

    It lies under `own`, by default under `state_folder`; in a simulation beside the workspace. Raises ConfigError.
    """
    if job.config.cross_site is None:
        return None
    state = own or state_folder(fl_ctx)
    if is_simulated_process():
        return former_run(job.config, state)
    return known_run(state, job.config.cross_site.run, submitter(fl_ctx), site)


def site_root(fl_ctx: FLContext, job: Job, name: str, site: SiteConfig) -> Path:
    """Return the folder of the site's ledger and records, which are kept beyond a job. In a simulation they are per run."""
    if is_simulated_process():
        return open_site_folder(fl_ctx, job, name, site)
    return site.state or state_folder(fl_ctx)


def note_refusal(fl_ctx: FLContext, reason: Reason) -> None:
    """Store a refusal that no run's record has, for the doctor and the site's health."""
    if not is_simulated_process():
        with suppress(Exception):  # the site must reply even if the disk or FLARE's context fails
            write_json(state_folder(fl_ctx) / REFUSAL, {"kind": "refusal", "reason": reason, "time": time.time()})


def observer(component: FLComponent, fl_ctx: FLContext, name: str, private: bool = False) -> Observer:
    """Return an observer that logs each event, and in a simulation also writes it to a file for the live view.

    `private`: outside a simulation, log events without their numbers.
    """
    output = os.environ.get(OUTPUT)

    def observe(event: Mapping[str, Any]) -> None:
        if event["event"] != "step":
            component.log_info(fl_ctx, json.dumps(log_event_privately(event) if private and not output else dict(event)))
        if output:
            folder = Path(output) / "events"
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / f"{name}.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(dict(event)) + "\n")

    return observe


def state_folder(fl_ctx: FLContext) -> Path:
    """Return the folder of all our files in a kit; in a simulation, its workspace."""
    return Path(os.environ.get(OUTPUT) or Path(workspace(fl_ctx).get_root_dir()) / STATE)


def _claim_and_sweep_folder(fl_ctx: FLContext, job: Job, state: Path, site: str = "") -> Path:
    """Return this run's folder under `state`, after deleting unfinished files in it.

    From now on, new files of this process are readable by its user only. `site`: the folder's owner, if two sites could name
    the same folder as their `state`.
    """
    os.umask(0o077)
    if is_simulated_process():
        return state
    # also if `state` is another folder; former versions left it readable
    make_private_folder(state_folder(fl_ctx)).chmod(0o700)
    found = claim_run_folder(state, run_folder_name(fl_ctx, job), submitter(fl_ctx), site)
    sweep(found)
    return found


def workspace(fl_ctx: FLContext) -> Workspace:
    """Return FLARE's description of the folders of this kit or simulation."""
    return fl_ctx.get_engine().get_workspace()
