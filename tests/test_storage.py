"""State files: exact, checksummed, atomic; hashes of checkpoints."""

import errno
import hashlib
import os
import re
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from filelock import Timeout
from safetensors import SafetensorError, deserialize
from safetensors.torch import save_file

from consilium.core.errors import CheckpointError
from consilium.core.storage import (
    copy_tree,
    digest,
    file_hash,
    file_lock,
    load_state,
    name_path_in_errors,
    save_state,
    sweep,
    write_atomic,
)


@pytest.mark.parametrize("half", [False, True])
def test_round_trip_is_exact(half: bool, tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 2), "one": torch.tensor(2.0), "none": torch.zeros(0, 3), "n": torch.arange(3)}
    tensors |= {"b": torch.randn(4).bfloat16()} if half else {}
    save_state(tmp_path / "x" / "s.safetensors", tensors, {"round": 3, "scalars": {"x": 0.5}})
    found, meta = load_state(tmp_path / "x" / "s.safetensors")
    assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in tensors.items())
    assert meta == {"round": 3, "scalars": {"x": 0.5}}
    assert [p.name for p in (tmp_path / "x").iterdir()] == ["s.safetensors"]
    found["a"].zero_()  # what is read is the reader's own
    assert torch.equal(load_state(tmp_path / "x" / "s.safetensors")[0]["a"], tensors["a"])


def test_a_name_as_long_as_the_file_system_allows_is_written(tmp_path: Path) -> None:
    write_atomic(tmp_path / ("n" * 255), b"one")
    write_atomic(tmp_path / ("n" * 255), b"two")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"two"]


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.bool])
def test_a_type_that_numpy_lacks_is_read_as_any_other(kind: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a": torch.ones(4).to(kind), "b": torch.ones(2)}
    save_state(tmp_path / "s.safetensors", tensors, {})
    found, _ = load_state(tmp_path / "s.safetensors")
    assert found["a"].dtype is kind
    assert found["a"].float().tolist() == [1.0] * 4
    assert digest(found) == digest(tensors)


def test_a_checksum_is_of_names_types_shapes_and_bytes() -> None:
    """By hand, so that a file of another version of ours is read."""
    tensors = {"b": torch.tensor(1.5, dtype=torch.bfloat16), "a": torch.tensor([[1, 2]]).T}
    said = b"atorch.int64(2, 1)" + struct.pack("<2q", 1, 2) + b"btorch.bfloat16()" + struct.pack("<f", 1.5)[2:]
    assert digest(tensors) == hashlib.sha256(said).hexdigest()


def test_damage_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    save_state(path, {"a": torch.zeros(100)}, {})
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="checksum does not match"):
        load_state(path)
    path.write_bytes(data[:50])
    with pytest.raises(CheckpointError, match="not a readable state file"):
        load_state(path)
    with pytest.raises(CheckpointError, match="not a readable state file"):
        load_state(tmp_path / "none")


def test_a_hash_is_of_contents_and_of_names_within_a_folder(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder / "sub").mkdir(parents=True)
        (tmp_path / folder / "b.bin").write_bytes(b"b" * 3_000_000)
        (tmp_path / folder / "sub" / "a.bin").write_bytes(b"a")
    one, two = tmp_path / "one", tmp_path / "two"
    assert file_hash(one / "b.bin") == hashlib.sha256(b"b" * 3_000_000).hexdigest()
    assert file_hash(one) == file_hash(two)
    (two / "sub" / "a.bin").rename(two / "sub" / "c.bin")
    assert file_hash(one) != file_hash(two)
    (two / "sub" / "c.bin").rename(two / "sub" / "a.bin")
    (two / "sub" / "a.bin").write_bytes(b"A")
    assert file_hash(one) != file_hash(two)


def test_a_hash_of_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "none"):
        with pytest.raises(CheckpointError, match="no such file, or a folder without files"):
            file_hash(tmp_path / name)


def test_what_a_process_left_half_written_is_swept_when_it_is_gone(tmp_path: Path) -> None:
    """A living process' own file stays; one of its number from before it began, as in a container, does not."""
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True)
    names = [".state.safetensors." + ended.stdout.strip(), f".job.yaml.{os.getpid()}", f".metrics.jsonl-1.{os.getpid()}"]
    kept = ["state.safetensors", ".lock", ".hidden", f"job.yaml.{os.getpid()}"]
    (tmp_path / "run").mkdir()
    for name in [*names, *kept]:
        (tmp_path / "run" / name).touch()
    os.utime(tmp_path / "run" / names[1], (1, 1))
    assert {p.name for p in sweep(tmp_path)} == set(names[:2])
    assert {p.name for p in (tmp_path / "run").iterdir()} == {names[2], *kept}


def test_threads_that_write_one_file_do_not_meet_in_a_temporary_one(tmp_path: Path) -> None:
    contents = [bytes([number]) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda one: [write_atomic(tmp_path / "state", one) for _ in range(20)], contents))
    assert (tmp_path / "state").read_bytes() in contents
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_lock_is_released_by_any_thread_and_never_waited_for_by_a_name_alone(tmp_path: Path) -> None:
    """A file that says who holds it would be believed for ever after a crash; the system's own lock goes with its process."""
    held, second = file_lock(tmp_path / "x.lock"), file_lock(tmp_path / "x.lock", wait=False)
    held.acquire()
    with pytest.raises(Timeout):
        second.acquire()
    releasing = threading.Thread(target=held.release)
    releasing.start()
    releasing.join()
    second.acquire()
    second.release()
    with (
        patch("fcntl.flock", side_effect=OSError(errno.ENOSYS, "no locks here")),
        pytest.raises((OSError, NotImplementedError)),
    ):
        file_lock(tmp_path / "y.lock").acquire()


def test_a_full_disk_leaves_no_half_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    full = patch("os.fsync", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with full, pytest.raises(OSError, match="space") as told:
        write_atomic(tmp_path / "a", b"new")
    assert told.value.filename == str(tmp_path / "a")  # which the system does not name
    with (
        pytest.raises(FileNotFoundError) as told,
        name_path_in_errors(tmp_path),
    ):  # by safetensors, whose error is none of the system's
        save_file({"a": torch.zeros(9)}, tmp_path / "no/folder")
    assert told.value.filename == str(tmp_path)
    with pytest.raises(SafetensorError, match="header"), name_path_in_errors(tmp_path):
        deserialize(b"")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


def test_a_failed_copy_says_which_file_and_why(tmp_path: Path) -> None:
    """shutil's own error has neither a number nor a name."""

    def full(origin: str, copy: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), origin, None, copy)

    for name in ("link", "pipe", "file"):
        (tmp_path / name).mkdir()
    (tmp_path / "link/a").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe/a")
    (tmp_path / "file/a").touch()
    for name, options, number, says in (
        ("link", {}, errno.ENOENT, f"No such file or directory: '{tmp_path / 'link/a'}'"),
        ("pipe", {}, errno.EINVAL, f"is a named pipe: '{tmp_path / 'pipe/a'}'"),
        ("file", {"copy_function": full}, errno.ENOSPC, f"No space left on device: '{tmp_path / 'copy-file/a'}'"),
    ):
        with pytest.raises(OSError, match=re.escape(says)) as failed:
            copy_tree(tmp_path / name, tmp_path / f"copy-{name}", **options)
        assert failed.value.errno == number
