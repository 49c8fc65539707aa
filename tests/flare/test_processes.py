"""A kit that runs is not changed and not copied: a living process counts, a pid file that a crash left does not."""

import builtins
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from nvflare.lighter.prov_utils import prepare_builders
from nvflare.lighter.provision import prepare_project
from nvflare.lighter.provisioner import Provisioner

from consilium.config.deployment import load_deployment
from consilium.core.errors import ConfigError
from consilium.flare.kit import deploy_prepare, key_lock, processes
from consilium.flare.kit.kit_reader import LOCKED
from consilium.flare.kit.local_folder import apply_local, update_local
from consilium.flare.kit.provision import project_of, provision
from consilium.flare.kit.renewal import renew, update_kit
from tests.conftest import run
from tests.flare.running import earlier

ROOT = Path(__file__).parents[2]
SITES = ROOT / "provisioning" / "sites.yml"
CLIENT = "nvflare.private.fed.app.client.client_train"
SERVER = "nvflare.private.fed.app.server.server_train"
PASSPHRASE = "five words of a telephone call"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with earlier():
        return provision(SITES, tmp_path_factory.mktemp("kits")) / "hospital-c"


@pytest.fixture
def kit(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "hospital-c", symlinks=True))


def sleeping(*words: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process with these words in its command line until the test ends."""
    code = "import time; print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code, *map(str, words)], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture
def running(kit: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process with the command line of FLARE's client of the kit."""
    yield from sleeping("-m", CLIENT, "-m", kit, "-s", "fed_client.json")


CHANGES: list[Callable[[Path], object]] = [
    update_local,
    lambda kit: apply_local(SITES, kit),
    lambda kit: update_kit(kit, kit),
    lambda kit: deploy_prepare.prepare(kit, ROOT / "provisioning/container/slurm.yaml", kit.with_name("out")),
    lambda kit: key_lock.lock(kit, PASSPHRASE),
]


def content(kit: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in kit.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("change", "linked"),
    [(change, False) for change in CHANGES]
    + [(CHANGES[0], True)]
    + [pytest.param(change, True, marks=pytest.mark.slow) for change in CHANGES[1:]],
)
def test_a_running_kit_is_refused_before_anything_is_written(
    change: Callable[[Path], object], linked: bool, kit: Path, running: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, path = content(kit), kit
    if linked:
        (path := kit.with_name("link")).symlink_to(kit)
    with pytest.raises(ConfigError, match=rf"runs from it \(process {running.pid}\); stop it first: consilium stop") as told:
        change(path)
    assert content(kit) == before
    remedy = str(told.value).rpartition("first: consilium ")[2]
    assert run(monkeypatch, *remedy.split()) == 0
    running.wait(10)
    with suppress(ConfigError):  # another fault of these hand-made calls
        change(path)
    processes.check_stopped(path)


def test_stop_command_stops_a_kit_and_clears_the_way_for_its_next_start(
    kit: Path, tmp_path: Path, running: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A pid file would refuse the next start, and a request to stop would end it."""
    for name in processes.MARKS:
        (kit / name).write_text("1")
    for job in sleeping("-m", f"{processes.MODULES}client.worker_process", "-m", kit):
        assert run(monkeypatch, "stop", kit) == 0
        assert None not in (running.poll(), job.poll())
    assert not any((kit / name).exists() for name in processes.MARKS)
    assert str(running.pid) in capsys.readouterr().out
    assert run(monkeypatch, "stop", kit) == 0
    assert "nothing runs" in capsys.readouterr().out
    assert run(monkeypatch, "stop", tmp_path) == 2


def test_a_running_kit_stays_locked_or_open(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may read the key again. `unlock` alone is allowed: a logout may have emptied the folder in memory."""
    monkeypatch.setitem(key_lock.COST, "n", 2**10)
    key_lock.lock(kit, PASSPHRASE)
    key_lock.unlock(kit, PASSPHRASE)
    before = content(kit)
    for process in sleeping("-m", CLIENT, "-m", kit, "-s", "fed_client.json"):
        for change in (lambda: key_lock.lock(kit), lambda: key_lock.unlock(kit, PASSPHRASE, for_good=True)):
            with pytest.raises(ConfigError, match=f"runs from it .process {process.pid}.; stop it first"):
                change()
        assert content(kit) == before
        shutil.rmtree((kit / "startup/client.key").resolve().parent)
        key_lock.unlock(kit, PASSPHRASE)
        assert content(kit) == before
    key_lock.unlock(kit, PASSPHRASE, for_good=True)
    assert not (kit / LOCKED).exists()


def test_a_server_is_never_renewed_while_it_runs(made: Path) -> None:
    """With --running it is refused even when stopped; without, it is refused while it runs."""
    kit = made.parent / "fl.hub.example"
    new = renew(SITES, made.parents[2], ["fl.hub.example"]) / "fl.hub.example"
    before, refused = content(kit), "a server reads its certificate at its start; stop it, and leave out --running"
    with pytest.raises(ConfigError, match=refused):
        update_kit(kit, new, running=True)
    for process in sleeping("-m", SERVER, "-m", kit, "-s", "fed_server.json"):
        with pytest.raises(ConfigError, match=f".process {process.pid}.; stop it first"):
            update_kit(kit, new)
        with pytest.raises(ConfigError, match=refused):
            update_kit(kit, new, running=True)
    assert content(kit) == before
    update_kit(kit, new)
    assert content(kit) != before


def test_pid_files_and_others_commands_are_no_sign_of_a_running_kit(kit: Path) -> None:
    for mark in processes.MARKS:
        (kit / mark).write_text("1\n")  # lives, and is none of the kit's
    processes.check_stopped(kit)
    editor = [kit / "startup" / processes.START]
    for words in (["doctor", kit], ["-m", CLIENT, "-m", f"{kit}-2"], [kit / "local/site.yaml"], editor, [CLIENT, kit]):
        for other in sleeping(*words):
            processes.check_stopped(kit)
            processes.stop([kit])
            assert other.poll() is None


def test_a_change_in_a_copy_changes_no_kit_whose_folders_are_links(kit: Path, tmp_path: Path) -> None:
    for name in ("local", "startup"):
        (kit / name).rename(tmp_path / name)
        (kit / name).symlink_to(tmp_path / name)
    (tmp_path / "local/site.yaml").rename(tmp_path / "site.yaml")
    (kit / "local/site.yaml").symlink_to(tmp_path / "site.yaml")
    before = (tmp_path / "site.yaml").read_text()
    copied = deploy_prepare.copy_without_run_files(kit, tmp_path / "copy")
    for path in [path for name in ("local", "startup") for path in (copied / name).rglob("*") if path.is_file()]:
        assert path.resolve().is_relative_to(copied)
    (copied / "local/site.yaml").write_text("")
    assert (tmp_path / "site.yaml").read_text() == before
    (tmp_path / "site.yaml").unlink()
    with pytest.raises(ConfigError, match=r"local/site\.yaml: cannot be copied \(.*No such file"):
        deploy_prepare.copy_without_run_files(kit, tmp_path / "second")


def test_a_copy_has_only_what_a_fresh_kit_has(kit: Path, tmp_path: Path) -> None:
    (kit / "local/custom").mkdir()
    (kit / "local/custom/own.py").touch()
    fresh = {path.relative_to(kit) for path in kit.rglob("*") if not path.is_dir()}
    for name in (
        "local/custom/__pycache__/own.pyc",
        "log.txt",
        "pid.fl",
        "daemon_pid.fl",
        "audit.log",
        "_consilium/errors/1.log",
        "4f1d/app/x",
        "transfer/job/meta.json",
        "startup/pid.fl",
        "startup/__pycache__/x.pyc",
        "startup/.ipynb_checkpoints/start-checkpoint.sh",
        "local/notes.txt",
        "local/datalist.json",
        "local/approved.json",
        "local/.ipynb_checkpoints/site-checkpoint.yaml",
    ):
        (kit / name).parent.mkdir(parents=True, exist_ok=True)
        (kit / name).write_text("1")
    copied = deploy_prepare.copy_without_run_files(kit, tmp_path / "copy")
    assert {path.relative_to(copied) for path in copied.rglob("*") if not path.is_dir()} == fresh


def test_the_script_that_would_start_a_participant_again_ends_first(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its process has the higher number, as after the numbers of processes have begun anew."""
    told: list[str] = []
    found = []
    for words in (["python3", "-u", "-m", "nvflare.private.fed.app.client.client_train"], ["/bin/bash", processes.START]):
        one = Mock(info={"cmdline": words})
        one.send_signal = lambda number, name=words[0]: told.append(name)
        found.append(one)
    found.append(Mock(info={"cmdline": None}))  # it ended while the processes of another kit were looked for
    looks = iter([found, []])
    monkeypatch.setattr(processes, "processes", lambda kit, jobs_only=False: next(looks))
    monkeypatch.setattr(processes.psutil, "wait_procs", lambda found, seconds: None)
    processes.stop([kit])
    assert told == ["/bin/bash", "python3"]


def test_the_root_key_is_never_readable_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at whenever FLARE writes a file, also into a folder that was open before."""
    seen: list[int] = []
    state = tmp_path / "consilium" / "state"
    state.mkdir(parents=True, mode=0o755)

    real = builtins.open

    def watched(file: object, *rest: object, **more: object) -> object:
        if str(file).endswith("cert.json"):
            seen.append(state.stat().st_mode & 0o077)
        return real(file, *rest, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(builtins, "open", watched)
    provision(SITES, tmp_path)
    assert seen
    assert set(seen) == {0}
    assert (state / "cert.json").stat().st_mode & 0o077 == 0


def test_a_backup_of_the_start_script_is_no_running_kit(kit: Path, tmp_path: Path) -> None:
    (tmp_path / "backup.sh").write_text("echo; read -r line")
    words = ["bash", str(tmp_path / "backup.sh"), str(kit / "startup" / processes.START)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as backup:
        assert backup.stdout
        assert backup.stdout.readline()
        processes.check_stopped(kit)
        processes.stop([kit])
        assert backup.poll() is None
        backup.kill()


def test_stop_of_a_relative_path_and_a_link_spares_a_kit_whose_name_begins_alike(
    kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Path(shutil.copytree(kit, f"{kit}-2", symlinks=True))
    (link := kit.with_name("link")).symlink_to(kit)
    monkeypatch.chdir(kit.parent)
    for path in (kit.name, f"./{kit.name}/../{kit.name}/", link.name):
        for longer in sleeping("-m", CLIENT, "-m", other, "-m", kit.parent):
            for process in sleeping("-m", CLIENT, "-m", kit / "startup" / ".."):
                assert run(monkeypatch, "stop", path) == 0
                assert process.poll() is not None
                assert longer.poll() is None


def test_flares_own_command_keeps_the_root_key_private_too(tmp_path: Path) -> None:
    raw = project_of(load_deployment(SITES), SITES)
    Provisioner(str(tmp_path), prepare_builders(raw)).provision(prepare_project(raw), logger=Mock())
    state = tmp_path / "consilium" / "state"
    assert (state / "cert.json").is_file()
    assert state.stat().st_mode & 0o077 == 0
