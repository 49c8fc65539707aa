"""The unit of a kit: what systemd makes of it, whatever a folder is called, and what it keeps shut."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from consilium.core.errors import ConfigError
from consilium.flare.kit.install import service
from consilium.flare.kit.install.service import quoted, unit
from consilium.flare.kit.provision import provision
from tests.conftest import run

NOBODY = 65534
ANALYZE = shutil.which("systemd-analyze")


@pytest.fixture(autouse=True)
def _kits_of_tests_lie_in_tmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "TEMPORARY", ())


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return kits whose owner is not root: a server on a port under 1024, a site with a CPU and one with whatever there is."""
    folder = tmp_path_factory.mktemp("hub")
    for name in ("data", "server-state", "state", "weights"):
        (folder / name).mkdir()
    server = {"name": "localhost", "org": "hub", "port": 443, "state": str(folder / "server-state")}
    paths = {
        "datalist": str(folder / "data" / "list.json"),
        "state": str(folder / "state"),
        "checkpoints": str(folder / "weights"),
    }
    sites = [{"name": "clinic", "org": "a", "site": {**paths, "device": "cpu"}}, {"name": "gpu", "org": "b"}]
    people = [{"name": "a@hub.example", "org": "hub", "role": "lead"}]
    (folder / "sites.yml").write_text(yaml.safe_dump({"name": "t", "server": server, "sites": sites, "admins": people}))
    made = provision(folder / "sites.yml", folder / "kits")
    _give(made)
    return made


def _give(folder: Path) -> None:
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def fields(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line and line[0] != "#")


def test_unit_runs_as_owner_and_writes_its_state(kits: Path) -> None:
    """The words are those that tests/deployment starts every participant with, and a container."""
    kit, base = kits / "clinic", kits.parents[2]
    found = fields(unit(kit))
    assert shlex.split(found["ExecStart"]) == ["/bin/bash", str(kit / "startup/sub_start.sh"), "--once"]
    assert shlex.split(found["ReadWritePaths"]) == [str(kit), str(base / "state")]
    assert shlex.split(found["ReadOnlyPaths"]) == [str(base / "data"), str(base / "weights")]
    owner = kit.stat().st_uid
    assert found["User"] != "root"
    assert subprocess.run(["id", "-u", found["User"]], capture_output=True, text=True, check=True).stdout == f"{owner}\n"
    assert found["ProtectSystem"] == "strict"
    assert found["NoNewPrivileges"] == found["PrivateTmp"] == found["PrivateDevices"] == "yes"
    assert found["CapabilityBoundingSet"] == ""


def test_unit_has_low_port_and_gpu_by_need(kits: Path) -> None:
    server, gpu = fields(unit(kits / "localhost")), fields(unit(kits / "gpu"))
    assert server["AmbientCapabilities"] == server["CapabilityBoundingSet"] == "CAP_NET_BIND_SERVICE"
    assert str(kits.parents[2] / "server-state") in shlex.split(server["ReadWritePaths"])
    assert server["PrivateDevices"] == "yes"
    assert "PrivateDevices" not in gpu
    assert gpu["DevicePolicy"] == "closed"


ODD = ["with space", "per%cent %n", 'quote"d', "back\\slash", "$HOME ${USER}", "-dash; rm", "[Service]", "ünïcode"]


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_odd_folders(kits: Path, tmp_path: Path) -> None:
    kit = tmp_path / " ".join(ODD)
    shutil.copytree(kits / "gpu", kit, symlinks=True)
    _give(kit)
    path = tmp_path / "consilium-gpu.service"
    path.write_text(unit(kit).replace("User=nobody", "User=daemon"))  # it warns of that special user
    done = subprocess.run([str(ANALYZE), "verify", "--man=no", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    rated = subprocess.run(
        [str(ANALYZE), "security", "--offline=true", "--threshold=30", path], capture_output=True, check=False
    )  # exit code 1 over an exposure of 3.0 of 10
    assert rated.returncode == 0


@pytest.mark.parametrize("name", ["../../cron.d/x", "a\nExecStartPre=/bin/true", "", "%n", "a b", "x" * 101])
def test_certificate_names_cannot_inject(name: str, kits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "kit_name", lambda kit: name)
    for use in (unit, service.file_name):
        with pytest.raises(ConfigError, match="is no participant's name"):
            use(kits / "clinic")


@pytest.mark.parametrize("name", ["a\nExecStartPre=/bin/true", "a\rb", "tab\there", "nul\x00", "\x7f", "line\u2028end", ""])
def test_control_characters_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="control characters"):
        quoted(name)


def test_quoting_by_systemds_manual() -> None:
    """systemd.syntax(7) and systemd.unit(5): \\ and " behind a backslash, %% for %."""
    assert quoted('/a b/%h/"c"\\') == '"/a b/%%h/\\"c\\"\\\\"'


def test_unsafe_kits_are_refused(kits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Path(shutil.copytree(kits / "gpu", tmp_path / "kit", symlinks=True))
    if os.geteuid() == 0:
        with pytest.raises(ConfigError, match="belongs to root, and the service runs as its owner"):
            unit(kit)
        _give(kit)
        os.chown(kit / "startup/client.key", 1, 1)
        with pytest.raises(ConfigError, match=r"client\.key: does not belong to the kit's owner"):
            unit(kit)
        _give(kit)
    (kit / "local/site.yaml").write_text("state: /srv/nowhere\n")
    with pytest.raises(ConfigError, match="/srv/nowhere: is not there"):
        unit(kit)
    (kit / "local/site.yaml").write_text("{}\n")
    monkeypatch.setattr(service, "TEMPORARY", (tmp_path,))
    with pytest.raises(ConfigError, match="a /tmp of its own"):
        unit(kit)


def test_unit_is_written_and_not_started(
    kits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service, "UNITS", tmp_path)
    assert run(monkeypatch, "service", "install", kits / "clinic", "--print") == 0
    printed = capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert run(monkeypatch, "service", "install", kits / "clinic") == 2
    assert "only root writes there" in capsys.readouterr().err
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert run(monkeypatch, "service", "install", kits / "clinic") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["consilium-clinic.service"]
    assert (tmp_path / "consilium-clinic.service").read_text() == printed
