"""The server's list of sites: the time and the facts of each site's last heartbeat.

The list is part of the server's status, which administrators can ask for, and of the file attendance.json. heartbeat_client.py
puts the facts into FLARE's heartbeats. No job needs to run.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, RunProcessKey
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.hci.conn import Connection
from nvflare.private.fed.server.client_manager import ClientManager
from nvflare.private.fed.server.server_engine import ServerEngine
from nvflare.private.fed.server.training_cmds import TrainingCommandModule

from consilium.core.errors import ConfigError
from consilium.core.storage import make_private_folder, read_json, write_json
from consilium.federation.compatibility import are_libraries, is_version
from consilium.federation.run_folders import ATTENDANCE, STATE
from consilium.flare import patches
from consilium.flare.kit import revocation
from consilium.flare.kit.audit_rotation import rotate_audit_log
from consilium.flare.kit.connection_refusals import Cause
from consilium.flare.kit.heartbeat_client import HEALTH, KEY, Facts, is_time, own_facts, valid_facts
from consilium.flare.kit.kit_reader import server_folders
from consilium.flare.kit.revocation import latest_heartbeat

MAX_SITES = 10_000
"""Largest number of sites in the list. Each of them has shown a certificate of the project."""
EVERY = 10.0
"""Seconds between two writes of the file."""
PERSON = "@"
"""Every person's name has this character, and no site's: the list of revoked names has both."""
COMPONENT = {"id": "attendance", "path": "consilium.flare.kit.heartbeat_server.Attendance"}
"""The entry of this component in the server kit's local/resources.json."""


class Attendance(FLComponent):
    """A component of the server's kit that stores each site's last heartbeat and adds the sites to the server's status.

    Raises ConfigError at the start if the patches do not fit the installed FLARE.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kit: Path | None = None
        self._engine: ServerEngine | None = None
        self._sites: dict[str, Facts] = {}
        self._written = 0.0
        self._writing = threading.Lock()
        """FLARE handles heartbeats in several threads, and two writes at a time could leave half a file."""
        self._latest = 0.0
        patches.SERVER_HEARTBEAT.wrap(self._record_heartbeat)
        patches.STATUS.wrap(self._add_sites_to_status)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """At the start, read the list from attendance.json.

        At each heartbeat or attempt to register, but at most every ten seconds, write it. Write it also while no site connects,
        such as after all their certificates have ended.
        """
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            self._kit = Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir())
            rotate_audit_log(self._kit)
            self._latest = latest_heartbeat(self._kit / STATE / ATTENDANCE)
            with suppress(ConfigError):  # the doctor reports it
                make_private_folder(server_folders(self._kit)[0])  # FLARE would create it readable by all users
            with suppress(ConfigError):  # there is no file yet, or it is damaged and is replaced
                self._sites = {
                    n: {k: v for k, v in one.items() if k not in ("here", "jobs", "cause")}
                    for n, one in read_attendance(self._kit)["sites"].items()
                    if "last_seen" in one
                }
        # a refused site sends no heartbeat, but it tries to register
        elif event_type in (EventType.CLIENT_HEARTBEAT_PROCESSED, EventType.CLIENT_REGISTER_RECEIVED):
            self._engine = fl_ctx.get_engine()
            self._write()
        elif event_type == EventType.SYSTEM_START:  # not in jobs' processes
            self._engine = fl_ctx.get_engine()
            threading.Thread(target=self._write_regularly, name="attendance", daemon=True).start()

    def _write_regularly(self) -> None:
        while True:
            time.sleep(EVERY)  # the first heartbeat may write at once
            self._write()

    def _write(self) -> None:
        """Write the list to attendance.json, unless a thread writes it now or did so less than ten seconds ago."""
        if self._kit is None or not self._writing.acquire(blocking=False):
            return
        path = self._kit / STATE / ATTENDANCE
        try:
            if time.monotonic() - self._written >= EVERY:
                self._written = time.monotonic()
                write_json(path, self._status_facts() | {"latest": self._latest})
        except OSError as error:  # FLARE would log a traceback every ten seconds
            self.logger.warning(f"{path}: cannot be written ({error.strerror}); make room")
        finally:
            self._writing.release()

    def _record_heartbeat(self, beat: Callable[..., bool], manager: ClientManager, token: str, name: str, *rest: Any) -> bool:
        """Store a site's facts after FLARE has accepted its heartbeat. Then FLARE has verified the site's name."""
        found, fl_ctx = beat(manager, token, name, *rest), rest[-1]
        # FLARE sets the second for another copy of a kit whose site is connected
        refused = fl_ctx.get_prop(FLContextKey.UNAUTHENTICATED) or fl_ctx.get_prop(FLContextKey.COMMUNICATION_ERROR)
        if not refused and (name in self._sites or len(self._sites) < MAX_SITES):
            peer, now = fl_ctx.get_peer_context(), time.time()
            self._latest = max(self._latest, now)  # a clock that is set back must not make a revocation's time earlier
            self._sites[name] = checked_facts(peer.get_prop(KEY) if peer else None, now)
        return found

    def _add_sites_to_status(
        self, status: Callable[..., None], module: TrainingCommandModule, conn: Connection, args: list[str]
    ) -> None:
        status(module, conn, args)
        if args[1] in (module.TARGET_TYPE_SERVER, module.TARGET_TYPE_ALL):
            conn.update_meta({KEY: self._status_facts()})

    def _status_facts(self) -> Facts:
        """Return {"server": the server's facts, "sites": {name: facts}}. "here" in a site's facts says if it is connected.

        A site that was revoked or disabled before its first heartbeat is listed too, without "last_seen".
        """
        jobs: dict[str, list[str]] = {}
        here: set[str] = set()
        disabled: set[str] = set()
        if self._engine:
            here = {client.name for client in self._engine.get_clients()}
            disabled = set(self._engine.server.client_manager.disabled_clients)
            for job_id, process in list(self._engine.run_processes.items()):
                for client in process[RunProcessKey.PARTICIPANTS].values():
                    jobs.setdefault(client.name, []).append(job_id)
        known = dict(self._sites)  # heartbeats of other threads change it
        sites = {n: facts | {"here": n in here, "jobs": jobs.get(n, [])} for n, facts in sorted(known.items())}
        # Why the server would refuse sites that are not connected, as far as it knows: a certificate's times are known from a
        # heartbeat only. A site whose connection fails before the registration, as with a kit of another project, has no name.
        now = time.time()
        causes = {n: Cause.ENDED for n, one in known.items() if one.get("certificate_ends", math.inf) < now}
        causes |= {n: Cause.EARLY for n, one in known.items() if one.get("certificate_starts", 0.0) > now}
        with suppress(ConfigError):  # a damaged revocation list is reported by the doctor
            revoked = revocation.revoked_until(self._kit / "local") if self._kit else {}
            late = {n: known.get(n, {}).get("last_seen", 0.0) for n in revoked if PERSON not in n}
            causes |= {n: Cause.REVOKED for n, seen in late.items() if seen <= revoked[n]}  # a later one is of a newer kit
        for name, cause in (causes | dict.fromkeys(disabled, Cause.REFUSED)).items():
            if name not in here:
                sites.setdefault(name, {"here": False, "jobs": []})["cause"] = cause
        return {"server": own_facts(), "sites": dict(sorted(sites.items()))}


SENT: dict[str, Callable[[Any], bool]] = {
    "version": is_version,
    "protocol": lambda value: type(value) is int and 0 <= value < 10**6,
    "libraries": are_libraries,
    "certificate_starts": is_time,
    "certificate_ends": is_time,
    "health": lambda value: type(value) is dict and valid_facts(value, HEALTH) == value,
    "clock": is_time,
}
"""The facts that a site may send, each with the check of its value."""
STORED: dict[str, Callable[[Any], bool]] = SENT | {
    "last_seen": is_time,
    "here": lambda value: type(value) is bool,
    "cause": lambda value: value in (None, *Cause),
    "jobs": lambda value: isinstance(value, list) and all(isinstance(job, str) for job in value),
    "skew": lambda value: type(value) in (int, float) and abs(value) < 1e11,
}
"""The facts of a site in the file, each with the check of its value."""


def checked_facts(sent: Any, now: float) -> Facts:
    """Return the valid ones of the facts that a site `sent`, with "last_seen" = `now` and "skew".

    "skew" is how many seconds the site's clock is ahead of the server's.
    """
    facts: Facts = {"last_seen": now} | valid_facts(sent, SENT)
    if isinstance(sent, Mapping) and "health" in sent:  # the valid ones of its facts, even if others are not
        facts["health"] = valid_facts(sent["health"], HEALTH)
    clock = facts.pop("clock", None)
    return facts if clock is None else facts | {"skew": round(clock - now, 1)}


def read_attendance(kit: Path) -> Facts:
    """Return the server's list of sites from its file in the server's kit. Raises ConfigError."""
    path = kit / STATE / ATTENDANCE
    try:
        found = read_json(path)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: not there: no site has been seen by this server; start it; "
            "where its kit is of an earlier version, run `consilium allow KIT` first"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); remove it, the server writes it anew") from None
    try:
        whole = {"version", "protocol"} <= valid_facts(found["server"], SENT).keys() and all(
            valid.keys() == one.keys() & STORED.keys()
            and {"here", "jobs"} <= valid.keys()
            # a site that was refused before its first heartbeat has a cause
            and ("last_seen" in valid or valid.get("cause") is not None)
            for one in found["sites"].values()
            for valid in [valid_facts(one, STORED)]
        )
    except (KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise ConfigError(f"{path}: is damaged, or of another version; remove it, the server writes it anew")
    return found
