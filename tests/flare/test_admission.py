"""Why a server does not let a site in: one list of causes at both ends, in logs, doctor, `sites` and metrics."""

import json
import logging
import shutil
import socketserver
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_exception import FLCommunicationError
from nvflare.private.fed.server.client_manager import ClientManager
from nvflare.private.fed.server.training_cmds import TrainingCommandModule

from consilium.cli.sites import site_rows
from consilium.flare.admin.kit_metrics import HELP, collect_metrics
from consilium.flare.kit import connection_refusals, doctor
from consilium.flare.kit.certificates import NO_ALERT
from consilium.flare.kit.connection_refusals import Cause, HeartbeatFilter, await_admission, cause_of, refusal_message
from consilium.flare.kit.doctor import examine
from consilium.flare.kit.heartbeat_client import note_connection_refusal, own_facts, register
from consilium.flare.kit.heartbeat_server import Attendance
from consilium.flare.kit.provision import provision
from consilium.flare.kit.revocation import REFUSED, revoke
from consilium.report.prometheus_text import exposition_text
from tests.conftest import run
from tests.deployment.test_renewal import age

SITES = Path(__file__).parents[2] / "provisioning" / "sites.yml"
SAID = {
    Cause.REVOKED: f"site-2: {REFUSED}",
    Cause.REFUSED: "Client 'site-2' is disabled",
    Cause.ENDED: "Ssl handshake failed: SSLV3_ALERT_CERTIFICATE_EXPIRED",
    Cause.EARLY: "certificate verify failed: certificate is not yet valid (_ssl.c:1006)",
    Cause.PROJECT: "Requested task does not match the current server task",
    Cause.UNKNOWN: "Maximum number of clients reached",
}
"""What FLARE's server, ours and OpenSSL say."""


def wrapped(kind: str, said: str) -> FLCommunicationError:
    """Return an error as FLARE raises it while it handles the server's words."""
    try:
        try:
            raise FLCommunicationError(f"{kind} {said}")
        except FLCommunicationError as inner:
            raise FLCommunicationError(kind, inner)  # noqa: B904 - as FLARE does
    except FLCommunicationError as error:
        return error


@pytest.mark.parametrize("cause", list(Cause))
def test_each_cause_is_known_by_what_is_said_and_has_a_remedy(cause: Cause) -> None:
    assert cause_of(SAID[cause]) is cause
    assert cause_of(SAID[cause].upper()) is cause
    assert cause.text
    assert cause.remedy


def test_a_servers_words_are_one_bounded_line_of_a_sites_log() -> None:
    said = connection_refusals.refusal_line(Cause.UNKNOWN, "no\nINFO - all is well\x1b[2J" + "x" * 5000)
    assert len(said.splitlines()) == 1
    assert "\x1b" not in said
    assert len(said) < 600


def test_only_the_servers_own_words_are_a_refusal() -> None:
    assert refusal_message(FLCommunicationError("error:client_registration " + SAID[Cause.REVOKED])) == SAID[Cause.REVOKED]
    assert refusal_message(wrapped("error:client_quit", SAID[Cause.REFUSED])) == SAID[Cause.REFUSED]
    assert refusal_message(FLCommunicationError("error:client_quit")) is None
    assert refusal_message(FLCommunicationError("cannot connect to server for 5 seconds")) is None
    assert refusal_message(OSError("x")) is None
    assert refusal_message(None) is None


def test_a_site_waits_with_the_cause_until_it_is_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    waited: list[float] = []
    monkeypatch.setattr(connection_refusals, "time", SimpleNamespace(sleep=waited.append, time=lambda: 1.0))
    answers: list[Any] = [wrapped("error:client_registration", SAID[Cause.REVOKED])] * 2 + [("token", "s", "i")]

    def register(*_: object) -> Any:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    assert await_admission(register, None, "site-2", "project", None) == ("token", "s", "i")  # type: ignore[arg-type]
    assert waited == [60.0, 60.0]
    assert caplog.text.count("does not let this site in: revoked: ") == 2
    assert "update-kit" in caplog.text
    assert "Traceback" not in capfd.readouterr().err
    assert connection_refusals.noted_cause(tmp_path) is Cause.REVOKED
    connection_refusals.note_cause(tmp_path, None)
    assert connection_refusals.noted_cause(tmp_path) is None
    answers.append(FLCommunicationError("cannot connect to server for 5 seconds"))
    with pytest.raises(FLCommunicationError, match="cannot connect"):
        await_admission(register, None, "site-2", "project", None)  # type: ignore[arg-type]


def test_refused_heartbeats_are_one_line_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(connection_refusals, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: 1.0))
    records: list[logging.LogRecord] = []
    logger = logging.Logger("communicator")
    logger.addHandler(handler := logging.Handler())
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addFilter(HeartbeatFilter(tmp_path))
    for second in range(0, 121, 5):
        now[0] = 100.0 + second
        try:
            raise wrapped("error:client_quit", SAID[Cause.REVOKED])
        except FLCommunicationError as error:
            logger.info(f"Failed to send heartbeat. Will try again. Exception: {error}")
    assert [one.levelname for one in records] == ["ERROR"] * 3
    assert all("revoked" in one.getMessage() for one in records)
    logger.info("something else")
    assert records[-1].getMessage() == "something else"
    assert connection_refusals.noted_cause(tmp_path) is Cause.REVOKED


def test_the_server_says_the_same_of_a_site_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Path(shutil.copytree(provision(SITES, tmp_path / "made") / "fl.hub.example", tmp_path / "server", symlinks=True))
    server = Attendance.__new__(Attendance)
    server._kit, day, now = kit, 86400.0, connection_refusals.time.time()
    seen = own_facts() | {"certificate_ends": now + day, "last_seen": now - 10}
    server._sites = {name: dict(seen) for name in ("a", "b", "c", "d", "e")}
    server._sites["b"]["certificate_ends"] = now - day
    server._sites["h"] = seen | {"certificate_starts": now + day}  # the server's clock is behind
    for name in ("a", "e", "f", "person@hub.example"):  # the last two were never seen
        revoke(name, kit)
    server._sites["e"]["last_seen"] = now + 10  # by a later kit
    manager = SimpleNamespace(disabled_clients={"c", "g"})
    engine = SimpleNamespace(get_clients=list, run_processes={}, server=SimpleNamespace(client_manager=manager))
    server._engine = engine  # type: ignore[assignment]
    rows = {row["site"]: row for row in site_rows(server._status_facts(), now)}
    states = {"a": "revoked", "b": "ended", "c": "refused", "d": "gone", "e": "gone", "f": "revoked", "g": "refused"}
    states["h"] = "not yet valid"
    assert {name: row["state"] for name, row in rows.items()} == states
    assert list(rows) == sorted(rows)
    for name in ("a", "f"):
        assert rows[name]["notes"] == ["its credential was revoked, so the server does not let it in"]
    assert rows["f"]["seen_seconds_ago"] is None


def test_a_site_that_was_revoked_before_its_first_heartbeat_is_listed_when_it_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No site has sent a heartbeat. The list at the server's kit, the metrics and a restarted server's list agree."""
    kit = Path(shutil.copytree(provision(SITES, tmp_path / "made") / "fl.hub.example", tmp_path / "server", symlinks=True))
    for owner, name in ((ClientManager, "heartbeat"), (TrainingCommandModule, "check_status")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back at the end
    manager = SimpleNamespace(disabled_clients=set())
    engine = SimpleNamespace(get_clients=list, run_processes={}, server=SimpleNamespace(client_manager=manager))
    workspace = SimpleNamespace(get_root_dir=lambda: str(kit))
    fl_ctx: Any = SimpleNamespace(get_prop=lambda key: workspace, get_engine=lambda: engine)
    server = Attendance()
    server.handle_event(EventType.SYSTEM_BOOTSTRAP, fl_ctx)
    revoke("hospital-a", kit)
    server.handle_event(EventType.CLIENT_REGISTER_RECEIVED, fl_ctx)
    assert run(monkeypatch, "sites", "--kit", kit) == 0
    told = capsys.readouterr().out
    assert "revoked, never" in told
    assert "hospital-a: its credential was revoked" in told
    assert 'consilium_refused{site="hospital-a",cause="revoked"} 1' in exposition_text(collect_metrics(kit), HELP)
    again = Attendance()
    again.handle_event(EventType.SYSTEM_BOOTSTRAP, fl_ctx)
    assert again._sites == {}
    assert list(again._status_facts()["sites"]) == ["hospital-a"]


# certificates that are not valid now --------------------------------------------------------------------------------------


@contextmanager
def grpc_server(startup: Path, port: int) -> Iterator[None]:
    """Answer TLS as FLARE's server does over gRPC."""
    key, own, root = ((startup / name).read_bytes() for name in ("server.key", "server.crt", "rootCA.pem"))
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([(key, own)], root, require_client_auth=True))
    server.start()
    yield
    server.stop(None).wait()


@contextmanager
def ssl_server(startup: Path, port: int) -> Iterator[None]:
    """Answer TLS as FLARE's server does over its other transports: with Python's ssl."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=startup / "rootCA.pem")
    context.load_cert_chain(startup / "server.crt", startup / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED

    class Reusing(socketserver.ThreadingTCPServer):
        allow_reuse_address = True  # the server of the test before had the port

    class Handshake(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                context.wrap_socket(self.request, server_side=True).sendall(b"x")

    with Reusing(("127.0.0.1", port), Handshake) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield
        server.shutdown()


@pytest.fixture(params=[grpc_server, ssl_server])
def alerts(made: Path, request: pytest.FixtureRequest) -> Iterator[bool]:
    """Run a server at the address in the kits, with its certificate. Return whether it sends alerts."""
    startup = made / "localhost" / "startup"
    port = json.loads((startup / "fed_server.json").read_text())["servers"][0]["service"]["target"].rpartition(":")[2]
    with request.param(startup, int(port)):
        yield request.param is ssl_server


TIMES = pytest.mark.parametrize(("days", "cause"), [(361, Cause.ENDED), (-3, Cause.EARLY)])
"""Days by which a certificate's times are earlier, and the cause for which a server refuses it."""


@pytest.fixture
def state(made: Path) -> Path:
    """Return the file with the root's key."""
    return made.parent / "state/cert.json"


@TIMES
def test_doctor_names_a_certificate_that_is_not_valid(days: int, cause: Cause, kit: Path, state: Path, alerts: bool) -> None:
    """With such a certificate FLARE raises an error before it connects."""
    age(kit, state, days, root=False)
    found = {one.check: one for one in examine(kit)}["admission"]
    assert found.found.startswith(f"the server does not let this site in: {cause}: {cause.text} (it is valid from ")
    assert found.found.endswith(" UTC)")
    assert found.remedy == cause.remedy
    assert connection_refusals.noted_cause(kit) is cause


def test_doctor_names_a_certificate_that_ended_with_its_root(kit: Path, state: Path, alerts: bool) -> None:
    age(kit, state, 361)
    found = {one.check: one for one in examine(kit)}
    assert not found["server"].ok
    assert found["admission"].remedy == Cause.ENDED.remedy


@TIMES
def test_doctor_names_a_certificate_that_only_the_servers_clock_refuses(
    days: int, cause: Cause, kit: Path, state: Path, alerts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handshake fails, so the registration has no reply. gRPC does not send the cause."""
    age(kit, state, days, root=False)
    monkeypatch.setattr(doctor, "why_certificate_invalid", lambda path: ("", None))
    unanswered = Mock(side_effect=FLCommunicationError("cannot connect to server for 10.0 seconds"))
    monkeypatch.setattr(connection_refusals, "try_registration", unanswered)
    found, shown = {one.check: one for one in examine(kit)}["admission"], cause if alerts else Cause.UNKNOWN
    assert found.found.startswith(f"the server does not let this site in: {shown}: {shown.text} (")
    assert ("[SSL: SSLV3_ALERT_" in found.found) == alerts
    assert (NO_ALERT in found.found) == (not alerts)
    assert found.remedy == shown.remedy


@TIMES
def test_site_learns_while_it_registers_that_the_servers_clock_refuses_it(
    days: int,
    cause: Cause,
    kit: Path,
    state: Path,
    alerts: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    age(kit, state, days, root=False)
    monkeypatch.chdir(kit)

    def register_when_noted(*_: object) -> tuple[str, str, str]:
        ends = time.monotonic() + 20
        while connection_refusals.noted_cause(kit) is None and time.monotonic() < ends:
            time.sleep(0.05)
        return "token", "s", "i"

    assert register(register_when_noted, None, "clinic", "test", None) == ("token", "s", "i")
    shown = cause if alerts else Cause.UNKNOWN
    assert connection_refusals.noted_cause(kit) is shown
    assert caplog.text.count(f"the server does not let this site in: {shown}: ") == 1


def test_valid_certificate_is_no_refusal(kit: Path, alerts: bool) -> None:
    note_connection_refusal(kit)
    assert connection_refusals.noted_cause(kit) is None


def test_certificate_that_flare_cannot_use_is_one_line(kit: Path, made: Path, alerts: bool) -> None:
    """The certificate is of another root with the same name."""
    other = provision(made.parents[1] / "sites.yml", kit.parent / "other")
    shutil.copy(other / "clinic/startup/client.crt", kit / "startup/client.crt")
    shutil.copy(other / "clinic/startup/client.key", kit / "startup/client.key")
    found = {one.check: one for one in examine(kit)}["admission"]
    assert "FLARE cannot use it" in found.found
    assert found.remedy == "restore startup/, or ask the hub for a new kit"
