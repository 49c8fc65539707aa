"""Patches: every method and module of FLARE that this package wraps or replaces, because FLARE has no event or setting for it.

Each patch names a piece of FLARE's code and the SHA-256 of the source that the patch was written for. The digest is compared
when the patch is applied. If the source differs, the patch raises ConfigError and nothing runs. The text beside each patch says
why FLARE's own code is not enough. The component that applies the patch says what replaces it.
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
    """Raise ConfigError unless the installed FLARE is of the series 2.9. Our imports would fail with any other series."""
    if not f"{nvflare.__version__}.".startswith(SERIES):
        raise ConfigError(f"nvflare: {nvflare.__version__} is installed, consilium.flare needs {PINNED}; {REMEDY}")


@dataclass(frozen=True)
class Patch:
    """A method of FLARE, or a name in one of FLARE's modules, with the digest of the source that the patch was written for.

    `name`: either "Class.method", or a name that `module` imports. `sha256`: the digest of the method's source, or of the whole
    module's source for an imported name. `seen`: the versions of FLARE that have this source.
    """

    module: str
    name: str
    sha256: str
    seen: tuple[str, ...] = (PINNED,)

    def checked_owner(self) -> Any:
        """Return the class or module that has the attribute `name`. Raises ConfigError if FLARE's source has another digest."""
        *path, name = self.name.split(".")
        try:
            module = import_module(self.module)
            owner = reduce(getattr, path, module)
            source = inspect.getsource(getattr(owner, name) if path else module)
            known = hasattr(owner, name) and hashlib.sha256(source.encode()).hexdigest() == self.sha256
        except (ImportError, AttributeError, TypeError, OSError):
            known = False
        if not known:
            raise ConfigError(
                f"nvflare {nvflare.__version__}: "
                f"{self.module}.{self.name} is not as in {', '.join(self.seen)}, where this package replaces it; {REMEDY}"
            )
        return owner

    def wrap(self, around: Callable[..., Any]) -> None:
        """Replace the method by a call of `around` with the original method and its arguments. Raises ConfigError."""
        owner, name = self.checked_owner(), self.name.rpartition(".")[2]
        method = getattr(owner, name)

        @wraps(method)
        def wrapped(*args: Any, **given: Any) -> Any:
            return around(method, *args, **given)

        setattr(owner, name, wrapped)

    def replace(self, value: Any) -> None:
        """Set the name in FLARE's module to `value`. Raises ConfigError."""
        setattr(self.checked_owner(), self.name, value)


SERVER_HEARTBEAT = Patch(
    "nvflare.private.fed.server.client_manager",
    "ClientManager.heartbeat",
    "87eeb4e63559a1f18b2fb5cceee39602d252d6fab073a1adec103ce861879a27",
)
"""The server's handling of a heartbeat. FLARE accepts every token that it ever signed, so a revoked site would stay connected
and could return after a restart. FLARE's heartbeat events cannot refuse a heartbeat, and their site name is not verified."""

STATUS = Patch(
    "nvflare.private.fed.server.training_cmds",
    "TrainingCommandModule.check_status",
    "ccb372b4e9d4596ec78605f0a1f868a6b2b7776ae21dfd4108792c7262a1a5ff",
)
"""The server's reply to an administrator's status command. FLARE's reply has fixed fields, without the sites' versions, clocks
and certificates."""

CERTIFICATE = Patch(
    "nvflare.private.fed.utils.identity_utils",
    "IdentityVerifier.verify_common_name",
    "17eafd576acaa9fddec1de43301ca7ab22f24660ea40e43f3cfd205b8597f06f",
)
"""The check of a certificate at registration and login. FLARE has no revocation list: a stolen kit works until it expires."""

NEW_SESSION = Patch(
    "nvflare.fuel.hci.server.sess",
    "SessionManager.create_session",
    "2a0275f62634ce858bf1466c670375871439c9648ffff0b14a0d99f1c5035141",
)
"""The creation of an administrator's session at login. FLARE does not store which revocation was in force at that time."""

SESSION = Patch(
    "nvflare.fuel.hci.server.sess",
    "SessionManager.get_session",
    "bdc471f94aeb737a4405cd28aac74d9d06f9a0658816df0fc04d2f45aafa5705",
)
"""The look-up of a session at each command. In FLARE, a session stays valid after its certificate was revoked."""

OLD_SESSION = Patch(
    "nvflare.fuel.hci.server.sess",
    "SessionManager.recreate_session",
    "721e14255aba6ccc8b36c5885f29c273c9fa2f72675918cb5914b92184fc8f44",
)
"""The re-creation of a session that the server has lost. FLARE accepts any token that it ever signed."""

CLIENT_HEARTBEAT = Patch(
    "nvflare.private.fed.client.fed_client_base",
    "FederatedClientBase.run_heartbeat",
    "f7ac1404e1b1fbbf8cc259d42835971dfd309ee404e5214430f34652b4f2761b",
)
"""The start of a client's heartbeats. FLARE waits one minute, by the wall clock, for the client's engine. If the clock is set
forward during this minute, FLARE never sends a heartbeat. The server then drops the site, while the site's log says that it is
connected."""

CLIENT_REGISTRATION = Patch(
    "nvflare.private.fed.client.communicator",
    "Communicator.client_registration",
    "dff0019bd85cf5ff966dc73587d9a0f9fbedff0c0601138e481d9b53b8bbaa8c",
)
"""A site's registration. If the server refuses it, FLARE's client ends with a traceback that names no cause. It is restarted
five times and then stays down."""

SITE_PROCESSES = Patch(
    "nvflare.private.fed.app.simulator.simulator_runner",
    "subprocess",
    "b6e1127fba8eb427b71a56036e22d41c156203cd50c5d1289e883a380d3d586f",
)
"""The module with which FLARE's simulator starts one Python process per site. Each process would import PyTorch, PEFT and
transformers itself, which costs five seconds of one core and 400 MB per site."""

SITE_WAITS = replace(SITE_PROCESSES, name="time")
"""The module with which FLARE's simulator waits: for its server, before it starts a site, and for a site's connection. Each
wait takes at least one second."""

TIMERS = Patch(
    "nvflare.fuel.f3.streaming.byte_receiver",
    "threading",
    "0bae535461a5460d67eb823852964cab8f56e4214f82f82416c72eae817fb94b",
)
"""The module whose Timer deletes the number of a received message after 65 seconds. FLARE starts one thread per timer. A site
asks for tasks twice per second, so the server's process would have about 200 threads per site."""

PATCHES = {
    "server": (SERVER_HEARTBEAT, STATUS, CERTIFICATE, NEW_SESSION, SESSION, OLD_SESSION, TIMERS),
    "site": (CLIENT_HEARTBEAT, CLIENT_REGISTRATION, TIMERS),
    "simulation": (SITE_PROCESSES, SITE_WAITS, TIMERS),
}
"""The patches by the role of the process that applies them."""


def check(role: str) -> str:
    """Return a line for the doctor if all patches of a role fit the installed FLARE. Raises ConfigError otherwise."""
    for patch in PATCHES[role]:
        patch.checked_owner()
    return f"nvflare {nvflare.__version__}: all {len(PATCHES[role])} places that this package replaces are the known ones"


_started = threading.Event()
"""Set when a timer is started; cleared when the timer thread wakes up."""
_thread = threading.Lock()
"""Acquired by the first timer, which starts the thread that calls all timers. It is never released."""


def _wait_for_new_timer(seconds: float | None = None) -> None:
    """Return after `seconds`, or as soon as another timer is started, because that timer may be due earlier."""
    _started.wait(seconds)
    _started.clear()


_timers = sched.scheduler(time.monotonic, _wait_for_new_timer)


class SharedTimer:
    """The part of threading.Timer that FLARE uses: call `function` after `interval` seconds unless the timer is cancelled."""

    daemon = True

    def __init__(self, interval: float, function: Callable[[], None]) -> None:
        self.interval = interval
        self._function: Callable[[], None] | None = function

    def start(self) -> None:
        """Start the timer."""
        _timers.enter(self.interval, 0, self._call)
        _started.set()
        if _thread.acquire(blocking=False):
            threading.Thread(target=_run_timers, name="shared_timers", daemon=True).start()

    def cancel(self) -> None:
        """Cancel the call, and drop the function at once so that the objects it refers to can be freed."""
        self._function = None

    def _call(self) -> None:
        if (function := self._function) is not None:
            try:
                function()
            except Exception as error:  # the other timers must still be called
                logging.getLogger(__name__).error(f"a timer failed: {type(error).__name__}")


def _run_timers() -> None:
    while True:
        _wait_for_new_timer()
        _timers.run()  # returns when no timer is left


def share_timers() -> None:
    """Let a single thread call all timers of FLARE's message receiver in this process. Raises ConfigError."""
    own = ModuleType("threading")
    own.__dict__.update(vars(threading) | {"Timer": SharedTimer})
    TIMERS.replace(own)
