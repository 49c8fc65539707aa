"""Certificates that end: who warns when; kits that are renewed in place; what is not a renewal; revoked names at the server."""

import errno
import json
import shutil
import socketserver
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from nvflare.apis.client import Client
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.hci.server.sess import SessionManager
from nvflare.lighter.utils import sign_content
from nvflare.private.fed.server.client_manager import ClientManager
from nvflare.private.fed.utils.identity_utils import IdentityVerifier, InvalidAsserterCert

from consilium.client.finding import Finding
from consilium.client.machine_check import run_check
from consilium.core.errors import ConfigError
from consilium.federation.run_folders import STATE
from consilium.flare.admin.session import connect
from consilium.flare.kit import heartbeat_client, revocation, revocation_check
from consilium.flare.kit.certificates import (
    NO_PROXIES,
    PROXIES,
    examine_own_certificate,
    examine_root,
    examine_server_connection,
    expiry_warnings,
)
from consilium.flare.kit.connection_refusals import Cause, note_cause, noted_cause
from consilium.flare.kit.kit_reader import certificate_path
from consilium.flare.kit.local_folder import update_local
from consilium.flare.kit.provision import provision
from consilium.flare.kit.renewal import OLD, renew, update_kit
from consilium.flare.kit.revocation import REFUSED, revoke, revoked_until
from consilium.flare.kit.revocation_check import READMITTED, RevocationCheck
from tests.deployment.network import Relay
from tests.flare.running import earlier

DAYS = 200
LEAD_CRT, OLD_KIT = "kits/test/prod_00/a@hub.example/startup/client.crt", "kits/test/prod_00/clinic/startup"
KEY = "clinic/startup/client.key"


def server_finding(kit: Path) -> Finding:
    return run_check("server", lambda: examine_server_connection(kit))


def deployment(folder: Path, days: int = DAYS) -> Path:
    server = {"name": "localhost", "org": "hub", "port": 9, "state": str(folder / "state")}
    people = [{"name": "a@hub.example", "org": "hub", "role": "lead"}]
    sites = [{"name": "clinic", "org": "clinic"}]
    path = folder / "sites.yml"
    path.write_text(yaml.safe_dump({"name": "test", "valid_days": days, "server": server, "sites": sites, "admins": people}))
    return path


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with sites.yml, kits/test/prod_00, and prod_01 with clinic and server renewed, for 300 days."""
    folder = tmp_path_factory.mktemp("hub")
    with earlier():
        provision(deployment(folder), folder / "kits")
    renew(deployment(folder, 300), folder / "kits", ["clinic", "localhost"])
    return folder


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the kits of another project of the same names."""
    folder = tmp_path_factory.mktemp("stranger")
    return provision(deployment(folder, 300), folder / "kits")


@pytest.fixture
def kit(hub: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(hub / "kits/test/prod_00/clinic", tmp_path / "clinic", symlinks=True))


@pytest.fixture
def new(hub: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(hub / "kits/test/prod_01/clinic", tmp_path / "new", symlinks=True))


def opened(kit: Path, name: str = "") -> x509.Certificate:
    return x509.load_pem_x509_certificate((kit / "startup" / name if name else certificate_path(kit)).read_bytes())


def set_clock(monkeypatch: pytest.MonkeyPatch, now: datetime, where: str = "certificates") -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return now

    monkeypatch.setattr(f"consilium.flare.kit.{where}.datetime", Clock)


@pytest.mark.parametrize(
    ("before", "remedy", "advice"),
    [
        (61, "", ""),
        (59, "", "59 days left: ask the hub for a renewed kit"),
        (31, "", "31 days left"),
        (29, "29 days left: ask the hub for a renewed kit, then `consilium update-kit KIT --from NEW_KIT`", ""),
        (-1, "set the clock, or ask the hub for a renewed kit", ""),
    ],
)
def test_expiry_warnings_start_at_60_days(
    before: int, remedy: str, advice: str, kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_clock(monkeypatch, opened(kit).not_valid_after_utc - timedelta(days=before, minutes=1))
    for found in (examine_own_certificate(kit), examine_root(kit)):  # the root ends with it
        assert found.remedy.startswith(remedy)
        assert bool(found.remedy) == bool(remedy)
        assert found.advice.startswith(advice)
        assert bool(found.advice) == bool(advice)


def test_clock_behind_the_kit(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's remedy, a later kit, would make it worse."""
    set_clock(monkeypatch, opened(kit).not_valid_before_utc - timedelta(hours=2))
    for found in (examine_own_certificate(kit), examine_root(kit)):
        assert found.remedy.startswith("set the clock: it is behind")


def test_login_checks_the_kits_validity(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = hub / "kits/test/prod_00/a@hub.example"
    for now, says in (
        (opened(kit).not_valid_before_utc - timedelta(minutes=5), "set the clock: it is behind"),
        (opened(kit).not_valid_after_utc + timedelta(minutes=5), "set the clock, or ask the hub for a renewed kit"),
    ):
        set_clock(monkeypatch, now)
        with pytest.raises(ConfigError, match=says), connect(kit):
            pass


def test_invalid_server_certificate_names_the_clock(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as a firewall that opens TLS."""
    aged = ssl.SSLCertVerificationError("certificate verify failed: certificate is not yet valid")
    aged.verify_code = 9
    monkeypatch.setattr("consilium.flare.kit.certificates.fetch_server_certificate", Mock(side_effect=aged))
    found = server_finding(kit)
    assert "its certificate is not valid now, 20" in found.found
    assert found.remedy.startswith("set the clock, or at the hub: `consilium renew")


def test_site_waits_until_its_certificate_is_valid(
    kit: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """FLARE's client alone would wait for ever. After the end it waits too, for a renewed kit."""
    told: list[float] = []
    causes: list[Cause | None] = []
    monkeypatch.setattr(heartbeat_client, "configure_logging", lambda workspace: None)

    def later(seconds: float) -> None:
        told.append(seconds)
        causes.append(noted_cause(kit))  # doctor and metrics read it
        set_clock(monkeypatch, begins - timedelta(seconds=90 - sum(told)), "heartbeat_client")

    monkeypatch.setattr(heartbeat_client.time, "sleep", later)
    begins, ends = opened(kit).not_valid_before_utc, opened(kit).not_valid_after_utc
    later(0)
    heartbeat_client.await_valid_certificate(kit)
    assert told == [0, 60, 60]
    assert caplog.text.count(f"the kit's certificate is valid from {begins:%Y-%m-%d %H:%M}") == 2
    set_clock(monkeypatch, ends + timedelta(seconds=1), "heartbeat_client")
    heartbeat_client.await_valid_certificate(kit)
    assert len(told) == 4
    heartbeat_client.await_valid_certificate(kit / "local")  # nothing to wait for
    monkeypatch.chdir(kit)
    monkeypatch.setattr(sys, "argv", ["/nvflare/private/fed/app/client/worker_process.py"])
    heartbeat_client.AttendanceReport()  # of a job, at a site that is connected
    assert len(told) == 4
    assert causes == [None, Cause.EARLY, Cause.EARLY, Cause.ENDED]


def test_status_warns_of_expiry(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = hub / "kits/test/prod_00/a@hub.example"
    assert expiry_warnings(kit) == []
    set_clock(monkeypatch, opened(kit).not_valid_after_utc - timedelta(days=20, minutes=-1))
    own, root = expiry_warnings(kit)
    assert own.startswith("clock: a@hub.example: now ")
    assert "19 days left: ask the hub for a renewed kit" in own
    assert root.startswith("root: ")


@pytest.fixture
def answering(hub: Path) -> Iterator[int]:
    """A port of this machine where something answers with the server's certificate, and asks for the other's."""
    startup = hub / "kits/test/prod_00/localhost/startup"
    shown = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=startup / "rootCA.pem")
    shown.load_cert_chain(startup / "server.crt", startup / "server.key")
    shown.verify_mode = ssl.CERT_REQUIRED

    class Handshake(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                shown.wrap_socket(self.request, server_side=True).recv(1)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handshake) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def test_doctor_uses_the_sites_proxy(kit: Path, answering: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As gRPC does; else it would find a problem behind every such firewall. A wrong password is told, and not shown."""
    for name in (*PROXIES, *NO_PROXIES):
        monkeypatch.delenv(name, raising=False)
    path = kit / "startup/fed_client.json"
    raw = json.loads(path.read_text())
    raw["servers"][0]["service"]["target"] = f"localhost:{answering}"
    path.write_text(json.dumps(raw))
    with Relay(None, login="ward 3:p@ss:word") as proxy:
        monkeypatch.setenv("https_proxy", f"http://ward%203:p%40ss%3Aword@127.0.0.1:{proxy.port}")
        assert "answers, and is of this project" in server_finding(kit).found
        assert proxy.asked == [f"CONNECT localhost:{answering}"]
        monkeypatch.setenv("no_proxy", "example.org, localhost")
        assert "answers, and is of this project" in server_finding(kit).found
        assert len(proxy.asked) == 1
        monkeypatch.setenv("no_proxy", "example.org")
        for wrong in (
            f"http://ward%203:hunter2@127.0.0.1:{proxy.port}",
            "http://ward:hunter2@127.0.0.1:x",
            "http://u:hunter2@a..b:1",
        ):
            monkeypatch.setenv("https_proxy", wrong)
            found = server_finding(kit)
            assert not found.ok
            assert "hunter2" not in found.found + found.remedy
            said = found.found.partition(": ")[2]  # the server's port may have these digits too
            assert ("407" in said) is ("ward%203" in wrong)


def test_renewal_keeps_the_roots_key(hub: Path) -> None:
    old, new = hub / "kits/test/prod_00", hub / "kits/test/prod_01"
    assert opened(old / "clinic").public_key() != opened(new / "clinic").public_key()
    before, after = opened(old / "localhost"), opened(new / "localhost")
    assert before.public_key() == after.public_key()  # it signs the sites' sessions
    assert (before.subject, list(before.extensions)) == (after.subject, list(after.extensions))
    assert (after.not_valid_after_utc - after.not_valid_before_utc).days == 300
    assert {path.name for path in new.iterdir()} == {"clinic", "localhost"}  # nobody's who was not named
    root, next_root = opened(old / "clinic", "rootCA.pem"), opened(new / "clinic", "rootCA.pem")
    assert (root.public_key(), root.subject) == (next_root.public_key(), next_root.subject)
    assert (next_root.not_valid_after_utc - next_root.not_valid_before_utc).days == 300
    for leaf in (old / "clinic", new / "clinic", old / "localhost", new / "localhost"):
        for one in (root, next_root):
            opened(leaf).verify_directly_issued_by(one)


def test_update_kit_keeps_local_files(kit: Path, new: Path) -> None:
    (kit / "local/site.yaml").write_text("device: cpu\n")
    note_cause(kit, Cause.REVOKED)  # of the former certificate
    (new / "startup/client.key").chmod(0o666)  # as it comes off a stick
    (new / "startup").chmod(0o777)
    told = update_kit(kit, new)
    until = datetime.now(UTC) + timedelta(days=300)
    assert told == [f"certificate valid until {until:%Y-%m-%d}", f"root valid until {until:%Y-%m-%d}"]
    assert opened(kit) == opened(new)
    assert (kit / "local/site.yaml").read_text() == "device: cpu\n"
    assert (kit / "_consilium").is_dir()
    assert noted_cause(kit) is None
    assert (kit / OLD / "client.key").is_file()
    assert (kit / OLD).stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in (kit / "startup", *(kit / "startup").iterdir()))


def of_another_project(new: Path, hub: Path, stranger: Path) -> None:
    shutil.rmtree(new / "startup")
    shutil.copytree(stranger / "clinic/startup", new / "startup")


def strangers_certificate(new: Path, hub: Path, stranger: Path) -> None:
    for name in ("client.crt", "client.key"):
        shutil.copy(stranger / "clinic/startup" / name, new / "startup" / name)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda new, hub, _: shutil.copy(hub / LEAD_CRT, new / "startup/client.crt"), "ask the hub for yours"),
        (of_another_project, "its root has another key than yours"),
        (strangers_certificate, "its certificate is not signed by its root"),
        (lambda new, hub, _: shutil.copytree(hub / OLD_KIT, new / "startup", dirs_exist_ok=True), "ends no later than the one"),
        (lambda new, _, other: shutil.copy(other / KEY, new / "startup/client.key"), "its key is none of its certificate"),
        (lambda new, *_: (new / "startup/sub_start.sh").open("a").write("true\n"), "its startup/ is not as the hub signed it"),
        (lambda new, *_: (new / "startup/signature.json").unlink(), "its startup/ is not as the hub signed it"),
    ],
)
def test_update_kit_refuses_other_kits(
    change: Callable[..., None], says: str, kit: Path, new: Path, hub: Path, stranger: Path
) -> None:
    change(new, hub, stranger)
    before = {p: p.read_bytes() for p in kit.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match=says):
        update_kit(kit, new)
    assert {p: p.read_bytes() for p in kit.rglob("*") if p.is_file()} == before


def test_new_root_key_needs_its_fingerprint(kit: Path, stranger: Path) -> None:
    fingerprint = opened(stranger / "clinic", "rootCA.pem").fingerprint(hashes.SHA256()).hex(":").upper()
    with pytest.raises(ConfigError, match="another key"):
        update_kit(kit, stranger / "clinic", fingerprint[:-2] + ("01" if fingerprint.endswith("00") else "00"))
    with pytest.raises(ConfigError, match="--fingerprint: 'SHA256:AA' is not a SHA-256 fingerprint"):
        update_kit(kit, stranger / "clinic", "SHA256:AA")
    update_kit(kit, stranger / "clinic", f"SHA256:{fingerprint}")
    assert opened(kit) == opened(stranger / "clinic")


def test_renew_refuses_unknown_names_and_folders(hub: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'clinc'; give one of a@hub"):
        renew(hub / "sites.yml", hub / "kits", ["clinc"])
    with pytest.raises(ConfigError, match="give the folder"):
        renew(hub / "sites.yml", tmp_path)


def test_renewal_keeps_relays_and_the_sites_behind_them(tmp_path: Path) -> None:
    """The server's renewed kit no longer knew them, and project.yml lost what an engineer had added."""
    sites, kits = deployment(tmp_path), tmp_path / "kits"
    with earlier():
        provision(sites, kits)
    raw = yaml.safe_load((kits / "project.yml").read_text())
    next(one for one in raw["participants"] if one["name"] == "clinic")["connect_to"] = {"name": "relay-1"}
    host = {"default_host": "localhost", "port": 9, "scheme": "grpc", "connection_security": "mtls"}
    raw["participants"].append({"name": "relay-1", "type": "relay", "org": "hub", "listening_host": host})
    (kits / "project.yml").write_text(yaml.safe_dump(raw))
    with earlier():
        first = provision(sites, kits)
    for names in ((), ("localhost",), ("relay-1",)):
        new = renew(sites, kits, names)
        assert {one.name for one in new.iterdir()} == set(names or ("localhost", "clinic", "a@hub.example", "relay-1"))
        if (new / "localhost").is_dir():
            (settings,) = json.loads((new / "localhost/startup/fed_server.json").read_text())["servers"]
            assert settings["auth_identity_map"] == {"relay-1.clinic": "clinic"}
        if (new / "relay-1").is_dir():
            assert opened(new / "relay-1").not_valid_after_utc > opened(first / "relay-1").not_valid_after_utc
    assert yaml.safe_load((kits / "project.yml").read_text())["participants"] == raw["participants"]
    with pytest.raises(ConfigError, match="a relay reads its certificate at its start; stop it, and leave out --running"):
        update_kit(first / "relay-1", new, running=True)
    del raw["participants"][-1]["name"]
    (kits / "project.yml").write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError, match=r"project\.yml: participants: a relay has no `name`"):
        provision(sites, kits)
    raw["participants"][-1]["name"] = "relay-1"
    (kits / "project.yml").write_text(yaml.safe_dump(raw))
    sites.write_text(sites.read_text().replace("name: test\n", "name: other\n"))  # the relays of one project are not another's
    assert {one.name for one in provision(sites, kits).iterdir()} == {"localhost", "clinic", "a@hub.example"}


# Revocation


@pytest.fixture
def server(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a server's kit, with FLARE's methods wrapped as in its process."""
    for owner, name in ((IdentityVerifier, "verify_common_name"), (ClientManager, "heartbeat")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    for name in ("get_session", "recreate_session"):
        monkeypatch.setattr(SessionManager, name, getattr(SessionManager, name))
    return Path(shutil.copytree(hub / "kits/test/prod_00/localhost", tmp_path / "server", symlinks=True))


def started(server: Path) -> RevocationCheck:
    """Return the component as the server's start makes it."""
    check, context = RevocationCheck(), FLContext()
    place = SimpleNamespace(get_site_config_dir=lambda: str(server / "local"))
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, place, private=True)
    check.handle_event("_system_bootstrap", context)
    return check


def shows(server: Path, kit: Path) -> bool:
    """Show a kit's certificate to the server, as at a registration."""
    name, key = "clinic", load_pem_private_key((kit / "startup/client.key").read_bytes(), None)
    return IdentityVerifier(str(server / "startup/rootCA.pem")).verify_common_name(
        asserted_cn=name, nonce="n", asserter_cert=opened(kit), signature=sign_content(name + "n", key, return_str=False)
    )


def test_revocation_refuses_earlier_certificates_only(server: Path, kit: Path, new: Path) -> None:
    started(server)
    assert shows(server, kit)
    cut = opened(kit).not_valid_before_utc.timestamp()
    (server / "local" / revocation.FILE).write_text(json.dumps({"clinic": {"until": cut}}))
    with pytest.raises(InvalidAsserterCert, match=REFUSED):
        shows(server, kit)
    assert opened(new).not_valid_before_utc.timestamp() > cut
    assert shows(server, new)
    revoke("clinic", server)
    with pytest.raises(InvalidAsserterCert, match=REFUSED):
        shows(server, new)


@pytest.mark.parametrize("text", ["{", "[]", '{"clinic": {}}', '{"clinic": {"until": "x"}}'])
def test_broken_revocation_list_admits_no_new_site(text: str, server: Path, kit: Path) -> None:
    check = started(server)
    (server / "local" / revocation.FILE).write_text(text)
    with pytest.raises(InvalidAsserterCert, match="nobody is let in"):
        shows(server, kit)
    assert (check._must_register_again("clinic", True), check._must_register_again("clinic", False)) == (False, True)
    with pytest.raises(ConfigError, match="cannot be read"):
        revoke("clinic", server)


def test_no_site_is_admitted_before_bootstrap(server: Path, kit: Path) -> None:
    RevocationCheck()
    with pytest.raises(InvalidAsserterCert, match="not ready"):
        shows(server, kit)


def test_revocation_refuses_earlier_tokens(server: Path, kit: Path, new: Path) -> None:
    started(server)
    manager, context = ClientManager(), FLContext()
    shows(server, kit)
    assert manager.heartbeat("old token", "clinic", "clinic", context) is True  # FLARE takes any name's token
    cut = time.time()
    (server / "local" / revocation.FILE).write_text(json.dumps({"clinic": {"until": cut}}))
    assert manager.heartbeat("old token", "clinic", "clinic", context) is False
    assert REFUSED in context.get_prop(FLContextKey.UNAUTHENTICATED)
    manager.clients.clear()  # as the check does at the next heartbeat of anybody
    (server / "local" / revocation.FILE).write_text(json.dumps({"clinic": {"until": cut - 3600}}))
    assert manager.heartbeat("old token", "clinic", "clinic", context) is False  # a restart of the server does not help
    assert not manager.clients


def test_two_sites_are_readmitted_at_once(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE handles heartbeats in several threads. One entry replaced the other's."""
    check, manager, names = started(server), ClientManager(), ("clinic", "ward")
    (server / "local" / revocation.FILE).write_text(json.dumps({name: {"until": 1.0} for name in names}))
    both = threading.Barrier(2)

    def slow_write(path: Path, value: Any) -> None:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value))

    monkeypatch.setattr(revocation_check, "write_json", slow_write)
    (server / STATE / READMITTED).unlink(missing_ok=True)
    for name in names:
        check._verified[name] = 1.0
        manager.clients[name] = Client(name, name)
    threads = [threading.Thread(target=manager.heartbeat, args=(name, name, name, FLContext())) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert json.loads((server / STATE / READMITTED).read_text()).keys() == set(names)


def test_renewed_site_stays_after_restart(server: Path, kit: Path, new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started(server)
    context, cut = FLContext(), opened(kit).not_valid_before_utc.timestamp()
    (server / "local" / revocation.FILE).write_text(json.dumps({"clinic": {"until": cut}}))
    manager = ClientManager()
    assert manager.heartbeat("new token", "clinic", "clinic", context) is False  # no certificate was shown yet
    shows(server, new)
    manager.clients["new token"] = Client("clinic", "new token")  # as FLARE's registration does
    assert manager.heartbeat("new token", "clinic", "clinic", FLContext()) is False  # known already, so nothing is new
    assert "new token" not in (server / STATE / READMITTED).read_text()

    started(server)  # another process: it has seen no certificate, and FLARE knows no site
    restarted = ClientManager()
    for token, name in (("old token", "clinic"), ("new token", "other"), ("", "clinic")):
        refused = FLContext()
        restarted.heartbeat(token, name, name, refused)
        assert (refused.get_prop(FLContextKey.UNAUTHENTICATED) is not None) == (name == "clinic")
    restarted.clients.clear()
    assert restarted.heartbeat("new token", "clinic", "clinic", FLContext()) is True
    assert restarted.heartbeat("new token", "clinic", "clinic", FLContext()) is False

    revoke("clinic", server)  # again: the later certificate counts no more, before and after a restart
    for check in (None, started(server)):
        restarted.clients.clear()
        refused = FLContext()
        assert restarted.heartbeat("new token", "clinic", "clinic", refused) is False
        assert REFUSED in refused.get_prop(FLContextKey.UNAUTHENTICATED), check
    before, revoked = (server / STATE / READMITTED).read_text(), (server / "local" / revocation.FILE).read_text()
    (server / "local" / revocation.FILE).write_text(json.dumps({"clinic": {"until": cut}}))
    with monkeypatch.context() as patched:
        patched.setattr(revocation_check, "read_json", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        started(server)
        shows(server, new)
        manager.clients["a token"], admitted = Client("clinic", "a token"), FLContext()
        manager.heartbeat("a token", "clinic", "clinic", admitted)
        assert admitted.get_prop(FLContextKey.UNAUTHENTICATED) is None
    assert (server / STATE / READMITTED).read_text() == before
    (server / "local" / revocation.FILE).write_text(revoked)
    for damage in ("{", "[]", '{"clinic": 1}'):
        (server / STATE / READMITTED).write_text(damage)
        assert restarted.heartbeat("new token", "clinic", "clinic", FLContext()) is False


def test_revoked_sites_are_logged_out(server: Path, kit: Path) -> None:
    check, manager, out = started(server), ClientManager(), []
    shows(server, kit)
    for name in ("clinic", "other"):
        manager.heartbeat(f"token of {name}", name, name, FLContext())
    revoke("clinic", server)
    context = FLContext()
    parts = SimpleNamespace(client_manager=manager, logout_client=out.append)
    engine = SimpleNamespace(server=parts, fire_event=lambda *_: None)
    context.get_engine = lambda: engine  # type: ignore[method-assign]
    check.handle_event("_client_heartbeat_received", context)
    assert out == ["token of clinic"]


def test_revocation_ends_sessions(server: Path) -> None:
    started(server)
    key = load_pem_private_key((server / "startup/server.key").read_bytes(), None)
    asserter = SimpleNamespace(
        cert=opened(server), sign=lambda text, return_str: sign_content(text, key, return_str=return_str)
    )
    manager = SessionManager(None)
    token = manager.create_session("a@hub.example", "hub", "lead", "").make_token(asserter)
    assert manager.get_session(token, asserter).user_name == "a@hub.example"
    revoke("a@hub.example", server)
    assert manager.get_session(token, asserter) is None
    with pytest.raises(ValueError, match="log in again"):
        manager.recreate_session(token, "", asserter)
    assert manager.get_session(token, asserter) is None
    manager.shutdown()


def test_revoke_needs_a_server_kit_with_the_check(server: Path, kit: Path) -> None:
    with pytest.raises(ConfigError, match="not the server's startup kit"):
        revoke("clinic", kit)
    for name in ("", " clinic", "server"):
        with pytest.raises(ConfigError, match="no name of"):
            revoke(name, server)
    path = server / "local/resources.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"components": []}))
    with pytest.raises(ConfigError, match="consilium allow KIT"):
        revoke("clinic", server)
    update_local(server)
    before = time.time()
    revoke("clinic", server)
    assert before <= revoked_until(server / "local")["clinic"] <= time.time()
    assert (server / "local" / revocation.FILE).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", ["client.crt", "client.key", "rootCA.pem", "signature.json"])
def test_half_copied_files_of_a_new_kit_change_nothing(name: str, kit: Path, new: Path) -> None:
    path, before = new / "startup" / name, opened(kit)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ConfigError, match="ask the hub"):
        update_kit(kit, new, running=True)
    assert opened(kit) == before
    assert not (kit / OLD).exists()


def test_an_update_that_was_interrupted_between_its_renames_is_done_by_the_next(kit: Path, new: Path) -> None:
    (kit / "startup").rename(kit / OLD)
    update_kit(kit, new)
    assert opened(kit) == opened(new)


def test_a_folder_that_is_no_kit_is_not_called_a_servers(new: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no startup kit"):
        update_kit(tmp_path / "none", new, running=True)
