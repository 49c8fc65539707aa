"""What sites tell of themselves at a heartbeat, what of it the server keeps, and what `consilium sites` shows of it."""

import errno
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext

from consilium import __version__
from consilium.cli.sites import describe_health, site_rows
from consilium.core.errors import ConfigError
from consilium.core.messages import PROTOCOL
from consilium.federation.run_folders import ATTENDANCE, STATE
from consilium.flare.kit import heartbeat_client, heartbeat_server
from consilium.flare.kit.connection_refusals import Cause
from consilium.flare.kit.heartbeat_client import DATA_PERIOD, KEY, STEP, HealthReport, gpu_memory, own_facts, valid_facts
from consilium.flare.kit.local_folder import COMPONENTS, missing_components, update_local
from consilium.flare.kit.provision import provision
from consilium.privacy.audit_log import FILE, AuditLog
from tests.conftest import run

NOW = 1_800_000_000.0


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kits")
    raw = {"name": "test", "server": {"name": "localhost", "org": "hub", "state": str(folder / "state")}}
    raw |= {"sites": [{"name": "clinic", "org": "clinic"}], "admins": [{"name": "a@b.example", "org": "hub", "role": "lead"}]}
    (folder / "sites.yml").write_text(yaml.safe_dump(raw))
    return provision(folder / "sites.yml", folder / "made")


def facts(**changed: Any) -> dict[str, Any]:
    return own_facts() | {"certificate_ends": NOW + 90 * 86400, "clock": NOW} | changed


def test_valid_facts_are_kept() -> None:
    kept = heartbeat_server.checked_facts(facts(clock=NOW + 12.34), NOW)
    assert kept["version"] == __version__
    assert kept["protocol"] == PROTOCOL
    assert kept["skew"] == 12.3
    assert kept["last_seen"] == NOW
    assert kept["libraries"].keys() <= {"torch", "nvflare", "peft", "monai", "opacus", "transformers"}


@pytest.mark.parametrize(
    "said",
    [None, 7, [], {}, {"version": "\x1b[31m"}, {"version": "1" * 41}, {"protocol": True}, {"protocol": -1}, {"clock": "now"},
     {"clock": float("nan")}, {"clock": 10**400}, {"libraries": {"torch": "a b"}}, {"certificate_ends": float("inf")}],
)  # fmt: skip
def test_invalid_facts_are_dropped(said: Any) -> None:
    assert heartbeat_server.checked_facts(said, NOW) == {"last_seen": NOW}


HEALTH = {
    "disk_free": 10**12, "memory_free": 2**33, "memory": 2**34, "gpus": [[2**33, 2**34]], "data_readable": True,
    "data_checked": NOW - 60, "refusal": "budget", "refused_at": NOW - 7200,
}  # fmt: skip


class Many(dict):  # type: ignore[type-arg]
    """A mapping that must not be walked through: a site may send any number of entries."""

    def __iter__(self) -> Any:
        raise AssertionError

    items = keys = values = __iter__


@pytest.mark.parametrize(
    ("said", "left"),
    [
        (HEALTH, HEALTH),
        (None, {}),
        ("x" * 10**6, {}),
        ([HEALTH], {}),
        ({"patients": 12, "disk_free": 1, "\x1b[31m": 1}, {"disk_free": 1}),
        ({"disk_free": 10**400, "memory_free": -1, "memory": True}, {}),
        ({"disk_free": 1.5, "memory_free": float("nan"), "memory": "1"}, {}),
        ({"gpus": [[1, 2]] * 65}, {}),
        ({"gpus": [[1, 2, 3]]}, {}),
        ({"gpus": [["\x1b[31m", 2]]}, {}),
        ({"gpus": "12"}, {}),
        ({"data_readable": 1, "data_checked": float("inf")}, {}),
        ({"refusal": "\x1b[31mbudget"}, {}),
        ({"refusal": "budget\n"}, {}),
        ({"refusal": ["budget"]}, {}),
        ({"refused_at": -1}, {}),
    ],
)
def test_of_health_the_server_takes_known_bounded_facts_only(said: Any, left: dict[str, Any]) -> None:
    kept = heartbeat_server.checked_facts(Many(facts(health=said)), NOW)
    assert kept.pop("health") == left
    assert kept == heartbeat_server.checked_facts(facts(), NOW)


def test_health_is_shown_and_its_problems_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = heartbeat_server.checked_facts(facts(health=HEALTH), NOW) | {"here": True, "jobs": []}
    bad = facts(health=HEALTH | {"disk_free": 10**9, "data_readable": False}, certificate_ends=NOW - 86400)
    unwell = heartbeat_server.checked_facts(bad, NOW) | {"here": True, "jobs": []}
    silent = heartbeat_server.checked_facts(facts(), NOW) | {"here": True, "jobs": []}
    gone = unwell | {"here": False}
    sites = {"a": kept, "b": unwell, "c": silent, "d": gone}
    first, second, third, fourth = site_rows({"server": own_facts(), "sites": sites}, NOW)
    assert describe_health(first["health"], NOW) == (
        "931.3 GiB of disk free, 8.0 GiB of memory free, GPU 0: 8.0 of 16.0 GiB free, data list can be read (1 min ago), "
        "last refused a job 2 h ago: budget"
    )
    assert first["notes"] == []
    assert second["notes"] == [
        "its certificate has ended: it is out once its connection breaks; `consilium renew`",
        "its data list cannot be read; `consilium doctor KIT` there says why",
        "under 5 GiB of its disk are free; a job may break off",
    ]
    assert third["health"] is None
    assert fourth["health"] is None  # its disk and memory may be others by now
    assert fourth["notes"] == ["its certificate has ended: it is out once its connection breaks; `consilium renew`"]


def test_a_site_shares_health_with_its_leave_only_and_nothing_of_its_data(tmp_path: Path) -> None:
    """Edits of site.yaml count at the next look; a list that cannot be read is found, its name stays."""
    kit, local = tmp_path, tmp_path / "local"
    local.mkdir()
    report = HealthReport.__new__(HealthReport)
    report.kit, report._data, report._paths = kit, {}, []
    assert report.collect_facts() is None  # no site.yaml
    (local / "site.yaml").write_text("{}\n")
    assert report.collect_facts() is None  # the default
    (local / "site.yaml").write_text("health: share\n")
    found = report.collect_facts()
    assert found is not None
    assert found.keys() == {"disk_free", "memory_free", "memory", "gpus"}
    free = [found["disk_free"], found["memory_free"], *(one for one, _ in found["gpus"])]
    assert all(size % 2**27 == 0 for size in free)  # to the byte they would show the size of each new file
    assert valid_facts(found, heartbeat_client.HEALTH) == found
    (local / "site.yaml").write_text("health: share\ndatalist: ../ward-7.json\n")
    found = report.collect_facts()
    assert found is not None
    assert found["data_readable"] is False
    (kit / "ward-7.json").write_text('{"training": [], "validation": [], "test": []}')
    assert (report.collect_facts() or {})["data_readable"] is False  # read every ten minutes
    report._data["data_checked"] -= DATA_PERIOD
    log = AuditLog(kit / STATE / "runs" / "r" / "sites" / "clinic" / FILE)
    for reason in ("budget", "data"):
        log.add({"kind": "refusal", "reason": reason, "what": "ward-7/patient-3.png"}, again=True)
    log.add({"kind": "hello"})
    found = report.collect_facts()
    assert found is not None
    assert found["data_readable"] is True
    assert found["refusal"] == "data"
    # another run's record was written to last, and its refusal is older
    older = AuditLog(kit / STATE / "runs" / "r2" / "sites" / "clinic" / FILE)
    older.add({"kind": "refusal", "reason": "policy", "time": 1.0})
    assert (report.collect_facts() or {})["refusal"] == "data"
    assert valid_facts(found, heartbeat_client.HEALTH) == found
    assert not any(word in json.dumps(found) for word in ("ward", "patient", "clinic"))
    (local / "site.yaml").write_text("health: share\ndatalist: ../ward-8.json\n")
    assert (report.collect_facts() or {})["data_readable"] is False  # another list is read at once
    (local / "site.yaml").write_text("health: share\ndatalist: ../ward-7.json\n")
    assert (report.collect_facts() or {})["data_readable"] is True
    (local / "site.yaml").write_text("health: share\ndevice: [\n")
    assert report.collect_facts() is None


def test_a_data_list_on_a_disk_that_is_away_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub got no health facts at all."""
    (tmp_path / "local").mkdir()
    (tmp_path / "local/site.yaml").write_text("health: share\ndatalist: ../ward-7.json\n")
    report = HealthReport.__new__(HealthReport)
    report.kit, report._data, report._paths = tmp_path, {}, []
    monkeypatch.setattr(heartbeat_client, "read_site_list", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
    assert (report.collect_facts() or {})["data_readable"] is False


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo '40384, 40960'; echo '100, 81559'", [[40384 * 2**20 // STEP * STEP, 40960 * 2**20], [0, 81559 * 2**20]]),
        ("for n in $(seq 100); do echo '128, 256'; done", [[2**27, 2**28]] * 64),
        ("echo '[N/A], [N/A]'", []),
        ("echo '1, 2, 3'", []),
        ("echo 'No devices were found'", []),
        ("echo '128, 256'; exit 9", []),
        ("exec sleep 60", []),
        ("", []),
    ],
)
def test_gpus_by_what_nvidias_tool_prints(
    script: str, found: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MiB become bytes, and free memory is rounded down. Output of another form is no GPU and no error."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        f'#!/bin/sh\n[ "$*" = "--query-gpu=memory.free,memory.total --format=csv,noheader,nounits" ] || exit 2\n{script}\n'
    )
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(heartbeat_client, "GPU_PATIENCE", 0.1 if "sleep" in script else 10.0)
    assert gpu_memory() == found
    tool.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_memory() == []


def test_a_hanging_disk_stops_health_and_no_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HealthReport, "collect_facts", lambda self: threading.Event().wait(60))
    report = HealthReport(tmp_path)
    assert report.facts is None
    report._last = time.monotonic() - 301, {"disk_free": 1}
    assert report.facts is None
    report._last = time.monotonic() - 299, {"disk_free": 1}
    assert report.facts == {"disk_free": 1}


def test_rows_note_problems() -> None:
    one = heartbeat_server.checked_facts(facts(clock=NOW - 300, certificate_ends=NOW + 5 * 86400), NOW) | {"jobs": ["j1"]}
    old = {"last_seen": NOW - 86400.0, "here": False, "jobs": []}
    other = heartbeat_server.checked_facts(facts(protocol=PROTOCOL + 1), NOW - 100) | {"here": True, "jobs": []}
    found = {"server": own_facts() | {"clock": NOW}, "sites": {"a": one | {"here": True}, "b": old, "c": other}}
    first, second, third = site_rows(found, NOW)
    assert (first["state"], first["clock_ahead_seconds"], first["certificate_days_left"]) == ("here", -300.0, 5)
    assert first["notes"] == [
        "its clock is -300 s from the server's; set it", "its certificate ends in 5 days; `consilium renew`"
    ]  # fmt: skip
    assert (second["state"], second["seen_seconds_ago"], second["version"]) == ("gone", 86400, None)
    assert "0.2.0 or before" in second["notes"][0]
    assert third["state"] == "silent"
    assert third["notes"][0] == f"speaks protocol {PROTOCOL + 1}: jobs refuse it"
    assert "or two copies of its kit run; `consilium doctor KIT` there" in third["notes"][-1]
    only_version = heartbeat_server.checked_facts({"version": __version__, "protocol": "x"}, NOW) | {"here": True, "jobs": []}
    (fourth,) = site_rows({"server": own_facts(), "sites": {"d": only_version}}, NOW)
    assert fourth["notes"] == ["speaks protocol (none told): jobs refuse it"]


def test_sites_at_the_server_as_table_and_json(
    kits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kit = Path(shutil.copytree(kits / "localhost", tmp_path / "kit", symlinks=True))
    assert run(monkeypatch, "sites", "--kit", kit) == 2
    assert "no site has been seen by this server" in capsys.readouterr().err
    names = ["hospital-a", "hospital-with-a-very-long-name-of-its-own.example.org"]
    seen = {
        n: heartbeat_server.checked_facts(facts(clock=time.time()), time.time()) | {"here": True, "jobs": ["0a1b2c3d-"]}
        for n in names
    }
    (kit / STATE).mkdir()
    (kit / STATE / ATTENDANCE).write_text(json.dumps({"server": own_facts(), "sites": seen}))
    monkeypatch.setenv("COLUMNS", "80")
    assert run(monkeypatch, "sites", "--kit", kit) == 0
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= 80
    assert "0a1b2c3d" in page
    assert run(monkeypatch, "sites", "--kit", kit, "--format", "json") == 0
    rows = json.loads(capsys.readouterr().out)["sites"]
    assert [row["site"] for row in rows] == names
    never = {"ghost": {"here": False, "jobs": [], "cause": Cause.REVOKED}}  # revoked before its first heartbeat
    (kit / STATE / ATTENDANCE).write_text(json.dumps({"server": own_facts(), "sites": seen | never}))
    assert run(monkeypatch, "sites", "--kit", kit) == 0
    page = capsys.readouterr().out
    assert "2 sites seen" in page
    assert "revoked, never" in page
    assert "this list is of" not in page
    for one in seen.values():
        one["last_seen"] -= 120
    (kit / STATE / ATTENDANCE).write_text(json.dumps({"server": own_facts() | {"clock": time.time() - 120}, "sites": seen}))
    assert run(monkeypatch, "sites", "--kit", kit) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "this list is of 2 min ago: the server does not run" in page
    assert "no heartbeat for a minute" not in page  # the sites may be well
    assert run(monkeypatch, "sites", "--kit", kits / "clinic") == 2


def unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have FLARE's methods that the component wraps put back at the end."""
    for name in ("heartbeat", "check_status"):
        for owner in (heartbeat_server.ClientManager, heartbeat_server.TrainingCommandModule):
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, getattr(owner, name))


def beat(kit: Path, *events: str) -> None:
    """Start a server's component in this kit and handle `events`, by default a first heartbeat that was processed."""
    manager = SimpleNamespace(disabled_clients=set())
    engine = SimpleNamespace(get_clients=list, run_processes={}, server=SimpleNamespace(client_manager=manager))
    fl_ctx: Any = SimpleNamespace(
        get_prop=lambda key: SimpleNamespace(get_root_dir=lambda: str(kit)), get_engine=lambda: engine
    )
    component = heartbeat_server.Attendance()
    for event in (EventType.SYSTEM_BOOTSTRAP, *(events or [EventType.CLIENT_HEARTBEAT_PROCESSED])):
        component.handle_event(event, fl_ctx)


def test_a_rejected_copy_of_a_kit_changes_nothing_that_is_known_of_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE keeps the first copy's connection, and the second's heartbeats counted as the site's."""
    unwrapped(monkeypatch)
    component, manager = heartbeat_server.Attendance(), heartbeat_server.ClientManager()

    def send(token: str, version: str) -> None:
        fl_ctx, peer = FLContext(), FLContext()
        peer.set_prop(KEY, facts(version=version))
        fl_ctx.set_peer_context(peer)
        manager.heartbeat(token, "clinic", "clinic", fl_ctx)

    send("first", "0.3.0")
    before = component._status_facts()["sites"]["clinic"]
    send("second", "0.3.1")
    assert component._status_facts()["sites"]["clinic"] == before
    send("first", "0.3.2")
    assert component._status_facts()["sites"]["clinic"]["version"] == "0.3.2"


def test_list_is_written_while_no_site_connects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate has ended since the list was written, so TLS does not let the site in. The server was restarted."""
    unwrapped(monkeypatch)
    (tmp_path / STATE).mkdir()
    seen = {"last_seen": time.time() - 50, "certificate_ends": time.time() - 9, "here": True, "jobs": []}
    (path := tmp_path / STATE / ATTENDANCE).write_text(json.dumps({"server": own_facts(), "sites": {"a": seen}}))
    thread = Mock()
    monkeypatch.setattr(heartbeat_server.threading, "Thread", thread)
    beat(tmp_path, EventType.SYSTEM_START)
    monkeypatch.setattr(heartbeat_server.time, "sleep", Mock(side_effect=[None, InterruptedError]))
    with pytest.raises(InterruptedError):
        thread.call_args.kwargs["target"]()
    found = json.loads(path.read_text())["sites"]["a"]
    assert (found["here"], found["cause"]) == (False, Cause.ENDED)


def test_full_disk_logs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    unwrapped(monkeypatch)
    (tmp_path / STATE).write_text("in the way")
    beat(tmp_path)
    assert "attendance.json: cannot be written (File exists); make room" in caplog.text


def test_two_threads_do_not_write_the_list_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unwrapped(monkeypatch)
    component, written = heartbeat_server.Attendance(), []
    component._kit = tmp_path

    def slow_write(path: Path, value: Any) -> None:
        written.append(path)
        if len(written) == 1:
            component._written -= 2 * heartbeat_server.EVERY  # a disk that needs longer
            other = threading.Thread(target=component._write)
            other.start()
            other.join()

    monkeypatch.setattr(heartbeat_server, "write_json", slow_write)
    component._write()
    assert len(written) == 1
    component._write()
    assert len(written) == 2


ROW = {"last_seen": 1, "here": True, "jobs": []}
WRONG = [{"here": 1}, {"jobs": 2}, {"jobs": [2]}, {"certificate_ends": "x"}, {"version": 1}, {"skew": "x"},
         {"last_seen": None}]  # fmt: skip
SITES = [[], {"a": 1}, {"a": {"here": True, "jobs": []}}, *({"a": ROW | wrong} for wrong in WRONG)]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"server": 1', '{"server": {}, "sites": {}}']
    + [json.dumps({"server": {"version": "0.3.0", "protocol": 3}, "sites": sites}) for sites in SITES],
)
def test_damaged_file_is_one_line(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / STATE).mkdir()
    (tmp_path / STATE / ATTENDANCE).write_text(text)
    with pytest.raises(ConfigError, match="the server writes it anew"):
        heartbeat_server.read_attendance(tmp_path)
    unwrapped(monkeypatch)
    beat(tmp_path)
    assert heartbeat_server.read_attendance(tmp_path)["sites"] == {}


@pytest.mark.parametrize(("name", "role"), [("localhost", "server"), ("clinic", "site")])
def test_allow_adds_missing_components(name: str, role: str, kits: Path, tmp_path: Path) -> None:
    kit = Path(shutil.copytree(kits / name, tmp_path / name, symlinks=True))
    assert missing_components(kit, role) == []
    path, ours = kit / "local/resources.json", [one["path"] for one in COMPONENTS[role]]
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"components": [one for one in raw["components"] if one["path"] not in ours]}))
    assert missing_components(kit, role) == [one["id"] for one in COMPONENTS[role]]
    update_local(kit)
    assert missing_components(kit, role) == []
    assert len(json.loads(path.read_text())["components"]) == len(raw["components"])


def test_heartbeats_load_no_torch() -> None:
    code = "import sys, consilium.flare.kit.heartbeat_client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
