"""Startup kits: what our builder puts into them, and that project.yml, sites.yml and FLARE's command agree."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from nvflare.lighter.utils import verify_folder_signature

from consilium.cli.main import COMMANDS
from consilium.config.deployment import load_deployment
from consilium.config.site import load_site
from consilium.core.errors import ConfigError, ConsiliumError
from consilium.flare.kit.certificates import root_certificate_fingerprint
from consilium.flare.kit.kit_hardening import (
    CLASSES,
    CONNECTED,
    STARTS,
    add_unlock_prompt,
    harden_start_scripts,
    shadows_job_settings,
    unsafe_scripts,
)
from consilium.flare.kit.kit_reader import kit_name
from consilium.flare.kit.local_folder import apply_local, update_local
from consilium.flare.kit.provision import project_of, provision
from tests.conftest import run

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "provisioning" / "sites.yml"


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return provision(EXAMPLE, tmp_path_factory.mktemp("kits"))


def local(kit: Path, name: str) -> dict[str, Any]:
    return json.loads((kit / "local" / name).read_text())


def test_example_kits_are_signed(kits: Path) -> None:
    assert {p.name for p in kits.iterdir()} == {entry.name for entry in load_deployment(EXAMPLE).entries()}
    for kit in kits.iterdir():
        startup = kit / "startup"
        assert verify_folder_signature(str(startup), str(startup / "rootCA.pem"), True, "signature.json")
        assert all(key.stat().st_mode & 0o077 == 0 for key in startup.glob("*.key"))
    assert (kits.parent / "state").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", ["hospital-a", "hospital-b", "hospital-c"])
def test_site_kit_forces_the_guard(kits: Path, name: str) -> None:
    privacy, resources = local(kits / name, "privacy.json"), local(kits / name, "resources.json")
    (scope,) = privacy["scopes"]
    assert privacy["default_scope"] == scope["name"]
    assert [f["path"] for f in scope["task_data_filters"]] == ["consilium.flare.job.filters.GuardTaskFilter"]
    assert [f["path"] for f in scope["task_result_filters"]] == ["consilium.flare.job.filters.GuardResultFilter"]
    assert resources["class_allow_list"] == list(CLASSES["site"])
    assert resources["class_list_enforcement_mode"] == "enforce"
    assert resources["allow_log_streaming"] is False


def test_no_role_has_byoc_or_shell(kits: Path) -> None:
    for name in ("fl.hub.example", "hospital-a", "hospital-b", "hospital-c"):
        permissions = local(kits / name, "authorization.json")["permissions"]
        assert permissions.keys() == {"project_admin", "org_admin", "lead", "member"}
        for rights in permissions.values():
            assert rights["byoc"] == rights["shell_commands"] == rights["server-predeployed-flwr"] == "none"


def test_kits_are_closed(kits: Path) -> None:
    """Scripts leave the folder they are called from before Python runs; settings lie where FLARE looks first."""
    for name in ("fl.hub.example", "hospital-a"):
        assert shadows_job_settings(kits / name)
        assert json.loads((kits / name / "comm_config.json").read_text()).keys() == {"grpc"}
        script = (kits / name / "startup/sub_start.sh").read_text()
        assert script.index('cd "$WORKSPACE/.empty" || exit 1') < script.index("python3")
        assert subprocess.run(["bash", "-n", kits / name / "startup/sub_start.sh"], check=False).returncode == 0
    assert "python3 -P -m" in (kits / "lead@hub.example/startup/fl_admin.sh").read_text()


def test_provision_local_closes_unsigned_kits(kits: Path, tmp_path: Path) -> None:
    for signed in (True, False):
        kit = Path(shutil.copytree(kits / "hospital-a", tmp_path / str(signed), symlinks=True))
        script = kit / "startup/sub_start.sh"
        script.write_text(script.read_text().replace('cd "$WORKSPACE/.empty"', "true"))
        (kit / "comm_config.json").unlink()
        (kit / "resources.json").unlink()
        if not signed:
            (kit / "startup/signature.json").unlink()
        apply_local(EXAMPLE, kit)
        assert shadows_job_settings(kit)
        assert bool(unsafe_scripts(kit / "startup")) is signed


def test_kits_are_private_and_the_fingerprint_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fingerprint is that of every kit's root certificate; the doctor of a kit shows it too."""
    os.umask(0o022)
    assert run(monkeypatch, "provision", EXAMPLE, "-o", tmp_path, "--only", "hospital-a") == 2
    assert run(monkeypatch, "provision", EXAMPLE, "-o", tmp_path) == 0
    printed = capsys.readouterr().out
    assert "All other kits" not in printed
    for kit in (tmp_path / "consilium/prod_00").iterdir():
        assert kit.stat().st_mode & 0o777 == 0o700
        root = x509.load_pem_x509_certificate((kit / "startup/rootCA.pem").read_bytes())
        number = root.fingerprint(hashes.SHA256()).hex()
        assert number in printed.splitlines()
        assert number in root_certificate_fingerprint(kit)
    assert run(monkeypatch, "provision", EXAMPLE, "-o", tmp_path, "--only", "hospital-a") == 0
    assert "All other kits stay as they are; a running server takes the new ones" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("hospital-a", ["doctor", "stop", "approve"]),
        ("fl.hub.example", ["doctor", "stop", "sites"]),
        ("lead@hub.example", ["doctor", "submit", "status"]),
    ],
)
def test_readme_of_a_kit_is_for_its_participant(name: str, commands: list[str], kits: Path) -> None:
    """Every command in it exists, every file it names is there, and nothing of FLARE's text is left."""
    (path,) = [one for one in (kits / name).rglob("*") if one.name == "readme.txt"]
    text = path.read_text()
    assert path.parent == kits / name
    assert name in text.splitlines()[0]
    used = re.findall(r"consilium ([a-z]+) ", text.replace("federation consilium", ""))
    assert set(used) == set(commands)
    assert {word for panel in COMMANDS.values() for word in panel} >= set(used)
    for file in re.findall(r"(?:startup|local)/[\w.]*\w", text):
        assert (kits / name / file).is_file()
    (page,) = re.findall(r"provisioning/\w+\.md", text)
    assert (ROOT / page).is_file()
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("name", "says"), [("hospital-a", "Successfully registered client"), ("fl.hub.example", "consilium sites --kit")]
)
def test_start_script_says_where_the_log_is(name: str, says: str, kits: Path, tmp_path: Path) -> None:
    """The process itself is replaced by one that ends at once. Both names of a problem's remedy are absolute paths."""
    kit = Path(shutil.copytree(kits / name, tmp_path / name, symlinks=True))
    (kit / "startup/sub_start.sh").write_text("#!/bin/bash\n")
    done = subprocess.run(["startup/start.sh"], cwd=kit, capture_output=True, text=True, check=True)
    assert f"{kit}/log.txt" in done.stdout
    assert says in done.stdout
    assert f"consilium stop {kit}" in done.stdout


def test_an_earlier_kits_start_scripts_are_completed_once_and_stay_whole_where_the_disk_is_full(
    kits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were cut to nothing first, and no command could mend that."""
    startup = tmp_path / "startup"
    startup.mkdir()
    for name in ("sub_start.sh", "start.sh"):
        shutil.copy(kits / "hospital-a/startup" / name, startup)
    start, sub_start = startup / "start.sh", startup / "sub_start.sh"
    now = start.read_text()
    start.write_text(start.read_text().replace(STARTS.format(connected=CONNECTED["site"]), ""))
    sub_start.write_text(sub_start.read_text().replace('cd "$WORKSPACE/.empty"', "true"))
    before = {path: (path.read_text(), path.stat().st_mode) for path in startup.iterdir()}
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for change in (add_unlock_prompt, harden_start_scripts):
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
        try:
            with pytest.raises((OSError, ConsiliumError)):
                change(startup)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path: (path.read_text(), path.stat().st_mode) for path in startup.iterdir()} == before
    for _ in range(2):  # an earlier kit's script is completed once
        mask = os.umask(0o077)
        add_unlock_prompt(startup)
        os.umask(mask)
        assert before[start][0] != start.read_text() == now
        assert start.stat().st_mode == before[start][1]


def test_unknown_start_script_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sub_start.sh").write_text("python3 -m nvflare\n")
    with pytest.raises(ConsiliumError, match="script of FLARE"):
        harden_start_scripts(tmp_path)


def test_entries_reach_their_kits(kits: Path) -> None:
    first, third = load_site(kits / "hospital-a/local/site.yaml"), load_site(kits / "hospital-c/local/site.yaml")
    assert first == load_deployment(EXAMPLE).sites[0].site
    assert first.privacy.budgets["site"].epsilon == 5
    assert not third.privacy.budgets
    (manager,) = [c for c in local(kits / "hospital-c", "resources.json")["components"] if c["id"] == "resource_manager"]
    assert manager["args"] == {"num_of_gpus": 2, "mem_per_gpu_in_GiB": 48, "expiration_period": 300}
    server = (kits / "fl.hub.example/local/resources.json").read_text()
    assert json.loads(server)["class_allow_list"] == list(CLASSES["server"])
    assert not set(CLASSES["server"]) & set(CLASSES["site"])
    assert '"/srv/consilium/jobs"' in server
    assert '"/srv/consilium/snapshots"' in server
    assert "/tmp" not in server
    assert not (kits / "fl.hub.example/local/privacy.json").exists()


def test_bundles_by_site_and_role(tmp_path: Path) -> None:
    raw = yaml.safe_load(EXAMPLE.read_text())
    raw["sites"][1]["bundles"] = True
    path = tmp_path / "sites.yml"
    path.write_text(yaml.safe_dump(raw))
    kits = provision(path, tmp_path / "kits")
    opened = local(kits / "hospital-b", "authorization.json")["permissions"]
    assert {role for role, rights in opened.items() if rights["byoc"] == "any"} == {"project_admin", "lead"}
    assert local(kits / "hospital-a", "authorization.json")["permissions"]["lead"]["byoc"] == "none"


FORMER = {
    "job.filters": "filters",
    "job.controller": "controller",
    "job.aggregator": "aggregator",
    "job.executor": "executor",
    "job.late_join": "late_sites",
    "kit.heartbeat_client": "attendance_report",
    "kit.heartbeat_server": "attendance",
    "kit.revocation_check": "revocation_check",
}
"""Modules under consilium.flare of the classes that kits name, now and in version 0.2.0."""


@pytest.mark.parametrize("name", ["hospital-a", "fl.hub.example"])
def test_allow_brings_a_kit_of_version_0_2_up_to_date(name: str, kits: Path, tmp_path: Path) -> None:
    kit = Path(shutil.copytree(kits / name, tmp_path / name, symlinks=True))
    files = [path for path in ((kit / "local" / one) for one in ("resources.json", "privacy.json")) if path.is_file()]
    now = [json.loads(path.read_text()) for path in files]
    for path in files:
        text = path.read_text()
        for module, former in FORMER.items():
            text = text.replace(f'"consilium.flare.{module}.', f'"consilium.flare.{former}.')
        path.write_text(text)
    assert [json.loads(path.read_text()) for path in files] != now
    for _ in range(2):
        update_local(kit)
        assert [json.loads(path.read_text()) for path in files] == now


def test_allow_keeps_names_of_others(kits: Path, tmp_path: Path) -> None:
    kit = Path(shutil.copytree(kits / "hospital-a", tmp_path / "kit", symlinks=True))
    scopes = local(kit, "privacy.json")
    scopes["scopes"][0]["task_data_filters"] += [{"path": "clinic.filters.GuardTaskFilter"}, {"path": "consilium.plug.Own"}]
    (kit / "local/privacy.json").write_text(json.dumps(scopes))
    update_local(kit)
    assert local(kit, "privacy.json") == scopes


def test_allow_leaves_a_relays_kit(
    kits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It got a site's policies, and a comm_config.json in place of the one that says where the relay listens."""
    kit = Path(shutil.copytree(kits / "hospital-a", tmp_path / "kit", symlinks=True))
    (kit / "startup/fed_relay.json").write_text("{}")
    (kit / "comm_config.json").unlink()
    before = {path: path.read_bytes() for path in kit.rglob("*") if path.is_file()}
    assert run(monkeypatch, "allow", kit, "--format", "json") == 0
    assert json.loads(capsys.readouterr().out) == {str(kit): "a relay's kit; it needs no list"}
    (tmp_path / "damaged/local").mkdir(parents=True)
    (tmp_path / "damaged/local/resources.json").write_text("{")
    assert run(monkeypatch, "allow", kit, tmp_path / "damaged") == 2  # what was done before is printed
    assert capsys.readouterr().out == f"{kit}: a relay's kit; it needs no list\n"
    assert {path: path.read_bytes() for path in kit.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["resources.json", "privacy.json"])
def test_allow_changes_nothing_in_a_kit_with_a_damaged_file(name: str, kits: Path, tmp_path: Path) -> None:
    kit = Path(shutil.copytree(kits / "hospital-a", tmp_path / "kit", symlinks=True))
    (kit / "comm_config.json").unlink()
    for damage in (b'{"a": ', b'{"a": "\xff"}'):
        (kit / "local" / name).write_bytes(damage)
        with pytest.raises(ConfigError, match=f"{name}: not valid JSON"):
            update_local(kit)
        assert (kit / "local" / name).read_bytes() == damage
        assert not (kit / "comm_config.json").exists()


def test_second_provision_keeps_the_root(tmp_path: Path) -> None:
    first, second = provision(EXAMPLE, tmp_path), provision(EXAMPLE, tmp_path)
    assert (first.name, second.name) == ("prod_00", "prod_01")
    roots = [(kits / "hospital-a/startup/rootCA.pem").read_text() for kits in (first, second)]
    assert roots[0] == roots[1]


@pytest.mark.slow  # a process of seconds
def test_nvflare_provision_makes_equal_policies(kits: Path, tmp_path: Path) -> None:
    project = yaml.safe_load((ROOT / "provisioning/project.yml").read_text())
    assert project == project_of(load_deployment(EXAMPLE), Path("provisioning/sites.yml"))
    command = [Path(sys.executable).with_name("nvflare"), "provision", "-p", "provisioning/project.yml", "-w", tmp_path / "ws"]
    environment = os.environ | {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT / "custom")}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=60)
    (made,) = (tmp_path / "ws").glob("consilium/prod_00")
    for name in ("privacy.json", "authorization.json", "resources.json", "site.yaml"):
        assert (made / "hospital-a/local" / name).read_text() == (kits / "hospital-a/local" / name).read_text()


def test_local_policies_by_certificate_name(kits: Path, tmp_path: Path) -> None:
    (tmp_path / "renamed").mkdir()
    kit = (kits / "hospital-b").rename(tmp_path / "renamed" / "kit")
    try:
        assert kit_name(kit) == "hospital-b"
        (kit / "local/privacy.json").unlink()
        apply_local(EXAMPLE, kit)
        assert local(kit, "privacy.json")["default_scope"] == "hospital"
        assert load_site(kit / "local/site.yaml").privacy.dataset == "retina-clinic"
    finally:
        kit.rename(kits / "hospital-b")


def edited(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "sites.yml"
    path.write_text(yaml.safe_dump(yaml.safe_load(EXAMPLE.read_text()) | changes))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, "start with `name:`, `server:`, `sites:`"),  # it named the fields of a job.yaml
        ({"sites": []}, "sites: []: expected List should have at least 1 item"),
        ({"sties": []}, "sties: unknown field; write sites instead"),
        ({"server": {"name": "a", "org": "b", "state": "jobs"}}, "server.state: 'jobs': expected an absolute path"),
        ({"admins": [{"name": "joe", "org": "x", "role": "lead"}]}, "admins.0.name: 'joe'"),
        ({"admins": [{"name": "a@b.de", "org": "x", "role": "boss"}]}, "admins.0.role: 'boss'"),
        ({"sites": [{"name": "a", "org": "x"}, {"name": "a", "org": "y"}]}, "every name once; 'a' is there twice"),
        ({"scheme": "http", "sites": [{"name": "a", "org": "x", "bundles": True}]}, "scheme: 'http' cannot carry bundled jobs"),
        ({"sites": [{"name": "a", "org": "x", "site": {"device": "gpu"}}]}, "sites.0.site.device: 'gpu'"),
        ({"sites": [{"name": "server", "org": "x"}]}, "sites: 'server' is what FLARE calls the server; give the site another"),
    ],
)
def test_wrong_sites_yml_is_one_line(changes: dict[str, Any] | None, message: str, tmp_path: Path) -> None:
    path = edited(tmp_path, **changes or {})
    if changes is None:
        path.write_text("")
    with pytest.raises(ConfigError) as told:
        provision(path, tmp_path / "kits")
    assert message in str(told.value)
    assert "\n" not in str(told.value)
    assert not (tmp_path / "kits").exists()


def test_changed_root_lifetime_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    provision(EXAMPLE, tmp_path / "kits")
    with pytest.raises(ConsiliumError, match=r"root_valid_days=100"):
        provision(edited(tmp_path, valid_days=100), tmp_path / "kits")
    assert capsys.readouterr() == ("", "")


def test_unknown_kits_are_refused(kits: Path, tmp_path: Path) -> None:
    others = edited(tmp_path, sites=[{"name": "clinic", "org": "x"}])
    with pytest.raises(ConfigError, match="none is named 'hospital-a'"):
        apply_local(others, kits / "hospital-a")
    with pytest.raises(ConfigError, match=r"startup/client\.crt is missing"):
        apply_local(EXAMPLE, tmp_path)


def test_only_makes_one_kit(tmp_path: Path) -> None:
    raw = yaml.safe_load(EXAMPLE.read_text())
    sites, folder = tmp_path / "sites.yml", tmp_path / "kits"
    sites.write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError, match=r"cert\.json: not there"):
        provision(sites, folder, ["hospital-a"])  # a project of its own, which no server would know
    first = provision(sites, folder)
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    raw["sites"].append({"name": "hospital-d", "org": "hospital_d"})
    sites.write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError, match=r"--only: .*none is named 'hospital-e'"):
        provision(sites, folder, ["hospital-e"])
    (kit,) = provision(sites, folder, ["hospital-d"]).iterdir()
    assert kit_name(kit) == "hospital-d"
    assert verify_folder_signature(str(kit / "startup"), str(first / "hospital-a/startup/rootCA.pem"), True, "signature.json")
    told = [json.loads((k / "startup/fed_client.json").read_text())["servers"] for k in (kit, first / "hospital-a")]
    assert told[0] == told[1]
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before
