"""A site's facts in every heartbeat: versions, clock, expiry of its certificate, states of jobs; but nothing about its data.

The component runs in the kit's own process, which lives for months beside the processes of jobs, so it does not import torch.
"""

import logging
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.message import Message
from nvflare.fuel.utils.log_utils import configure_logging
from nvflare.lighter.utils import load_crt
from nvflare.private.defs import CellChannelTopic
from nvflare.private.fed.client.client_engine import ClientEngine
from nvflare.private.fed.client.client_status import ClientStatus
from nvflare.private.fed.client.communicator import Communicator
from nvflare.private.fed.client.fed_client_base import FederatedClientBase

from consilium import __version__
from consilium.core.errors import ConfigError
from consilium.core.messages import PROTOCOL
from consilium.federation.compatibility import libraries
from consilium.flare import patches
from consilium.flare.kit.certificates import OTHER_ROOT, fetch_server_certificate
from consilium.flare.kit.connection_refusals import (
    Cause,
    HeartbeatFilter,
    await_admission,
    note_answer,
    note_cause,
    refusal_line,
)
from consilium.flare.kit.health import HealthReport
from consilium.flare.kit.kit_contents import ANSWERED

KEY = "consilium_attendance"
"""The key of the facts in a heartbeat's context, and of the list of sites in the server's status."""
COMPONENT = {"id": "attendance", "path": "consilium.flare.kit.heartbeat_client.AttendanceReport"}
"""The entry of this component in a site kit's local/resources.json."""
Facts = dict[str, Any]
JOB = "worker_process"
"""Name of the module that FLARE runs in a job's process at a site."""
JOB_STATES = {ClientStatus.STARTING: "starting", ClientStatus.STARTED: "running"}
"""Words for FLARE's states of a job's process at a site. FLARE's process is "starting" until it has loaded its code."""
RETRY = 60.0
"""Seconds between two checks of a certificate that is not valid. Each check logs one line."""
SILENCE = 30.0
"""Seconds without a reply from the server until a site with an invalid certificate counts as refused."""
POLL = 0.1
"""Seconds between two checks whether FLARE's client has an engine."""


def own_facts(
    certificate_ends: float | None = None, health: Facts | None = None, processes: Mapping[str, str] | None = None
) -> Facts:
    """Return this participant's facts: versions, clock, the time its certificate expires, its `health`, and its `processes`.

    Times are in seconds since 1970. `processes`: see `job_processes`. Facts that are None are left out.
    """
    facts: Facts = {"version": __version__, "protocol": PROTOCOL, "libraries": libraries(), "clock": time.time()}
    more = {"certificate_ends": certificate_ends, "health": health, "processes": processes}
    return facts | {name: value for name, value in more.items() if value is not None}


def await_valid_certificate(kit: Path) -> None:
    """Wait until the kit's certificate is valid by this machine's clock. Log every minute that it is not.

    With an invalid certificate, FLARE 2.9's client fails without a message and then waits for ever, even after the certificate
    has become valid.
    """
    while (path := kit / "startup" / "client.crt").is_file() and (found := why_certificate_invalid(path))[0]:
        configure_logging(Workspace(str(kit)))  # FLARE does it later
        logging.getLogger(__name__).error(f"the kit's certificate {found[0]}; waiting")
        note_cause(kit, found[1])
        time.sleep(RETRY)


def why_certificate_invalid(path: Path) -> tuple[str, Cause | None]:
    """Return (why a certificate is not valid now, with a remedy; the cause). ("", None) for a valid certificate."""
    try:
        own, now = load_crt(path), datetime.now(UTC)
    except (OSError, ValueError):  # such as a half-copied file
        return "cannot be read: restore the kit", None
    if own.not_valid_before_utc <= now <= own.not_valid_after_utc:
        return "", None
    span = f"from {own.not_valid_before_utc:%Y-%m-%d %H:%M} to {own.not_valid_after_utc:%Y-%m-%d %H:%M}"
    remedy = "set the clock, or ask the hub for a renewed kit"
    cause = Cause.EARLY if now < own.not_valid_before_utc else Cause.ENDED
    return f"is valid {span}, now is {now:%Y-%m-%d %H:%M} UTC: {remedy}", cause


def await_engine(beat: Callable[..., None], client: FederatedClientBase, *rest: Any) -> None:
    """Start heartbeats once FLARE's client has its engine, shortly after registration; see patches.CLIENT_HEARTBEAT."""
    while not client.engine:
        time.sleep(POLL)
    beat(client, *rest)


def job_processes(kit: Path, engine: ClientEngine) -> dict[str, str]:
    """Return by job id the state of each job's process at this site: "starting", or "running".

    A process of one of our jobs is starting until it has answered the hello. Before that, it reads the data.
    """
    states = {job: engine.client_executor.get_status(job) for job in list(engine.get_all_job_ids())}
    found = {job: JOB_STATES[state] for job, state in states.items() if state in JOB_STATES}
    ours = {job for job in found if any((kit / job).glob("app_*/config/job.yaml"))}
    waiting = {job for job in ours if not (kit / job / ANSWERED).exists()}
    return found | dict.fromkeys(waiting, JOB_STATES[ClientStatus.STARTING])


def register(registration: Callable[..., tuple[Any, ...]], *given: Any) -> tuple[Any, ...]:
    """Register a site as `await_admission` does. Beside it, find out whether the server is of another project.

    Then no connection is made and the server sends no cause, so FLARE 2.9 tries again without one.
    """
    threading.Thread(target=note_other_project, args=(Path.cwd(),), daemon=True).start()
    return await_admission(registration, *given)


def note_other_project(kit: Path) -> None:
    """Log and note the cause if no root of the kit has signed the server's certificate."""
    try:
        fetch_server_certificate(kit)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in OTHER_ROOT:
            note_cause(kit, Cause.PROJECT)
            logging.getLogger(__name__).error(refusal_line(Cause.PROJECT, str(error)))
    except (OSError, ConfigError):  # such as a server that does not run yet
        pass


class AttendanceReport(FLComponent):
    """A component of a site's kit that puts `own_facts` into every heartbeat."""

    def __init__(self) -> None:
        super().__init__()
        if Path(sys.argv[0]).stem != JOB:  # FLARE creates this component in jobs' processes too
            await_valid_certificate(Path.cwd())  # FLARE creates components in the kit's folder, before it connects
            patches.CLIENT_HEARTBEAT.wrap(await_engine)
            patches.CLIENT_REGISTRATION.wrap(register)
            logging.getLogger(f"{Communicator.__module__}.{Communicator.__qualname__}").addFilter(HeartbeatFilter(Path.cwd()))
        self._kit = Path.cwd()
        self._health: HealthReport | None = None
        self._answered = self._said = 0.0

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Put the facts into the context that FLARE sends with a heartbeat.

        After a heartbeat, log an error, at most once a minute, if the kit's certificate is not valid. If the server does not
        reply either, note the certificate as the cause.
        """
        if event_type == EventType.BEFORE_CLIENT_HEARTBEAT:
            engine = fl_ctx.get_engine()
            if self._health is None:  # the first heartbeat; a job's process sends none
                self._health = HealthReport(self._kit)
                cell = engine.get_cell().core_cell
                cell.add_incoming_reply_filter(CellChannel.SERVER_MAIN, CellChannelTopic.HEART_BEAT, self._note_reply)
            ends = None
            with suppress(OSError, ValueError):  # the certificate is being replaced by a renewed one
                ends = load_crt(self._kit / "startup" / "client.crt").not_valid_after_utc.timestamp()
            fl_ctx.set_prop(
                KEY, own_facts(ends, self._health.facts, job_processes(self._kit, engine)), private=False, sticky=False
            )
        elif event_type == EventType.AFTER_CLIENT_HEARTBEAT:
            # A connection outlives its certificate, so the site stays connected until the connection breaks.
            wrong, cause = why_certificate_invalid(self._kit / "startup" / "client.crt")
            if wrong and (now := time.monotonic()) - self._said >= RETRY:
                self._said = now
                if (away := now - self._answered > SILENCE) and cause:
                    note_cause(self._kit, cause)
                left = "the server does not answer" if away else "it stays until the connection breaks"
                logging.getLogger(__name__).error(f"the kit's certificate {wrong}; {left}")

    def _note_reply(self, reply: Message) -> None:
        """Note that the server admits the site. FLARE fires its event after a heartbeat even if the server did not reply."""
        if reply.get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.OK:
            self._answered = time.monotonic()
            note_answer(self._kit)
