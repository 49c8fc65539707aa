"""Which sites are here: what the server keeps of what each tells of itself at a heartbeat, and what an admin is told.

FLARE's heartbeats carry what heartbeat_client.py puts into them, and an admin may ask the server for its status. Neither needs
a job.
"""

import json
import time
from collections.abc import Callable, Mapping
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
from consilium.core.storage import private_folder, write_atomic
from consilium.federation.compatibility import are_libraries, is_version
from consilium.federation.run_folders import ATTENDANCE, STATE
from consilium.flare.kit.heartbeat_client import KEY, Facts, own_facts
from consilium.flare.kit.revocation import latest_heartbeat
from consilium.flare.method_wrapper import wrap

MOST_SITES = 10_000
"""Sites that are kept; each has shown a certificate of the project."""
EVERY = 10.0
"""Seconds between two writings of the file."""
COMPONENT = {"id": "attendance", "path": "consilium.flare.kit.heartbeat_server.Attendance"}
"""In the server kit's local/resources.json."""


class Attendance(FLComponent):
    """A component of the server's own kit: keeps who was here, when, and with what, and tells an admin who may ask for status.

    Raises ConsiliumError at the start where FLARE is none that it knows.
    """

    def __init__(self) -> None:
        super().__init__()
        self._folder: Path | None = None
        self._engine: ServerEngine | None = None
        self._sites: dict[str, Facts] = {}
        self._written = 0.0
        self._latest = 0.0
        wrap(ClientManager, "heartbeat", self._heartbeat)
        wrap(TrainingCommandModule, "check_status", self._status)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Learn where the kit is, and what it knows from before a restart."""
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            self._folder = Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir()) / STATE
            self._sites = _kept(self._folder / ATTENDANCE)
            self._latest = latest_heartbeat(self._folder / ATTENDANCE)
        elif event_type == EventType.CLIENT_HEARTBEAT_PROCESSED:
            self._engine = fl_ctx.get_engine()
            if time.monotonic() - self._written >= EVERY:
                self._written = time.monotonic()
                self._write()

    def _heartbeat(self, beat: Callable[..., bool], manager: ClientManager, token: str, name: str, *rest: Any) -> bool:
        """Note what a site says, once FLARE has taken its heartbeat: then the name is its certificate's."""
        found, fl_ctx = beat(manager, token, name, *rest), rest[-1]
        if not fl_ctx.get_prop(FLContextKey.UNAUTHENTICATED) and (name in self._sites or len(self._sites) < MOST_SITES):
            peer, now = fl_ctx.get_peer_context(), time.time()
            self._latest = max(self._latest, now)  # a clock that is set back must not make a revocation weaker
            self._sites[name] = checked_facts(peer.get_prop(KEY) if peer else None, now)
        return found

    def _status(self, status: Callable[..., None], module: TrainingCommandModule, conn: Connection, args: list[str]) -> None:
        status(module, conn, args)
        if args[1] in (module.TARGET_TYPE_SERVER, module.TARGET_TYPE_ALL):
            conn.update_meta({KEY: self._answer()})

    def _answer(self) -> Facts:
        """Return the server's own facts, and those of all sites with whether each is here and which jobs it has."""
        jobs: dict[str, list[str]] = {}
        here: set[str] = set()
        if self._engine:
            here = {client.name for client in self._engine.get_clients()}
            for job_id, process in list(self._engine.run_processes.items()):
                for client in process[RunProcessKey.PARTICIPANTS].values():
                    jobs.setdefault(client.name, []).append(job_id)
        sites = {n: facts | {"here": n in here, "jobs": jobs.get(n, [])} for n, facts in sorted(self._sites.items())}
        return {"server": own_facts(), "sites": sites}

    def _write(self) -> None:
        if self._folder is None:
            return
        try:
            told = self._answer() | {"latest": self._latest}
            write_atomic(private_folder(self._folder) / ATTENDANCE, json.dumps(told).encode())
        except OSError as error:  # FLARE would log a traceback every ten seconds
            self.logger.warning(f"{self._folder / ATTENDANCE}: cannot be written ({error.strerror}); make room")


def checked_facts(told: Any, now: float) -> Facts:
    """Return of what a site says that which is of its kind, with when it said it and how far its clock is ahead (seconds)."""
    told = told if isinstance(told, Mapping) else {}
    facts: Facts = {"last_seen": now}
    if is_version(told.get("version")):
        facts["version"] = told["version"]
    if type(told.get("protocol")) is int and 0 <= told["protocol"] < 10**6:
        facts["protocol"] = told["protocol"]
    if are_libraries(told.get("libraries")):
        facts["libraries"] = dict(told["libraries"])
    if _is_time(told.get("clock")):
        facts["skew"] = round(told["clock"] - now, 1)
    if _is_time(told.get("certificate_ends")):
        facts["certificate_ends"] = told["certificate_ends"]
    return facts


def _is_time(told: Any) -> bool:
    return type(told) in (int, float) and 0 <= told < 1e11


def read(kit: Path) -> Facts:
    """Return what the server's kit knows of its sites, from its file, on the server's machine. Raises ConfigError."""
    path = kit / STATE / ATTENDANCE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        remedy = "start it; where its kit is of an earlier version, run `consilium allow KIT` first"
        raise ConfigError(f"{path}: not there: no site has been seen by this server; {remedy}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); remove it, the server writes it anew") from None
    if not _is_whole(found):
        raise ConfigError(f"{path}: is damaged, or of another version; remove it, the server writes it anew")
    return found


def _kept(path: Path) -> dict[str, Facts]:
    """Return the sites of a former life of the server; none where the file is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    sites = found["sites"] if _is_whole(found) else {}
    return {name: {k: v for k, v in facts.items() if k not in ("here", "jobs")} for name, facts in sites.items()}


def _is_whole(found: Any) -> bool:
    """Tell whether a file says what `_answer` returns."""
    try:
        server, sites = found["server"], found["sites"]
        return is_version(server["version"]) and type(server["protocol"]) is int and all(map(_is_row, sites.values()))
    except (KeyError, TypeError, AttributeError):
        return False


def _is_row(one: Facts) -> bool:
    skew, told = one.get("skew", 0.0), checked_facts(one, one["last_seen"])
    known = all(told[name] == one[name] for name in ("version", "protocol", "libraries", "certificate_ends") if name in one)
    whole = (
        _is_time(one["last_seen"])
        and type(one["here"]) is bool
        and isinstance(one["jobs"], list)
        and all(isinstance(job, str) for job in one["jobs"])
    )
    return whole and known and type(skew) in (int, float) and abs(skew) < 1e11
