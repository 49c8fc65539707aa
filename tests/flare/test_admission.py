"""Why a server does not let a site in: one list of causes at both ends, in logs, doctor, `sites` and metrics."""

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_exception import FLCommunicationError
from nvflare.private.fed.server.client_manager import ClientManager
from nvflare.private.fed.server.training_cmds import TrainingCommandModule

from consilium.cli.sites import site_rows
from consilium.flare.admin.kit_metrics import HELP, collect_metrics
from consilium.flare.kit import connection_refusals
from consilium.flare.kit.connection_refusals import Cause, HeartbeatFilter, await_admission, cause_of, refusal_message
from consilium.flare.kit.heartbeat_client import own_facts
from consilium.flare.kit.heartbeat_server import Attendance
from consilium.flare.kit.provision import provision
from consilium.flare.kit.revocation import REFUSED, revoke
from consilium.report.prometheus_text import exposition_text
from tests.conftest import run

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
    seen = own_facts(now + day) | {"last_seen": now - 10}
    server._sites = {name: dict(seen) for name in ("a", "b", "c", "d", "e")}
    server._sites["b"]["certificate_ends"] = now - day
    revoke("a", kit)
    revoke("e", kit)
    server._sites["e"]["last_seen"] = now + 10  # by a later kit
    for never_seen in ("f", "person@hub.example"):
        revoke(never_seen, kit)
    manager = SimpleNamespace(disabled_clients={"c", "g"})
    engine = SimpleNamespace(get_clients=list, run_processes={}, server=SimpleNamespace(client_manager=manager))
    server._engine = engine  # type: ignore[assignment]
    rows = {row["site"]: row for row in site_rows(server._status_facts(), now)}
    states = {"a": "revoked", "b": "ended", "c": "refused", "d": "gone", "e": "gone", "f": "revoked", "g": "refused"}
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
