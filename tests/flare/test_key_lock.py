"""Private keys under a passphrase: on the way and on disk nothing opens the kit without it, and an opened kit is as it was."""

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from consilium.core.errors import ConfigError
from consilium.flare.kit import key_lock
from consilium.flare.kit.certificates import check_certificate_time
from consilium.flare.kit.doctor import examine
from consilium.flare.kit.kit_hardening import is_as_signed
from consilium.flare.kit.kit_reader import LOCKED, has_private_key
from consilium.flare.kit.renewal import renew, update_kit
from tests.conftest import run

PASSPHRASE = "five words of a telephone call"
OTHER_USER = 65534
COST = dict(key_lock.COST)


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Derive keys in a millisecond: what a guess costs has a test of its own."""
    monkeypatch.setitem(key_lock.COST, "n", 2**10)


def test_a_guess_costs_what_owasp_asks() -> None:
    """Password Storage Cheat Sheet: scrypt with N = 2^17 (128 MiB), r = 8, p = 1."""
    assert COST == {"length": 32, "n": 2**17, "r": 8, "p": 1}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "passphrase"
    path.write_text(f"{PASSPHRASE}\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder in which kits are opened."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(key_lock, "IN_MEMORY", (str(tmp_path / "memory"),))
    return tmp_path / "memory"


@pytest.fixture
def public() -> Iterator[Path]:
    """Return a folder that all users may enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextmanager
def other_user() -> Iterator[None]:
    os.seteuid(OTHER_USER)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture(scope="module")
def renewed(made: Path) -> Path:
    return renew(made.parents[1] / "sites.yml", made.parents[1], ["clinic"]) / "clinic"


def command_in(message: str) -> list[list[str]]:
    """Return the words of the commands that a message says to run."""
    (command,) = re.findall(r"run `([^`]+)`", message)
    return [shlex.split(one) for one in command.split(" && ")]


def test_a_locked_kit_holds_no_key_and_opens_in_memory_as_it_was(
    kit: Path, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = kit / "startup/client.key"
    before, signature = key.read_bytes(), (kit / "startup/signature.json").read_bytes()
    well = {one.check for one in examine(kit) if one.ok} | {"server"}  # no server runs
    assert run(monkeypatch, "lock", kit, "--passphrase-file", file) == 0
    assert not key.exists()
    assert stat.S_IMODE((kit / LOCKED).stat().st_mode) == 0o600
    content = b"".join(path.read_bytes() for path in kit.rglob("*") if path.is_file() and path.parent.name != "local")
    assert not any(line in content for line in before.splitlines() if len(line) > 20 and b"PRIVATE" not in line)
    found = {one.check: one for one in examine(kit)}
    assert found["signature"].ok
    assert f"run `consilium unlock {kit}`" in found["key"].line()
    assert {one.check for one in found.values() if not one.ok and one.check in well} == {"key"}
    with pytest.raises(ConfigError, match="consilium unlock"):
        check_certificate_time(kit)
    capsys.readouterr()
    assert run(monkeypatch, "unlock", kit / "startup" / "..", "--passphrase-file", file) == 0  # as start.sh calls it
    told = capsys.readouterr().out
    assert "in memory" in told
    assert told.startswith(f"{kit}: ")
    assert key.read_bytes() == before
    assert key.resolve().is_relative_to("/dev/shm")
    assert stat.S_IMODE(key.resolve().stat().st_mode) == 0o600
    assert stat.S_IMODE(key.resolve().parent.stat().st_mode) == 0o700
    assert (kit / "startup/signature.json").read_bytes() == signature
    assert is_as_signed(kit / "startup")
    found = {one.check: one for one in examine(kit)}
    assert found["signature"].ok
    assert found["key"].line() == "ok       key: locked, and open now"
    check_certificate_time(kit)
    opened = key.resolve().parent
    capsys.readouterr()
    assert run(monkeypatch, "unlock", kit, "--format", "json") == 0  # open already: nobody is asked
    assert json.loads(capsys.readouterr().out) == {"kit": str(kit), "keys": None}
    assert run(monkeypatch, "lock", kit, "--format", "json") == 0  # closes it: nobody is asked
    assert json.loads(capsys.readouterr().out) == {"kit": str(kit), "in_clear": []}
    assert not opened.exists()
    assert not key.is_symlink()
    assert run(monkeypatch, "unlock", kit, "--passphrase-file", file, "--for-good") == 0
    assert key.read_bytes() == before
    assert not key.is_symlink()
    assert not (kit / LOCKED).exists()
    assert run(monkeypatch, "unlock", kit) == 2


def test_two_locks_of_one_kit_are_different_and_each_opens(kit: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(kit, tmp_path / "other", symlinks=True))
    for one in (kit, other):
        key_lock.lock(one, PASSPHRASE)
    assert (kit / LOCKED).read_bytes() != (other / LOCKED).read_bytes()
    for one in (kit, other):
        key_lock.unlock(one, PASSPHRASE, for_good=True)
    assert (kit / "startup/client.key").read_bytes() == (other / "startup/client.key").read_bytes()


@pytest.mark.parametrize("wrong", ["passphrase", "token", "salt", "empty", "binary"])
def test_what_does_not_open_is_one_line(wrong: str, kit: Path) -> None:
    key_lock.lock(kit, PASSPHRASE)
    path = kit / LOCKED
    salt, token = path.read_bytes().split()
    damaged = {
        "token": salt + b"\n" + token[:-8] + b"AAAAAA==",
        "salt": b"00" * 16 + b"\n" + token,
        "empty": b"",
        "binary": os.urandom(200),
    }
    if wrong in damaged:
        path.write_bytes(damaged[wrong])
    with pytest.raises(ConfigError, match="wrong passphrase, or a damaged file"):
        key_lock.unlock(kit, PASSPHRASE + "!" if wrong == "passphrase" else PASSPHRASE)
    assert not (kit / "startup/client.key").exists()


@pytest.mark.parametrize("name", ["../local/authorization.json", "/tmp/x.key", "start.sh", "../x.key"])
def test_a_file_made_by_others_writes_keys_only(name: str, kit: Path) -> None:
    key_lock.lock(kit, PASSPHRASE)
    salt = os.urandom(16)
    token = key_lock._cipher(PASSPHRASE, salt).encrypt(json.dumps({name: "x"}).encode())
    (kit / LOCKED).write_bytes(salt.hex().encode() + b"\n" + token)
    with pytest.raises(ConfigError, match="other files than keys"):
        key_lock.unlock(kit, PASSPHRASE, for_good=True)


def test_a_link_of_others_is_not_followed(kit: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("x")
    key_lock.lock(kit, PASSPHRASE)
    (kit / "startup/client.key").symlink_to(tmp_path / "mine" / "letter")
    key_lock.lock(kit)
    assert (tmp_path / "mine" / "letter").read_text() == "x"
    assert not (kit / "startup/client.key").is_symlink()


def test_a_passphrase_is_long_or_given_by_nobody(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short").write_text("x" * 11)
    assert run(monkeypatch, "lock", kit, "--passphrase-file", tmp_path / "short") == 2
    assert "11 characters; use at least 12" in capsys.readouterr().err
    (tmp_path / "short").write_text("x" * 4097)
    assert run(monkeypatch, "lock", kit, "--passphrase-file", tmp_path / "short") == 2
    assert "over 4,096 characters" in capsys.readouterr().err
    assert run(monkeypatch, "lock", kit) == 2
    assert "nobody to ask" in capsys.readouterr().err
    assert (kit / "startup/client.key").is_file()
    (tmp_path / "short").write_text("x" * 12)
    monkeypatch.setenv("CONSILIUM_PASSPHRASE_FILE", str(tmp_path / "short"))
    assert run(monkeypatch, "lock", kit) == 0


def test_without_memory_the_page_says_that_keys_are_on_disk(
    kit: Path, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(key_lock, "IN_MEMORY", ("", "/no/such/folder"))
    key_lock.lock(kit, PASSPHRASE)
    assert run(monkeypatch, "unlock", kit, "--passphrase-file", file) == 0
    assert "its keys are on disk" in capsys.readouterr().out
    assert (kit / "startup/client.key").is_file()
    key_lock.lock(kit)
    assert not list(kit.glob("consilium-keys-*"))


def test_a_renewed_kit_travels_locked_and_stays_so(renewed: Path, kit: Path, tmp_path: Path) -> None:
    key_lock.lock(kit, PASSPHRASE)
    new = Path(shutil.copytree(renewed, tmp_path / "new"))
    with pytest.raises(ConfigError, match="its key is in clear, yours is locked; run `consilium lock` and `consilium unlock`"):
        update_kit(kit, new)
    key_lock.lock(new, PASSPHRASE + " new")
    with pytest.raises(ConfigError, match="consilium unlock"):
        update_kit(kit, new)
    key_lock.unlock(new, PASSPHRASE + " new")
    update_kit(kit, new)
    key = kit / "startup/client.key"
    assert key.is_symlink()  # nothing of it came to the disk
    key_lock.lock(kit)
    assert not key.exists()
    key_lock.unlock(kit, PASSPHRASE + " new")
    assert is_as_signed(kit / "startup")
    key_lock.lock(kit)


def test_lock_names_the_former_key_of_a_kit_that_was_open_at_its_update(
    renewed: Path, kit: Path, tmp_path: Path, memory: Path
) -> None:
    """It may be the only one: the former keys.locked is gone."""
    key_lock.lock(kit, PASSPHRASE)
    former = key_lock.unlock(kit, PASSPHRASE)
    new = Path(shutil.copytree(renewed, tmp_path / "new"))
    key_lock.lock(new, PASSPHRASE + " new")
    renewed = key_lock.unlock(new, PASSPHRASE + " new")
    update_kit(kit, new)
    assert key_lock.lock(kit) == [former / "client.key"]
    assert not renewed.exists()
    assert not list((kit / "startup").glob("*.key"))
    key_lock.unlock(kit, PASSPHRASE + " new", for_good=True)
    assert is_as_signed(kit / "startup")


@pytest.mark.parametrize("linked", [True, False])
def test_a_kit_with_a_relative_path_is_opened_and_locked_without_a_folder_in_memory(
    linked: bool, kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_lock, "IN_MEMORY", ())
    monkeypatch.chdir(kit.parent)
    relative, before = Path(kit.name), (kit / "startup/client.key").read_bytes()
    key_lock.lock(relative, PASSPHRASE)
    opened = key_lock.unlock(relative, PASSPHRASE)
    assert (kit / "startup/client.key").read_bytes() == before
    if not linked:  # as after a crash before the link
        (kit / "startup/client.key").unlink()
    assert key_lock.lock(relative) == []
    assert not opened.exists()


def test_a_key_that_others_can_read_is_a_problem(kit: Path) -> None:
    (kit / "startup/client.key").chmod(0o644)
    found = {one.check: one for one in examine(kit)}["key"]
    assert "mode 644: others can read it" in found.found
    assert found.remedy.startswith(f"chmod 600 {kit}/startup/client.key")


def test_a_key_that_is_not_in_the_locked_file_is_never_removed(kit: Path, made: Path) -> None:
    key = kit / "startup/client.key"
    before = key.read_bytes()
    (kit / LOCKED).write_bytes(b"")  # half a copy
    for passphrase in (None, PASSPHRASE):
        with pytest.raises(ConfigError, match="wrong passphrase, or a damaged file"):
            key_lock.lock(kit, passphrase)
    assert key.read_bytes() == before
    (kit / LOCKED).unlink()
    key_lock.lock(kit, PASSPHRASE)
    other = (made / "a@hub.example/startup/client.key").read_bytes()
    key.write_bytes(other)
    with pytest.raises(ConfigError, match="another key than in"):
        key_lock.lock(kit, PASSPHRASE)
    with pytest.raises(ConfigError, match="another key than in"):
        key_lock.unlock(kit, PASSPHRASE, for_good=True)
    assert key.read_bytes() == other
    key.unlink()
    key_lock.unlock(kit, PASSPHRASE, for_good=True)
    assert key.read_bytes() == before


def test_an_interrupted_lock_is_a_problem_and_is_ended_by_the_next(
    kit: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = kit / "startup/client.key"
    before = key.read_bytes()

    def stop(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(key_lock, "_remove_key", stop)
        with pytest.raises(KeyboardInterrupt):
            key_lock.lock(kit, PASSPHRASE)
    (kit / "startup/.client.key.7").write_bytes(before[:99])  # of an unlock for good that was killed
    found = {one.check: one for one in examine(kit)}["key"]
    assert "in clear" in found.found
    assert f"consilium lock {kit}" in found.remedy
    assert run(monkeypatch, "lock", kit, "--passphrase-file", file) == 0
    assert not list((kit / "startup").glob("*key*"))
    key_lock.unlock(kit, PASSPHRASE, for_good=True)
    assert key.read_bytes() == before


def test_a_former_key_in_the_kit_is_not_left_in_clear(kit: Path) -> None:
    shutil.copytree(kit / "startup", kit / "startup.old")
    with pytest.raises(ConfigError, match=r"startup\.old/client\.key: a private key in clear; move"):
        key_lock.lock(kit, PASSPHRASE)
    assert (kit / "startup/client.key").is_file()
    shutil.rmtree(kit / "startup.old")
    key_lock.lock(kit, PASSPHRASE)


def test_what_is_no_passphrase_or_no_key_is_one_line(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff" * 20)
    assert run(monkeypatch, "lock", kit, "--passphrase-file", tmp_path / "bytes") == 2
    assert "not text in UTF-8" in capsys.readouterr().err
    (kit / "startup/client.key").write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError, match="not a key in PEM format"):
        key_lock.lock(kit, PASSPHRASE)
    (kit / "startup/client.key").unlink()
    with pytest.raises(ConfigError, match="the private key is not there"):
        key_lock.lock(kit, PASSPHRASE)
    assert not (kit / LOCKED).exists()


def test_a_restart_of_the_machine_does_not_alter_the_kit(kit: Path) -> None:
    key_lock.lock(kit, PASSPHRASE)
    shutil.rmtree(key_lock.unlock(kit, PASSPHRASE))
    assert is_as_signed(kit / "startup")
    shutil.rmtree(key_lock.unlock(kit, PASSPHRASE))


@pytest.mark.parametrize("damage", ["short", "other"])
def test_lock_refuses_if_the_locked_file_has_changed_since_unlock(
    damage: str, kit: Path, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = kit / "startup/client.key"
    before = key.read_bytes()
    key_lock.lock(kit, PASSPHRASE)
    key_lock.unlock(kit, PASSPHRASE)
    if damage == "short":
        os.truncate(kit / LOCKED, 1000)
    else:
        (kit / LOCKED).write_bytes(os.urandom(3000))
    assert run(monkeypatch, "lock", kit) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "has changed since `consilium unlock`" in told.err
    assert key.read_bytes() == before
    move, lock = command_in(told.err)
    subprocess.run(move, check=True)
    assert run(monkeypatch, *lock[1:]) == 2  # there is no terminal
    assert f"{kit / LOCKED} is gone; new passphrase: nobody to ask" in capsys.readouterr().err
    assert key.read_bytes() == before
    assert run(monkeypatch, *lock[1:], "--passphrase-file", file) == 0
    assert not key.is_symlink()
    key_lock.unlock(kit, PASSPHRASE, for_good=True)
    assert key.read_bytes() == before


@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize("error", [OSError(30, "Read-only file system"), KeyboardInterrupt()])
def test_failed_unlock_leaves_no_key(
    error: BaseException, for_good: bool, kit: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (kit / "startup/client.key").read_bytes()
    key_lock.lock(kit, PASSPHRASE)

    def write_and_fail(path: Path, data: bytes) -> None:
        path.write_bytes(data)
        raise error

    def fail(self: Path, target: Path) -> None:
        raise error

    with monkeypatch.context() as patched:
        if for_good:
            patched.setattr(key_lock, "write_atomic", write_and_fail)
        else:
            patched.setattr(Path, "symlink_to", fail)
        with pytest.raises(type(error)):
            key_lock.unlock(kit, PASSPHRASE, for_good)
    assert not list(memory.iterdir())
    assert not list((kit / "startup").glob("*key"))
    key_lock.unlock(kit, PASSPHRASE, for_good=True)
    assert (kit / "startup/client.key").read_bytes() == before


def test_lock_removes_keys_in_memory_without_links_of_this_kit_only(kit: Path, tmp_path: Path, memory: Path) -> None:
    key_lock.lock(kit, PASSPHRASE)
    other = Path(shutil.copytree(kit, tmp_path / "other", symlinks=True))
    kept = {key_lock.unlock(other, PASSPHRASE)}
    (other / "startup/client.key").unlink()
    key_lock.unlock(kit, PASSPHRASE)
    (kit / "startup/client.key").unlink()  # as after a crash before the link
    key_lock.unlock(kit, PASSPHRASE)
    (memory / "consilium-keys-link").symlink_to(tmp_path / "other")
    kept.add(memory / "consilium-keys-link")
    if os.geteuid() == 0:
        foreign = Path(shutil.copytree(next(memory.glob("*/client.key")).parent, memory / "consilium-keys-foreign"))
        (foreign / key_lock.OPENED).write_text(json.dumps({"kit": str(kit), "sha256": ""}))
        os.chown(foreign, OTHER_USER, OTHER_USER)
        kept.add(foreign)
    assert len(list(memory.iterdir())) == len(kept) + 2
    assert key_lock.lock(kit) == []
    assert set(memory.iterdir()) == kept
    assert (other / "startup").is_dir()


def test_lock_keeps_and_names_keys_in_memory_of_another_locked_file(
    kit: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They may be the only ones."""
    key_lock.lock(kit, PASSPHRASE)
    folder = key_lock.unlock(kit, PASSPHRASE)
    (kit / "startup/client.key").unlink()
    os.truncate(kit / LOCKED, 1000)
    assert run(monkeypatch, "lock", kit) == 0
    told = capsys.readouterr().err
    assert told == f"warning: private keys in clear stay: {folder}/client.key; move them to a safe place, or delete them\n"
    assert (folder / "client.key").is_file()


def test_lock_names_private_keys_that_stay_in_clear(
    kit: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = kit / "startup/client.key"
    (tmp_path / "safe").write_bytes(key.read_bytes())
    copies = [kit / "local/sub/notes.txt", kit / "my-key.pem", kit / "startup/client.key.bak", tmp_path / "safe"]
    copies[0].parent.mkdir()
    for copy in copies:
        copy.write_bytes(b"# my key\n" + key.read_bytes())
    (kit / "local/public.pem").write_text("-----BEGIN PUBLIC KEY-----\n")
    (kit / "local/locked.pem").write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\n")
    os.mkfifo(kit / "local/pipe")
    key.unlink()
    key.symlink_to(tmp_path / "safe")
    assert run(monkeypatch, "lock", kit, "--passphrase-file", file) == 0
    told = capsys.readouterr()
    assert "its keys are locked" in told.out
    listed = ", ".join(map(str, copies))
    assert told.err == f"warning: private keys in clear stay: {listed}; move them to a safe place, or delete them\n"
    assert all(copy.is_file() for copy in copies)
    for copy in copies:
        copy.unlink()
    assert run(monkeypatch, "lock", kit) == 0
    assert capsys.readouterr().err == ""


def test_a_passphrase_file_that_others_can_read_is_a_warning(
    kit: Path, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.chmod(0o640)
    assert run(monkeypatch, "lock", kit, "--passphrase-file", file) == 0
    told = capsys.readouterr().err
    assert told == f"warning: {file}: mode 640: others can read the passphrase; run `chmod 600 {file}`\n"
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(file.parent))  # systemd's; an access list shows as the group's rights
    assert run(monkeypatch, "unlock", kit, "--passphrase-file", file) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    key_lock.lock(kit)
    subprocess.run(command_in(told)[0], check=True)
    assert run(monkeypatch, "unlock", kit, "--passphrase-file", file) == 0
    assert capsys.readouterr().err == ""
    key_lock.lock(kit)


def test_root_neither_locks_nor_unlocks_the_kit_of_another_user(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key_lock.lock(kit, PASSPHRASE)
    if os.geteuid() == 0:
        os.chown(kit, OTHER_USER, OTHER_USER)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for for_good in (False, True):
        with pytest.raises(ConfigError, match=f"belongs to user {kit.stat().st_uid}.* consilium unlock {kit}`"):
            key_lock.unlock(kit, PASSPHRASE, for_good)
    assert not (kit / "startup/client.key").is_symlink()
    (kit / LOCKED).unlink()
    (kit / "startup/client.key").write_text("x")
    with pytest.raises(ConfigError, match=f"belongs to user {kit.stat().st_uid}.* consilium lock {kit}`"):
        key_lock.lock(kit, PASSPHRASE)
    assert not (kit / LOCKED).exists()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv")
def test_the_command_for_root_unlocks_the_kit_for_its_owner(made: Path, public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["setpriv", "--reuid", str(OTHER_USER), "--clear-groups", sys.executable, "-c", "import consilium, typer"]
    if subprocess.run(words, cwd=public, capture_output=True).returncode != 0:
        pytest.skip("the other user cannot read the package")
    monkeypatch.setitem(key_lock.COST, "n", COST["n"])
    kit = Path(shutil.copytree(made / "clinic", public / "clinic"))
    before = (kit / "startup/client.key").read_bytes()
    key_lock.lock(kit, PASSPHRASE)
    (public / "passphrase").write_text(PASSPHRASE)
    for path in (public / "passphrase", kit, *kit.rglob("*")):
        os.chown(path, OTHER_USER, OTHER_USER)
    with pytest.raises(ConfigError) as refused:
        key_lock.unlock(kit, PASSPHRASE)
    (words,) = command_in(str(refused.value))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = subprocess.run([*words, "--passphrase-file", public / "passphrase"], cwd=public, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    key = kit / "startup/client.key"
    assert (key.read_bytes(), key.resolve().stat().st_uid) == (before, OTHER_USER)
    opened = key.resolve().parent
    key.unlink()  # root finds the folder of the kit's owner all the same
    assert key_lock.lock(kit) == []
    assert not opened.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_keys_that_another_user_opened_are_one_line(
    made: Path, public: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kit = Path(shutil.copytree(made / "clinic", public / "clinic"))
    for path in (kit, kit / "startup", kit / "startup/client.crt"):
        path.chmod(0o755)
    key_lock.lock(kit, PASSPHRASE)
    key_lock.unlock(kit, PASSPHRASE)
    with other_user():
        with pytest.raises(
            ConfigError, match=f"was unlocked by user 0, and user {OTHER_USER} cannot read it; run this as user 0"
        ):
            has_private_key(kit)
        assert run(monkeypatch, "unlock", kit) == 2
    assert "client.key: was unlocked by user 0" in capsys.readouterr().err
    key_lock.lock(kit)
    with other_user(), pytest.raises(ConfigError, match=r"keys.locked: cannot be read \(Permission denied\)"):
        key_lock.unlock(kit, PASSPHRASE)
