"""Atomic, checksummed files of tensors with a JSON header: the server's checkpoint and a site's private state. No pickle."""

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

import psutil
from filelock import FileLock
from safetensors import SafetensorError, TensorSpec, safe_open, serialize

from consilium.core.errors import CheckpointError, Reason, RefusedError
from consilium.core.lazy import Tensor, torch

if TYPE_CHECKING:  # every command reads this file, and most draw nothing
    from matplotlib.figure import Figure

PATIENCE = 600.0
"""Seconds to wait for another process' lock: longer than anything that is done under one."""
PRIVATE, PUBLIC = 0o600, 0o666
"""Modes of new files: for this user alone, which is what all state is; and what the umask leaves, for what a user exports."""
MOST_NOTES = 2**26
"""Bytes of a JSON file of keys and values: the largest, of every round's drift, has about 10,000 a round."""
_TEMPORARY = re.compile(r"\..+\.(\d{1,9})")


def save_state(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write `tensors` and the JSON-able `meta` so that a crash leaves either the old file or the new one."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {"meta": json.dumps(dict(meta)), "sha256": digest(ready)}
    write_atomic(path, serialize({name: _described(tensor) for name, tensor in ready.items()}, metadata=header))


def _described(tensor: Tensor) -> TensorSpec:
    """Return where a tensor's bytes are: safetensors' own `save` takes 20 times as long to find it out for small ones."""
    kind = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(dtype=kind, shape=tensor.shape, data_ptr=tensor.data_ptr(), data_len=tensor.nbytes)


def load_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, meta) of a file that `save_state` wrote. Raises CheckpointError if it is missing or damaged."""
    try:
        tensors, header = _read(path)
        meta, expected = json.loads(header["meta"]), header["sha256"]
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a readable state file ({error}); restore it or start afresh") from None
    if digest(tensors) != expected:
        raise CheckpointError(f"{path}: checksum does not match, the file is damaged; restore it or start afresh")
    return tensors, meta


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors and header of a file: by way of numpy, which takes a third of torch's time for small tensors."""
    try:
        with safe_open(path, framework="np") as file:
            return {name: torch.from_numpy(file.get_tensor(name)) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (TypeError, AttributeError):  # numpy has no bfloat16, and no type of 8 bits
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def write_atomic(path: Path, data: bytes, mode: int = PRIVATE) -> None:
    """Write bytes through a temporary file beside `path`, flushed to disk before it takes the name.

    The file, and what folders it needs, are the user's alone; with PUBLIC they are as the umask says.
    """
    private_folder(path.parent) if mode == PRIVATE else path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)  # of an earlier process of the same number, with whatever mode
    try:
        with named(path), open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # a full disk would otherwise keep half a file
        temporary.unlink(missing_ok=True)
        raise


def write_figure(path: Path, figure: "Figure", dpi: int, mode: int = PRIVATE, **settings: Any) -> None:
    """Write a figure in the format of the path's ending, as `write_atomic` does: matplotlib writes through a link.

    `settings` as for `savefig`.
    """
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:], dpi=dpi, **settings)
    write_atomic(path, drawn.getvalue(), mode)


@contextmanager
def room_for(what: Path) -> Iterator[None]:
    """Make a disk on which `what` cannot be written a refusal with the word `ledger`, as where nothing can be put on record."""
    try:
        yield
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise RefusedError(f"{what}: cannot be written ({why}); nothing was sent; make room", Reason.LEDGER) from None


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Have an OSError of the block name a file or folder: one that an open file raises, such as of a full disk, names none.

    What the system refuses safetensors, which says so in words alone, is one too.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
    except SafetensorError as error:
        if not (number := re.search(r"os error (\d+)", str(error))):
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


@contextmanager
def undone(folder: Path) -> Iterator[None]:
    """Leave nothing new in a folder where the block fails, so that it can be done again; see also `named`."""
    before = set(folder.iterdir()) if folder.is_dir() else set()
    try:
        with named(folder):
            yield
    except BaseException:
        for one in set(folder.iterdir()) - before if folder.is_dir() else ():
            shutil.rmtree(one) if one.is_dir() else one.unlink()
        raise


def note(path: Path, key: str, values: Mapping[str, Any]) -> None:
    """Put JSON-able values under a key into a JSON file of the user's alone; again under the same key, they replace those.

    Raises ValueError for a file that holds something else.
    """
    kept = _read_json_object(path)
    write_atomic(path, json.dumps({**kept, key: dict(values)}).encode())


def noted(path: Path, remedy: str) -> dict[str, Any]:
    """Return what a JSON file of keys and values holds, {} where there is none.

    Raises RefusedError, which names the file and the `remedy`, where nobody can read it.
    """
    try:
        return _read_json_object(path)
    except (OSError, ValueError):
        raise unreadable(path, remedy) from None


def _read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, {} where there is no file. Raises ValueError for others, or over MOST_NOTES bytes."""
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        text = file.read(MOST_NOTES + 1)
    if len(text) > MOST_NOTES:
        raise ValueError(f"{path}: over {MOST_NOTES:,} bytes; restore it")
    try:
        found = json.loads(text)
    except RecursionError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds no JSON object; restore it")
    return found


def unreadable(path: Path, remedy: str) -> RefusedError:
    """Return the refusal of what depends on a file that nobody can read."""
    return RefusedError(f"{path}: cannot be read; nothing was sent; {remedy}", Reason.LEDGER)


def open_private(path: Path, mode: Literal["a", "a+", "w", "x"]) -> TextIO:
    """Open a text file as `open` does; a new one is the user's alone.

    "w" makes a new file in the place of a link or of a file with other names. A link is never appended to.
    """
    if mode == "w":
        path.unlink(missing_ok=True)
    new = os.O_EXCL if mode == "w" else 0
    return open(path, mode, encoding="utf-8", opener=lambda name, flags: os.open(name, flags | new | os.O_NOFOLLOW, PRIVATE))


def private_folder(path: Path) -> Path:
    """Make a folder, and those above it that are missing, for this user alone; one that exists stays as it is. Return it."""
    for folder in [] if path.is_dir() else reversed([path, *path.parents]):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)
    return path


def sweep(folder: Path) -> list[Path]:
    """Remove what `write_atomic` left half-written anywhere under `folder` when its process ended; return the files."""
    found = [path for path in folder.rglob(".*") if (match := _TEMPORARY.fullmatch(path.name)) and _left(path, int(match[1]))]
    for path in found:
        path.unlink(missing_ok=True)
    return found


def _left(path: Path, pid: int) -> bool:
    """Tell whether the process that wrote a temporary file is gone: none has its number, or one that began later."""
    try:
        return not path.is_symlink() and path.is_file() and path.stat().st_mtime < psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, OSError, OverflowError):
        return False


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time into the block; the lock ends with its process, however that ends."""
    private_folder(folder)
    with file_lock(folder / ".lock"):
        yield


def file_lock(path: Path, wait: bool = True) -> FileLock:
    """Return a lock between processes, held from `acquire` on (or in a `with` block) and free when its process ends.

    Acquiring one that stays held raises filelock.Timeout; without `wait` at once. A file system without locks is an OSError.
    """
    return FileLock(path, PATIENCE if wait else 0, PRIVATE, thread_local=False, fallback_to_soft=False)


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file, or of a folder: over its files' names and contents, wherever the folder lies.

    Raises CheckpointError if there is nothing readable at `path`.
    """
    try:
        if path.is_file():
            with open(path, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        names = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
        if not names:
            raise CheckpointError(f"{path}: no such file, or a folder without files; give the checkpoint's path")
        parts = "".join(f"{file_hash(path / name)}  {name}\n" for name in names)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); give a readable checkpoint") from None
    return hashlib.sha256(parts.encode()).hexdigest()


@cache
def checkpoint_hash(path: Path) -> str:
    """Return a checkpoint's `file_hash`, taken once per process: the sites of a simulation share it."""
    return file_hash(path)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors: names, types, shapes, bytes."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(_bytes(tensor.contiguous()))
    return found.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, where they are."""
    try:
        return tensor.numpy().reshape(-1).data
    except TypeError:  # numpy has no bfloat16
        return tensor.reshape(-1).view(torch.uint8).numpy().data
