"""A revoked name while the server's clock is set back: no order of times on a clock decides who is let in."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.fuel.hci.server.sess import Session, SessionManager
from nvflare.lighter.utils import load_crt, sign_content
from nvflare.private.fed.server.client_manager import ClientManager
from nvflare.private.fed.server.training_cmds import TrainingCommandModule
from nvflare.private.fed.utils.identity_utils import IdentityVerifier, InvalidAsserterCert

from consilium.core.storage import note
from consilium.federation.run_folders import ATTENDANCE, STATE
from consilium.flare.job import job_context
from consilium.flare.kit import revocation
from consilium.flare.kit.heartbeat_server import Attendance
from consilium.flare.kit.revocation import COMPONENT, revoke
from consilium.flare.kit.revocation_check import RevocationCheck
from consilium.privacy.secagg.certificates import certificate_for, pem_of

DAY = 86400.0
LEAD = "lead@hub.example"
SetClock = Callable[[float], None]


@pytest.fixture(scope="module")
def keys() -> list[rsa.RSAPrivateKey]:
    return [rsa.generate_private_key(65537, 2048) for _ in range(2)]


@pytest.fixture
def server(keys: list[rsa.RSAPrivateKey], tmp_path: Path) -> Path:
    """Return what a server's kit has: a certificate that is valid for a year since 30 days, and one of a clinic since a day."""
    root, own = keys
    for folder in ("startup", "local", STATE):
        (tmp_path / folder).mkdir()
    for name, of, since in (("rootCA.pem", "hub", -40), ("server.crt", "server", -30), ("clinic.crt", "clinic", -1)):
        public = (root if of == "hub" else own).public_key()
        made = certificate_for(of, public, "hub", root, authority=of == "hub", days=(since, 365))
        (tmp_path / "startup" / name).write_text(pem_of(made))
    (tmp_path / "local" / "resources.json").write_text(json.dumps({"components": [COMPONENT]}))
    return tmp_path


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """Return a function that sets the machine's clock to a number of seconds from when the server's certificate was made."""
    now = [0.0]
    monkeypatch.setattr("time.time", lambda: now[0])

    def set_clock(seconds: float) -> None:
        now[0] = seconds

    return set_clock


@pytest.fixture
def check(server: Path, monkeypatch: pytest.MonkeyPatch) -> RevocationCheck:
    """Return the component as the server's start makes it, with FLARE's methods wrapped for this test alone."""
    for owner, names in (
        (IdentityVerifier, ["verify_common_name"]),
        (ClientManager, ["heartbeat"]),
        (SessionManager, ["create_session", "get_session", "recreate_session"]),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    found, fl_ctx = RevocationCheck(), FLContext()
    place = SimpleNamespace(get_site_config_dir=lambda: str(server / "local"))
    fl_ctx.set_prop(FLContextKey.WORKSPACE_OBJECT, place, private=True)
    found.handle_event("_system_bootstrap", fl_ctx)
    return found


def begins(server: Path, name: str = "server.crt") -> float:
    return load_crt(server / "startup" / name).not_valid_before_utc.timestamp()


def registers(server: Path, key: rsa.RSAPrivateKey) -> bool:
    verifier = IdentityVerifier(str(server / "startup" / "rootCA.pem"))
    return verifier.verify_common_name(
        asserted_cn="clinic",
        nonce="n",
        asserter_cert=load_crt(server / "startup" / "clinic.crt"),
        signature=sign_content("clinic" + "n", key, return_str=False),
    )


def test_a_site_that_registered_before_the_clock_was_set_back_is_taken_out(
    server: Path, keys: list[rsa.RSAPrivateKey], check: RevocationCheck, clock: SetClock
) -> None:
    clock(begins(server) + 31 * DAY)
    assert registers(server, keys[1])
    manager, out = ClientManager(), list[str]()
    manager.heartbeat("token", "clinic", "clinic", FLContext())
    clock(begins(server) + 30.5 * DAY)
    revoke("clinic", server)
    fl_ctx = FLContext()
    parts = SimpleNamespace(client_manager=manager, logout_client=out.append)
    engine = SimpleNamespace(server=parts, fire_event=lambda *_: None)
    fl_ctx.get_engine = lambda: engine  # type: ignore[method-assign]
    check.handle_event("_client_heartbeat_received", fl_ctx)
    assert out == ["token"]


def test_a_session_from_before_the_clock_was_set_back_ends_and_a_later_one_does_not(
    server: Path, keys: list[rsa.RSAPrivateKey], check: RevocationCheck, clock: SetClock
) -> None:
    clock(begins(server) + 31 * DAY)
    manager = SessionManager(None)
    manager.shutdown()
    asserter = SimpleNamespace(
        cert=load_crt(server / "startup" / "server.crt"), sign=lambda text, return_str: sign_content(text, keys[1], return_str)
    )

    def login() -> tuple[Session, str]:
        found = manager.create_session(LEAD, "hub", "lead", "")
        return found, found.make_token(asserter)

    _, token = login()
    assert manager.get_session(token, asserter)
    clock(begins(server) + 30.5 * DAY)
    revoke(LEAD, server)
    assert manager.get_session(token, asserter) is None
    later, next_token = login()  # by a later certificate; the clock still shows a time before the first login
    assert manager.get_session(next_token, asserter) is later
    assert manager.get_session(token, asserter) is None


def test_a_running_job_leaves_a_name_out_that_is_revoked_after_the_clock_was_set_back(server: Path, clock: SetClock) -> None:
    note(server / "local" / revocation.FILE, "former", {"until": begins(server) + DAY})
    clock(begins(server) + 31 * DAY)
    fl_ctx = FLContext()
    workspace = SimpleNamespace(get_workspace=lambda: Workspace(str(server)))
    fl_ctx.get_engine = lambda: workspace  # type: ignore[method-assign]
    revoked = job_context.watch_revocations(fl_ctx)
    assert revoked() == set()
    clock(begins(server) + 30.5 * DAY)
    revoke("clinic", server)
    assert revoked() == {"clinic"}


@pytest.mark.parametrize("noted", [True, False], ids=["heartbeat noted", "certificate of the server"])
def test_a_revocation_by_a_clock_that_is_behind_holds_once_the_clock_is_right(
    noted: bool, server: Path, keys: list[rsa.RSAPrivateKey], check: RevocationCheck, clock: SetClock
) -> None:
    """The certificate is of a day ago. By a clock that shows last year it was made later than the revocation."""
    if noted:
        seen = {"clinic": {"last_seen": begins(server, "clinic.crt") + 60, "here": True, "jobs": []}}
        (server / STATE / ATTENDANCE).write_text(json.dumps({"server": {}, "sites": seen}))
    else:
        shutil.copy(server / "startup" / "server.crt", server / "startup" / "as-it-was.crt")
        fresh = certificate_for("server", keys[1].public_key(), "hub", keys[0], days=(0, 365))
        (server / "startup" / "server.crt").write_text(pem_of(fresh))
    clock(begins(server, "rootCA.pem") - 365 * DAY)
    revoke("clinic", server)
    clock(begins(server, "clinic.crt") + DAY)
    with pytest.raises(InvalidAsserterCert, match="revoked"):
        registers(server, keys[1])


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("former", [False, True], ids=["", "a file of a former version"])
def test_heartbeats_by_a_clock_that_was_set_back_do_not_lower_the_latest_time(
    restarted: bool,
    former: bool,
    server: Path,
    keys: list[rsa.RSAPrivateKey],
    check: RevocationCheck,
    clock: SetClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server's certificate is of 30 days ago and the clinic's of a day ago. One heartbeat came by the right clock."""
    monkeypatch.setattr(TrainingCommandModule, "check_status", TrainingCommandModule.check_status)
    monkeypatch.setattr(ClientManager, "heartbeat", ClientManager.heartbeat)
    allowed = SimpleNamespace(disabled_clients=set())
    engine = SimpleNamespace(get_clients=list, run_processes={}, server=SimpleNamespace(client_manager=allowed))
    fl_ctx: Any = SimpleNamespace(
        get_prop=lambda key: (
            SimpleNamespace(get_root_dir=lambda: str(server)) if key == FLContextKey.WORKSPACE_OBJECT else None
        ),
        get_engine=lambda: engine,
        get_peer_context=lambda: None,
    )

    def begin() -> Attendance:
        started = Attendance()
        started.handle_event("_system_bootstrap", fl_ctx)
        return started

    def beat(component: Attendance) -> None:
        component._record_heartbeat(lambda *_: True, ClientManager(), "token", "clinic", fl_ctx)  # FLARE takes each
        component._written = 0.0  # as after ten seconds
        component.handle_event("_client_heartbeat_processed", fl_ctx)

    right = begins(server, "clinic.crt") + DAY
    clock(right)
    component = begin()
    beat(component)
    if former:
        path = server / STATE / ATTENDANCE
        path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "latest"}))
    clock(right - 10 * DAY)
    if restarted or former:
        component = begin()
    beat(component)
    revoke("clinic", server)
    clock(right)
    with pytest.raises(InvalidAsserterCert, match="revoked"):
        registers(server, keys[1])


def test_a_second_revocation_by_a_clock_that_was_set_back_gives_nothing_back(
    server: Path, keys: list[rsa.RSAPrivateKey], check: RevocationCheck, clock: SetClock
) -> None:
    clock(begins(server, "clinic.crt") + 60)
    revoke("clinic", server)
    clock(begins(server, "clinic.crt") - 60)
    revoke("clinic", server)
    with pytest.raises(InvalidAsserterCert, match="revoked"):
        registers(server, keys[1])
