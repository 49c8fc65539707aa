"""What monitoring is told of a kit, by hand-made files of a run, a ledger and a record; alert rules speak of nothing else."""

import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from consilium.core.errors import ConfigError
from consilium.core.storage import file_lock
from consilium.federation.run_folders import STATE
from consilium.flare.admin.kit_metrics import HELP, collect_metrics
from consilium.flare.kit import connection_refusals
from consilium.flare.kit.heartbeat_client import own_facts
from consilium.flare.kit.provision import provision
from consilium.privacy.accounting import Entry
from consilium.privacy.audit_log import FILE, AuditLog
from consilium.privacy.ledger import Ledger
from consilium.report.prometheus_text import Sample, exposition_text
from consilium.report.run_files import LOCK, RunLog, has_process
from tests.conftest import run, small_config

ALERTS = Path(__file__).parents[2] / "provisioning/alerts.yml"
PROMTOOL = shutil.which("promtool")
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
def server(made: Path, tmp_path: Path) -> Iterator[Path]:
    """Return a server's kit with a running run of which two of three rounds are done; a site's answer was refused once."""
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
    lines.append({"time": "damaged", "event": "refused", "site": "b", "round": 2, "reason": "late"})
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"time": 1, "ev')
    with file_lock(folder / LOCK):  # as the run's process holds it
        yield kit


def crash(kit: Path) -> None:
    """Let the run's lock go, as the end of its process does."""
    (kit / STATE / "runs/fundus-1" / LOCK).unlink()


def numbers(kit: Path) -> dict[str, float]:
    """Return every number by its name and labels, as the text says it."""
    text = exposition_text(collect_metrics(kit), HELP)
    return {name: float(value) for name, value in re.findall(r"^([^#\s].*) (\S+)$", text, re.MULTILINE)}


def test_server_metrics(server: Path) -> None:
    found = numbers(server)
    run = '{run="fundus-1"}'
    assert found[f"consilium_run_round{run}"] == 2
    assert found[f"consilium_run_rounds{run}"] == 3
    assert states(found) == {"running": 1}
    assert "consilium_run_end_timestamp_seconds" not in str(found)
    assert found[f"consilium_run_round_seconds{run}"] == 5
    assert found[f"consilium_run_last_event_timestamp_seconds{run}"] == 1_000_020
    assert found['consilium_run_refusals_total{run="fundus-1",site="b"}'] == 1
    assert found['consilium_run_site_last_seen_timestamp_seconds{run="fundus-1",site="a"}'] == 1_000_013
    assert found['consilium_certificate_days_left{of="root"}'] == 359


def test_a_servers_runs_are_in_its_kit_whatever_site_yaml_says(server: Path, tmp_path: Path) -> None:
    """`state` is a site's. The server always writes into its kit."""
    (server / "local/site.yaml").write_text(f"state: {tmp_path / 'elsewhere'}\n")
    assert numbers(server)['consilium_run_round{run="fundus-1"}'] == 2


def states(found: dict[str, float]) -> dict[str, float]:
    """Return the states of the one run."""
    return {re.findall('state="(\\w+)"', name)[0]: value for name, value in found.items() if "run_state" in name}


def stop(kit: Path, reason: str, when: float) -> Path:
    """Have the run's record say that it was stopped; return the run's folder."""
    folder = kit / STATE / "runs" / "fundus-1"
    line = {"event": "stopped", "reason": reason, "time": when}
    (folder / "metrics.jsonl").write_text(
        "\n".join([*(folder / "metrics.jsonl").read_text().splitlines()[:-1], json.dumps(line), ""])
    )
    return folder


def test_a_run_that_was_stopped_says_when_and_why_until_it_is_resumed(server: Path) -> None:
    folder = stop(server, "3 sites refused: budget", 1_000_030.0)
    found = numbers(server)
    assert states(found) == {"stopped": 1}
    assert found['consilium_run_end_timestamp_seconds{run="fundus-1"}'] == 1_000_030
    assert found['consilium_run_stopped{run="fundus-1",cause="3 sites refused: budget"}'] == 1
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"event": "resumed", "round": 2, "phase": 0, "time": 1_000_040.0}) + "\n")
    assert states(numbers(server)) == {"running": 1}
    (folder / "results.json").write_text("{}")
    found = numbers(server)
    assert states(found) == {"completed": 1}
    assert not [name for name in found if "run_stopped" in name]


def test_a_run_whose_process_has_ended_without_a_result_is_lost(server: Path) -> None:
    assert states(numbers(server)) == {"running": 1}
    crash(server)
    assert states(numbers(server)) == {"lost": 1}
    with file_lock(server / STATE / "runs/fundus-1" / LOCK):
        assert states(numbers(server)) == {"running": 1}
    stop(server, "no room", 1_000_030.0)
    assert states(numbers(server)) == {"stopped": 1}


@pytest.mark.parametrize("kept", [True, False])
def test_a_look_at_a_runs_lock_changes_no_file(kept: bool, server: Path) -> None:
    crash(server)
    folder = server / STATE / "runs/fundus-1"
    lock = folder / LOCK
    lock.unlink(missing_ok=True)
    if kept:
        lock.touch()
        os.utime(lock, (1, 1))
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert not has_process(folder)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_run_is_resumed_while_its_metrics_are_written(server: Path) -> None:
    """The look takes the run's lock for an instant, and no resume may fail by it."""
    crash(server)
    path = server / STATE / "runs/fundus-1"
    look = file_lock(path / LOCK)
    look.acquire()
    threading.Timer(0.3, look.release).start()
    RunLog(path, small_config("fedit"), resume=True).close()


def attend(kit: Path, **sites: dict[str, Any]) -> None:
    """Write the server's list of sites."""
    rows = {name: {"last_seen": 1_000_000.0, "here": True, "jobs": []} | facts for name, facts in sites.items()}
    (kit / STATE / "attendance.json").write_text(json.dumps({"server": own_facts(), "sites": rows}))


HEALTH = {"disk_free": 7 * 10**9, "memory_free": 4096, "memory": 8192, "gpus": [[100, 200]], "data_readable": True}
HEALTH |= {"data_checked": 1_000_001.0, "refusal": "budget", "refused_at": 1_000_002.0}


def test_what_sites_say_of_themselves_becomes_metrics_of_the_server(server: Path) -> None:
    said = {"health": HEALTH, "skew": -3.5, "certificate_ends": 2_000_000.0, "version": "0.3.1"}
    attend(server, a=said, b={"cause": "ended", "here": False})
    found = {name: value for name, value in numbers(server).items() if "_site_" in name and 'site="a"' in name}
    seen = {name: found.pop(name) for name in list(found) if "last_seen" in name}
    assert seen.keys() == {'consilium_run_site_last_seen_timestamp_seconds{run="fundus-1",site="a"}'}
    assert found == {
        'consilium_site_last_heartbeat_timestamp_seconds{site="a"}': 1_000_000,
        'consilium_site_info{site="a",version="0.3.1"}': 1,
        'consilium_site_clock_ahead_seconds{site="a"}': -3.5,
        'consilium_site_certificate_end_timestamp_seconds{site="a"}': 2_000_000,
        'consilium_site_disk_free_bytes{site="a"}': 7 * 10**9,
        'consilium_site_memory_free_bytes{site="a"}': 4096,
        'consilium_site_gpu_memory_free_bytes{site="a",gpu="0"}': 100,
        'consilium_site_data_readable{site="a"}': 1,
        'consilium_site_data_checked_timestamp_seconds{site="a"}': 1_000_001,
        'consilium_site_last_refusal_timestamp_seconds{site="a",code="budget"}': 1_000_002,
    }
    others = {name for name in numbers(server) if 'site="b"' in name and "heartbeat" not in name and "last_seen" not in name}
    assert others == {'consilium_refused{site="b",cause="ended"}', 'consilium_run_refusals_total{run="fundus-1",site="b"}'}


def test_old_runs_are_left_out(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time() + 31 * 86400
    monkeypatch.setattr("consilium.flare.admin.kit_metrics.time.time", lambda: now)
    assert not [name for name in numbers(server) if "fundus-1" in name]


def test_site_metrics(site: Path) -> None:
    record = AuditLog(site / STATE / "runs/fundus-1/sites/clinic" / FILE)
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


def test_every_data_set_has_its_budget_before_its_first_release(site: Path) -> None:
    """Those without a release were missing as soon as another had one."""
    sets = {"a": {"datalist": "a.json"}, "b": {"datalist": "b.json"}, "c": {"datalist": "c.json", "patients": "ward"}}
    for name in "abc":
        (site / "local" / f"{name}.json").write_text("{}")
    policy = {"datasets": sets, "privacy": {"budgets": {"site": {"epsilon": 5}}}}
    (site / "local/site.yaml").write_text(yaml.safe_dump(policy))
    for round in (0, 1):
        row = Entry("a", "site", "zero-out", "local", "job", "run-1", round, 0, 20.0, 1.0, 1, 0.3)
        Ledger(site / STATE / "ledger.sqlite").charge_once(row, {})
    left = {name: value for name, value in numbers(site).items() if "epsilon_left" in name}
    assert left == {
        'consilium_epsilon_left{dataset="a",unit="site"}': pytest.approx(5 - 0.2335, abs=1e-4),
        'consilium_epsilon_left{dataset="b",unit="site"}': 5,
        'consilium_epsilon_left{dataset="ward",unit="site"}': 5,
    }


def test_labels_are_escaped() -> None:
    """By the format's rules: backslash, line feed and double quote are escaped."""
    assert exposition_text([Sample("x", float("inf"), {"a": 'C:\\d "q"\nb'})], {"x": "what"}) == (
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
        collect_metrics(tmp_path)


@pytest.mark.parametrize(("file", "role"), [("fed_admin.json", "person"), ("fed_relay.json", "relay")])
def test_other_kits_have_no_metrics(file: str, role: str, site: Path, tmp_path: Path) -> None:
    """They were reported as sites with an intact ledger."""
    kit = Path(shutil.copytree(site, tmp_path / "kit", symlinks=True))
    (kit / "startup" / file).write_text("{}")
    with pytest.raises(ConfigError, match=f"is the kit of a {role}, which has no metrics"):
        collect_metrics(kit)


DAY = 86400.0
ON = re.compile(r"\((.+?)\) and on \((.+?)\) \((.+)\)$")
INCREASE = re.compile(r"increase\((\w+)\[1h\]\)")


def firing(
    rule: str, kits: list[Path], now: float, before: dict[str, float] | None = None, yesterday: frozenset[str] = frozenset()
) -> set[str]:
    """Return the series, as text, for which an alert's expression holds now; those without labels as "".

    The part of Prometheus' language that the rules use: `and on (labels) (...)`, `or`, `unless`, a comparison of numbers,
    time() and increase over an hour. `before`: the numbers an hour ago. `yesterday`: the labels of a series with `offset 1d`.
    """
    if " or " in rule:
        return set().union(*(firing(one, kits, now, before, yesterday) for one in rule.split(" or ")))
    if " unless " in rule:
        rule, _, right = rule.partition(" unless ")
        if right.endswith(" offset 1d"):
            return firing(rule, kits, now, before) - yesterday
        (names, right), *_ = re.findall(r"on \((.+?)\) \((.+)\)$", right)
        wanted = [label.strip() for label in names.split(",")]
        left_out = {key(one, wanted) for one in firing(right, kits, now, before)}
        return {one for one in firing(rule, kits, now, before) if key(one, wanted) not in left_out}
    if joined := ON.fullmatch(rule):
        left, labels, right = joined.groups()
        wanted = [label.strip() for label in labels.split(",")]
        keys = {key(one, wanted) for one in firing(right, kits, now, before)}
        return {one for one in firing(left, kits, now, before) if key(one, wanted) in keys}
    found = {name: value for kit in kits for name, value in numbers(kit).items()}
    said = {selector: value for selector, value in re.findall(r"(consilium_\w+)(\{[^}]*\})?", rule)}
    (main, only), *_ = said.items()
    named = re.compile(re.escape(main) + r"(\{.*\})?")
    rule = rule.replace(only, "") if only else rule
    labels = {one.removeprefix(main) for one in found if named.fullmatch(one) and selected(one, only)}
    return {one for one in labels if holds(rule, {name: found.get(name + one, 0.0) for name in said}, one, now, before or {})}


def selected(series: str, selector: str) -> bool:
    """Return whether a series fits a selector with at most one matcher, such as {cause!~"a|b.*"}."""
    if not selector:
        return True
    ((name, sign, wanted),) = re.findall(r'(\w+)(=~|!~|=)"([^"]*)"', selector)
    (value,) = key(series, [name])
    return (value == wanted) if sign == "=" else bool(re.fullmatch(wanted, value)) == (sign == "=~")


def holds(rule: str, values: dict[str, float], labels: str, now: float, before: dict[str, float]) -> bool:
    """Return whether a comparison holds of the numbers of one series' labels."""
    text = INCREASE.sub(lambda found: str(values[found[1]] - before.get(found[1] + labels, 0.0)), rule)
    text = re.sub(r"consilium_\w+", lambda found: repr(values[found[0]]), text).replace("time()", repr(now))
    return bool(eval(text, {"__builtins__": {}}))


def key(labels: str, wanted: list[str]) -> tuple[str, ...]:
    return tuple("".join(re.findall(f'{name}="([^"]*)"', labels)) for name in wanted)


def alert_rules() -> dict[str, str]:
    """Return each alert's expression by its name."""
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"])
    return {rule["alert"].removeprefix("Consilium"): rule["expr"] for rule in group["rules"]}


@pytest.fixture
def alerts() -> dict[str, str]:
    return alert_rules()


def test_alerts_on_recorded_metrics(server: Path, site: Path, alerts: dict[str, str]) -> None:
    """The times of the records are by hand; a day after its end nothing fires of a run any more."""
    run = '{run="fundus-1"}'
    t = 1_000_020.0
    assert firing(alerts["RunStands"], [server], t + 7199) == set()
    assert firing(alerts["RunStands"], [server], t + 7201) == {run}
    assert firing(alerts["RunStopped"], [server], t) == set()
    assert firing(alerts["RunStands"], [server], t + 29 * DAY) == {run}  # a process that hangs does so until it is ended
    assert firing(alerts["RunLost"], [server], t) == set()
    assert firing(alerts["SiteSilent"], [server], t + DAY - 10) == {'{run="fundus-1",site="b"}'}
    attend(server, b={"cause": "revoked", "here": False})
    assert firing(alerts["SiteSilent"], [server], t + DAY - 10) == set()
    crash(server)
    assert firing(alerts["RunStands"], [server], t + 7201) == set()
    assert firing(alerts["RunLost"], [server], t + DAY - 1) == {run}
    assert firing(alerts["RunLost"], [server], t + DAY + 1) == set()
    stop(server, "no room", t)
    assert firing(alerts["RunLost"], [server], t) == set()
    assert firing(alerts["RunStands"], [server], t + 30 * DAY) == set()  # no false alarm for a run that has ended
    assert firing(alerts["RunStopped"], [server], t + DAY - 1) == {'{run="fundus-1",cause="no room"}'}
    assert firing(alerts["RunStopped"], [server], t + DAY + 1) == set()
    for days in (0, 2, 10, 25):
        assert firing(alerts["SiteSilent"], [server], t + days * DAY) == set()  # no run goes on
    stop(server, "aborted by lead@hub.example in round 3", t)
    assert firing(alerts["RunStopped"], [server], t) == set()
    assert firing(alerts["Refusals"], [server], t) == set()
    assert firing(alerts["CertificateEnds"], [server], t) == set()
    assert firing(alerts["LedgerBroken"], [site], t) == set()
    assert firing(alerts["MetricsOld"], [site], time.time() + 3700) == {""}
    assert firing(alerts["BudgetLow"], [site], t) == set()
    (site / STATE).mkdir(exist_ok=True)
    (site / STATE / "ledger.sqlite").write_text("no ledger")
    assert firing(alerts["LedgerBroken"], [site], t) == {""}


def test_each_alert_fires_at_its_bound_and_not_before(
    server: Path, site: Path, alerts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules of certificates, disks, refused and unwell sites, budgets and refused answers, on both sides of their bounds."""
    fired = set[str]()

    def check(alert: str, kit: Path, *expected: str, **more: Any) -> None:
        assert firing(alerts[alert], [kit], 1_000_020.0, **more) == set(expected)
        fired.add(alert) if expected else None

    for days, ends, soon in ((60, False, False), (59, True, False), (14, True, False), (13, True, True), (-1, True, True)):
        monkeypatch.setattr("consilium.flare.admin.kit_metrics.days_left", lambda found, days=days: days)
        both = ('{of="participant"}', '{of="root"}')
        check("CertificateEnds", site, *(both if ends else ()))
        check("CertificateEndsSoon", site, *(both if soon else ()))
    for free, full in ((5 * 10**9, False), (5 * 10**9 - 1, True)):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr("consilium.flare.admin.kit_metrics.shutil", SimpleNamespace(disk_usage=lambda _, u=usage: u))
        check("DiskFull", site, *([""] if full else []))
        attend(server, a={"health": HEALTH | {"disk_free": free}})
        check("SiteUnwell", server, *(['{site="a"}'] if full else []))
    attend(server, a={"health": HEALTH | {"data_readable": False}}, b={})
    check("SiteUnwell", server, '{site="a"}')
    attend(server, a={"health": HEALTH | {"data_readable": False}, "here": False})
    check("SiteUnwell", server)  # what it said last is no news once it is gone
    check("SiteRefused", server)
    attend(server, b={"cause": "revoked", "here": False})
    check("SiteRefused", server, '{site="b",cause="revoked"}')
    check("SiteRefused", server, yesterday=frozenset({'{site="b",cause="revoked"}'}))  # it has left
    attend(server, b={"cause": "ended", "here": False})
    check("SiteRefused", server, '{site="b",cause="ended"}', yesterday=frozenset({'{site="b",cause="revoked"}'}))
    for spent, low in ((4.5, False), (4.6, True)):
        monkeypatch.setattr("consilium.flare.admin.kit_metrics.epsilon_for", lambda *_, spent=spent: spent)
        check("BudgetLow", site, *(['{dataset="ward",unit="site"}'] if low else []))
    path = server / STATE / "runs" / "fundus-1" / "metrics.jsonl"
    line, first = json.dumps({"event": "refused", "site": "b", "round": 2, "reason": "late", "time": 1.0}), path.read_text()
    before = {'consilium_run_refusals_total{run="fundus-1",site="b"}': 1.0}  # an hour ago
    for more, many in ((3, False), (4, True)):
        path.write_text("\n".join([line] * more) + "\n" + first)
        check("Refusals", server, *(['{run="fundus-1",site="b"}'] if many else []), before=before)
    assert fired | {"RunStands", "RunLost", "RunStopped", "SiteSilent", "LedgerBroken", "MetricsOld"} == alerts.keys()


def test_alerts_use_written_metrics(server: Path, site: Path, alerts: dict[str, str]) -> None:
    AuditLog(site / STATE / "runs/r/sites/clinic" / FILE).add({"kind": "hello"})
    stop(server, "no room", 1_000_030.0)
    connection_refusals.note_cause(site, connection_refusals.Cause.REVOKED)
    attend(server, a={"health": HEALTH, "skew": 0.0, "certificate_ends": 2_000_000.0, "version": "0.3.0"})
    assert numbers(site)['consilium_refused{site="clinic",cause="revoked"}'] == 1
    written = {name.partition("{")[0] for kit in (server, site) for name in numbers(kit)}
    spoken = {name for rule in alerts.values() for name in re.findall(r"consilium_\w+", rule)}
    assert spoken <= written
    assert written == {f"consilium_{name}" for name in HELP}
    labels = {name: set(re.findall(r'(\w+)="', name)) for kit in (server, site) for name in numbers(kit)}
    for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]:  # texts name labels that the alert has
        (metric, *_) = re.findall(r"consilium_\w+", rule["expr"])
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert any(name.partition("{")[0] == metric and named <= found for name, found in labels.items())


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of Debian's package prometheus")
def test_promtool_reads_the_rules() -> None:
    done = subprocess.run([str(PROMTOOL), "check", "rules", ALERTS], capture_output=True, text=True, check=False)
    assert (done.returncode, "SUCCESS" in done.stdout) == (0, True), done.stdout + done.stderr
