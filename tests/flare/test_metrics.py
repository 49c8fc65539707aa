"""What monitoring is told of a kit, by hand-made files of a run, a ledger and a record; alert rules speak of nothing else."""

import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
import yaml

from consilium.core.errors import ConfigError
from consilium.federation.run_folders import STATE
from consilium.flare.admin.metrics import HELP, collect
from consilium.flare.kit.provision import provision
from consilium.privacy.ledger.audit import FILE, Record
from consilium.report.exposition import Sample, exposition
from tests.conftest import run

ALERTS = Path(__file__).parents[2] / "provisioning/alerts.yml"
BUDGET = {"dataset": "ward", "budgets": {"site": {"epsilon": 5}}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kits")
    server = {"name": "localhost", "org": "hub", "port": 9, "state": str(folder / "state")}
    people = [{"name": "a@hub.example", "org": "hub", "role": "lead"}]
    sites = [{"name": "clinic", "org": "clinic", "site": {"privacy": BUDGET}}]
    (folder / "sites.yml").write_text(yaml.safe_dump({"name": "t", "server": server, "sites": sites, "admins": people}))
    return provision(folder / "sites.yml", folder)


@pytest.fixture
def site(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "clinic", tmp_path / "clinic", symlinks=True))


@pytest.fixture
def server(made: Path, tmp_path: Path) -> Path:
    """Return a server's kit with a run of which two of three rounds are done; a site's answer was refused once."""
    kit = Path(shutil.copytree(made / "localhost", tmp_path / "server", symlinks=True))
    folder, t = kit / STATE / "runs" / "fundus-1", 1_000_000.0
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text("training: {rounds: 3}\n")
    lines = [{"time": t, "event": "joined", "site": "b", "round": 0}]
    for round in (0, 1):
        place = {"round": round, "phase": 0}
        lines += [
            {"time": t + 10 * round, "event": "started", "sites": ["a", "b"], **place},
            {"time": t + 10 * round + 3, "event": "result", "site": "a", "metrics": {}, **place},
            {"time": t + 10 * round + 4 + round, "event": "concluded", "sites": ["a"], **place},
        ]
    lines.append({"time": t + 20, "event": "refused", "site": "b", "round": 2, "reason": "late"})
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"time": 1, "ev')
    return kit


def numbers(kit: Path) -> dict[str, float]:
    """Return every number by its name and labels, as the text says it."""
    text = exposition(collect(kit), HELP)
    return {name: float(value) for name, value in re.findall(r"^([^#\s].*) (\S+)$", text, re.MULTILINE)}


def test_server_metrics(server: Path) -> None:
    found = numbers(server)
    run = '{run="fundus-1"}'
    assert found[f"consilium_run_round{run}"] == 2
    assert found[f"consilium_run_rounds{run}"] == 3
    assert found[f"consilium_run_finished{run}"] == 0
    assert found[f"consilium_run_round_seconds{run}"] == 5
    assert found[f"consilium_run_last_event_timestamp_seconds{run}"] == 1_000_020
    assert found['consilium_run_refusals_total{run="fundus-1",site="b"}'] == 1
    assert found['consilium_site_last_seen_timestamp_seconds{site="a"}'] == 1_000_013
    assert found['consilium_site_last_seen_timestamp_seconds{site="b"}'] == 1_000_000
    assert found['consilium_certificate_days_left{of="root"}'] == 359
    assert found["consilium_revoked_names"] == 0


def test_old_runs_are_left_out(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time() + 31 * 86400
    monkeypatch.setattr("consilium.flare.admin.metrics.time.time", lambda: now)
    assert not [name for name in numbers(server) if "fundus-1" in name]


def test_site_metrics(site: Path) -> None:
    record = Record(site / STATE / "runs/fundus-1/sites/clinic" / FILE)
    record.add({"kind": "hello"})
    record.add({"kind": "train", "round": 0})
    found = numbers(site)
    assert found['consilium_epsilon_spent{dataset="ward",unit="site"}'] == 0
    assert found['consilium_epsilon_left{dataset="ward",unit="site"}'] == 5
    assert found['consilium_messages_total{run="fundus-1"}'] == 2
    assert found['consilium_record_intact{run="fundus-1"}'] == found["consilium_ledger_intact"] == 1
    record.path.write_text(record.path.read_text().replace("hello", "hallo"))
    (site / STATE / "ledger.sqlite").write_text("no ledger")
    found = numbers(site)
    assert found['consilium_record_intact{run="fundus-1"}'] == found["consilium_ledger_intact"] == 0


def test_labels_are_escaped() -> None:
    """By the format's rules: backslash, line feed and double quote are escaped."""
    assert exposition([Sample("x", float("inf"), {"a": 'C:\\d "q"\nb'})], {"x": "what"}) == (
        "# HELP consilium_x what\n# TYPE consilium_x gauge\n" + r'consilium_x{a="C:\\d \"q\"\nb"} +Inf' + "\n"
    )


def test_collector_file(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = os.umask(0o022)
    assert run(monkeypatch, "metrics", site, "-o", tmp_path / "c.prom") == 0
    os.umask(before)
    assert (tmp_path / "c.prom").stat().st_mode & 0o044
    assert (tmp_path / "c.prom").read_text().endswith("\n")
    assert run(monkeypatch, "metrics", site, "-o", tmp_path / "c.txt") == 2
    assert "name it so" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no startup kit"):
        collect(tmp_path)


def test_alerts_use_written_metrics(server: Path, site: Path) -> None:
    Record(site / STATE / "runs/r/sites/clinic" / FILE).add({"kind": "hello"})
    written = {name.partition("{")[0] for kit in (server, site) for name in numbers(kit)}
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    spoken = {name for rule in group["rules"] for name in re.findall(r"consilium_\w+", rule["expr"])}
    assert spoken <= written
    assert written == {f"consilium_{name}" for name in HELP}
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) == 9
