"""An administrator's session with a running federation: submit, watch, abort and download jobs.

Every error of FLARE is raised as a ConsiliumError of one line.
"""

import io
import re
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import yaml
from nvflare.apis.fl_exception import FLCommunicationError
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.flare_api import api_spec
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from consilium.core.errors import (
    ABORTED_RUN,
    UNEXPLAINED,
    ConfigError,
    ConsiliumError,
    ExitCode,
    JobError,
    UnreachableError,
    raise_first,
)
from consilium.core.sanitize import shown
from consilium.core.schema import read_yaml
from consilium.core.storage import read_json
from consilium.federation.run_folders import default_run_name
from consilium.flare.kit.certificates import check_certificate_time, why_no_connection
from consilium.flare.kit.connection_refusals import cause_of, refusal_message
from consilium.flare.kit.heartbeat_client import KEY
from consilium.flare.kit.kit_reader import read_settings, server_folders
from consilium.report import untrusted_files
from consilium.report.live_view import progress

ENDED = "FINISHED"
ABORTED = "FINISHED:ABORTED"
WAITING = "SUBMITTED"
TIMESTAMP = len("2026-11-22 20:30:00: ")
"""Length of the timestamp before the text in a line of FLARE's scheduler."""
LOST = "LOST"
"""Our status for a job whose server process has died. `consilium resume` continues its run.

A job also has it for moments between the end of its process and its final status.
"""
NO_REASON = (
    "no reason was left, as if its process at the server was killed; see the logs of the server and of the sites; "
    "`consilium resume` continues a run"
)
UNLISTED = "is not in allow_list"
"""Part of FLARE's error if a kit's allow-list lacks our classes, such as in a kit that FLARE's own tools made."""
MAX_REASONS = 5
"""A list of jobs shows the reason of at most this many failed jobs, the newest. Each needs a download of the job's result."""
ABORT_SECONDS = 60.0
"""How long an aborted job is waited for. Its server process has to end first, within a few seconds as a rule."""
LOST_SECONDS = 10.0
"""Seconds with status LOST after which `abort` and `download` report a job as lost."""
OVERDUE = 30.0
"""Seconds after which a site's heartbeat is missing. Each site sends one every ten seconds."""
MAX_APPS = 64
"""Apps read in a stored job. A job's author can put any number of apps in it."""
_RAISED = r"^[A-Za-z_][\w.]*: \S.*$"
"""The last line of a traceback."""
_LOGGED = r"^\d\S+ \S+ - \S+ - ERROR - (?:\[.*?\] - )?(?!Traceback)(.*)$"
FLARE_ERRORS: tuple[type[Exception], ...] = tuple(
    kind for kind in vars(api_spec).values() if isinstance(kind, type) and issubclass(kind, Exception)
)
NO_SESSION, INACTIVE = (api_spec.SessionClosed, api_spec.AuthenticationError), "session_inactive"
"""FLARE's exceptions for a session that the server no longer has; and the text of its other exceptions for the same."""
Job = dict[str, Any]


class Admin:
    """An administrator's actions in one session.

    A job is named by FLARE's job id, by the first characters of that id if no other id begins with them, or by its experiment.
    An experiment stands for the job that was submitted last under this name.
    """

    def __init__(self, session: Session) -> None:
        self.session = session

    @property
    def upload_folder(self) -> Path:
        """The folder in the kit from which FLARE submits job folders."""
        return Path(self.session.upload_dir)

    def jobs(self) -> list[Job]:
        """Return FLARE's metadata of all jobs, oldest first.

        A job whose server process has died gets the status LOST. FLARE reports it as RUNNING.
        """
        running = {job.job_id for job in self.session.get_system_info().job_info}
        jobs = sorted(self.session.list_jobs(detailed=True), key=lambda job: job["submit_time"])
        lost = {job["job_id"] for job in jobs if job["status"] == "RUNNING"} - running
        return [job | {"status": LOST} if job["job_id"] in lost else job for job in jobs]

    def find_job(self, name: str) -> Job:
        """Return FLARE's metadata of one job. Raises ConfigError if there is none, or if the name fits several job ids."""
        if not name:  # as from an unset variable of a script
            raise ConfigError("JOB: empty; give a job id or an experiment; `consilium status --kit KIT` lists them")
        jobs = self.jobs()
        # the whole id first, because an experiment may cost downloads
        found = next((job for job in jobs if job["job_id"] == name), None) or self._last_submission(name, jobs)
        if found is not None:
            return found
        fitting = [job for job in jobs if job["job_id"].startswith(name)]
        problems = {
            f"{len(fitting)} jobs have ids that begin so; give more characters of the id": len(fitting) > 1,
            "no such job or experiment; `consilium status --kit KIT` lists them": not fitting,
        }
        raise_first(problems, source=shown(name))
        return fitting[0]

    def find_present_job(self, name: str) -> Job:
        """Return FLARE's metadata of one job. Raises ConfigError as `find_job`, and JobError if it is lost for LOST_SECONDS."""
        ends = time.monotonic() + LOST_SECONDS
        while (found := self.find_job(name))["status"] == LOST:
            if time.monotonic() > ends:
                raise JobError(f"{shown(name)}: is LOST: {self._failure_line(found, {})}", ExitCode.LOST)
            time.sleep(2)
        return found

    def _last_submission(self, experiment: str, jobs: list[Job]) -> Job | None:
        """Return the metadata of an experiment's last job, None if there is none.

        Jobs that FLARE's own tools submitted have no experiment in their metadata, so their job.yaml is downloaded and read.
        """

        def names_experiment(job: Job) -> bool:
            with tempfile.TemporaryDirectory() as folder, suppress(*FLARE_ERRORS, ConfigError, ValueError, OSError):
                (file,) = (Path(self.session.download_job_result(job["job_id"], folder)) / "job").glob("*/app/config/job.yaml")
                raw = read_yaml(file)
                return isinstance(raw, dict) and str(raw.get("experiment")) == experiment
            return False

        by_metadata = (job for job in reversed(jobs) if experiment_of(job) == experiment)
        by_files = (job for job in reversed(jobs) if not job.get("experiment") and names_experiment(job))
        return next(by_metadata, None) or next(by_files, None)

    def submit(self, folder: Path) -> str:
        """Submit a job folder; return FLARE's job id."""
        return self.session.submit_job(str(folder.resolve()))

    def attendance(self) -> dict[str, Any]:
        """Return the server's list of sites (see heartbeat_server.py). Raises ConsiliumError if the server's kit is too old."""
        found = self.session._do_command("check_status server")["meta"].get(KEY)
        if found is None:
            raise ConsiliumError(
                "the server's kit has no list of connected sites; stop the server, run `consilium allow KIT` there, and start "
                "it again"
            )
        return found

    def await_sites(self, wanted: set[str], seconds: float) -> set[str]:
        """Wait at most `seconds` until the `wanted` sites are connected. Return those that still are not."""
        ends = time.monotonic() + seconds
        while missing := wanted - {client.name for client in self.session.get_system_info().client_info}:
            if time.monotonic() >= ends:
                break
            time.sleep(1)
        return missing

    def former_plan(self, experiment: str) -> tuple[set[str], int]:
        """Return the sites of an experiment's last job, and how many rounds it planned, 0 if that is not on record.

        Raises ConfigError if this job still runs or waits.
        """
        last = self._last_submission(experiment, self.jobs())
        if last is None:
            return set(), 0
        if not _has_ended(last["status"]):
            raise ConfigError(
                f"{experiment}: job {last['job_id']} is still running; wait for its end, or `consilium abort` it first"
            )
        rounds = last.get("rounds")
        sites = {line.split(":")[0] for line in last.get("job_deploy_detail", []) if line.endswith(": OK")} - {"server"}
        return sites, rounds if isinstance(rounds, int) else 0

    def status(self, name: str) -> Job:
        """Return one job's state for `consilium status`.

        The keys are "job_id", "experiment", "status", "progress" and "problems" (failed deployments, one line per site).
        "reason" says why the job ended early, and "waits" why it has not started. If the server waits for results,
        "silent_seconds" in the progress's "waiting" has the sites without a current heartbeat.
        """
        meta = self.find_job(name)
        found: Job = {"job_id": meta["job_id"], "experiment": experiment_of(meta), "status": meta["status"]}
        found["problems"] = _undeployed(meta)
        if meta["status"] == LOST:
            return found | {"progress": None, "reason": self._failure_line(meta, {})}
        if not meta["status"].startswith(ENDED):
            waits = self._scheduler_text(meta["job_id"]) if meta["status"] == WAITING else ""
            try:
                running = self.session.show_stats(meta["job_id"], api_spec.TargetType.SERVER).get("server", {}).get("consilium")
            except FLARE_ERRORS:  # before the job's controller has started, and while the job ends
                running = None
            if running and (waiting := running.get("waiting")):
                # seconds since the last heartbeat of each site whose heartbeat is overdue; a slow site still sends heartbeats
                ages = dict[str, int]()
                with suppress(ConsiliumError):  # a kit of an old version has no list of sites
                    seen = self.attendance()
                    now, sites = seen["server"]["clock"], seen["sites"].items()
                    ages = {name: round(now - one["last_seen"]) for name, one in sites if "last_seen" in one}
                waiting["silent_seconds"] = {name: ages[name] for name in waiting["sites"] if ages.get(name, 0) > OVERDUE}
            return found | {"progress": running} | ({"waits": waits} if waits else {})
        found |= self._download_progress(meta["job_id"])
        if meta["status"] == ABORTED:
            reason = found.get("reason", "aborted, or ended by FLARE")
            found["reason"] = f"{reason}; {_resume_hint(meta)}" if reason.startswith((ABORTED_RUN, UNEXPLAINED)) else reason
        elif _has_failed(meta["status"]):
            found["reason"] = self._failure_line(meta, found)
        return found

    def reasons(self, jobs: list[Job]) -> list[str]:
        """Return one line per job: why it failed.

        The line is "" for a job that did not fail, and for all failed jobs except the newest MAX_REASONS.
        """
        failed = [job for job in jobs if job["status"] == LOST or _has_failed(job["status"])][-MAX_REASONS:]
        return [self._failure_line(job, self._download_progress(job["job_id"])) if job in failed else "" for job in jobs]

    def _failure_line(self, job: Job, result: Job) -> str:
        """Return why a job failed. `result`: the value of `_download_progress`."""
        if job["status"] == LOST:
            return f"its server process is gone; {_resume_hint(job)}"
        reason = result.get("reason") or "; ".join(_undeployed(job)) or self._scheduler_text(job["job_id"]) or NO_REASON
        return " ".join(reason.split())

    def _scheduler_text(self, job_id: str) -> str:
        """Return the last lines of FLARE's scheduler about a job that has not started, joined by "; ". "" if there are none."""
        history = self.session.get_job_meta(job_id).get("schedule_history") or []
        return "; ".join(text for text in dict.fromkeys(str(line)[TIMESTAMP:] for line in history[-2:]) if text != "scheduled")

    def _download_progress(self, job_id: str) -> Job:
        """Return an ended job's "progress" and, if it ended early, its "reason".

        They are read from the job's result. Without the right to download it, "progress" is None.
        """
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = self.download(job_id, Path(folder))
            except FLARE_ERRORS:
                return {"progress": None}
            finished = None
            # files are incomplete after a full disk, for example
            with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, yaml.YAMLError):
                finished = progress(result) if (result / "metrics.jsonl").is_file() else None
            if finished and finished["finished"]:
                return {"progress": finished}
            return {"progress": finished} | ({"reason": reason} if (reason := stored_reason(result)) else {})

    def download(self, job_id: str, destination: Path) -> Path:
        """Download an ended job's result. Return this package's folder in it, whose files RunLog describes.

        Raises ConfigError if the job was downloaded to `destination` before: FLARE would put the result inside the former one.
        """
        if (place := destination / job_id).exists():
            raise ConfigError(f"{place}: exists; remove it, or give another folder")
        return Path(self.session.download_job_result(job_id, str(destination))) / "workspace" / "consilium"

    def abort_and_await_end(self, job_id: str) -> bool:
        """Stop a job and wait for its end, at most ABORT_SECONDS. Return whether it has ended.

        Its checkpoint stays at the server. Until the end `consilium resume` refuses the run.
        """
        self.session.abort_job(job_id)
        ends = time.monotonic() + ABORT_SECONDS
        while not (ended := _has_ended(self.find_job(job_id)["status"])) and time.monotonic() < ends:
            time.sleep(2)  # FLARE writes each query to its audit.log
        return ended


def _undeployed(job: Job) -> list[str]:
    """Return a line for each participant at which FLARE could not deploy a job."""
    return [line for line in job.get("job_deploy_detail", []) if not line.endswith(": OK")]


def _has_ended(status: str) -> bool:
    return status == LOST or status.startswith(ENDED)


def _has_failed(status: str) -> bool:
    return status.startswith(ENDED) and status not in ("FINISHED:COMPLETED", ABORTED)


def _resume_hint(job: Job) -> str:
    return f"`consilium resume {shown(experiment_of(job))} --kit KIT` goes on from the last finished round"


def experiment_of(job: Job) -> str:
    """Return the name of a job's run at the server, as job_context.run_folder_name does."""
    return job.get("experiment") or default_run_name(job["name"], job["job_id"])


def stored_jobs(kit: Path, experiment: str) -> list[Path]:
    """Return FLARE's folders of all jobs of an experiment, from the files of the server's kit. Unreadable jobs are left out.

    A job's experiment is in FLARE's metadata, or in its job.yaml if FLARE's own tools submitted the job. Raises ConfigError if
    the kit's settings name no folder of jobs.
    """
    found = []
    for meta in sorted(server_folders(kit)[0].glob("*/meta")):
        names = set()
        with suppress(Exception):
            names.add(experiment_of(read_json(meta)))
        with suppress(Exception), zipfile.ZipFile(meta.with_name("data")) as job:  # an author may submit anything
            for name in [name for name in job.namelist() if name.endswith("/config/job.yaml")][:MAX_APPS]:
                with suppress(Exception):
                    names.add(read_yaml(zipfile.Path(job, name))["experiment"])
        if experiment in names:
            found.append(meta.parent)
    return found


def received_jobs(kit: Path) -> dict[Path, Job]:
    """Return FLARE's metadata of the jobs that a site has received, by FLARE's folder of the job in the kit.

    Each has the key `experiment`. The server has sent all these files. A folder without readable metadata is left out.
    """
    found: dict[Path, Job] = {}
    for folder in untrusted_files.subfolders(kit):
        meta: Job = {"name": "job", **untrusted_files.read_json(folder / "meta.json")}
        if meta.get("job_id") == folder.name:
            found[folder] = meta | {
                "name": (name := str(meta["name"])),
                "experiment": str(experiment_of(meta | {"name": name})),
            }
    return found


def stored_reason(result: Path) -> str | None:
    """Return why a job ended early, from its downloaded result. None if nothing is found.

    The reason is the text of stopped.txt in our folder, else the first error in FLARE's log.
    """
    stopped, log = result / "stopped.txt", result.parent / "error_log.txt"
    if stopped.is_file() and (ours := stopped.read_text(encoding="utf-8", errors="replace").strip()):
        return ours
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    found = [line for pattern in (_RAISED, _LOGGED) for line in re.findall(pattern, text, re.MULTILINE)]
    if found and UNLISTED in found[0]:
        return f"{found[0].strip()}; at each participant stop it, run `consilium allow KIT`, start it"
    return found[0].strip() if found else None


@contextmanager
def connect(kit: Path, seconds: float = 15) -> Iterator[Admin]:
    """Log in with an administrator's startup kit, and yield the session.

    Raises ConfigError if the folder is no administrator's kit, UnreachableError if there is no connection or the server has
    ended the session, and ConsiliumError for FLARE's other errors.
    """
    config = kit / "startup" / "fed_admin.json"
    if not config.is_file():
        raise ConfigError(f"--kit: {kit}: not an admin's startup kit (no startup/fed_admin.json); give its folder")
    check_certificate_time(kit)
    try:
        user = read_settings(config)["admin"]["username"]
    except (KeyError, TypeError):
        raise ConfigError(f"{config}: names no person; restore it, or ask the hub for the kit") from None
    try:
        with redirect_stdout(sys.stderr), redirect_stderr(io.StringIO()):  # FLARE prints lines, and a traceback if refused
            try:
                session = new_secure_session(user, str(kit.resolve()), timeout=seconds)
            except KeyboardInterrupt:  # FLARE does not close its connection, and its threads would keep this process alive
                for cell in list(CoreCell.ALL_CELLS.values()):
                    cell.stop()
                raise
            except TypeError:  # FLARE raises it if the server's reply has no certificate
                raise UnreachableError(f"{kit}: the server is only just starting; try again in a minute") from None
        try:
            yield Admin(session)
        finally:
            session.close()
    except (api_spec.NoConnection, FLCommunicationError) as error:
        if (said := refusal_message(error)) is not None:
            cause = cause_of(said)
            why = f"the server refuses this kit: {cause}: {cause.text} ({said}); ask the hub"
        else:
            why = f"no connection to the server ({error}); {why_no_connection(kit) or 'see that it runs and can be reached'}"
        raise UnreachableError(f"{kit}: {why}") from None
    except FLARE_ERRORS as error:
        if isinstance(error, NO_SESSION) or INACTIVE in str(error):
            raise UnreachableError(
                f"{kit}: the server has ended this session: it was started anew, or the person's credential was revoked; "
                "run the command again"
            ) from None
        raise ConsiliumError(f"FLARE: {error}") from None
