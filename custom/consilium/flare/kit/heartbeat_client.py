"""A site's facts in every heartbeat: versions, clock, expiry of its certificate, health; but nothing about its data.

The component runs in the kit's own process, which lives for months beside the processes of jobs, so it does not import torch.
"""

import logging
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.message import Message
from nvflare.fuel.utils.log_utils import configure_logging
from nvflare.lighter.utils import load_crt
from nvflare.private.defs import CellChannelTopic
from nvflare.private.fed.client.communicator import Communicator
from nvflare.private.fed.client.fed_client_base import FederatedClientBase

from consilium import __version__
from consilium.config.site import load_site
from consilium.core.errors import ConfigError, ConsiliumError, Reason
from consilium.core.messages import PROTOCOL
from consilium.core.storage import read_json
from consilium.data.text import read_site_list
from consilium.federation.compatibility import libraries
from consilium.federation.run_folders import REFUSAL, RUNS, STATE, records_folder
from consilium.flare import patches
from consilium.flare.kit.certificates import connection_refusal, fetch_server_certificate
from consilium.flare.kit.connection_refusals import (
    Cause,
    HeartbeatFilter,
    await_admission,
    note_answer,
    note_cause,
    refusal_line,
)
from consilium.privacy.audit_log import FILE, lines
from consilium.report.untrusted_files import as_finite_float

KEY = "consilium_attendance"
"""The key of the facts in a heartbeat's context, and of the list of sites in the server's status."""
COMPONENT = {"id": "attendance", "path": "consilium.flare.kit.heartbeat_client.AttendanceReport"}
"""The entry of this component in a site kit's local/resources.json."""
Facts = dict[str, Any]
JOB = "worker_process"
"""Name of the module that FLARE runs in a job's process at a site."""
RETRY = 60.0
"""Seconds between two checks of a certificate that is not valid. Each check logs one line."""
SILENCE = 30.0
"""Seconds without a reply from the server until a site with an invalid certificate counts as refused."""
COPIES = (
    "the server accepts connections and answers no heartbeat of this site; if another copy of this kit runs, stop it, then "
    "stop and start this one"
)
"""The log line of a site whose heartbeats the server does not answer although it runs."""
POLL = 0.1
"""Seconds between two checks whether FLARE's client has an engine."""


def own_facts() -> Facts:
    """Return this participant's versions and clock, in seconds since 1970."""
    return {"version": __version__, "protocol": PROTOCOL, "libraries": libraries(), "clock": time.time()}


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


def register(registration: Callable[..., tuple[Any, ...]], *given: Any) -> tuple[Any, ...]:
    """Register a site as `await_admission` does. Meanwhile check every minute whether TLS with the server fails.

    Then the server sends no cause, and FLARE 2.9 tries again without one.
    """
    registered = threading.Event()
    threading.Thread(target=_watch_connection, args=(Path.cwd(), registered), daemon=True).start()
    try:
        return await_admission(registration, *given)
    finally:
        registered.set()


def _watch_connection(kit: Path, registered: threading.Event) -> None:
    while not registered.is_set():
        note_connection_refusal(kit)
        registered.wait(RETRY)


def note_connection_refusal(kit: Path) -> bool:
    """Log and note the cause if TLS with the server fails because of a certificate. Return whether it does."""
    if (found := connection_refusal(kit)) is not None:
        note_cause(kit, found[0])
        logging.getLogger(__name__).error(refusal_line(*found))
    return found is not None


def note_no_answer(kit: Path) -> None:
    """Log why the server answers no heartbeat: its refusal of a certificate, or else another copy of the kit.

    If two copies of a kit run, FLARE's server answers only the copy that registered last. Nothing is logged if the server
    cannot be reached, because FLARE logs that.
    """
    if note_connection_refusal(kit):
        return
    with suppress(OSError, ConfigError):
        fetch_server_certificate(kit)
        logging.getLogger(__name__).error(COPIES)


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
        reply either, note the certificate as the cause. If only the server does not reply, log why, see `note_no_answer`.
        """
        if event_type == EventType.BEFORE_CLIENT_HEARTBEAT:
            if self._health is None:  # the first heartbeat; a job's process sends none
                self._health = HealthReport(self._kit)
                cell = fl_ctx.get_engine().get_cell().core_cell
                cell.add_incoming_reply_filter(CellChannel.SERVER_MAIN, CellChannelTopic.HEART_BEAT, self._note_reply)
            facts = own_facts() | ({"health": health} if (health := self._health.facts) is not None else {})
            with suppress(OSError, ValueError):  # the certificate is being replaced by a renewed one
                own = load_crt(self._kit / "startup" / "client.crt")
                facts["certificate_starts"] = own.not_valid_before_utc.timestamp()
                facts["certificate_ends"] = own.not_valid_after_utc.timestamp()
            fl_ctx.set_prop(KEY, facts, private=False, sticky=False)
        elif event_type == EventType.AFTER_CLIENT_HEARTBEAT:
            # A connection outlives its certificate, so the site stays connected until the connection breaks.
            wrong, cause = why_certificate_invalid(self._kit / "startup" / "client.crt")
            away = (now := time.monotonic()) - self._answered > SILENCE
            if (wrong or away) and now - self._said >= RETRY:
                self._said = now
                if not wrong:  # the server's clock may differ
                    threading.Thread(target=note_no_answer, args=(self._kit,), daemon=True).start()
                    return
                if away and cause:
                    note_cause(self._kit, cause)
                left = "the server does not answer" if away else "it stays until the connection breaks"
                logging.getLogger(__name__).error(f"the kit's certificate {wrong}; {left}")

    def _note_reply(self, reply: Message) -> None:
        """Note that the server admits the site. FLARE fires its event after a heartbeat even if the server did not reply."""
        if reply.get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.OK:
            self._answered = time.monotonic()
            note_answer(self._kit)


# health ----------------------------------------------------------------------------------------------------------------
# A site's health facts in its heartbeats: the state of its machine and whether its data list can be read. They are sent only if
# the site's site.yaml says `health: share`. No fact counts or names anything in the site's data.

PERIOD = 30.0
"""Seconds between two checks of the machine. An edit of site.yaml takes effect at the next check."""
DATA_PERIOD, MAX_AGE = 600.0, 300.0
"""DATA_PERIOD: seconds between two readings of the data lists. MAX_AGE: seconds after which the facts are too old to send."""
STEP = 2**27
"""Free disk and memory are rounded down to multiples of this many bytes. Exact numbers would show the size of each new file."""
GPU_QUERY = ("nvidia-smi", "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits")
GPU_PATIENCE, MAX_GPUS, MAX_RECORDS = 10.0, 64, 5
"""Seconds to wait for nvidia-smi; largest number of GPUs; number of newest records that are searched for a refusal."""


def is_time(value: Any) -> bool:
    """Return whether a value is a time in seconds since 1970, before the year 5138."""
    return type(value) in (int, float) and 0 <= value < 1e11


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**60


HEALTH: dict[str, Callable[[Any], bool]] = {
    "disk_free": _is_size,
    "memory_free": _is_size,
    "memory": _is_size,
    "gpus": lambda value: (
        isinstance(value, list | tuple)
        and len(value) <= MAX_GPUS
        and all(isinstance(one, list | tuple) and len(one) == 2 and all(map(_is_size, one)) for one in value)
    ),
    "data_readable": lambda value: type(value) is bool,
    "data_checked": is_time,
    "refusal": lambda value: type(value) is str and value in list(Reason),
    "refused_at": is_time,
}
"""All health facts with the checks of their values. Sizes are in bytes. "gpus": [free, total] of each GPU. "refusal": the code
of the site's last refusal of a job."""


def valid_facts(sent: Any, checks: Mapping[str, Callable[[Any], bool]]) -> Facts:
    """Return the facts that a site `sent` and that pass the check of their name in `checks`."""
    sent = sent if isinstance(sent, Mapping) else {}
    return {name: sent[name] for name, is_valid in checks.items() if name in sent and is_valid(sent[name])}


class HealthReport:
    """Collects a site's health facts every PERIOD seconds, in its own thread: a disk that hangs must not stop heartbeats."""

    def __init__(self, kit: Path) -> None:
        self.kit = kit
        self._last: tuple[float, Facts | None] = (0.0, None)
        self._data: Facts = {}
        self._paths: list[Path] = []
        threading.Thread(target=self._run, name="health", daemon=True).start()

    @property
    def facts(self) -> Facts | None:
        """The facts that were collected last. None if the site does not share its health, or if the facts are too old."""
        when, found = self._last
        return found if time.monotonic() - when < MAX_AGE else None

    def _run(self) -> None:
        while True:
            try:
                self._last = time.monotonic(), self.collect_facts()
            except Exception:  # such as an error of the disk; the next attempt may succeed
                self._last = time.monotonic(), None
            time.sleep(PERIOD)

    def collect_facts(self) -> Facts | None:
        """Collect and return the facts. None if the site does not share its health, or if its site.yaml cannot be read."""
        try:
            site = load_site(self.kit / "local" / "site.yaml")
        except ConfigError:
            return None
        if site.health is None:
            return None
        state, memory = records_folder(self.kit, site.state), psutil.virtual_memory()
        found: Facts = {"disk_free": shutil.disk_usage(state if state.is_dir() else self.kit).free // STEP * STEP}
        found |= {"memory_free": memory.available // STEP * STEP, "memory": memory.total, "gpus": gpu_memory()}
        paths = [one for one in (site.datalist, *(data.datalist for data in site.datasets.values())) if one]
        if paths != self._paths or not 0 <= time.time() - self._data.get("data_checked", 0.0) < DATA_PERIOD:
            readable = True
            for path in paths:
                try:
                    read_site_list(path)
                except (ConsiliumError, OSError):  # OSError: such as a network disk that is away
                    readable = False
            self._data, self._paths = {"data_readable": readable, "data_checked": time.time()}, paths
        return found | (self._data if paths else {}) | last_refusal(self.kit, state)


def gpu_memory() -> list[list[int]]:
    """Return [free bytes, total bytes] per GPU that NVIDIA's driver lists; [] without GPUs. Does not import torch."""
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        said = subprocess.run(GPU_QUERY, capture_output=True, text=True, timeout=GPU_PATIENCE, check=True).stdout
        rows = [[int(number) * 2**20 for number in row.split(",")] for row in said.splitlines()[:MAX_GPUS]]
        return [[free // STEP * STEP, whole] for free, whole in rows]
    return []


def last_refusal(kit: Path, state: Path) -> Facts:
    """Return the code and time of the site's last refusal, from the newest audit records in `state` and from REFUSAL; or {}.

    The server has received this code already, so it reveals nothing new. The reason of an evaluation whose scores stay at the
    site stays, too.
    """
    found: list[Any] = []
    with suppress(OSError, ValueError, RecursionError):
        found.append(read_json(kit / STATE / REFUSAL))
    with suppress(OSError):
        records = sorted((state / RUNS).rglob(FILE), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in records[:MAX_RECORDS]:
            with suppress(ConsiliumError):
                found += lines(path)
    times = [
        (at, str(one["reason"]))
        for one in found
        if isinstance(one, dict) and one.get("kind") == "refusal" and one.get("reason") in list(Reason) and not one.get("stays")
        if (at := as_finite_float(one.get("time"))) is not None  # it is no number if a file was edited
    ]
    return dict(zip(("refused_at", "refusal"), max(times), strict=True)) if times else {}
