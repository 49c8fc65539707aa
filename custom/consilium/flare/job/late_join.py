"""Sites that connect or leave while a job runs. FLARE 2.9 starts a job only at the sites that are connected at its start.

`LateSites` runs in the server's process. It sends a running job to a site that connects later, with the messages that FLARE
uses to start every job. So the site checks signature, rights, privacy scope and approval as always. `Arrivals` runs in the
job's process. It finds such sites, and the controller registers them. At the end of a job, `LateSites` also ends FLARE's wait
for a silent site: FLARE would wait ten minutes and then give a complete job the status ABNORMAL.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import RunProcessKey, SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import ALL_SITES, Job, JobMetaKey
from nvflare.apis.job_scheduler_spec import DispatchInfo
from nvflare.fuel.utils.log_utils import get_obj_logger
from nvflare.private.admin_defs import MsgHeader, ReturnCode
from nvflare.private.fed.server.server_engine import ServerEngine
from nvflare.private.fed.utils.fed_utils import extract_participants

from consilium.core.errors import ConsiliumError
from consilium.core.sanitize import shown

COMPONENT = {"id": "late_sites", "path": "consilium.flare.job.late_join.LateSites"}
"""The entry of this component in the server kit's local/resources.json."""
AGAIN = 30.0
"""Seconds to wait before a job is sent again to a site that has logged in again: its old process ends in that time."""
SILENT = 60.0
"""Seconds without a heartbeat after which an ended job no longer waits for a site."""
EVERY = 3.0
"""Seconds between two checks of the connected sites by a job's process."""
_DETAIL = JobMetaKey.JOB_DEPLOY_DETAIL.value


class LateSites(FLComponent):
    """A component of the server's kit. Jobs are sent by a separate thread, one at a time, so heartbeats do not wait."""

    def __init__(self) -> None:
        super().__init__()
        self._busy = threading.Lock()
        self._seen: dict[str, float] = {}
        self._beats: dict[str, tuple[float, float]] = {}
        """By login token: (FLARE's time of the last heartbeat, the monotonic time at which this component first saw it)."""
        self._tried: set[tuple[str, str]] = set()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """At every heartbeat, start a thread that looks for sites without a job meant for them, unless one is running."""
        if event_type == EventType.CLIENT_HEARTBEAT_PROCESSED and self._busy.acquire(blocking=False):
            threading.Thread(target=self._handle_late_silent_sites, args=(fl_ctx.get_engine(),), daemon=True).start()

    def _handle_late_silent_sites(self, engine: ServerEngine) -> None:
        try:
            here = {client.token: client for client in engine.get_clients()}
            now = time.monotonic()
            self._seen = {token: self._seen.get(token, now) for token in here}
            for token, client in here.items():  # FLARE uses the wall clock, which may be set meanwhile
                if self._beats.get(token, (None,))[0] != client.last_connect_time:
                    self._beats[token] = client.last_connect_time, now
            self._beats = {token: beat for token, beat in self._beats.items() if token in here}
            self._tried = {(job, token) for job, token in self._tried if job in engine.run_processes}
            # stop FLARE's wait for silent sites in jobs whose server process has ended
            for client in [one for token, one in here.items() if now - self._beats.get(token, (0.0, math.inf))[1] > SILENT]:
                for job_id in engine.job_runner.get_client_outcome_jobs(client.name) - engine.run_processes.keys():
                    engine.job_runner.resolve_client_outcome(job_id, client.name)
                    self.logger.info(f"{client.name}: silent; job {job_id} ends without its outcome")
            for job_id, job in list(engine.job_runner.running_jobs.items()):
                for token, client in here.items():
                    if (job_id, token) not in self._tried and (app := self._missing_app(engine, job, client)):
                        self._tried.add((job_id, token))
                        self._send_job(engine, job, client, app)
        finally:
            self._busy.release()

    def _missing_app(self, engine: ServerEngine, job: Job, client: Client) -> str | None:
        """Return the app of a job that a site should run and was not sent since its last login; None if there is none."""
        process = engine.run_processes.get(job.job_id)
        if process is None or client.token in process[RunProcessKey.PARTICIPANTS]:
            return None
        came_back = client.name in {one.name for one in process[RunProcessKey.PARTICIPANTS].values()}
        if came_back and time.monotonic() - self._seen[client.token] < AGAIN:
            return None
        deployed = {app: extract_participants(sites) for app, sites in job.get_deployment().items()}
        apps = (a for a, sites in deployed.items() if client.name in sites or [s.upper() for s in sites] == [ALL_SITES])
        return next(apps, None)

    def _send_job(self, engine: ServerEngine, job: Job, client: Client, app: str) -> None:
        """Deploy and start a job's app at a site, and add the site to the job's participants. Log a failure at the server."""
        with engine.new_context() as fl_ctx:
            try:
                admin = engine.server.admin_server
                message = engine.job_runner._make_deploy_message(job, job.get_application(app, fl_ctx), app, fl_ctx)
                replies = admin.send_requests_and_get_reply_dict({client.token: message}, timeout_secs=admin.timeout)
                reply = replies.get(client.token)
                if reply is None or reply.get_header(MsgHeader.RETURN_CODE, ReturnCode.OK) != ReturnCode.OK:
                    reason = "no answer" if reply is None else shown(reply.body, 200)
                    raise ConsiliumError(f"{client.name}: did not take job {job.job_id}, which runs: {reason}")
                wanted = job.resource_spec.get(client.name, {}) if job.resource_spec else {}
                checked = engine.check_client_resources(job, {client.name: wanted}, fl_ctx)
                enough, token = checked.get(client.name, (False, "no answer"))
                if not enough:
                    raise ConsiliumError(
                        f"{client.name}: lacks the resources that job {job.job_id} asks for: {shown(token, 200)}"
                    )
                process = engine.run_processes[job.job_id]
                others = {t: one for t, one in process[RunProcessKey.PARTICIPANTS].items() if one.name != client.name}
                process[RunProcessKey.PARTICIPANTS] = others | {client.token: client}
                job.meta[JobMetaKey.JOB_CLIENTS] = [one.to_dict() for one in process[RunProcessKey.PARTICIPANTS].values()]
                engine.start_client_job(job, {client.name: DispatchInfo(app, wanted, token)}, fl_ctx)
                manager = engine.get_component(SystemComponents.JOB_MANAGER)  # `consilium resume` reads the job's sites there
                detail = list(manager.get_job(job.job_id, fl_ctx).meta.get(_DETAIL) or [])
                kept = [line for line in detail if not line.startswith(f"{client.name}: ")]
                manager.update_meta(job.job_id, {_DETAIL: [*kept, f"{client.name}: OK"]}, fl_ctx)
                self.log_info(fl_ctx, f"{client.name}: came while job {job.job_id} runs, and has been sent it")
            except ConsiliumError as error:
                self.log_warning(fl_ctx, str(error))
            except Exception:  # raised by FLARE's functions, or by a site's malformed reply
                self.log_exception(fl_ctx, f"{client.name}: job {job.job_id} could not be sent to it")


class Arrivals:
    """Checks every EVERY seconds, until it is stopped, for new sites of a job, and calls `arrived` with their names."""

    def __init__(self, engine: ServerEngine, job_id: str, arrived: Callable[[set[str]], None]) -> None:
        self._engine, self._job_id, self._arrived = engine, job_id, arrived
        self._over, self._logger = threading.Event(), get_obj_logger(self)
        threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> None:
        """Stop the checks."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(EVERY):
            try:
                found: Mapping[str, Any] | None = self._engine._retrieve_clients_data(self._job_id)
                known = self._engine.client_manager.clients
                if found and found.keys() != known.keys():
                    self._engine.client_manager.set_clients(dict(found))
                    self._arrived({client.name for token, client in found.items() if token not in known})
            except Exception as error:  # such as a connection that ends with the job; the next check is soon
                self._logger.info(f"the connected sites could not be read now ({type(error).__name__})")
