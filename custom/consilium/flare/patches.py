"""All of FLARE's code that this package wraps or replaces. FLARE has no event or setting for any of it.

Every patch names FLARE's code, and the SHA-256 of the source for which it was written, which holds the signature too. It is
compared when the patch is applied: another source is refused, and nothing runs. The components that use a patch say what they
do with it; here is why FLARE's own code will not do. Importing any module of this folder checks FLARE's version first.
"""

import hashlib
import inspect
import logging
import sched
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce, wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import nvflare

from consilium.core.errors import ConfigError

PINNED = "2.9.0"
SERIES = "2.9."
REMEDY = f"pip install nvflare=={PINNED}"


def check_version() -> None:
    """Raise ConfigError for a FLARE of another series, whose modules cannot even be imported by ours."""
    if not f"{nvflare.__version__}.".startswith(SERIES):
        raise ConfigError(f"nvflare: {nvflare.__version__} is installed, consilium.flare needs {PINNED}; {REMEDY}")


@dataclass(frozen=True)
class Patch:
    """A method of FLARE's, or a name in one of its modules, and what its source was.

    `name`: such as "Class.method", or a name that `module` imports, and then the source is the whole module's. `sha256`: of
    the source in all versions of FLARE in `seen`.
    """

    module: str
    name: str
    sha256: str
    seen: tuple[str, ...] = (PINNED,)

    def check(self) -> Any:
        """Return the class or module that holds the name. Raises ConfigError unless FLARE's source is the known one."""
        *path, name = self.name.split(".")
        try:
            module = import_module(self.module)
            owner = reduce(getattr, path, module)
            source = inspect.getsource(getattr(owner, name) if path else module)
            known = hasattr(owner, name) and hashlib.sha256(source.encode()).hexdigest() == self.sha256
        except (ImportError, AttributeError, TypeError, OSError):
            known = False
        if not known:
            what = f"{self.module}.{self.name} is not as in {', '.join(self.seen)}, where this package replaces it"
            raise ConfigError(f"nvflare {nvflare.__version__}: {what}; {REMEDY}")
        return owner

    def wrap(self, around: Callable[..., Any]) -> None:
        """Have `around` called in the method's place, with the method and then its arguments. Raises ConfigError."""
        owner, name = self.check(), self.name.rpartition(".")[2]
        method = getattr(owner, name)

        @wraps(method)
        def wrapped(*args: Any, **given: Any) -> Any:
            return around(method, *args, **given)

        setattr(owner, name, wrapped)

    def replace(self, value: Any) -> None:
        """Put `value` in the name's place. Raises ConfigError."""
        setattr(self.check(), self.name, value)


SERVER_HEARTBEAT = Patch(
    "nvflare.private.fed.server.client_manager",
    "ClientManager.heartbeat",
    "87eeb4e63559a1f18b2fb5cceee39602d252d6fab073a1adec103ce861879a27",
)
"""The server's part of a heartbeat. FLARE accepts every token that it once signed, so a revoked site would stay, and come back.
Its events around a heartbeat cannot refuse one, and carry no name that is known to be the certificate's."""

STATUS = Patch(
    "nvflare.private.fed.server.training_cmds",
    "TrainingCommandModule.check_status",
    "ccb372b4e9d4596ec78605f0a1f868a6b2b7776ae21dfd4108792c7262a1a5ff",
)
"""The server's answer to an administrator who asks for its status. FLARE's fields are fixed: versions, clocks and certificates
of the sites are not among them."""

CERTIFICATE = Patch(
    "nvflare.private.fed.utils.identity_utils",
    "IdentityVerifier.verify_common_name",
    "17eafd576acaa9fddec1de43301ca7ab22f24660ea40e43f3cfd205b8597f06f",
)
"""The check of a certificate at a registration or login. FLARE has no revocation list: a stolen kit is good until it ends."""

NEW_SESSION = Patch(
    "nvflare.fuel.hci.server.sess",
    "SessionManager.create_session",
    "2a0275f62634ce858bf1466c670375871439c9648ffff0b14a0d99f1c5035141",
)
"""The making of an administrator's session at a login. FLARE's session does not say which revocation was in force then."""

SESSION = Patch(
    "nvflare.fuel.hci.server.sess",
    "SessionManager.get_session",
    "bdc471f94aeb737a4405cd28aac74d9d06f9a0658816df0fc04d2f45aafa5705",
)
"""The look-up of a session at each command. FLARE's session would outlive the revocation of its certificate."""

OLD_SESSION = Patch(
    "nvflare.fuel.hci.server.sess",
    "SessionManager.recreate_session",
    "721e14255aba6ccc8b36c5885f29c273c9fa2f72675918cb5914b92184fc8f44",
)
"""The return to a session that the server no longer has. FLARE makes it from any token that it signed."""

CLIENT_HEARTBEAT = Patch(
    "nvflare.private.fed.client.fed_client_base",
    "FederatedClientBase.run_heartbeat",
    "f7ac1404e1b1fbbf8cc259d42835971dfd309ee404e5214430f34652b4f2761b",
)
"""The start of a client's heartbeats. FLARE waits a minute for the client's engine by the wall clock. Where the clock is set
forward meanwhile, it never sends one; the server forgets the site, which by its own log is connected."""

CLIENT_REGISTRATION = Patch(
    "nvflare.private.fed.client.communicator",
    "Communicator.client_registration",
    "dff0019bd85cf5ff966dc73587d9a0f9fbedff0c0601138e481d9b53b8bbaa8c",
)
"""A site's registration. Where the server refuses it, FLARE's client ends with a traceback that has no cause, is started anew
five times, and then is gone."""

SITE_PROCESSES = Patch(
    "nvflare.private.fed.app.simulator.simulator_runner",
    "subprocess",
    "b6e1127fba8eb427b71a56036e22d41c156203cd50c5d1289e883a380d3d586f",
)
"""The module by which FLARE's simulator starts a Python for each site. Each loads PyTorch, PEFT and transformers for itself:
five seconds of a core and 400 MB."""

SITE_WAITS = replace(SITE_PROCESSES, name="time")
"""The module by which FLARE's simulator waits for its server, before it starts a site, and for a site's connection: a second
each time."""

TIMERS = Patch(
    "nvflare.fuel.f3.streaming.byte_receiver",
    "threading",
    "0bae535461a5460d67eb823852964cab8f56e4214f82f82416c72eae817fb94b",
)
"""The module whose Timer forgets the number of a received message after 65 s. FLARE takes a thread for each. Sites ask for
tasks twice a second: two hundred threads a site in the server's process."""

PATCHES = {
    "server": (SERVER_HEARTBEAT, STATUS, CERTIFICATE, NEW_SESSION, SESSION, OLD_SESSION, TIMERS),
    "site": (CLIENT_HEARTBEAT, CLIENT_REGISTRATION, TIMERS),
    "simulation": (SITE_PROCESSES, SITE_WAITS, TIMERS),
}
"""By who applies them."""


def check(role: str) -> str:
    """Return a line that says that a role's patches fit the FLARE that is installed. Raises ConfigError where one does not."""
    for patch in PATCHES[role]:
        patch.check()
    return f"nvflare {nvflare.__version__}: all {len(PATCHES[role])} places that this package replaces are the known ones"


_started = threading.Event()
"""A timer was started since the thread last looked."""
_thread = threading.Lock()
"""Held from the first timer's start on, when the thread that calls all timers begins."""


def _wait(seconds: float | None = None) -> None:
    """Return after so many seconds, or when a timer is started, which may be due before."""
    _started.wait(seconds)
    _started.clear()


_timers = sched.scheduler(time.monotonic, _wait)


class SharedTimer:
    """What FLARE uses of threading.Timer: `function` is called after `interval` seconds, unless it is cancelled before."""

    daemon = True

    def __init__(self, interval: float, function: Callable[[], None]) -> None:
        self.interval = interval
        self._function: Callable[[], None] | None = function

    def start(self) -> None:
        """Begin to wait."""
        _timers.enter(self.interval, 0, self._call)
        _started.set()
        if _thread.acquire(blocking=False):
            threading.Thread(target=_run_timers, name="shared_timers", daemon=True).start()

    def cancel(self) -> None:
        """Do not call the function, and free at once what it holds."""
        self._function = None

    def _call(self) -> None:
        if (function := self._function) is not None:
            try:
                function()
            except Exception as error:  # the other timers go on
                logging.getLogger(__name__).error(f"a timer failed: {type(error).__name__}")


def _run_timers() -> None:
    while True:
        _wait()
        _timers.run()  # until none is left


def share_timers() -> None:
    """Have one thread call all timers of FLARE's receiver of messages in this process. Raises ConfigError."""
    own = ModuleType("threading")
    own.__dict__.update(vars(threading) | {"Timer": SharedTimer})
    TIMERS.replace(own)
