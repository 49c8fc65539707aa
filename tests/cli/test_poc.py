"""`consilium poc` before anything starts: what it refuses, its folder, its port, and its messages. No federation runs."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from consilium.cli import poc
from consilium.flare.kit.local_federation import LocalFederation
from tests.conftest import JOBS, run


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the folders for which a federation was about to be made. The command ends there."""
    folders = list[Path]()

    def make(folder: Path, *_: object, **__: object) -> Any:
        folders.append(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(poc, "LocalFederation", make)
    return folders


@pytest.mark.parametrize("content", [b'{"a":', b"", b"[]", b"\xff"])
def test_damaged_job_folder_is_refused_before_anything_is_made(
    content: bytes, tmp_path: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = shutil.copytree(JOBS / "quickstart", tmp_path / "job")
    (job / "meta.json").write_bytes(content)
    assert run(monkeypatch, "poc", job, "--workspace", tmp_path / "w") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{job}/meta.json: ")
    assert line.endswith(f"restore the file, or give {job}/app/config/job.yaml instead of the folder")
    assert not made
    assert not (tmp_path / "w").exists()


def test_commands_of_the_same_second_have_folders_of_their_own(
    tmp_path: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(poc.time, "strftime", lambda form: "poc-20260101-120000")
    for _ in range(3):
        assert run(monkeypatch, "poc", "--keep") == 130
    assert [one.name for one in made] == ["poc-20260101-120000", "poc-20260101-120000-2", "poc-20260101-120000-3"]
    assert all(one.is_dir() and one.stat().st_mode & 0o077 == 0 for one in made)


def test_folder_made_by_another_command_in_the_same_moment_is_refused(
    tmp_path: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "w").mkdir()
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert run(monkeypatch, "poc", "--keep", "--workspace", tmp_path / "w") == 2
    assert capsys.readouterr().err == f"--workspace: {tmp_path / 'w'}: exists; give a new folder\n"
    assert not made


@pytest.mark.parametrize("filename", [None, "w/kits/project.yml"])
def test_full_disk_names_the_file_and_a_command_that_works(
    filename: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), filename)

    monkeypatch.setattr(poc, "LocalFederation", full)
    assert run(monkeypatch, "poc", "--keep", "--workspace", tmp_path / "w") == 1
    why = "No space left on device; make room; start it anew, with another --workspace if you give one"
    assert capsys.readouterr().err == f"{filename or tmp_path / 'w'}: {why}\n"


def test_long_site_name_is_refused_before_anything_is_made(
    tmp_path: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A certificate's name has at most 64 characters."""
    for length, code in ((65, 2), (64, 130)):
        folder = tmp_path / str(length)
        assert run(monkeypatch, "poc", "--keep", "--sites", f"{'s' * length},b", "--workspace", folder) == code
        assert ("use at most 64 letters" in capsys.readouterr().err) == (code == 2)
        assert folder.exists() == (code == 130)
    person = {"name": "lead@hub.example", "org": "hub", "role": "lead"}
    server = {"name": "localhost", "org": "hub", "state": "/srv/consilium"}
    for field, raw in {
        "sites.0.name": {"sites": [{"name": "s" * 65, "org": "s"}]},
        "server.name": {"server": server | {"name": "s" * 65}},
        "admins.0.name": {"admins": [person | {"name": f"{'s' * 60}@hub.example"}]},
    }.items():
        whole = {"name": "p", "server": server, "sites": [{"name": "s", "org": "s"}], "admins": [person]} | raw
        (tmp_path / "sites.yml").write_text(yaml.safe_dump(whole))
        assert run(monkeypatch, "provision", tmp_path / "sites.yml", "-o", tmp_path / "kits") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert field in line
        assert "64" in line
        assert not (tmp_path / "kits").exists()


def test_ctrl_c_while_a_command_is_imported_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(target: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("consilium.cli.main.resolve", interrupted)
    assert run(monkeypatch, "poc", "--keep") == 130
    assert capsys.readouterr().err == "interrupted\n"


# port ------------------------------------------------------------------------------------------------------------------

GRPC = """
import sys
import grpc
from concurrent import futures
server = grpc.server(futures.ThreadPoolExecutor(1))
assert server.add_insecure_port(f"0.0.0.0:{sys.argv[1]}") == int(sys.argv[1])
"""


def grpc_server(port: int) -> subprocess.CompletedProcess[str]:
    """Have a process of its own make a gRPC server at a port, as FLARE's server does."""
    return subprocess.run([sys.executable, "-c", GRPC, str(port)], capture_output=True, text=True, check=False)


def test_taken_port_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE's server writes gRPC's line into its log and runs on. A line about another port does not count."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("consilium.flare.kit.processes.reserve_port", lambda: taken)
        federation = LocalFederation(tmp_path, {"site-1": {}}, make=lambda file, folder: folder)
        assert yaml.safe_load(federation.file.read_text())["server"]["port"] == port
        with subprocess.Popen(["sleep", "60"]) as process:
            federation.started["server"] = process  # type: ignore[assignment]
            (tmp_path / "server.log").write_text(f"Failed to add port: '0.0.0.0:{port + 1}': Address already in use\n")
            federation.check_alive()
            (tmp_path / "server.log").write_text(grpc_server(port).stderr)
            told = f"^port {port} of this machine is taken by another program; run the command again$"
            with pytest.raises(poc.ConsiliumError, match=told):
                federation.check_alive()
            process.kill()


def test_port_is_reserved_for_the_server(tmp_path: Path) -> None:
    """Kits take seconds to make, and the server takes seconds to start."""
    federation = LocalFederation(tmp_path, {"site-1": {}}, make=lambda file, folder: folder)
    for address in ("", "127.0.0.1"):
        with pytest.raises(OSError, match="in use"):
            socket.create_server((address, federation.port))
    assert grpc_server(federation.port).returncode == 0
    port = federation.port
    del federation
    socket.create_server(("127.0.0.1", port)).close()


def test_stop_answers_in_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kits/poc/prod_00").mkdir(parents=True)
    assert run(monkeypatch, "poc", "--stop", tmp_path, "--format", "json") == 0
    assert json.loads(capsys.readouterr().out) == {"workspace": str(tmp_path), "stopped": False}
