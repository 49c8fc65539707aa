"""`consilium serve`: pages show the same numbers as other commands, only the address opens them, and no request writes."""

import asyncio
import contextlib
import hashlib
import html
import http.client
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import psutil
import pytest
import yaml

from consilium.cli import kit_pages
from consilium.cli.serve import COOKIE, HEADERS, HOST, MOST_CONNECTIONS, KitSite
from consilium.cli.site_records import find_site_records
from consilium.client import approval
from consilium.config.job import load_job
from consilium.config.site import SiteConfig
from consilium.federation.job_assembly import assemble_job
from consilium.federation.run_folders import STATE
from consilium.flare.job.recipe import export_simulation_job
from consilium.flare.kit import key_lock
from consilium.flare.kit.certificates import root_key_fingerprint
from consilium.flare.kit.evidence_archive import verify
from consilium.flare.kit.provision import provision
from consilium.privacy import audit_log, ledger
from consilium.privacy.accounting import VOID
from consilium.privacy.audit_log import FILE, AuditLog
from consilium.report.tables import size_text
from consilium.runtime.engine import simulate
from tests.cli.browser import Tab, browse
from tests.conftest import run, small_config
from tests.deployment.federation import free_port
from tests.report.pages import Page

EVIL = "<img src=x onerror=alert(1)>"
TOKEN = "the-token"
JOB = "0c5d0bd4-7b0c-4f0e-8c1e-000000000000"
COMMAND = [sys.executable, "-c", "from consilium.cli.main import main; main()"]


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return kits in whose folders are two runs, of which one is private, and names and texts with HTML."""
    folder = tmp_path_factory.mktemp("serve")
    server = {"name": "localhost", "org": "hub", "port": free_port(), "state": str(folder / "state")}
    site = {"privacy": {"dataset": "ward-7", "budgets": {"site": {"epsilon": 50, "delta": 1e-5}}}}
    sites: list[dict[str, Any]] = [{"name": "clinic", "org": "clinic", "site": site}, {"name": "other", "org": "other"}]
    people = [{"name": "a@hub.example", "org": "hub", "role": "lead"}]
    (folder / "sites.yml").write_text(yaml.safe_dump({"name": "t", "server": server, "sites": sites, "admins": people}))
    kits = provision(folder / "sites.yml", folder / "kits")
    for name, privacy in (("secret", {"unit": "site", "clip": 1.0, "noise_multiplier": 2.0}), ("open", None)):
        config = small_config("fedit", rounds=2, local_steps=1)
        if privacy:
            config = type(config).model_validate(config.model_dump() | {"privacy": privacy})
        workspace = folder / name
        settings = {one: SiteConfig.model_validate(site if privacy else {}) for one in ("clinic", "other")}
        simulate(assemble_job(config), settings, workspace, lambda event: None)
        own = kits / "clinic" / STATE / "runs" / name / "sites/clinic"
        own.parent.mkdir(parents=True)
        (workspace / "sites/clinic").rename(own)
        if privacy:
            (own / "ledger.sqlite").rename(kits / "clinic" / STATE / "ledger.sqlite")
        (workspace / "simulation.json").unlink()
        shutil.rmtree(workspace / "sites")
        shutil.copytree(workspace, kits / "localhost" / STATE / "runs" / name)
    record = AuditLog(kits / "clinic" / STATE / "runs/refused/sites/clinic/r" / FILE)
    record.add({"site": "clinic", "kind": "refusal", "what": f"</td><script>alert(1)</script>{EVIL}"})
    (kits / "clinic" / STATE / "runs" / EVIL).mkdir()
    stopped = kits / "localhost" / STATE / "runs" / EVIL
    shutil.copytree(kits / "localhost" / STATE / "runs/open", stopped)
    with open(stopped / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"event": "stopped", "time": 1.7e9, "reason": EVIL}) + "\n")
    return kits


class Browser:
    """A user at the address of a KitSite: requests as they are written, with the host, and with the cookie after `enter`."""

    def __init__(self, port: int, timeout: float = 120) -> None:
        self.port, self.timeout, self.cookie, self.root = port, timeout, "", ""

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        link = http.client.HTTPConnection(HOST, self.port, timeout=self.timeout)
        link.putrequest(method, path, skip_host=True)
        found = {"Host": f"{HOST}:{self.port}"} | ({"Cookie": self.cookie} if self.cookie else {}) | headers
        for name, value in found.items():
            for one in value.split("|") if value else ():
                link.putheader(name, one)
        link.endheaders()
        reply = link.getresponse()
        body = reply.read()
        link.close()
        return reply.status, {name.lower(): value for name, value in reply.getheaders()}, body

    def enter(self) -> None:
        status, headers, _ = self.ask(f"/?token={TOKEN}")
        assert status == 303
        self.root, self.cookie = headers["location"], headers["set-cookie"].partition(";")[0]

    def text(self, path: str = "") -> str:
        status, _, body = self.ask(self.root + path)
        assert status == 200, body
        return body.decode()

    def crawl(self) -> dict[str, tuple[dict[str, str], bytes]]:
        """Return the headers and bodies of all pages to which links lead, by path."""
        found, left = dict[str, tuple[dict[str, str], bytes]](), [self.root]
        while left:
            if (path := left.pop()) not in found:
                status, headers, body = self.ask(path)
                assert status == 200, path
                found[path] = (headers, body)
                if headers["content-type"].startswith("text/html"):
                    links = (one["href"] for one in Page(body.decode()).of("a"))
                    left += [urlsplit(urljoin(path, link)).path for link in links if not link.startswith("#")]
        return found


@contextmanager
def served(kit: Path) -> Iterator[Browser]:
    """Serve a kit in a thread."""
    listener, loop, ready = socket.create_server((HOST, 0)), asyncio.new_event_loop(), threading.Event()
    port = listener.getsockname()[1]

    async def serve() -> None:
        async with KitSite(kit, TOKEN, port).serving(listener):
            ready.set()
            await end.wait()

    end = asyncio.Event()
    task = loop.create_task(serve())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        assert ready.wait(30)
        yield Browser(port)
    finally:
        task.add_done_callback(lambda _: loop.stop())
        loop.call_soon_threadsafe(end.set)
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def site(kits: Path) -> Iterator[Browser]:
    """Return a user at the pages of a site, who is let in."""
    with served(kits / "clinic") as browser:
        browser.enter()
        yield browser


@pytest.fixture(scope="module")
def server(kits: Path) -> Iterator[Browser]:
    with served(kits / "localhost") as browser:
        browser.enter()
        yield browser


@pytest.fixture
def kit(kits: Path, tmp_path: Path) -> Path:
    """Return a copy of the site's kit, to change."""
    return Path(shutil.copytree(kits / "clinic", tmp_path / "clinic", symlinks=True))


def rows(page: str) -> list[list[str]]:
    """Return the cells of all rows of all tables on a page."""
    found = (re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in re.findall(r"<tr[^>]*>(.*?)</tr>", page, re.S))
    return [[html.unescape(re.sub(r"<[^>]+>", "", cell)) for cell in row] for row in found]


def row(page: str, *first: str) -> list[str]:
    (found,) = [one for one in rows(page) if one[: len(first)] == list(first)]
    return found


# numbers ---------------------------------------------------------------------------------------------------------------


def test_sites_page_has_numbers_of_audit_and_ledger(
    kits: Path, site: Browser, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, kit = site.text(), kits / "clinic"
    assert run(monkeypatch, "privacy", "ledger", kit, "--format", "json") == 0
    (spent,) = json.loads(capsys.readouterr().out)["data_sets"]
    assert spent["releases"] == 2
    epsilon = spent["epsilon"]["site"]["1e-05"]
    assert row(page, "ward-7", "site") == ["ward-7", "site", "50", "1e-05", f"{epsilon:.4g}", f"{50 - epsilon:.4g}"]
    assert run(monkeypatch, "audit", kit / STATE / "runs/secret", "--format", "json") == 0
    messages = json.loads(capsys.readouterr().out)[0]["messages"]
    total = sum(tensor["bytes"] for one in messages for tensor in one.get("tensors", {}).values())
    assert total > 1000
    last = [one["privacy"]["epsilon"] for one in messages if "privacy" in one][-1]
    expected = [
        "secret",
        str(len(messages)),
        size_text(total),
        "clip 1.0, multiplier 2.0",
        f"{last:.4g} at delta 1e-05",
        "unaltered",
    ]
    assert row(page, "secret", str(len(messages))) == expected
    assert row(page, "open", str(len(messages)))[3:5] == ["none", "-"]
    assert row(page, "secret", "ended")
    assert row(page, "refused", "ended")[-1].endswith(f": </td><script>alert(1)</script>{EVIL}")
    assert int(row(page, "this participant")[2]) > 300
    detail = site.text("runs/secret")
    kinds = [one[1] for one in rows(detail) if len(one) == 8][1:]
    assert kinds == [one["kind"] for one in messages]
    assert f"epsilon {last:.4g} at delta 1e-05" in detail


def test_servers_page_has_runs_and_curves(kits: Path, server: Browser) -> None:
    page = server.text()
    assert "no site has been seen" in page
    assert row(page, "open")[2:4] == ["completed", "2 of 2"]
    assert row(page, EVIL)[2] == "stopped"
    assert row(page, EVIL)[6] == EVIL
    curves = server.text("runs/open")
    assert curves.count("<svg") >= 2
    assert 'href="../"' in curves
    assert str(kits) not in curves


def test_sites_seen_are_shown(kits: Path, tmp_path: Path) -> None:
    hub, now = Path(shutil.copytree(kits / "localhost", tmp_path / "hub", symlinks=True)), time.time()
    facts = {"last_seen": now, "version": "0.3.0", "protocol": 3, "skew": 99.0, "here": True, "jobs": []}
    server = {"version": "0.3.0", "protocol": 3, "libraries": {}, "clock": now}
    (hub / STATE / "attendance.json").write_text(json.dumps({"server": server, "sites": {"clinic": facts}}))
    page = kit_pages.overview(hub)
    assert row(page, "clinic")[2:5] == ["0.3.0", "3", "+99 s"]
    assert "its clock is +99 s" in page


def test_health_page_has_the_doctors_findings(
    kits: Path, site: Browser, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "doctor", kits / "clinic", "--format", "json") == 1
    findings = json.loads(capsys.readouterr().out)
    shown = {cells[0]: cells[1] for cells in rows(site.text("health"))[1:]}
    assert shown == {one["check"]: "PROBLEM" if not one["ok"] else "advice" if one["advice"] else "ok" for one in findings}
    assert shown["server"] == "PROBLEM"


def test_noise_from_a_seed_and_void_noise_are_named(kit: Path) -> None:
    (path,) = (kit / STATE / "runs/secret").rglob(FILE)
    text = path.read_text()
    path.write_text(text.replace('"mechanism": "discrete gaussian"', '"seeded": true'))
    assert row(kit_pages.overview(kit), "secret", "4")[3] == "NOT PRIVATE: from a seed"
    assert "the noise of 2 messages came from a seed" in kit_pages.run_page(kit, "secret")
    path.write_text(text.replace('"mechanism": "discrete gaussian", ', "").replace('"unit": "site"', '"unit": "record"'))
    assert f"2 messages are {VOID}" in html.unescape(kit_pages.run_page(kit, "secret"))


def test_altered_record_is_named(kit: Path) -> None:
    (path,) = (kit / STATE / "runs/secret").rglob(FILE)
    path.write_text(path.read_text().replace('"round": 1', '"round": 7'))
    assert row(kit_pages.overview(kit), "secret", "4")[5] == "ALTERED"
    assert "ALTERED: line" in kit_pages.run_page(kit, "secret")
    path.write_bytes(b"\xff\n")
    assert row(kit_pages.overview(kit), "secret", "0")[5] == "ALTERED"
    assert "cannot be read" in kit_pages.run_page(kit, "secret")


def test_large_record_is_not_shown_as_altered(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kit_pages, "MOST_BYTES", 1000)
    monkeypatch.setattr("consilium.report.page.run_page.MOST_BYTES", 1000)
    meta = {"job_id": JOB, "name": "small", "experiment": "secret"}
    (kit / JOB).mkdir()
    (kit / JOB / "meta.json").write_text(json.dumps(meta))
    page, detail = html.unescape(kit_pages.overview(kit)), html.unescape(kit_pages.run_page(kit, "secret"))
    assert "ALTERED" not in page + detail
    assert "cannot be read" not in page + detail
    assert row(page, "secret", "-") == ["secret", "-", "-", "-", "-", kit_pages.RECORD_TOO_LARGE]
    assert "did not begin" not in page
    assert kit_pages.LEDGER_BROKEN not in page
    assert row(page, "ward-7", "site")
    assert kit_pages.TOO_LARGE in detail
    assert 'href="evidence/secret"' in page
    with kit_pages.open_evidence(kit, "secret") as archive:
        (tmp_path / "it.zip").write_bytes(archive.read())
    assert verify(tmp_path / "it.zip", root_key_fingerprint(kit))["record"] is None
    assert run(monkeypatch, "audit", kit) == 0
    assert "runs/secret/" in capsys.readouterr().out
    with contextlib.closing(sqlite3.connect(find_site_records(kit).ledger)) as db, db:
        db.execute("DELETE FROM releases WHERE rowid = (SELECT max(rowid) FROM releases)")
    assert kit_pages.LEDGER_BROKEN in html.unescape(kit_pages.overview(kit))
    (altered,) = (kit / STATE / "runs/refused").rglob(FILE)
    altered.write_text(altered.read_text().replace("clinic", "clinik") * 2)
    assert row(kit_pages.overview(kit), "refused", "2")[5] == "ALTERED"


def test_record_whose_privacy_was_altered_is_shown_as_altered(kit: Path) -> None:
    (path,) = (kit / STATE / "runs/secret").rglob(FILE)
    path.write_text(path.read_text().replace('"unit"', '"unix"'))
    assert row(kit_pages.overview(kit), "secret", "4")[5] == "ALTERED"
    assert kit_pages.ALTERED in kit_pages.run_page(kit, "secret")


@pytest.mark.parametrize("how", ["gone", "cut", "altered"])
def test_no_number_is_shown_without_a_whole_ledger(how: str, kit: Path) -> None:
    """The command refuses there; a page that said 0 spent, or that no budget is set, would be false."""
    ledger = find_site_records(kit).ledger
    assert kit_pages.LEDGER_BROKEN not in html.unescape(kit_pages.overview(kit))
    if how == "gone":
        ledger.unlink()
    else:
        with contextlib.closing(sqlite3.connect(ledger)) as db, db:
            change = "DELETE FROM releases" if how == "cut" else "UPDATE releases SET time = time + 1"
            db.execute(f"{change} WHERE rowid = (SELECT max(rowid) FROM releases)")
    page = html.unescape(kit_pages.overview(kit))
    assert kit_pages.LEDGER_BROKEN in page
    assert "sets no budget" not in page
    assert "no private job has run" not in page
    assert str(kit) not in page


@pytest.mark.parametrize("content", [b"[" * 100_000 + b"]" * 100_000, b"\xff"])
def test_job_with_hostile_files_does_not_hide_the_page(content: bytes, kit: Path, tmp_path: Path) -> None:
    (kit / "local/site.yaml").write_text("approve: digest\n")
    app = kit / JOB / "app_clinic"
    shutil.copytree(export_simulation_job(small_config("fedit"), tmp_path / "job", ["clinic"]) / "app", app)
    (kit / JOB / "meta.json").write_text(json.dumps({"job_id": JOB, "name": "small"}))
    (app / "config" / "config_fed_client.json").write_bytes(content)
    assert "none: the job cannot run here" in kit_pages.overview(kit)


def test_approvals_wait_and_are_given(kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = kit / "local/site.yaml"
    assert "asks for no approval" in kit_pages.overview(kit)
    settings.write_text("approve: digest\n")
    app = kit / JOB / "app_clinic"
    shutil.copytree(export_simulation_job(small_config("fedit"), tmp_path / "job", ["clinic"]) / "app", app)
    meta = {"job_id": JOB, "name": "small", "experiment": f"{EVIL} 7", "submitter_name": "a@hub.example", "submit_time": 0}
    (kit / JOB / "meta.json").write_text(json.dumps(meta))
    page, digest = kit_pages.overview(kit), approval.digest(app, load_job(app / approval.JOB))
    assert row(page, f"{EVIL} 7", "did not begin", "a@hub.example")[-1] == f"waits for approval of digest {digest}"
    assert "No job is approved." in page
    assert run(monkeypatch, "approve", app, "--kit", kit, "--yes") == 0
    page = kit_pages.overview(kit)
    assert row(page, "small")[-1] == digest
    assert "nothing left" in row(page, f"{EVIL} 7")[-1]
    (kit / "local" / approval.FILE).write_text("[")
    page = kit_pages.overview(kit)
    assert "refuses every job" in page
    assert row(page, f"{EVIL} 7", "did not begin")[-1].startswith("waits for approval")


def test_deleted_run_says_by_whom_and_why(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "forget", "open", "--kit", kit, "--reason", "withdrawn") == 0
    assert row(kit_pages.overview(kit), "open", "files deleted")[-1].endswith(": withdrawn")


def test_evidence_is_the_commands_archive(kits: Path, site: Browser, tmp_path: Path) -> None:
    status, headers, body = site.ask(f"{site.root}evidence/secret")
    assert (status, headers["content-type"]) == (200, "application/zip")
    assert headers["content-disposition"] == "attachment; filename*=UTF-8''secret.evidence.zip"
    (tmp_path / "it.zip").write_bytes(body)
    found = verify(tmp_path / "it.zip", root_key_fingerprint(kits / "other"))
    assert (found["site"], found["experiment"], found["record"], found["ledger"]) == ("clinic", "secret", None, None)
    assert found["rows"] == 2


def test_locked_kit_offers_no_evidence(kit: Path, capfd: pytest.CaptureFixture[str]) -> None:
    key_lock.lock(kit, "five words of a passphrase")
    with served(kit) as browser:
        browser.enter()
        page = browser.text()
        assert "The kit is locked" in page
        assert "evidence/" not in page
        status, _, body = browser.ask(f"{browser.root}evidence/secret")
        assert status == 500
        assert str(kit) not in body.decode()
        assert "Traceback" not in body.decode()
    assert "is locked" in capfd.readouterr().err


# attacks ---------------------------------------------------------------------------------------------------------------


def refused(reply: tuple[int, dict[str, str], bytes], status: int) -> None:
    """Check that a reply is an error page that tells nothing about the kit."""
    found, headers, body = reply
    assert found == status
    assert "set-cookie" not in headers
    assert [word for word in ("clinic", "secret", "Traceback", "File ", "/tmp", "/home") if word in body.decode()] == []


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{port}", "127.0.0.1", "localhost", "127.0.0.1:1", "[::1]:{port}",
     "127.0.0.1.evil.example:{port}", "localhost:{port}.evil.example", "evil.example@127.0.0.1:{port}", "",
     "127.0.0.1:{port}|evil.example"],
)  # fmt: skip
def test_other_hosts_are_refused(site: Browser, host: str) -> None:
    """A page of evil.example whose name leads to this machine sends its own name (DNS rebinding)."""
    reply = site.ask(site.root, Host=host.format(port=site.port))
    if "|" in host or not host:
        assert reply[0] in (400, 403)
        assert b"clinic" not in reply[2]
        return
    refused(reply, 403)
    refused(site.ask(f"/?token={TOKEN}", Host=host.format(port=site.port)), 403)


def test_both_names_of_this_machine_are_served(site: Browser) -> None:
    assert site.ask(site.root, Host=f"localhost:{site.port}")[0] == 200


@pytest.mark.parametrize(
    "path", ["/", "{root}", "{root}runs/secret", "{root}health", "{root}evidence/secret", "/none", "{root}?token={token}",
             "/{token}", "/{token}/", "/?token=", "/?token=wrong", "/?token=%ff%fe", "/?Token={token}", "/?token={token}x",
             "/#{token}", "/?x={token}", "{root}runs/secret?token={token}", "//?token={token}"],
)  # fmt: skip
def test_nothing_without_the_token_in_its_place(site: Browser, path: str) -> None:
    stranger = Browser(site.port)
    path = path.format(root=site.root, token=TOKEN)
    refused(stranger.ask(path), 401)
    for value in (TOKEN, "", "x" * 43, "é"):
        refused(stranger.ask(path, Cookie=f"{COOKIE}={value}".encode().decode("latin-1")), 401)
    refused(stranger.ask(path, Authorization=f"Bearer {TOKEN}", Token=TOKEN), 401)
    session = site.cookie.partition("=")[2]
    refused(stranger.ask(f"/?token={session}"), 401)


def test_cookie_is_for_this_path_only_and_not_for_scripts(site: Browser) -> None:
    status, headers, body = Browser(site.port).ask(f"/?token={TOKEN}")
    assert (status, body) == (303, b"")
    attributes = {one.strip() for one in headers["set-cookie"].split(";")[1:]}
    assert attributes == {"HttpOnly", "SameSite=Strict", f"Path={site.root}"}
    assert len(site.root) >= 22
    assert TOKEN not in headers["location"] + headers["set-cookie"]
    refused(site.ask("/", Cookie=""), 401)  # as a browser does, which sends no cookie there


def test_two_kits_have_different_secrets(site: Browser, server: Browser) -> None:
    assert site.root != server.root
    assert site.cookie != server.cookie
    refused(server.ask(server.root, Cookie=site.cookie), 401)


def test_secrets_are_compared_in_constant_time(kits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return one == other

    monkeypatch.setattr("consilium.cli.serve.hmac.compare_digest", compare)
    with served(kits / "clinic") as browser:
        browser.enter()
        browser.text("runs/open")
    assert compared == [TOKEN.encode(), browser.cookie.partition("=")[2].encode()]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"])
def test_only_reading_is_allowed(site: Browser, method: str) -> None:
    for path in ("", "runs/secret", "evidence/secret", "health"):
        refused(site.ask(site.root + path, method), 405)
    refused(site.ask(f"/?token={TOKEN}", method), 405)


def test_head_has_the_headers_of_get(site: Browser) -> None:
    for path in ("", "evidence/secret"):
        status, headers, body = site.ask(site.root + path, "HEAD")
        assert (status, body) == (200, b"")
        assert int(headers["content-length"]) > 1000


OUTSIDE = ["..", "%2e%2e", "..%2f..%2flocal%2fsite.yaml", "%2e%2e%2f%2e%2e%2fledger.sqlite", "%252e%252e%252flocal",
           "..%5c..", "%00", "secret%00", "%2fetc%2fpasswd", "secret%2f..%2fopen", "secret%2fsites", "SECRET", "secret.",
           "secret/../../../startup/client.key", "%ff", "~", "*", "x" * 5000]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_paths_outside_the_runs_lead_nowhere(site: Browser, server: Browser, name: str) -> None:
    for one, place in ((site, "runs"), (site, "evidence"), (server, "runs"), (server, "evidence")):
        refused(one.ask(f"{one.root}{place}/{name}"), 404)


def test_run_that_is_a_link_is_not_shown(kit: Path, tmp_path: Path) -> None:
    (tmp_path / "away").mkdir()
    (kit / STATE / "runs/linked").symlink_to(tmp_path / "away")
    (kit / STATE / "runs/refused/sites/clinic/r" / FILE).unlink()
    (kit / STATE / "runs/refused/sites/clinic/r" / FILE).symlink_to(next((kit / STATE / "runs/secret").rglob(FILE)))
    page = kit_pages.overview(kit)
    assert "linked" not in page
    with pytest.raises(kit_pages.UnknownRunError):
        kit_pages.run_page(kit, "linked")
    assert "There is no record" in kit_pages.run_page(kit, "refused")


def plant(kind: str, path: Path) -> None:
    """Put something that is no plain file in the place of a file."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one, contextlib.chdir(path.parent):  # a socket's path is short
            one.bind(path.name)
    else:
        path.symlink_to("/dev/zero")


def makes_pages(kit: Path) -> bool:
    """Tell whether the overview and the page of a run are made, or refused with a cause, within 10 seconds."""

    def make() -> None:
        kit_pages.overview(kit)
        kit_pages.run_page(kit, "secret")

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(10)
    return not thread.is_alive()


@pytest.mark.parametrize("name", ["clinic", "localhost"])
def test_pipes_hold_up_no_page(name: str, kits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file after the other becomes a pipe."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    kit = Path(shutil.copytree(kits / name, tmp_path / name, symlinks=True))
    for one in ("open", EVIL):
        shutil.rmtree(kit / STATE / "runs" / one)
    files = [one for one in sorted((kit / STATE).rglob("*.[jsy]*")) if not {"adapters", "phantoms", "cases"} & {*one.parts}]
    assert len(files) > 3
    for path in files:
        old = path.read_bytes()
        plant("pipe", path)
        assert makes_pages(kit), path
        path.unlink()
        path.write_bytes(old)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
@pytest.mark.parametrize("place", [".", "runs/open", "runs/secret/sites"])
def test_planted_record_hides_no_run(place: str, kind: str, kit: Path) -> None:
    plant(kind, kit / STATE / place / FILE)
    assert makes_pages(kit)
    assert row(kit_pages.overview(kit), "secret", "4")[5] == "unaltered"


def test_each_record_is_read_once(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Counter[Path]()

    def counted(function: Any) -> Any:
        return lambda path: (read.update([path]), function(path))[1]

    monkeypatch.setattr(audit_log, "load_record", counted(audit_log.load_record))
    monkeypatch.setattr(ledger, "lines", counted(ledger.lines))
    page = kit_pages.overview(kit)
    assert row(page, "secret", "4")[5] == "unaltered"
    assert set(read) >= {*(kit / STATE).rglob(FILE)}
    assert set(read.values()) == {1}


@pytest.mark.parametrize("text", [b"GARBAGE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /\x00 HTTP/1.1\r\n\r\n",
                                  b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 99999 + b"\r\n\r\n"])  # fmt: skip
def test_broken_requests_get_no_details(site: Browser, text: bytes) -> None:
    with socket.create_connection((HOST, site.port), timeout=30) as link:
        link.sendall(text)
        reply = link.recv(65536).decode(errors="replace")
    assert re.match(r"HTTP/1\.[01] 4\d\d ", reply)
    assert [word for word in ("Traceback", "File ", "clinic", "site-packages") if word in reply] == []
    assert site.ask(site.root)[0] == 200


HALF = b"GET / HTTP/1.1\r\nHost: x\r\nX: "
HEAVY = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20_000


def strangers(stack: contextlib.ExitStack, port: int, sent: bytes, count: int) -> list[socket.socket]:
    """Open connections that send what is given as far as the server takes it, and read nothing."""
    links = [stack.enter_context(socket.create_connection((HOST, port), timeout=5)) for _ in range(count)]
    for link in links:
        link.setblocking(False)
        with contextlib.suppress(OSError):
            link.send(sent)
    return links


def is_closed(link: socket.socket) -> bool:
    """Tell whether the server closes a connection within 10 seconds."""
    link.settimeout(10)
    try:
        while link.recv(2**20):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.slow
@pytest.mark.parametrize("sent", [HALF, HEAVY, b""])
def test_connections_of_strangers_do_not_lock_the_person_out(kits: Path, sent: bytes) -> None:
    """The process may have 256 files open."""
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen([*COMMAND, "serve", "--kit", str(kits / "clinic")], stdout=subprocess.PIPE)
        )
        stack.callback(process.kill)
        assert process.stdout
        address = urlsplit(process.stdout.readline().decode().strip())
        psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE, (256, 256))
        browser = Browser(int(address.port or 0), timeout=20)
        links = strangers(stack, browser.port, sent, 400)
        status, headers, _ = browser.ask(f"/?{address.query}")
        assert status == 303
        browser.root, browser.cookie = headers["location"], headers["set-cookie"].partition(";")[0]
        assert "What left" in browser.text()
        assert is_closed(links[0])
        assert len(psutil.Process(process.pid).net_connections()) <= MOST_CONNECTIONS + 100  # a burst may exceed the limit


def test_request_that_drips_is_closed(kits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consilium.cli.serve.WAIT", 0.3)
    with served(kits / "clinic") as browser, socket.create_connection((HOST, browser.port)) as link:
        start = time.monotonic()
        link.settimeout(0.1)
        for byte in HALF + b"y" * 200:
            with contextlib.suppress(TimeoutError):
                link.sendall(bytes([byte]))
                if not link.recv(1):
                    break
        assert 0.15 < time.monotonic() - start < 5


@pytest.mark.slow
def test_page_of_the_person_survives_a_flood(site: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, replies = threading.Event(), list[tuple[int, dict[str, str], bytes]]()
    monkeypatch.setattr(kit_pages, "health_page", lambda kit: str(ends.wait(60)))
    thread = threading.Thread(target=lambda: replies.append(site.ask(f"{site.root}health")))
    thread.start()
    with contextlib.ExitStack() as stack:
        time.sleep(0.5)
        for _ in range(3):
            strangers(stack, site.port, HALF, MOST_CONNECTIONS)
            time.sleep(0.2)
        ends.set()
        thread.join(30)
    assert [reply[::2] for reply in replies] == [(200, b"True")]


@pytest.mark.parametrize(
    "cookies", [f"{{mine}}; {COOKIE}=planted", f"{COOKIE}=planted; {{mine}}", 'a="; {mine}; b="', f"{COOKIE}; {{mine}};;=",
                f"{COOKIE}=x; " * 9 + "{mine}", "{mine}" + "".join(f"; {n}={'x' * 4000}" for n in range(180)),
                "a=é; {mine}", f'{COOKIE}="planted; {{mine}}'],
)  # fmt: skip
def test_planted_cookies_lock_nobody_out(site: Browser, cookies: str) -> None:
    """Another port of this machine may set cookies, which the browser sends here too."""
    assert site.ask(site.root, Cookie=cookies.format(mine=site.cookie))[0] == 200
    refused(site.ask(site.root, Cookie=cookies.format(mine="a=b")), 401)


def test_all_replies_have_the_headers(site: Browser) -> None:
    """Among them replies that aiohttp makes without the application."""
    host, cookie = f"Host: {HOST}:{site.port}", f"Cookie: {site.cookie}"
    requests = {
        f"GET {site.root} HTTP/1.1\r\n{host}\r\n{cookie}": 200,
        f"GET /?token={TOKEN} HTTP/1.1\r\n{host}": 303,
        "GARBAGE": 400,
        "GET / HTTP/9.9": 400,
        f"GET / HTTP/1.1\r\n{host}\r\nX y: z": 400,
        f"GET /{'x' * 99999} HTTP/1.1\r\n{host}": 400,
        f"GET / HTTP/1.1\r\n{host}\r\nX: {'y' * (2**20 + 9)}": 400,
        f"GET / HTTP/1.1\r\n{host}\r\n" + "X: y\r\n" * 999: 400,
        f"GET / HTTP/1.1\r\n{host}\r\nTransfer-Encoding: chunked\r\nContent-Length: 3": 400,
        f"GET / HTTP/1.1\r\n{host}\r\n{host}": 400,
        f"GET {site.root} HTTP/1.1\r\n{host}": 401,
        f"GET {site.root} HTTP/1.1\r\nHost: x": 403,
        f"GET {site.root}none HTTP/1.1\r\n{host}\r\n{cookie}": 404,
        f"POST {site.root} HTTP/1.1\r\n{host}\r\n{cookie}\r\nContent-Length: 9999999": 405,
        f"GET {site.root} HTTP/1.1\r\n{host}\r\n{cookie}\r\nExpect: x": 417,
    }
    for text, status in requests.items():
        with socket.create_connection((HOST, site.port), timeout=30) as link:
            link.sendall(f"{text}\r\n\r\n".encode())
            lines = link.recv(65536).decode(errors="replace").partition("\r\n\r\n")[0].split("\r\n")
        assert (text[:200], lines[0].split()[1]) == (text[:200], str(status))
        assert {f"{name}: {value}" for name, value in HEADERS.items()} <= set(lines), text[:200]


def test_failure_shows_no_path(site: Browser, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(kit: Path) -> str:
        raise OSError(5, "broken", f"{kit}/local/site.yaml")

    monkeypatch.setattr(kit_pages, "overview", fail)
    refused(site.ask(site.root), 500)
    assert "broken" in capfd.readouterr().err


def test_slow_check_holds_up_no_other_page(site: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = threading.Event()
    monkeypatch.setattr(kit_pages, "health_page", lambda kit: str(ends.wait(60)))
    thread = threading.Thread(target=site.ask, args=(f"{site.root}health",))
    thread.start()
    try:
        assert "Jobs" in site.text()
        assert thread.is_alive()
    finally:
        ends.set()
        thread.join(30)


def test_pages_hold_nothing_of_others_and_change_nothing(kits: Path, site: Browser, server: Browser) -> None:
    """Follow every link at a site and at a server."""
    before = hashes(kits)
    for browser in (site, server):
        found = browser.crawl()
        assert len(found) >= 5
        for path, (headers, body) in found.items():
            assert headers["cache-control"] == "no-store", path
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["content-security-policy"].startswith("default-src 'none';")
            assert "script" not in headers["content-security-policy"]
            if not headers["content-type"].startswith("text/html"):
                continue
            text = body.decode()
            page = Page(text)
            names = {tag for tag, _ in page.tags}
            assert names & {"script", "link", "iframe", "object", "embed", "base", "form", "img", "input", "button"} == set()
            assert re.findall(r"https?:|@import|url\((?!#)|src=(?!x)", text) == []
            assert [name for _, attributes in page.tags for name in attributes if name.startswith("on")] == []
            assert [link for link in page.of("a") if re.match(r"[a-z]+:|//", link["href"])] == []
    assert hashes(kits) == before


def hashes(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Return hash, mode and time of every file and folder."""
    paths = [one for one in folder.rglob("*") if not one.is_symlink()]
    return {
        str(one): (
            hashlib.sha256(one.read_bytes()).hexdigest() if one.is_file() else "",
            one.stat().st_mode,
            one.stat().st_mtime_ns,
        )
        for one in paths
    }


def test_archive_is_private_outside_the_kit_and_deleted(
    kits: Path, site: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, make = [], kit_pages.pack

    def watched(kit: Path, name: str, files: Any, path: Path) -> None:
        make(kit, name, files, path)
        seen.append((path.is_relative_to(kit), path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777))
        with open(path, "ab") as file:
            file.write(b"x" * 2**25)  # more than the buffers of a connection hold

    monkeypatch.setattr(kit_pages, "pack", watched)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert site.ask(f"{site.root}evidence/secret")[0] == 200
    with socket.create_connection((HOST, site.port), timeout=60) as link:  # leaves in the middle of the download
        words = f"GET {site.root}evidence/secret HTTP/1.1\r\nHost: {HOST}:{site.port}\r\nCookie: {site.cookie}\r\n\r\n"
        link.sendall(words.encode())
        assert link.recv(100).startswith(b"HTTP/1.1 200")
        assert list(tmp_path.iterdir()) == []  # the open file has no name any more, so nothing is left however the command ends
    assert seen == [(False, 0o700, 0o600)] * 2


# the command -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_command_listens_on_this_machine_only_and_ends(kits: Path, number: int) -> None:
    words = [*COMMAND, "serve", "--kit", str(kits / "clinic")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            address = urlsplit(process.stdout.readline().strip())
            assert address.hostname == "127.0.0.1"
            assert re.fullmatch(r"token=[\w-]{43}", address.query)  # 256 bits
            listening = [one.laddr for one in psutil.Process(process.pid).net_connections() if one.status == psutil.CONN_LISTEN]
            assert listening == [("127.0.0.1", address.port)]
            assert address.query not in " ".join(psutil.Process(process.pid).cmdline())
            assert "Ctrl-C ends it" in process.stdout.readline()
            browser = Browser(int(address.port or 0))
            assert browser.ask(f"/?{address.query}")[0] == 303
            process.send_signal(number)
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert (output, errors) == ("", "")


def test_command_refuses_what_is_no_kit_of_a_site_or_server(
    kits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for kit in (tmp_path, kits / "a@hub.example"):
        assert run(monkeypatch, "serve", "--kit", kit) == 2
        assert "neither a site's nor the server's startup kit" in " ".join(capsys.readouterr().err.split())
    for name in ("client.crt", "rootCA.pem"):
        kit = Path(shutil.copytree(kits / "clinic", tmp_path / name, symlinks=True))
        (kit / "startup" / name).chmod(0o600)
        (kit / "startup" / name).write_bytes(b"")
        assert run(monkeypatch, "serve", "--kit", kit) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"{kit}/startup/{name}: not a certificate; restore the kit, or ask the hub for it"
    with socket.create_server((HOST, 0)) as taken:
        assert run(monkeypatch, "serve", "--kit", kits / "clinic", "--port", taken.getsockname()[1]) == 2
    assert "give another port" in " ".join(capsys.readouterr().err.split())


def test_port_80_is_not_named_by_browsers(kits: Path) -> None:
    assert KitSite(kits / "clinic", TOKEN, 80).hosts == {"127.0.0.1", "127.0.0.1:80", "localhost", "localhost:80"}
    assert KitSite(kits / "clinic", TOKEN, 8080).hosts == {"127.0.0.1:8080", "localhost:8080"}


# browser ---------------------------------------------------------------------------------------------------------------

MEASURED = """[document.documentElement.clientWidth, document.documentElement.scrollWidth,
 document.querySelectorAll("a").length, location.href, document.cookie, document.title]"""
FOCUSED = """(() => { const one = document.activeElement, box = one.getBoundingClientRect();
 return one.tagName === "A" ? [one.href, box.width > 0 && box.right > 0] : null })()"""


@pytest.mark.slow
def test_browser_reads_all_pages_by_keys_without_scripts(site: Browser, server: Browser, tmp_path: Path) -> None:
    async def visit(tab: Tab) -> None:
        for browser, name, paths in ((site, "site", ("", "runs/secret", "health")), (server, "server", ("", "runs/open"))):
            await tab.open(f"http://{HOST}:{browser.port}/?token={TOKEN}")
            for number, path in enumerate(paths):
                await tab.open(urljoin(f"http://{HOST}:{browser.port}{browser.root}", path))
                for width in (400, 1200):
                    await tab.size(width)
                    found = await tab.run(MEASURED)
                    assert found[:2] == [width, width], (path, found)
                    assert TOKEN not in found[3]
                    assert found[4] == ""
                    await tab.picture(tmp_path / f"{name}{number}-{width}.png")
                reached = set()
                for _ in range(200):
                    await tab.press_tab()
                    if (focused := await tab.run(FOCUSED)) is None:
                        continue
                    assert focused[1], "the focus is on something that is not shown"
                    if focused[0] in reached:
                        break
                    reached.add(focused[0])
                links = await tab.run("[...document.links].map(one => one.href)")
                assert set(links) <= reached
        assert {urlsplit(one).netloc for one in tab.requests} == {f"{HOST}:{one.port}" for one in (site, server)}

    browse(tmp_path, visit)
