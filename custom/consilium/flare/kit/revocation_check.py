"""The server's check of revocations: certificates at registration and login, tokens at heartbeats and commands.

For each registration and session, the check stores the revocation that was in force when it was made. If another revocation is
in force later, the registration or session is refused. Times of this machine's clock are not compared, because the clock may
be set back between a registration and a revocation. patches.py says why FLARE's methods are wrapped.

After a restart of the server its sites go on with the tokens of their last registration, and FLARE accepts every token that it
ever signed. For a name with a revocation, only the token of a registration with a later certificate is accepted. Its hash is
stored in the kit, because a site does not register again by itself.
"""

import hashlib
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.hci.server.sess import Session, SessionManager
from nvflare.private.fed.server.client_manager import ClientManager
from nvflare.private.fed.utils.identity_utils import InvalidAsserterCert, get_cn_from_cert

from consilium.core.errors import ConfigError
from consilium.core.storage import read_json, write_json
from consilium.federation.run_folders import STATE
from consilium.flare import patches
from consilium.flare.kit.revocation import REFUSED, revoked_until

READMITTED = "readmitted.json"
"""The file in our folder of the server's kit, by name: {"until": its revocation, "token": SHA-256 of its later token}."""


class RevocationCheck(FLComponent):
    """A component of the server's kit. Raises ConfigError at the start if the patches do not fit the installed FLARE."""

    def __init__(self) -> None:
        super().__init__()
        self._local: Path | None = None
        self._verified: dict[str, float | None] = {}
        self._logins = WeakKeyDictionary[Session, float | None]()
        """For each session, the value of `revoked_at` for its person at the login."""
        self._readmitting = threading.Lock()
        """Held while READMITTED is read and written: FLARE handles heartbeats in several threads."""
        self._registering = threading.local()
        """FLARE's context of the registration that this thread handles. FLARE sends a site only a cause that is in it."""
        patches.CERTIFICATE.wrap(self._check_certificate)
        patches.SERVER_HEARTBEAT.wrap(self._check_heartbeat)
        patches.NEW_SESSION.wrap(self._note_login)
        patches.SESSION.wrap(self._valid_session)
        patches.OLD_SESSION.wrap(self._check_recreated_session)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Store the kit's folder before FLARE's server accepts clients. At each heartbeat, log out the revoked sites."""
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            self._local = Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_site_config_dir())
        elif event_type == EventType.CLIENT_REGISTER_RECEIVED:
            self._registering.fl_ctx = fl_ctx
        elif event_type == EventType.CLIENT_REGISTER_PROCESSED:
            self._registering.fl_ctx = None
        elif event_type == EventType.CLIENT_HEARTBEAT_RECEIVED:
            server = fl_ctx.get_engine().server
            for token, client in list(server.client_manager.clients.items()):  # also sites that send no heartbeats
                if self._must_register_again(client.name, True):
                    server.logout_client(token)
                    self.log_warning(fl_ctx, f"{client.name}: {REFUSED}; it is out")

    def revoked_at(self, name: str) -> float | None:
        """Return the time at which a name was revoked, None if it was not. Certificates made until then are refused.

        Raises ConfigError if the list cannot be read. The caller must then refuse the connection.
        """
        if self._local is None:
            raise ConfigError("the server is not ready")
        return revoked_until(self._local).get(name)

    def _check_certificate(self, verify: Callable[..., bool], *args: Any, **given: Any) -> bool:
        """Verify a certificate as FLARE does, and then raise InvalidAsserterCert if it is revoked."""
        verified, own = verify(*args, **given), given["asserter_cert"]
        name = get_cn_from_cert(own)
        try:
            until = self.revoked_at(name)
        except ConfigError as error:
            raise InvalidAsserterCert(str(error)) from None
        if until is not None and own.not_valid_before_utc.timestamp() <= until:
            if (fl_ctx := getattr(self._registering, "fl_ctx", None)) is not None:
                fl_ctx.set_prop(FLContextKey.UNAUTHENTICATED, f"{name}: {REFUSED}", sticky=False)
            raise InvalidAsserterCert(f"{name}: {REFUSED}")
        self._verified[name] = until
        return verified

    def _check_heartbeat(self, beat: Callable[..., bool], manager: ClientManager, token: str, name: str, *rest: Any) -> bool:
        """Refuse a heartbeat of a revoked name that has not shown a later certificate. FLARE would accept its old token."""
        registered = token in manager.clients
        if self._must_register_again(name, registered):
            # after a restart of the server, the token of a registration with a certificate after the revocation still counts
            until: float | None = None
            readmitted = False
            with suppress(ConfigError, OSError):
                until = self.revoked_at(name)
                readmitted = until is not None and self._readmissions().get(name) == _readmission(until, token)
            if not readmitted:
                rest[-1].set_prop(FLContextKey.UNAUTHENTICATED, f"{name}: {REFUSED}", sticky=False)
                return False
            self._verified[name] = until
        if registered and self._local is not None and (until := self._verified.get(name)) is not None:
            entry = _readmission(until, token)
            # if the disk is full or READMITTED cannot be read, the site must be restarted after a restart of the server
            with suppress(OSError), self._readmitting:
                stored = self._readmissions()
                if stored.get(name) != entry:
                    write_json(self._local.parent / STATE / READMITTED, stored | {name: entry})
        return beat(manager, token, name, *rest)

    def _readmissions(self) -> dict[str, Any]:
        """Return the content of READMITTED; {} if there is none, or if it is damaged. Raises OSError if it cannot be read."""
        with suppress(FileNotFoundError, ValueError, RecursionError):
            if self._local is not None and isinstance(stored := read_json(self._local.parent / STATE / READMITTED), dict):
                return stored
        return {}

    def _must_register_again(self, name: str, registered: bool) -> bool:
        """Return whether a name must show a certificate again. If the list cannot be read, only `registered` names may stay."""
        try:
            until = self.revoked_at(name)
        except ConfigError:
            return not registered
        return until is not None and not (registered and self._verified.get(name) == until)

    def _note_login(self, create: Callable[..., Session], *args: Any, **given: Any) -> Session:
        """Create a session, and store the revocation in force at this login.

        If the list cannot be read nothing is stored: then the certificate check has already refused the login.
        """
        found = create(*args, **given)
        with suppress(ConfigError):
            self._logins[found] = self.revoked_at(found.user_name)
        return found

    def _valid_session(self, get: Callable[..., Session | None], *args: Any) -> Session | None:
        """Return a person's session, or None if it was made before the revocation that is in force."""
        found = get(*args)
        return found if found and self._is_valid(found) else None

    def _is_valid(self, session: Session) -> bool:
        try:
            until = self.revoked_at(session.user_name)
        except ConfigError:
            return False
        return until is None or self._logins.get(session) == until

    def _check_recreated_session(self, again: Callable[..., Session], manager: SessionManager, *args: Any) -> Session:
        """Refuse to re-create a revoked person's session: its token does not say which certificate was used at the login."""
        found = again(manager, *args)
        if not self._is_valid(found):
            manager.end_session_by_id(found.sess_id)
            raise ValueError(f"{found.user_name}: log in again")
        return found


def _readmission(until: float, token: str) -> dict[str, Any]:
    """Return an entry of READMITTED. The token itself is a secret."""
    return {"until": until, "token": hashlib.sha256(token.encode()).hexdigest()}
