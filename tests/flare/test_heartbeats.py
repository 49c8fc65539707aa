"""Heartbeats of a site's own process, by FLARE's client."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.message import Message
from nvflare.private.fed.client.client_engine import ClientEngine
from nvflare.private.fed.client.client_executor import JobExecutor
from nvflare.private.fed.client.communicator import Communicator
from nvflare.private.fed.client.fed_client_base import FederatedClientBase

from consilium.flare.kit import connection_refusals, heartbeat_client
from consilium.flare.kit.connection_refusals import Cause
from consilium.flare.kit.heartbeat_client import AttendanceReport


def test_clock_jump_at_start_keeps_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE makes a client's engine a moment after it has registered, and waits for it a minute by the wall clock."""
    monkeypatch.setattr(FederatedClientBase, "run_heartbeat", FederatedClientBase.run_heartbeat)  # put back at the end
    AttendanceReport()
    began, beats = threading.Event(), list[str]()
    client = FederatedClientBase.__new__(FederatedClientBase)
    client.engine, client.token, client.ssid, client.client_name = None, "token", "ssid", "site-1"
    client.servers = {"test": {}}
    client.logger = SimpleNamespace(error=beats.append, info=beats.append)
    client.communicator = SimpleNamespace(send_heartbeat=lambda *given: (beats.append(given[4]), began.set()))
    client.start_heartbeat(interval=1)
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + 3600)
    time.sleep(0.3)
    assert beats == []  # none without an engine
    client.engine = object()
    assert began.wait(10)
    assert beats == ["site-1"]


class Server:
    """Answers a client's heartbeats by a return code, or not at all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(heartbeat_client, "HealthReport", lambda kit: SimpleNamespace(facts=None))
        self.site, self.filters, self.sent = AttendanceReport(), list[Callable[[Message], None]](), dict[str, Any]()

        def add(channel: str, topic: str, callback: Callable[[Message], None]) -> None:
            assert (channel, topic) == ("task", "heart_beat")
            self.filters.append(callback)

        cell = SimpleNamespace(core_cell=SimpleNamespace(add_incoming_reply_filter=add))
        self.engine = engine = ClientEngine.__new__(ClientEngine)
        engine.client_executor = JobExecutor(SimpleNamespace(), "startup")
        engine.get_cell = lambda: cell
        self.fl_ctx: Any = SimpleNamespace(
            get_engine=lambda: engine, set_prop=lambda key, value, **_: self.sent.update({key: value})
        )

    def beat(self, code: str = "") -> None:
        """Do what FLARE does at a heartbeat: its second event comes without an answer too."""
        self.site.handle_event(EventType.BEFORE_CLIENT_HEARTBEAT, self.fl_ctx)
        (reply,) = self.filters
        if code:
            reply(Message({MessageHeaderKey.RETURN_CODE: code}))
        self.site.handle_event(EventType.AFTER_CLIENT_HEARTBEAT, self.fl_ctx)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.chdir(tmp_path)
    for owner, name in ((FederatedClientBase, "run_heartbeat"), (Communicator, "client_registration")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back at the end
    return Server(monkeypatch)


def test_the_cause_of_a_refusal_stays_until_the_server_lets_the_site_in(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An unanswered heartbeat says nothing, whether the server is away or its answer is an error."""
    connection_refusals.note_cause(tmp_path, Cause.REVOKED)
    for code in ("", ReturnCode.TIMEOUT, ReturnCode.UNAUTHENTICATED, ReturnCode.COMM_ERROR):
        server.beat(code)
        assert connection_refusals.noted_cause(tmp_path) is Cause.REVOKED
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            server.beat(ReturnCode.OK)
    assert caplog.text.count("the server lets this site in again") == 1
    assert connection_refusals.noted_cause(tmp_path) is None


def test_a_certificate_that_ends_under_a_running_site_is_logged_each_minute(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While the connection holds it is in; once the server does not answer, the end is the cause."""
    now = [1000.0]
    monkeypatch.setattr(heartbeat_client, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    ended = list[str]()
    monkeypatch.setattr(
        heartbeat_client, "why_certificate_invalid", lambda path: ("".join(ended), Cause.ENDED if ended else None)
    )
    server.beat(ReturnCode.OK)
    assert caplog.text == ""
    ended.append("is valid from 2025-01-01 to 2026-01-01, now is 2026-01-02")
    for _ in range(13):
        server.beat(ReturnCode.OK)
        now[0] += 10
    assert caplog.text.count("is valid from 2025-01-01") == 3
    assert "it stays until the connection breaks" in caplog.text
    assert connection_refusals.noted_cause(tmp_path) is None
    for _ in range(13):
        server.beat()
        now[0] += 10
    assert "the server does not answer" in caplog.text
    assert connection_refusals.noted_cause(tmp_path) is Cause.ENDED


def test_server_that_does_not_answer_is_asked_each_minute_whether_tls_fails(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate is valid by the site's clock, and may not be by the server's."""
    now, asked = [1000.0], list[Path]()
    monkeypatch.setattr(heartbeat_client, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    monkeypatch.setattr(heartbeat_client, "why_certificate_invalid", lambda path: ("", None))
    monkeypatch.setattr(heartbeat_client, "note_connection_refusal", asked.append)
    for code, checks in ((ReturnCode.OK, 0), ("", 2)):
        for _ in range(13):
            server.beat(code)
            now[0] += 10
        assert len(asked) == checks


def test_log_names_another_copy_of_the_kit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server runs and refuses nothing, but answers no heartbeat. Without a server, or with a refusal, there is no line."""
    line = "if another copy of this kit runs, stop it, then stop and start this one"

    def unreachable(kit: Path) -> None:
        raise OSError("connection refused")

    refusals: list[tuple[Cause, str] | None] = [None, None, (Cause.ENDED, "expired")]
    monkeypatch.setattr(heartbeat_client, "connection_refusal", lambda kit: refusals.pop(0))
    for fetch, lines in ((lambda kit: None, 1), (unreachable, 1), (lambda kit: None, 1)):
        monkeypatch.setattr(heartbeat_client, "fetch_server_certificate", fetch)
        heartbeat_client.note_no_answer(tmp_path)
        assert caplog.text.count(line) == lines
    assert not refusals
