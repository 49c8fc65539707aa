"""What FLARE's server asks before it takes a credential: a certificate at a registration or a login, a token at a heartbeat, a
session's token. FLARE 2.9 has no event that could refuse these, so its methods are wrapped, in this process only.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.hci.server.sess import SessionManager
from nvflare.private.fed.server.client_manager import ClientManager
from nvflare.private.fed.utils.identity_utils import IdentityVerifier, InvalidAsserterCert, get_cn_from_cert

from consilium.errors import ConfigError
from consilium.flare.method_wrapper import wrap
from consilium.flare.revocation import REFUSED, read


class RevocationCheck(FLComponent):
    """A component of the server's own kit. Raises ConsiliumError at the start where FLARE is none that it knows."""

    def __init__(self) -> None:
        super().__init__()
        self._local: Path | None = None
        self._verified: dict[str, float] = {}
        wrap(IdentityVerifier, "verify_common_name", self._certificate)
        wrap(ClientManager, "heartbeat", self._heartbeat)
        wrap(SessionManager, "get_session", self._session)
        wrap(SessionManager, "recreate_session", self._old_session)

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
        self._verified[name] = time.time()
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
        return until is not None and not (registered and self._verified.get(name, 0.0) > until)

    def _session(self, get: Callable[..., Any], *args: Any) -> Any:
        """Return a person's session, none that is older than the revocation."""
        found = get(*args)
        return None if found and self._is_out(found.user_name, found.start_time > self._until(found.user_name)) else found

    def _until(self, name: str) -> float:
        try:
            return self.until(name) or 0.0
        except ConfigError:
            return float("inf")

    def _old_session(self, again: Callable[..., Any], manager: SessionManager, *args: Any) -> Any:
        """Have a revoked person log in anew: a session's token says nothing of the certificate that it came from."""
        found = again(manager, *args)
        if self._until(found.user_name) > 0:
            manager.end_session_by_id(found.sess_id)
            raise ValueError(f"{found.user_name}: log in again")
        return found
