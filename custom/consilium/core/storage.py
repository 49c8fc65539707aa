"""Files that survive a crash: tensors with a checksum and JSON values (no pickle), JSON objects, private folders, locks.

The server's checkpoint, a site's private state and the guard's records are written with these functions.
"""

import errno
import hashlib
import io
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.resources.abc import Traversable
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
"""Seconds to wait for another process' lock: longer than any block that holds one."""
PRIVATE, PUBLIC = 0o600, 0o666
"""Modes of new files. State is private to its owner; files that a user exports follow the umask."""
MOST_NOTES = 2**26
"""The largest size in bytes of a JSON file that `note` writes. Of these, drift.json grows most: by about 10 kB per round."""


def save_state(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write `tensors` and `meta` (JSON values) to a file. A crash leaves either the old file or the new one."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {"meta": json.dumps(dict(meta)), "sha256": digest(ready)}
    # safetensors' own `save` takes 20 times as long for this on small tensors
    specs = {
        name: TensorSpec(dtype=str(t.dtype).removeprefix("torch."), shape=t.shape, data_ptr=t.data_ptr(), data_len=t.nbytes)
        for name, t in ready.items()
    }
    write_atomic(path, serialize(specs, metadata=header))


def flatten_groups(groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of all groups, each named "GROUP/NAME", for `save_state`."""
    return {f"{group}/{name}": tensor for group, values in groups.items() for name, tensor in values.items()}


def group_of(tensors: Mapping[str, Tensor], group: str) -> dict[str, Tensor]:
    """Return one group of the tensors that `flatten_groups` has named, by their own names."""
    return {name.removeprefix(f"{group}/"): tensor for name, tensor in tensors.items() if name.startswith(f"{group}/")}


def load_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, meta) from a file that `save_state` wrote. Raises CheckpointError if it is missing or damaged."""
    with _open_state(path) as (file, header):
        # copies, because tensors of torch are views of the file, which may be overwritten after its check
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        meta, expected = json.loads(header["meta"]), header["sha256"]
    if digest(tensors) != expected:
        raise CheckpointError(f"{path}: checksum does not match, the file is damaged; restore it or start afresh")
    return tensors, meta


def load_state_meta(path: Path) -> dict[str, Any]:
    """Return the meta of a file of `save_state` without reading its tensors. Raises CheckpointError as `load_state` does."""
    with _open_state(path) as (_, header):
        meta: dict[str, Any] = json.loads(header["meta"])
    return meta


@contextmanager
def _open_state(path: Path) -> Iterator[tuple[Any, dict[str, str]]]:
    """Open a file that `save_state` wrote. Raises CheckpointError for errors in the block, too."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file, file.metadata() or {}
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a readable state file ({error}); restore it or start afresh") from None


def write_atomic(path: Path, data: bytes, mode: int = PRIVATE) -> None:
    """Write bytes to a temporary file beside `path`, flush it to disk, and rename it to `path`.

    The file, and folders that are created for it, are private to the user. With PUBLIC they follow the umask. A private file
    also survives a power cut: a site that forgets an answer that has left could give a second one.
    """
    make_private_folder(path.parent) if mode == PRIVATE else path.parent.mkdir(parents=True, exist_ok=True)
    # Another thread may write the file, too. A long name is cut, so that this one is not too long for the file system.
    temporary = path.with_name(f".{path.name[:50]}-{threading.get_ident()}.{os.getpid()}")
    temporary.unlink(missing_ok=True)  # left by an earlier process with the same id
    try:
        with name_path_in_errors(path), open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # a full disk would otherwise leave half a file
        temporary.unlink(missing_ok=True)
        raise
    if mode == PRIVATE:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names of the files in a folder to disk. Do nothing on a file system that cannot do this."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            error.filename = str(folder)  # os.fsync names none
            raise
    finally:
        os.close(opened)


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    """Write a JSON value with `write_atomic`, private to the user."""
    write_atomic(path, json.dumps(value, indent=indent).encode())


def read_json(path: Path | Traversable) -> Any:
    """Return the value in a JSON file. Raises OSError, and ValueError or RecursionError for a file that is not JSON."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_figure(path: Path, figure: "Figure", dpi: int, mode: int = PRIVATE, **settings: Any) -> None:
    """Write a figure with `write_atomic`, in the format of the path's suffix. matplotlib itself would write through a link.

    `settings`: for `savefig`.
    """
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:], dpi=dpi, **settings)
    write_atomic(path, drawn.getvalue(), mode)


@contextmanager
def refuse_if_unwritable(what: Path) -> Iterator[None]:
    """Turn an OSError in the block into a RefusedError with the reason `ledger`: the file `what` cannot be written."""
    try:
        yield
    except OSError as error:
        why = error.strerror or type(error).__name__
        remedy = "change its permissions" if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else "make room"
        raise RefusedError(f"{what}: cannot be written ({why}); nothing was sent; {remedy}", Reason.LEDGER) from None


@contextmanager
def name_path_in_errors(path: Path) -> Iterator[None]:
    """Add `path` to an OSError of the block that names no file, as after a write to a full disk.

    A SafetensorError whose text contains an error number of the system becomes an OSError with that number.
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


def copy_tree(source: Path | str, target: Path, **options: Any) -> Path:
    """Copy a folder as `shutil.copytree` does, and return the copy. Of its errors the first is raised, with number and path."""
    try:
        return Path(shutil.copytree(source, target, **options))
    except shutil.Error as error:
        origin, copy, why = error.args[0][0]
        code = int(found[1]) if (found := re.match(r"\[Errno (\d+)\]", why)) else 0
        path = origin if str(origin) in why and str(copy) not in why else copy  # a full disk's error may name none
        raise OSError(code or errno.EINVAL, os.strerror(code) if code else why, str(path)) from None


@contextmanager
def clean_up_on_failure(folder: Path) -> Iterator[None]:
    """Delete everything new in `folder`, and a new `folder` itself, if the block fails. So the block can be repeated.

    OSErrors name the folder, see `name_path_in_errors`.
    """
    before, is_new = set(folder.iterdir()) if folder.is_dir() else set(), not folder.exists()
    try:
        with name_path_in_errors(folder):
            yield
    except BaseException:
        for one in set(folder.iterdir()) - before if folder.is_dir() else ():
            shutil.rmtree(one) if one.is_dir() else one.unlink()
        if is_new and folder.is_dir():
            folder.rmdir()
        raise


def note(path: Path, key: str, values: Mapping[str, Any]) -> None:
    """Store `values` (JSON values) under `key` in a private JSON file, and replace earlier values of the key.

    Raises ValueError if the file does not hold a JSON object.
    """
    write_json(path, _read_json_object(path) | {key: dict(values)})


def read_notes(path: Path, remedy: str) -> dict[str, Any]:
    """Return the content of a JSON file that `note` wrote, {} if there is no file.

    Raises RefusedError with the reason `ledger`, the file and the `remedy` if the file cannot be read.
    """
    try:
        return _read_json_object(path)
    except (OSError, ValueError):
        raise unreadable_error(path, remedy) from None


def _read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, {} without a file. Raises ValueError for other content, or over MOST_NOTES bytes."""
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        text = file.read(MOST_NOTES + 1)
    if len(text) > MOST_NOTES:
        raise ValueError(f"{path}: over {MOST_NOTES:,} bytes; restore it from a backup")
    try:
        found = json.loads(text)
    except RecursionError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds no JSON object; restore it")
    return found


def unreadable_error(path: Path, remedy: str) -> RefusedError:
    """Return the refusal, with the reason `ledger`, because a file of a site's records cannot be read."""
    return RefusedError(f"{path}: cannot be read; nothing was sent; {remedy}", Reason.LEDGER)


def open_private(path: Path, mode: Literal["a", "a+", "w", "x"]) -> TextIO:
    """Open a text file like `open`. A new file is private to the user.

    "w" replaces a symbolic or hard link by a new file. "a" and "a+" raise OSError for a symbolic link.
    """
    if mode == "w":
        path.unlink(missing_ok=True)
    new = os.O_EXCL if mode == "w" else 0
    return open(path, mode, encoding="utf-8", opener=lambda name, flags: os.open(name, flags | new | os.O_NOFOLLOW, PRIVATE))


def make_private_folder(path: Path) -> Path:
    """Create a folder and its missing parents, private to the user, and return it. Existing folders are not changed.

    The new names are flushed to disk, so that they survive a power cut.
    """
    for folder in [] if path.is_dir() else reversed([path, *path.parents]):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)
            with suppress(PermissionError):  # a folder that this user may write and not read
                sync_folder(folder.parent)
    return path


def sweep(folder: Path) -> list[Path]:
    """Remove temporary files under `folder` that `write_atomic` left when its process ended; return their paths."""
    found = []
    for path in list(folder.rglob(".*")):
        if (match := re.fullmatch(r"\..+\.(\d{1,9})", path.name)) is None:
            continue
        try:  # the process has ended if none has its id, or one that started after the file was written
            plain = not path.is_symlink() and path.is_file()
            gone = plain and path.stat().st_mtime < psutil.Process(int(match[1])).create_time()
        except psutil.NoSuchProcess:
            gone = True
        except (psutil.Error, OSError, OverflowError):
            gone = False
        if gone:
            path.unlink(missing_ok=True)
            found.append(path)
    return found


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Let one process at a time into the block. The lock is released if its process ends in any way."""
    make_private_folder(folder)
    with file_lock(folder / ".lock"):
        yield


def file_lock(path: Path, wait: bool = True) -> FileLock:
    """Return a lock between processes. Hold it by `acquire` or a `with` block; it is released when its process ends.

    Acquiring raises filelock.Timeout if another process holds it for PATIENCE seconds (at once without `wait`), and OSError on
    a file system without locks.
    """
    return FileLock(path, PATIENCE if wait else 0, PRIVATE, thread_local=False, fallback_to_soft=False)


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of all files in a folder.

    The folder's own path does not matter. Raises CheckpointError if there is nothing readable at `path`.
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


checkpoint_hash = cache(file_hash)
"""Return a checkpoint's `file_hash`, computed once per process, because the sites of a simulation share it."""


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors: of their names, types, shapes and bytes."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        found.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)  # bytes, because NumPy has no bfloat16
    return found.hexdigest()
