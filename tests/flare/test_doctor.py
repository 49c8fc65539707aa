"""What the doctor says of a startup kit: a good one is well, and every way to weaken it is seen."""

import errno
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import yaml

from consilium.cli import site_checks as cli_doctor
from consilium.client import machine_check
from consilium.client.finding import Finding
from consilium.core.errors import Reason, UnreachableError
from consilium.federation.run_folders import ATTENDANCE, STATE
from consilium.flare.kit import certificates, connection_refusals, doctor
from consilium.flare.kit.connection_refusals import Cause
from consilium.flare.kit.doctor import examine
from consilium.flare.kit.heartbeat_client import note_connection_refusal, own_facts
from consilium.flare.kit.local_folder import update_local
from consilium.flare.kit.provision import provision
from consilium.privacy.audit_log import AuditLog
from tests.conftest import run
from tests.deployment.federation import free_port
from tests.deployment.relayed import RELAY, provision_relayed
from tests.privacy.test_ledger import RECORD, old_ledger


@pytest.fixture
def server(made: Path) -> Iterator[None]:
    """Answer one TLS connection as the server of the kits would."""
    startup = made / "localhost" / "startup"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(startup / "server.crt", startup / "server.key")
    context.load_verify_locations(startup / "rootCA.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    port = int(json.loads((startup / "fed_server.json").read_text())["servers"][0]["service"]["target"].rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)) as listener:

        def answer() -> None:
            with suppress(ssl.SSLError):  # a client may hang up on us
                context.wrap_socket(listener.accept()[0], server_side=True).close()
            listener.close()  # a later connection is refused at once

        thread = threading.Thread(target=answer)
        thread.start()
        yield
        thread.join(10)


def problems(kit: Path) -> dict[str, str]:
    return {f.check: f.line() for f in examine(kit) if not f.ok}


def change(name: str, edit: Callable[[Any], None]) -> Callable[[Path], None]:
    def apply(kit: Path) -> None:
        path = kit / "local" / name
        values = json.loads(path.read_text())
        edit(values)
        path.write_text(json.dumps(values))

    return apply


def listing(entry: str) -> Callable[[Path], None]:
    """Add one entry to the allow-list."""
    return change("resources.json", lambda r: r["class_allow_list"].append(entry))


def unsafe_start(kit: Path) -> None:
    """Make the start script FLARE's own."""
    path = kit / "startup/sub_start.sh"
    path.write_text(path.read_text().replace('cd "$WORKSPACE/.empty"', "true"))


def test_a_new_kit_is_well_for_jobs_with_generated_data(kit: Path, server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_refusals, "PATIENCE", 0.5)  # for an admission, which this server cannot give
    found = {f.check: f for f in examine(kit)}
    assert [f.line() for f in found.values() if not f.ok] == []
    assert found["data list"].line() == (
        "warning  data list: none in site.yaml: only jobs with generated data run; set `datalist:` for others"
    )
    assert found["server"].found.endswith("answers, and is of this project")
    assert found["signature"].found == "startup/ is as it was made"


def test_a_path_that_breaks_jobs_is_a_problem(kit: Path) -> None:
    moved = kit.rename(kit.with_name("my kit"))
    assert "quotes" in problems(moved)["path"]


def test_a_kit_that_every_user_may_change_is_a_problem_and_its_remedy_mends_it(kit: Path) -> None:
    assert "mode" not in problems(kit)
    (kit / "local" / "site.yaml").chmod(0o666)
    line = problems(kit)["mode"]
    assert f"{kit / 'local' / 'site.yaml'}: every user of this machine can change it; chmod -R go-w {kit}" in line
    subprocess.run(line.split("; ")[1].split(",")[0].split(), check=True)
    assert "mode" not in problems(kit)


@pytest.mark.parametrize(
    ("time_of", "shown"),
    [(lambda now: now, True), (lambda now: now - 4 * 86400, False)]
    + [(lambda now, odd=odd: odd, False) for odd in ("soon", None, [], 10**400, float("nan"))],
)
def test_the_last_refusal_of_the_last_days_is_shown(
    time_of: Callable[[float], Any], shown: bool, kit: Path, tmp_path: Path
) -> None:
    """An edited record, with a time that is none, does not stop the other checks."""
    (kit / "local" / "site.yaml").write_text(f"state: {tmp_path / 'state'}\n")
    entry = {"kind": "refusal", "reason": Reason.LEDGER, "time": time_of(time.time())}
    AuditLog(tmp_path / "state/runs/ward-3/audit.jsonl").add(entry)
    lines = [f.line() for f in examine(kit) if f.check == "last refusal"]
    assert [": ledger: the site's privacy ledger or record cannot be used" in line for line in lines] == [True] * shown


def test_a_state_that_cannot_be_written_is_a_problem(kit: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    (kit / "local" / "site.yaml").write_text(f"state: {state}\n")
    assert "state" not in problems(kit)  # it is made with the first job
    state.write_text("")
    assert f"{state}: `state` in site.yaml needs a folder, and this is a file; name a folder" in problems(kit)["state"]
    state.unlink()
    state.mkdir()
    with patch("consilium.flare.kit.doctor.TemporaryFile", side_effect=PermissionError(13, "Permission denied")):
        assert f"{state}: cannot be written (Permission denied)" in problems(kit)["state"]


@pytest.mark.parametrize(
    ("where", "check"),
    [
        ("consilium.flare.kit.doctor.check_no_lost_rows", "privacy ledger"),
        ("consilium.client.machine_check.read_site_list", "data list"),
        ("pathlib.Path.iterdir", "checkpoints"),
        ("consilium.flare.kit.doctor.examine_disk", "disk"),
    ],
)
def test_a_path_that_this_user_cannot_reach_is_one_problem_among_the_others(
    where: str, check: str, kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor ended at the first such path."""
    (kit / "local/site.yaml").write_text("datalist: /srv/private/x\ncheckpoints: /srv/private/x\n")
    monkeypatch.setattr(doctor, "CHECKS", ())
    monkeypatch.setattr(where, Mock(side_effect=PermissionError(errno.EACCES, "Permission denied", "/srv/private/x")))
    found = {one.check: one for one in examine(kit)}
    assert found[check].line().startswith(f"PROBLEM  {check}: /srv/private/x: Permission denied; ")
    assert {"site.yaml", "device", "server"} <= found.keys()


def test_other_server_is_a_problem(kit: Path, made: Path, tmp_path: Path, server: None) -> None:
    stranger = provision(made.parents[1] / "sites.yml", tmp_path / "other")
    shutil.copy(stranger / "clinic/startup/rootCA.pem", kit / "startup/rootCA.pem")
    found = problems(kit)
    assert "CERTIFICATE_VERIFY_FAILED" in found["server"]
    assert f": {Cause.PROJECT}: " in found["server"]
    assert "was altered" in found["signature"]


@pytest.mark.parametrize("name", ["clinic", "a@hub.example"])
def test_a_kit_of_another_project_is_named_as_the_cause(name: str, made: Path, tmp_path: Path, server: None) -> None:
    """Both kits are whole, with the same names and the same address: only the roots differ."""
    found = problems(provision(made.parents[1] / "sites.yml", tmp_path / "other") / name)
    assert found.keys() == {"server"}
    assert ": wrong project: no root of this kit has signed its certificate" in found["server"]
    assert "ask the hub for this project's kit" in found["server"]


def test_running_site_notes_another_project(
    made: Path, tmp_path: Path, server: None, kit: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """TLS fails, so the server sends no cause, and FLARE's log has none."""
    other = provision(made.parents[1] / "sites.yml", tmp_path / "other") / "clinic"
    note_connection_refusal(other)
    assert connection_refusals.noted_cause(other) is Cause.PROJECT
    assert caplog.text.count("the server does not let this site in: wrong project: its kit is of another project") == 1
    (kit / "startup/fed_client.json").unlink()
    note_connection_refusal(kit)  # without an address there is no server to look at
    assert connection_refusals.noted_cause(kit) is None


@pytest.mark.parametrize(
    ("age", "uptime", "ok", "said"),
    [
        (20, 1000, True, "the server lets this site in, and answers its heartbeats"),
        (700, 1000, False, "the server has answered no heartbeat for 11.7 min; its log says why; if another copy of this kit"),
        (None, 1000, False, "the server has answered no heartbeat yet; its log says why; if another copy of this kit runs"),
        (90_000, 10, True, "the server has answered no heartbeat yet; ask again in two minutes"),
    ],
)
def test_running_site_is_admitted_only_while_the_server_answers(
    age: float | None, uptime: float, ok: bool, said: str, kit: Path, server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.time()
    running = [Mock(**{"create_time.return_value": began - seconds}) for seconds in (uptime, 5000)]
    monkeypatch.setattr(doctor, "processes", lambda kit: running)
    if age is not None:
        connection_refusals.note_answer(kit)
        os.utime(kit / STATE / connection_refusals.LAST_ANSWER, (began - age, began - age))
    found = {one.check: one for one in examine(kit)}["admission"]
    assert found.ok is ok
    assert said in "; ".join(filter(None, (found.found, found.remedy, found.advice)))


def test_refused_person_is_a_problem(made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    person = made / "a@hub.example"
    monkeypatch.setattr(doctor, "examine_server_connection", lambda kit: Finding("server", "answers"))
    refused = UnreachableError(f"{person}: the server refuses this kit: revoked: its credential was revoked; ask the hub")
    monkeypatch.setattr(cli_doctor, "connect", Mock(side_effect=refused))
    assert run(monkeypatch, "doctor", person) == 1
    assert "admission: the server refuses this kit: revoked" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(cli_doctor, "connect", lambda kit: nullcontext())
    assert run(monkeypatch, "doctor", person) == 0
    assert "the server lets this person in" in capsys.readouterr().out


def test_noted_cause_ends_when_the_server_admits_the_kit(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine_server_connection", lambda kit: Finding("server", "answers"))
    connection_refusals.note_cause(kit, Cause.REVOKED)
    answers = iter(["its credential was revoked", None])
    monkeypatch.setattr(connection_refusals, "try_registration", lambda kit: next(answers))
    for cause in (Cause.REVOKED, None):
        assert {one.check: one for one in examine(kit)}["admission"].ok is (cause is None)
        assert connection_refusals.noted_cause(kit) is cause


def test_a_server_of_another_name_is_no_other_project(kit: Path, server: None) -> None:
    path = kit / "startup/fed_client.json"
    path.write_text(path.read_text().replace("localhost:", "127.0.0.1:"))
    found = problems(kit)["server"]
    assert "address has changed" in found
    assert "wrong project" not in found


@pytest.mark.parametrize(
    ("weaken", "check", "says"),
    [
        (listing("consilium."), "allow-list", "'consilium.' is a prefix: a job can call any name under it"),
        (listing("consilium.flare.kit.provision"), "allow-list", "'consilium.flare.kit.provision' is a prefix"),
        (listing("consilium.flare."), "allow-list", "a site needs consilium.flare.job.executor.SiteExecutor, "),
        (listing("nvflare.app_common.workflows"), "allow-list", "name single classes"),
        (listing("*"), "allow-list", "'*' is a prefix"),
        (listing("consilium.cli.main.app"), "allow-list", "app' is none that a site needs; run `consilium allow KIT`"),
        (listing("consilium.flare.job.controller.RoundController"), "allow-list", "RoundController' is none that a site needs"),
        (change("resources.json", lambda r: r["class_allow_list"].pop(0)), "allow-list", "SiteExecutor' is missing"),
        (change("resources.json", lambda r: r.update(class_allow_list="consilium.")), "allow-list", "is not a list of names"),
        (change("resources.json", lambda r: r.pop("class_allow_list")), "allow-list", "is missing"),
        (lambda kit: (kit / "comm_config.json").unlink(), "settings", "code with them; run `consilium allow KIT`"),
        (lambda kit: (kit / "resources.json").unlink(), "settings", "run `consilium allow KIT`"),
        (unsafe_start, "start script", "loads Python modules from the folder it is called in"),
        (change("resources.json", lambda r: r.update(class_list_enforcement_mode="warn")), "allow-list", "mode warn"),
        (change("resources.json", lambda r: r.pop("allow_log_streaming")), "log streaming", "error logs"),
        (change("privacy.json", lambda p: p.pop("default_scope")), "privacy scope", "default None"),
        (change("privacy.json", lambda p: p["scopes"].append({"name": "open"})), "privacy scope", "2 scopes"),
        (change("privacy.json", lambda p: p["scopes"][0].pop("task_data_filters")), "privacy scope", "GuardTaskFilter"),
        (change("privacy.json", lambda p: p["scopes"][0].pop("task_result_filters")), "privacy scope", "GuardResultFilter"),
        (change("authorization.json", lambda a: a["permissions"].update(lead="any")), "rights", "lead has byoc: any"),
        (change("authorization.json", lambda a: a["permissions"]["lead"].update(shell_commands="o:site")), "rights", "o:site"),
        (lambda kit: (kit / "local/authorization.json").unlink(), "rights", "consilium provision SITES_YML --local KIT"),
        (lambda kit: (kit / "local/privacy.json").write_text("{"), "privacy scope", "not valid JSON"),
        (lambda kit: (kit / "local/site.yaml").write_text("device: gpu"), "site.yaml", "device: 'gpu'"),
        (lambda kit: (kit / "startup/fed_client.json").open("a").write(" "), "signature", "was altered"),
        (lambda kit: (kit / "startup/client.crt").unlink(), "startup kit", "startup/client.crt is missing"),
        (lambda kit: None, "server", "Connection refused"),
    ],
)
def test_weakened_kits_are_found(weaken: Callable[[Path], None], check: str, says: str, kit: Path) -> None:
    weaken(kit)
    assert says in problems(kit)[check]


def test_first_look_at_the_examples_kit_needs_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_check.torch.cuda, "device_count", lambda: 0)
    kits = provision(Path(__file__).parents[2] / "provisioning/sites.yml", tmp_path / "kits")
    assert "device" not in problems(kits / "hospital-a")
    assert "promises 2 GPUs, 0 found" in problems(kits / "hospital-c")["device"]


def test_connection_settings_are_checked(kit: Path) -> None:
    found = {one.check: one for one in examine(kit)}["settings"]
    assert (found.ok, found.advice) == (True, "")
    (kit / "comm_config.json").write_text('{"max_message_size": 1}')
    found = {one.check: one for one in examine(kit)}["settings"]
    assert found.ok
    assert "49 sites at a server at most" in found.advice
    (kit / "comm_config.json").write_text("{")
    assert "not valid JSON" in problems(kit)["settings"]


def test_unsigned_kit_of_nvflare_package_passes(kit: Path) -> None:
    (kit / "startup/signature.json").unlink()
    assert "signature" not in problems(kit)


@pytest.mark.parametrize(("days", "says"), [(-1, "set the clock"), (345, "days left"), (400, "set the clock")])
def test_clock_is_compared_with_the_certificate(days: int, says: str, kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(UTC) + timedelta(days=days)

    monkeypatch.setattr(certificates, "datetime", Clock)
    assert says in problems(kit)["clock"]


@pytest.mark.parametrize("weaken", [listing("consilium."), unsafe_start, lambda kit: (kit / "comm_config.json").unlink()])
def test_allow_updates_an_older_kit(weaken: Callable[[Path], None], kit: Path) -> None:
    """But for a signed start script, which is the hub's."""
    (kit / "startup/signature.json").unlink()
    weaken(kit)
    before = problems(kit)
    update_local(kit)
    assert set(problems(kit)) < set(before)
    assert not {"allow-list", "settings", "start script"} & set(problems(kit))


def test_other_allowed_classes_are_a_warning(kit: Path) -> None:
    listing("nvflare.app_common.workflows.fedavg.FedAvg")(kit)
    (found,) = [f for f in examine(kit) if f.check == "allow-list"]
    assert found.ok
    assert found.line().startswith(
        "warning  allow-list: just the classes of ours that a site needs, enforced; any job can use 1"
    )


def test_approval_with_byoc_is_a_problem(kit: Path) -> None:
    (kit / "local/site.yaml").write_text("approve: digest\n")
    assert "approval" not in problems(kit)
    change("authorization.json", lambda a: a["permissions"]["lead"].update(byoc="any"))(kit)
    assert "a job's code runs before it is checked" in problems(kit)["approval"]


@pytest.mark.parametrize(
    ("text", "problem"), [("", True), ("# datalist: /data\n", True), ("[]\n", True), ("''\n", True), ("{}\n", False)]
)
def test_empty_site_yaml_is_a_problem(text: str, problem: bool, kit: Path) -> None:
    """The site refuses every job then, because the file may have lost the hospital's policies. `{}` says: none."""
    (kit / "local/site.yaml").write_text(text)
    assert ("site.yaml" in problems(kit)) is problem
    if problem:
        assert ("write `{}`" if text[:1] in ("", "#") else "is not a map") in problems(kit)["site.yaml"]


def test_server_kit_is_checked(made: Path, tmp_path: Path) -> None:
    kit = Path(shutil.copytree(made / "localhost", tmp_path / "server", symlinks=True))
    assert problems(kit) == {}
    checks = {f.check for f in examine(kit)}
    assert {"allow-list", "rights", "signature", "start script", "settings", "clock"} <= checks
    assert not {"privacy scope", "site.yaml", "data list", "server"} & checks
    listing("consilium.flare.job.executor.SiteExecutor")(kit)
    assert "is none that a server needs" in problems(kit)["allow-list"]


def test_a_servers_state_is_private_writable_and_lasting(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Path(shutil.copytree(made / "localhost", tmp_path / "server", symlinks=True))

    def found() -> Finding:
        return {one.check: one for one in examine(kit)}["state"]

    change("resources.json", lambda r: r["components"][1]["args"].update(uri_root=str(tmp_path / "state" / "jobs")))(kit)
    with monkeypatch.context() as patched:
        patched.setattr(doctor, "TEMPORARY", ())
        assert found().line() == f"ok       state: {tmp_path / 'state'}: is made at the start, for this user only"
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(0o750)
    assert found().line().startswith("PROBLEM  state: ")
    assert "mode 750" in found().found
    subprocess.run(found().remedy, shell=True, check=True)
    assert found().ok
    assert "temporary folder" in found().found  # pytest's folders are under /tmp
    monkeypatch.setattr(doctor, "TEMPORARY", ())
    assert found().line() == f"ok       state: {tmp_path / 'state'}: for this user only"
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert "cannot write there" in found().found
    change("resources.json", lambda r: r.pop("components"))(kit)
    assert "names no folder of jobs" in found().found


def test_a_servers_full_disk_is_a_problem(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of its jobs' folder, which need not be the kit's."""
    kit = Path(shutil.copytree(made / "localhost", tmp_path / "server", symlinks=True))
    (state := tmp_path / "state").mkdir(mode=0o700)
    change("resources.json", lambda r: r["components"][1]["args"].update(uri_root=str(state / "jobs")))(kit)
    usage = machine_check.shutil.disk_usage
    asked: list[Path] = []

    def nearly_full(path: Path) -> Any:
        asked.append(path)
        return usage(path)._replace(free=2**30)

    monkeypatch.setattr(machine_check.shutil, "disk_usage", nearly_full)
    told = f"PROBLEM  disk: {state}: 1.0 GiB free; free at least 5 GiB, or set `state:` in sites.yml to a larger disk"
    assert problems(kit)["disk"] == told
    assert asked == [state]


def test_a_port_that_needs_more_rights_is_a_problem(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's refusal is by hand: tests may run as root, whom it allows every port."""
    kit = Path(shutil.copytree(made / "localhost", tmp_path / "server", symlinks=True))
    path = kit / "startup/fed_server.json"
    port = certificates.server_address(kit).rpartition(":")[2]
    path.write_text(path.read_text().replace(f":{port}", ":443"))

    class Refusing(socket.socket):
        def bind(self, address: Any) -> None:
            raise PermissionError(13, "Permission denied") if address == ("", 443) else AssertionError(address)

    monkeypatch.setattr(doctor, "socket", SimpleNamespace(**vars(socket) | {"socket": Refusing}))
    told = problems(kit)["port"]
    assert told.startswith("PROBLEM  port: 443: this user may not listen there; run it as a service with CAP_NET_BIND_SERVICE")
    assert "a `port` over 1023 in sites.yml" in told


def test_a_servers_port_is_free_before_it_runs(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Path(shutil.copytree(made / "localhost", tmp_path / "server", symlinks=True))
    port = certificates.server_address(kit).rpartition(":")[2]

    def said() -> str:
        return {one.check: one for one in examine(kit)}["port"].line()

    assert said() == f"ok       port: {port}: free"
    with socket.create_server(("127.0.0.1", int(port))):
        assert said().startswith(f"PROBLEM  port: {port}: Address already in use; stop what listens there")
        monkeypatch.setattr(doctor, "processes", lambda kit: [1])
        assert said() == f"ok       port: {port}: it listens"
    assert said().startswith(f"PROBLEM  port: {port}: it runs and does not listen; ")


def test_relays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The server names them, a site behind one asks it and not the server, and a relay's own kit is no site's."""
    raw = {"name": "t", "server": {"name": "localhost", "org": "hub", "port": free_port(), "state": str(tmp_path / "state")}}
    raw |= {"sites": [{"name": name, "org": name} for name in ("a", "b", "c")], "admins": []}
    raw["admins"] = [{"name": "a@hub.example", "org": "hub", "role": "lead"}]
    (tmp_path / "sites.yml").write_text(yaml.safe_dump(raw))
    kits = provision_relayed(tmp_path / "sites.yml", tmp_path / "kits")
    assert {one.check: one for one in examine(kits / "localhost")}["relays"].line() == f"ok       relays: {RELAY} before b, c"
    assert run(monkeypatch, "revoke", RELAY, "--kit", kits / "localhost") == 0
    assert f"{RELAY} is a relay: if it runs," in capsys.readouterr().out
    relay = {one.check: one for one in examine(kits / RELAY)}
    assert {name for name, one in relay.items() if not one.ok} == {"server"}  # it does not run
    assert relay["port"].found.endswith("free")
    assert {"signature", "clock", "root"} <= relay.keys()
    address = certificates.server_address(kits / "b")
    assert address == f"localhost:{relay['port'].found.partition(':')[0]}"
    assert certificates.server_address(kits / "a") == certificates.server_address(kits / RELAY) != address
    assert problems(kits / "b")["server"].startswith(f"PROBLEM  server: {address}: [Errno 111]")
    for kit, file in ((kits / "b", "local/relay__resources.json"), (kits / "a", "startup/fed_client.json")):
        before = (kit / file).read_text()
        (kit / file).write_text(before.replace(certificates.server_address(kit), "localhost"))
        assert f"{kit / file}: names no " in problems(kit)["server"]  # a traceback said that '' is no number
        (kit / file).write_text(before)
    (kits / RELAY / "local/comm_config.json").write_text("{}")
    assert "comm_config.json: has not the form of FLARE's file" in problems(kits / RELAY)["port"]
    monkeypatch.setattr(doctor, "examine_server_connection", lambda kit: Finding("server", "answers"))
    assert "not asked through a relay" in {one.check: one for one in examine(kits / "b")}["admission"].found
    (kits / "localhost" / STATE).mkdir()
    seen = {name: {"last_seen": 1, "here": name == "a", "jobs": []} for name in ("a", "b", "c")}
    (kits / "localhost" / STATE / ATTENDANCE).write_text(json.dumps({"server": own_facts(), "sites": seen}))
    monkeypatch.setattr(doctor, "processes", lambda kit: [1])
    assert f"no site behind {RELAY} is here" in {one.check: one for one in examine(kits / "localhost")}["relays"].advice


def test_lost_ledger_is_a_problem(kit: Path) -> None:
    """No job would run; the data protection officer is told to look here."""
    assert "privacy ledger" not in problems(kit)
    AuditLog(kit / "_consilium" / "runs" / "r" / "audit.jsonl").add({"kind": "update", "ledger": "6a" * 32})
    assert "the privacy ledger is gone: " in (line := problems(kit)["privacy ledger"])
    assert "run `consilium privacy accept`" in line


def test_void_rows_are_named(kit: Path) -> None:
    (kit / "_consilium").mkdir(exist_ok=True)
    old_ledger(kit / "_consilium" / "ledger.sqlite", RECORD, replace(RECORD, job="fundus", round=1))
    (found,) = [one for one in examine(kit) if one.check == "privacy ledger"]
    assert found.ok
    assert "2 rows (jobs fundus, job) are void: " in found.advice
    assert "seed of 32 bits" in found.advice


@pytest.mark.parametrize("name", ["lead", "clinic"])
def test_altered_files_are_named(name: str, made: Path, tmp_path: Path) -> None:
    kit = Path(shutil.copytree(made / {"lead": "a@hub.example"}.get(name, name), tmp_path / name, symlinks=True))
    found = {one.check: one for one in examine(kit)}
    assert found["signature"].ok
    script = next((kit / "startup").glob("*.sh"))
    script.write_text(script.read_text() + "# mine\n")
    (kit / "startup" / "more.txt").write_text("1")
    signature = {one.check: one for one in examine(kit)}["signature"]
    assert signature.found == f"startup/ was altered: {', '.join(sorted([script.name, 'more.txt']))}"


def test_a_persons_kit_is_no_site(made: Path) -> None:
    """Nothing is asked of it that only a site has, or obeying the doctor would write a site's list into it."""
    checks = {one.check: one for one in examine(made / "a@hub.example")}
    of_sites = {"allow-list", "rights", "privacy scope", "data list", "components", "site.yaml", "disk", "admission"}
    assert not checks.keys() & of_sites
    assert {"signature", "clock", "root", "server"} <= checks.keys()
    assert [name for name, one in checks.items() if not one.ok and name in ("signature", "clock", "root")] == []


@pytest.mark.parametrize("name", ["client.crt", "client.key", "rootCA.pem", "signature.json"])
@pytest.mark.parametrize("signed", [True, False])
def test_half_copied_files_are_problems(name: str, signed: bool, kit: Path) -> None:
    path = kit / "startup" / name
    path.write_bytes(path.read_bytes()[:300])
    if not signed and name != "signature.json":
        (kit / "startup/signature.json").unlink()
    found = {one.check for one in examine(kit) if not one.ok}
    expected = {"client.crt": "startup kit", "client.key": "key", "rootCA.pem": "root", "signature.json": "signature"}
    assert expected[name] in found


def test_a_file_that_is_no_text_is_a_problem_and_no_traceback(kit: Path) -> None:
    for path in (kit / "startup/sub_start.sh", kit / "comm_config.json"):
        path.write_bytes(path.read_bytes() + b"# \xff\n")
    found = {one.check for one in examine(kit) if not one.ok}
    assert {"signature", "settings"} <= found
    update_local(kit)


@pytest.mark.parametrize("name", ["clinic", "localhost"])
@pytest.mark.parametrize("bad", [None, 1, "x", [], [1]])
def test_settings_of_another_form_are_problems(
    name: str, bad: Any, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slip in authorization.json ended the doctor with a traceback."""
    monkeypatch.setattr(doctor, "examine_versions", list)
    for file, check, key in (
        ("local/authorization.json", "rights", "permissions"),
        ("local/privacy.json", "privacy scope", "scopes"),
        ("local/resources.json", "components", "components"),
        ("startup/fed_server.json", "relays", "servers"),
    ):
        if (made / name / file).is_file():
            kit = Path(shutil.copytree(made / name, tmp_path / key, symlinks=True))
            (kit / file).write_text(json.dumps(json.loads((kit / file).read_text()) | {key: bad}))
            found = {one.check: one for one in examine(kit)}
            assert found[check].remedy or found[check].advice
