"""Heartbeats of a site's own process, by FLARE's client."""

import threading
import time
from types import SimpleNamespace

import pytest
from nvflare.private.fed.client.fed_client_base import FederatedClientBase

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
