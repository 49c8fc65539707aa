"""Sites that come and go, and networks as hospitals have them: slow and broken lines, a proxy that lets one port out."""

import json
import os
import shutil
from pathlib import Path

import psutil
import pytest
import torch
from typer.testing import CliRunner

from consilium import __version__
from consilium.cli.main import app
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.messages import BYTES_DOWN, BYTES_UP, PROTOCOL
from consilium.core.storage import load_state
from consilium.federation.job_assembly import assemble_job
from consilium.runtime.engine import simulate
from tests.conftest import small_config
from tests.deployment.federation import ADMIN, ROOT, Federation
from tests.deployment.network import Relay
from tests.deployment.relayed import RELAY, provision_relayed

SLOW = {"delay": 0.2, "rate": 250_000.0}
"""Seconds one way, and 2 Mbit/s."""


def job(rounds: int, grace: float) -> JobConfig:
    raw = small_config("fedit", rounds=rounds).model_dump()
    raw["federation"] |= {"straggler_grace_seconds": grace}
    return JobConfig.model_validate(raw)


def here(federation: Federation) -> dict[str, dict]:
    found = CliRunner().invoke(app, ["sites", "--kit", str(federation.kit(ADMIN)), "--format", "json"])
    assert found.exit_code == 0, (found.output, found.exception)
    return {row["site"]: row for row in json.loads(found.stdout)["sites"]}


def trained(federation: Federation) -> list[str]:
    """Return the sites of the last concluded round; none while a line is being written."""
    return next((event["sites"] for event in reversed(federation.events("concluded"))), [])


def mine(federation: Federation, kind: str) -> list[dict]:
    """Return what the server recorded of site-2."""
    return [event for event in federation.events(kind) if event["site"] == "site-2"]


@pytest.mark.long
def test_broken_lines_and_late_sites_change_no_bit(tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    simulate(assemble_job(job(3, 60.0)), {n: SiteConfig() for n in ("site-1", "site-2")}, reference, lambda event: None)
    with (
        Federation(tmp_path / "kits", {"site-1": {}, "site-2": {}}) as federation,
        Relay(federation.port, **SLOW) as line,
        Relay(None, login="ward 3:p@ss:word") as proxy,
    ):
        federation.reroute("site-2", line.port)
        federation.start()
        first = federation.submit(federation.export(job(3, 60.0)))
        federation.until(lambda: federation.concluded() >= 1, 120, "round 1")
        line.stall(4)
        federation.until(lambda: federation.concluded() >= 2, 120, "round 2, after a stall")
        line.reset()
        assert federation.wait(first) == "FINISHED:COMPLETED"
        ours, theirs = (load_state(f / "server/state.safetensors")[0] for f in (federation.server_files(), reference))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
        assert [e["sites"] for e in federation.events("concluded")] == [["site-1", "site-2"]] * 3
        counted = {way: sum(e["metrics"][way] for e in mine(federation, "result")) for way in (BYTES_UP, BYTES_DOWN)}
        assert counted[BYTES_UP] < line.up  # with certificates, heartbeats, hello and the final scores
        assert counted[BYTES_DOWN] < line.down
        line.delay = line.rate = 0.0

        second = federation.submit(federation.export(job(500, 2.0)))
        federation.until(lambda: federation.concluded() >= 1, 90, "round 1")
        federation.add("site-3")
        way = f"http://ward%203:p%40ss%3Aword@127.0.0.1:{proxy.port}"
        federation.variables["site-3"] = {"https_proxy": way, "no_proxy": "127.0.0.1"}
        federation.start("site-3")
        federation.until(lambda: "site-3" in trained(federation), 60, "site-3 to train in the job that runs")
        assert proxy.asked
        assert set(proxy.asked) == {f"CONNECT localhost:{federation.port}"}
        federation.kill("site-2")
        federation.until(lambda: trained(federation) == ["site-1", "site-3"], 60, "a round without site-2")
        federation.start("site-2")
        federation.until(lambda: "site-2" in trained(federation), 120, "site-2 to be back in the job that runs")
        rows = here(federation)
        assert rows.keys() == {"site-1", "site-2", "site-3"}
        assert all(row["jobs"] == [second] and row["state"] == "here" and not row["notes"] for row in rows.values())
        assert all(abs(row["clock_ahead_seconds"]) < 5 and row["certificate_days_left"] > 300 for row in rows.values())
        federation.shutdown()


def release(folder: Path, version: str, protocol: int = PROTOCOL) -> dict[str, str]:
    """Return the environment of a participant that has another release of the package, made under `folder`."""
    package = Path(
        shutil.copytree(ROOT / "custom/consilium", folder / "consilium", ignore=shutil.ignore_patterns("__pycache__"))
    )
    for name, old, new in (
        ("__init__.py", f'"{__version__}"', f'"{version}"'),
        ("core/messages.py", f"PROTOCOL = {PROTOCOL}\n", f"PROTOCOL = {protocol}\n"),
    ):
        text = (package / name).read_text()
        assert old in text
        (package / name).write_text(text.replace(old, new))
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


@pytest.mark.long
def test_patch_releases_mix_and_protocols_do_not(tmp_path: Path) -> None:
    minor = __version__.rpartition(".")[0]
    with Federation(tmp_path / "kits", {"site-1": {}, "site-2": {}, "site-3": {}}) as federation:
        federation.variables |= {
            "server": release(tmp_path / "a", f"{minor}.7"),  # site-1 has this checkout's, which is older
            "site-2": release(tmp_path / "b", f"{minor}.9"),
            "site-3": release(tmp_path / "c", f"{minor}.9", PROTOCOL + 1),
        }
        federation.start()
        assert federation.wait(federation.submit(federation.export(job(2, 5.0)))) == "FINISHED:COMPLETED"
        assert [e["sites"] for e in federation.events("concluded")] == [["site-1", "site-2"]] * 2
        (refused,) = {e["reason"] for e in federation.events("refused")}
        assert f"speaks protocol {PROTOCOL + 1} (consilium {minor}.9), the server {PROTOCOL} ({minor}.7)" in refused
        rows = here(federation)
        assert [rows[name]["version"] for name in federation.sites] == [__version__, f"{minor}.9", f"{minor}.9"]
        assert [bool(rows[name]["notes"]) for name in federation.sites] == [False, False, True]
        federation.shutdown()


@pytest.mark.long
def test_dead_connection_is_found(tmp_path: Path) -> None:
    """As by a router whose table was full: no end is told. Without keep-alives a site was not back after five minutes."""
    raw = job(1000, 1.0).model_dump()
    raw["federation"]["min_sites"] = 1
    with Federation(tmp_path, {"site-1": {}, "site-2": {}}) as federation, Relay(federation.port) as line:
        federation.reroute("site-2", line.port)
        federation.start()
        federation.submit(federation.export(JobConfig.model_validate(raw)))
        federation.until(lambda: len(mine(federation, "result")) >= 2, 120, "two rounds of site-2")
        before = line.connections
        line.forget()
        federation.until(lambda: trained(federation) == ["site-1"], 60, "a round without site-2")
        federation.until(lambda: "site-2" in trained(federation), 200, "site-2 to be back")
        assert line.connections > before
        federation.shutdown()


@pytest.mark.long
def test_relayed_sites_use_the_relay_only(tmp_path: Path) -> None:
    with Federation(tmp_path, {"site-1": {}, "site-2": {}, "site-3": {}}, make=provision_relayed) as federation:
        federation.start("server", RELAY, wait=0)
        federation.start("site-1", "site-2", "site-3")
        submitted = federation.submit(federation.export(job(200, 5.0)))
        federation.until(lambda: federation.concluded() >= 1, 120, "round 1")
        assert trained(federation) == ["site-1", "site-2", "site-3"]
        lines = {name: connected(federation, name) for name in (*federation.sites, RELAY)}
        assert lines == {
            "site-1": 2,
            "site-2": 0,
            "site-3": 0,
            RELAY: 1,
        }  # FLARE's process and the job's; the relay for two sites
        federation.abort(submitted)
        federation.shutdown()


def connected(federation: Federation, name: str) -> int:
    """Return how many connections a participant's processes have to the server's port."""
    links = [link for pid in federation.processes(name) for link in psutil.Process(pid).net_connections()]
    return sum(1 for link in links if link.raddr and link.raddr.port == federation.port)
