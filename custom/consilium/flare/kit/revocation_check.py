"""What FLARE's server asks before it takes a credential: a certificate at a registration or a login, a token at a heartbeat, a
session's token. FLARE 2.9 has no event that could refuse these, so its methods are wrapped, in this process only.

A registration or session counts for the revocation that was in force when it was made. Times of this machine's clock are not
compared: it may be set back between a registration and a revocation.
"""

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
from consilium.flare import patches
from consilium.flare.kit.revocation import REFUSED, read


class RevocationCheck(FLComponent):
    """A component of the server's own kit. Raises ConsiliumError at the start where FLARE is none that it knows."""

    def __init__(self) -> None:
        super().__init__()
        self._local: Path | None = None
        self._verified: dict[str, float | None] = {}
        self._logins = WeakKeyDictionary[Session, float | None]()
        """Until when a person's credentials were revoked at the login, None where they were not."""
        patches.CERTIFICATE.wrap(self._certificate)
        patches.SERVER_HEARTBEAT.wrap(self._heartbeat)
        patches.NEW_SESSION.wrap(self._new_session)
        patches.SESSION.wrap(self._session)
        patches.OLD_SESSION.wrap(self._old_session)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Learn where the kit is. FLARE's server takes nobody in before this event."""
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            self._local = Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_site_config_dir())
        elif event_type == EventType.CLIENT_HEARTBEAT_RECEIVED:
            self._drop(fl_ctx)

    def until(self, name: str) -> float | None:
        """Return until when a name's credentials were revoked, None where they are not. Raises ConfigError: refuse then."""
        if self._local is None:
            raise ConfigError("the server is not ready")
        return read(self._local).get(name)

    def _certificate(self, verify: Callable[..., bool], *args: Any, **given: Any) -> bool:
        """Check a certificate's signature as FLARE does, and then whether it was revoked."""
        verified, own = verify(*args, **given), given["asserter_cert"]
        name = get_cn_from_cert(own)
        try:
            until = self.until(name)
        except ConfigError as error:
            raise InvalidAsserterCert(str(error)) from None
        if until is not None and own.not_valid_before_utc.timestamp() <= until:
            raise InvalidAsserterCert(f"{name}: {REFUSED}")
        self._verified[name] = until
        return verified

    def _heartbeat(self, beat: Callable[..., bool], manager: ClientManager, token: str, name: str, *rest: Any) -> bool:
        """Refuse a name that has not shown a later certificate; FLARE would take any token that it once signed."""
        if not self._is_out(name, token in manager.clients):
            return beat(manager, token, name, *rest)
        rest[-1].set_prop(FLContextKey.UNAUTHENTICATED, f"{name}: {REFUSED}", sticky=False)
        return False

    def _drop(self, fl_ctx: FLContext) -> None:
        """Take the sites out that are there by a revoked credential, whether or not they are heard of again."""
        server = fl_ctx.get_engine().server
        for token, client in list(server.client_manager.clients.items()):
            if self._is_out(client.name, True):
                server.logout_client(token)
                self.log_warning(fl_ctx, f"{client.name}: {REFUSED}; it is out")

    def _is_out(self, name: str, registered: bool) -> bool:
        """Tell whether a name must show a certificate (again). With a list that cannot be read nobody new comes in."""
        try:
            until = self.until(name)
        except ConfigError:
            return not registered
        return until is not None and not (registered and self._verified.get(name) == until)

    def _new_session(self, create: Callable[..., Session], *args: Any, **given: Any) -> Session:
        """Note the revocation in force at a login. With a list that cannot be read no certificate has passed before."""
        found = create(*args, **given)
        with suppress(ConfigError):
            self._logins[found] = self.until(found.user_name)
        return found

    def _session(self, get: Callable[..., Session | None], *args: Any) -> Session | None:
        """Return a person's session, none that was made before the revocation in force."""
        found = get(*args)
        return found if found and self._stands(found) else None

    def _stands(self, session: Session) -> bool:
        try:
            until = self.until(session.user_name)
        except ConfigError:
            return False
        return until is None or self._logins.get(session) == until

    def _old_session(self, again: Callable[..., Session], manager: SessionManager, *args: Any) -> Session:
        """Have a revoked person log in anew: a session's token says nothing of the certificate that it came from."""
        found = again(manager, *args)
        if not self._stands(found):
            manager.end_session_by_id(found.sess_id)
            raise ValueError(f"{found.user_name}: log in again")
        return found
