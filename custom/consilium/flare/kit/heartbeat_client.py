"""What a site tells of itself at every heartbeat: versions, clock, certificate. Nothing of its data.

It runs in the site's own process, which lives for months beside the jobs' processes, so it loads no torch.
"""

import logging
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.fuel.utils.log_utils import configure_logging
from nvflare.lighter.utils import load_crt
from nvflare.private.fed.client.fed_client_base import FederatedClientBase

from consilium import __version__
from consilium.core.messages import PROTOCOL
from consilium.federation.compatibility import libraries
from consilium.flare import patches

KEY = "consilium_attendance"
"""In a heartbeat's context, and in the server's answer to an admin."""
COMPONENT = {"id": "attendance", "path": "consilium.flare.kit.heartbeat_client.AttendanceReport"}
"""In a site kit's local/resources.json."""
Facts = dict[str, Any]
JOB = "worker_process"
"""The module that FLARE runs for a job at a site."""
LOOK = 60.0
"""Seconds between two looks at a certificate that is not valid, each with a line in the log."""
ENGINE = 0.1
"""Seconds between two looks for the client's engine."""


def own_facts(certificate_ends: float | None = None) -> Facts:
    """Return what a participant tells of itself: versions, its clock (seconds since 1970), and when its certificate ends."""
    facts: Facts = {"version": __version__, "protocol": PROTOCOL, "libraries": libraries(), "clock": time.time()}
    return facts if certificate_ends is None else facts | {"certificate_ends": certificate_ends}


def await_certificate(kit: Path) -> None:
    """Return once the kit's certificate is valid by this machine's clock; until then the log says that it is not.

    FLARE 2.9's client would fail without a word, and wait for ever, also when the certificate's time has come.
    """
    while (path := kit / "startup" / "client.crt").is_file() and (wrong := _not_valid(path)):
        configure_logging(Workspace(str(kit)))  # FLARE does it later
        logging.getLogger(__name__).error(f"the kit's certificate {wrong}; waiting")
        time.sleep(LOOK)


def _not_valid(path: Path) -> str:
    """Return what is wrong with a certificate now, with a remedy; "" for one that is valid."""
    try:
        own, now = load_crt(path), datetime.now(UTC)
    except (OSError, ValueError):  # half of it is copied
        return "cannot be read: restore the kit"
    if own.not_valid_before_utc <= now <= own.not_valid_after_utc:
        return ""
    span = f"from {own.not_valid_before_utc:%Y-%m-%d %H:%M} to {own.not_valid_after_utc:%Y-%m-%d %H:%M}"
    return f"is valid {span}, now is {now:%Y-%m-%d %H:%M} UTC: set the clock, or ask the hub for a renewed kit"


def await_engine(beat: Callable[..., None], client: FederatedClientBase, *rest: Any) -> None:
    """Begin heartbeats once the client's engine is there, a moment after the registration.

    FLARE 2.9 waits for it by the wall clock. Where that is set forward by a minute meanwhile, as at a machine's start, FLARE
    never sends a heartbeat: after ten minutes the server forgets the site, which is connected by its own log.
    """
    while not client.engine:
        time.sleep(ENGINE)
    beat(client, *rest)


class AttendanceReport(FLComponent):
    """A component of a site's own kit: has every heartbeat say `own_facts`. Nothing of the site's data is among them."""

    def __init__(self) -> None:
        super().__init__()
        if Path(sys.argv[0]).stem != JOB:  # a site that is connected gets jobs, whose processes make this component too
            await_certificate(Path.cwd())  # FLARE is in the kit when it makes its components, before it connects
            patches.CLIENT_HEARTBEAT.wrap(await_engine)
        self._ends: float | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Put the facts into the context that goes with a heartbeat."""
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
            self._ends = load_crt(Path(workspace.get_startup_kit_dir()) / "client.crt").not_valid_after_utc.timestamp()
        elif event_type == EventType.BEFORE_CLIENT_HEARTBEAT:
            fl_ctx.set_prop(KEY, own_facts(self._ends), private=False, sticky=False)
