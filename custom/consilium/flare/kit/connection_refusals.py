"""Why a server refuses the connection or registration of a participant.

Logs, doctor, `consilium sites` and metrics use the same list of causes.
"""

import io
import logging
import math
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import FLCommunicationError
from nvflare.apis.signal import Signal
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.cell_cipher import InvalidCertChain
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.private.defs import ClientType
from nvflare.private.fed.authenticator import Authenticator
from nvflare.private.fed.client.communicator import Communicator

from consilium.core.errors import ConfigError
from consilium.core.sanitize import shown
from consilium.core.storage import make_private_folder, read_json, write_json
from consilium.federation.run_folders import STATE

FILE = "admission.json"
"""The file in our folder of a site's kit while the server refuses the site: {"cause"}."""
LAST_ANSWER = "heartbeat-answer"
"""An empty file in our folder of a site's kit. Its time is that of the server's last answer to a heartbeat."""
RETRY = 60.0
"""Seconds between two attempts to register. Each attempt logs one line."""
PATIENCE = 10.0
"""Seconds that the doctor waits for a server's answer."""
NEW_KIT = "stop the site, ask the hub for a renewed kit, then `consilium update-kit KIT --from NEW_KIT`, and start it"


class Cause(StrEnum):
    """A cause of a refusal."""

    REVOKED = "revoked"
    REFUSED = "refused"
    ENDED = "ended"
    EARLY = "not yet valid"
    PROJECT = "wrong project"
    UNKNOWN = "unknown"

    @property
    def text(self) -> str:
        """The cause in words."""
        return _MEANINGS[self][0]

    @property
    def remedy(self) -> str:
        """What the site's administrator can do about the cause."""
        return _MEANINGS[self][1]


_MEANINGS = {
    Cause.REVOKED: ("its credential was revoked", NEW_KIT),
    Cause.REFUSED: ("the hub has disabled it", "ask the hub why; `nvflare system enable-client` there lets it in again"),
    Cause.ENDED: ("its certificate has ended", f"set the clock, or {NEW_KIT}"),
    Cause.EARLY: ("its certificate is not yet valid", "set the clock, here or at the server"),
    Cause.PROJECT: ("its kit is of another project than the server's", "ask the hub for this project's kit"),
    Cause.UNKNOWN: ("the server gives no cause that this version knows", "ask the hub what the server's log says"),
}
_CAUSE_BY_TEXT = (
    ("credential was revoked", Cause.REVOKED),
    ("is disabled", Cause.REFUSED),
    ("expired", Cause.ENDED),
    ("not yet valid", Cause.EARLY),
    ("bad certificate", Cause.EARLY),  # OpenSSL's alert for a certificate that begins later by the server's clock
    ("does not match the current server task", Cause.PROJECT),
    ("unknown ca", Cause.PROJECT),
    ("certificate verify failed", Cause.PROJECT),
)
"""Parts, in lower case, of messages from FLARE's server, our components and OpenSSL, each with its cause."""
REJECTED, QUIT = "error:client_registration", "error:client_quit"
"""Prefixes of FLARE's errors at a site."""


def cause_of(message: str) -> Cause:
    """Return the cause of a refusal from the message `message` of a server or of OpenSSL."""
    text = message.lower().replace("_", " ")
    return next((cause for part, cause in _CAUSE_BY_TEXT if part in text), Cause.UNKNOWN)


def refusal_message(error: BaseException | None) -> str | None:
    """Return the server's message if FLARE's error is a refusal; None for other errors, such as an unreachable server.

    FLARE wraps an error that has the message in one that does not, so the chain of contexts is searched.
    """
    while isinstance(error, FLCommunicationError):
        words = str(error).removeprefix(REJECTED).removeprefix(QUIT)
        if words.strip() and words != str(error):
            return words.strip()
        error = error.__context__
    return None


def note_cause(kit: Path, cause: Cause | None) -> None:
    """Write to the kit's files why the server refuses it. None as `cause` says that the server admits it."""
    path = kit / STATE / FILE
    with suppress(OSError):  # a full disk
        if cause is None:
            path.unlink(missing_ok=True)
        elif noted_cause(kit) is not cause:
            write_json(path, {"cause": cause})


def note_answer(kit: Path) -> None:
    """Write to the kit's files that the server has answered a heartbeat now, so it admits the site.

    Log it if the server refused the site before.
    """
    if noted_cause(kit) is not None:
        logging.getLogger(__name__).info("the server lets this site in again")
        note_cause(kit, None)
    with suppress(OSError):
        (make_private_folder(kit / STATE) / LAST_ANSWER).touch(0o600)


def seconds_since_answer(kit: Path) -> float:
    """Return the seconds since the server's last answer to a heartbeat, infinity if it has answered none."""
    try:
        return max(0.0, time.time() - (kit / STATE / LAST_ANSWER).stat().st_mtime)
    except OSError:
        return math.inf


def noted_cause(kit: Path) -> Cause | None:
    """Return why the server refused the kit at its last attempt. None if it was admitted, or never tried."""
    try:
        return Cause(read_json(kit / STATE / FILE)["cause"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def refusal_line(cause: Cause, message: str) -> str:
    """Return the line for a site's log about a refusal, with the cause and the server's message `message`."""
    return f"the server does not let this site in: {cause}: {cause.text} ({shown(message, 200)}); {cause.remedy}"


def await_admission(
    register: Callable[..., tuple[Any, ...]], communicator: Communicator, name: str, project: str, fl_ctx: FLContext
) -> tuple[Any, ...]:
    """Register a site. If the server refuses it, log the cause and try again every minute; see patches.CLIENT_REGISTRATION."""
    while True:
        try:
            with redirect_stderr(io.StringIO()):  # FLARE prints a traceback
                return register(communicator, name, project, fl_ctx)
        except FLCommunicationError as error:
            if (said := refusal_message(error)) is None:
                raise
        note_cause(Path.cwd(), cause := cause_of(said))
        logging.getLogger(__name__).error(f"{refusal_line(cause, said)}; trying again every minute")
        time.sleep(RETRY)


class HeartbeatFilter(logging.Filter):
    """Replaces FLARE's log lines about refused heartbeats by one line per minute that names the cause.

    FLARE logs one line every five seconds, without a cause.
    """

    def __init__(self, kit: Path) -> None:
        super().__init__()
        self.kit, self._last = kit, 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging.Filter. FLARE logs inside its exception handler, so the error is the current exception."""
        if (said := refusal_message(sys.exc_info()[1])) is None:
            return True
        note_cause(self.kit, cause := cause_of(said))
        record.levelno, record.levelname, record.msg, record.args = logging.ERROR, "ERROR", refusal_line(cause, said), ()
        due = time.monotonic() - self._last >= RETRY or not self._last
        self._last = time.monotonic() if due else self._last
        return due


def try_registration(kit: Path) -> str | None:
    """Register with a site's kit. Return the server's message if it refuses the kit, None if it admits it.

    The site must not run, because the server drops an earlier login of the same name. Raises FLCommunicationError if the server
    does not reply, and ConfigError if FLARE cannot use the kit's certificates.
    """
    startup = kit / "startup"
    raw = read_json(startup / "fed_client.json")
    server, client = raw["servers"][0], raw["client"]
    root, own, key = (str(startup / client[name]) for name in ("ssl_root_cert", "ssl_cert", "ssl_private_key"))
    secrets = {DriverParams.CA_CERT.value: root, DriverParams.CLIENT_CERT.value: own, DriverParams.CLIENT_KEY.value: key}
    secrets[DriverParams.CONNECTION_SECURITY.value] = client.get("connection_security", "mtls")
    flare_decomposers.register()
    try:
        cell = Cell(
            fqcn=f"{client['fqsn']}.{uuid.uuid4()}",  # the server accepts names that begin with the site's
            root_url=f"{server['service'].get('scheme', 'grpc')}://{server['service']['target']}",
            secure=True,
            credentials=secrets,
            create_internal_listener=False,
            parent_url=None,
            auth_identity_map={FQCN.ROOT_SERVER: server["identity"]},
        )
    except InvalidCertChain as error:
        raise ConfigError(f"{own}: FLARE cannot use it ({error}); restore startup/, or ask the hub for a new kit") from None
    authenticator = Authenticator(
        cell=cell,
        project_name=server["name"],
        client_name=client["fqsn"].rpartition(".")[2],
        client_type=ClientType.ADMIN,  # not a site's type, so the server sends no jobs
        expected_sp_identity=server["identity"],
        secure_mode=True,
        root_cert_file=root,
        private_key_file=key,
        cert_file=own,
        msg_timeout=PATIENCE / 2,
        retry_interval=1.0,
        timeout=PATIENCE,
    )
    output = io.StringIO()
    try:
        with redirect_stderr(output), redirect_stdout(output):
            cell.start()
            authenticator.authenticate(FLContext(), Signal())
    except FLCommunicationError as error:
        if (said := refusal_message(error)) is None:
            raise
        return said
    finally:
        cell.stop()
    return None
