"""Decoded samples on the site's disk, for any number of threads and processes: 8-bit arrays, mapped into memory.

Names are salted hashes of a sample's sources: files' content, settings, the reading code. A changed file, or a job with
other settings, makes another sample. Nothing here is unpickled, and every file has a checksum: a torn or altered one is made
again. Where the disk is full or cannot be written to, samples are not kept, and training goes on without.
"""

import contextlib
import hashlib
import json
import logging
import math
import mmap
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import PIL

from consilium.core.errors import DataError
from consilium.core.storage import PRIVATE, private_folder
from consilium.data.datalist import Item
from consilium.data.safe_open import MOST_SLIDE, check_file

CachedSample = dict[str, np.ndarray]
"""A sample's arrays of 8 bits."""
FOLDER = "consilium-samples"
"""Name of the subfolder that holds the cache, in the folder of site.yaml's `cache`."""
VERSION = 2
"""Of the code that reads samples: raise it when the same file becomes another sample."""
SPARE = 2**30
"""Bytes of the disk that are left free."""
RECENT = 2.0
"""Seconds in which a file may change again without a change of its time."""
SALT, DIGEST = 32, 16
"""Bytes of the salt, and of a salted hash."""
MOST_LINES = 500_000
"""A longer index is started again."""
_MAGIC = b"consmp01"
_HEAD = len(_MAGIC) + 32
_CHECK = 8
_LINE = 2 * (2 * DIGEST + _CHECK) + 1
_APART = frozenset({"image", "label", "patient", "study"})
"""Fields of an item that a sample does not depend on, or only by their files' content."""
_OWN = re.compile(r"salt|index|[0-9a-f]{32}\.sample|\.(salt|[0-9a-f]{32})-\d+\.\d{1,9}")
_log = logging.getLogger(__name__)


class Store:
    """Samples under `folder`, at most `most` bytes. Raises OSError.

    Samples that were used longest ago are evicted, but none that was used since this process began: otherwise a data set larger
    than the cache would be rewritten in every epoch.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self._most, self._began = folder, most, time.time_ns()
        self._lock, self._writes, self._full = threading.RLock(), True, False
        self.salt = make_folder(folder)
        self._index = _Index(folder / "index", self.salt)
        self.fingerprints = Fingerprints(self._index, self.salt, self._keep_line)
        self._used = cache_contents(folder)[1]
        self._verified: dict[str, tuple[int, int, int]] = {}

    def get(self, name: str) -> CachedSample | None:
        """Return a sample as read-only arrays on mapped memory; None if it is not there, or damaged."""
        path = self._path(name)
        try:
            with path.open("rb") as file:
                found, data = os.fstat(file.fileno()), mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # ValueError: an empty file
            return None
        content, version = memoryview(data), (found.st_ino, found.st_size, found.st_mtime_ns)
        if self._verified.get(name) != version:  # the checksum is verified once a process
            if bytes(content[:_HEAD]) != _MAGIC + self._digest(name, [content[_HEAD:]]):
                path.unlink(missing_ok=True)
                return None
            self._verified[name] = version
        at = _HEAD + 4 + int.from_bytes(content[_HEAD : _HEAD + 4], "big")
        sample: CachedSample = {}
        for key, shape in json.loads(bytes(content[_HEAD + 4 : at])).items():
            sample[key] = np.frombuffer(content[at : at + math.prod(shape)], np.uint8).reshape(shape)
            at += math.prod(shape)
        with contextlib.suppress(OSError):
            os.utime(path, ns=(time.time_ns(), found.st_mtime_ns))  # the time of use, which few file systems keep by themselves
        return sample

    def put(self, name: str, sample: CachedSample) -> bool:
        """Keep a sample; tell whether there was room."""
        path = self._path(name)
        header = json.dumps({key: array.shape for key, array in sample.items()}).encode()
        body: list[bytes | memoryview] = [len(header).to_bytes(4, "big"), header]
        body += [np.ascontiguousarray(array).reshape(-1).data for array in sample.values()]
        if path.exists():  # written by another process, or for an equal file
            return True
        if not self._writes or not self._make_room(_HEAD + sum(map(len, body))):
            return False
        return self._tried(lambda: self._write(path, [_MAGIC, self._digest(name, body), *body]))

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.sample"

    def _digest(self, name: str, parts: Iterable[bytes | memoryview]) -> bytes:
        found = hashlib.blake2b(name.encode(), key=self.salt, digest_size=_HEAD - len(_MAGIC))
        for part in parts:
            found.update(part)
        return found.digest()

    def _keep_line(self, key: str, value: str) -> None:
        if self._writes:
            self._tried(lambda: self._index.put(key, value))

    def _tried(self, write: Callable[[], None]) -> bool:
        """Tell whether `write` succeeded. After a disk that is full, or cannot be written to, nothing is tried again."""
        try:
            if not self.folder.is_dir():  # cleared during the run
                make_folder(self.folder, self.salt)
            write()
        except OSError as error:
            self._stop(error.strerror or "error")
            return False
        return True

    def _write(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        """Write a file under a hidden name, then rename it. It is not flushed: a file torn by a crash fails its checksum."""
        temporary = path.with_name(f".{path.stem}-{threading.get_ident()}.{os.getpid()}")
        try:
            with open(temporary, "wb", opener=_private) as file:
                file.writelines(parts)
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def _make_room(self, size: int) -> bool:
        """Reserve `size` bytes; evict samples if the cache is full. Tell whether cache and disk have room."""
        with self._lock:
            if not self._full and self._used + size > self._most:
                self._used = self._evict(self._most - size - self._most // 20)
                self._full = self._used + size > self._most
            if self._full:
                return False
            with contextlib.suppress(OSError):  # if the disk is gone, writing fails
                if shutil.disk_usage(self.folder.parent).free < size + SPARE:
                    self._stop(f"under {SPARE // 2**30} GiB of the disk are free")
                    return False
            self._used += size
            return True

    def _evict(self, wanted: int) -> int:
        """Remove samples that were used longest ago, until `wanted` bytes are left; return the bytes that are."""
        kept = sorted(_samples(self.folder))
        used = sum(size for _, size, _ in kept)
        for last, size, path in kept:
            if used <= wanted or last >= self._began:
                break
            path.unlink(missing_ok=True)
            used -= size
        return used

    def _stop(self, why: str) -> None:
        with self._lock:
            warned, self._writes = not self._writes, False
        if not warned:
            _log.warning(f"{self.folder}: decoded samples are no longer kept ({why}); training goes on, slower")


def open_store(folder: Path | None, most: int) -> Store | None:
    """Return the store below `folder`; None without a folder or room, and, with a warning, where none can be made."""
    if folder is None or most <= 0:
        return None
    try:
        return Store(folder / FOLDER, most)
    except OSError as error:
        _log.warning(f"{folder / FOLDER}: decoded samples are not kept ({error.strerror}); training goes on, slower")
        return None


# names ------------------------------------------------------------------------------------------------------------------


def salted(salt: bytes, *parts: object) -> str:
    """Return a hash of the parts as texts, in order, that reveals nothing without the salt."""
    found = hashlib.blake2b(key=salt, digest_size=DIGEST)
    for part in parts:
        text = str(part).encode(errors="surrogateescape")
        found.update(len(text).to_bytes(8, "big") + text)
    return found.hexdigest()


class Fingerprints:
    """Names of samples by content, and which items have passed a check. `index`: what is known of files.

    `keep(key, value)` adds to the index, and handles a full disk.
    """

    def __init__(self, index: "_Index", salt: bytes, keep: Callable[[str, str], None]) -> None:
        self._index, self._salt, self._keep = index, salt, keep

    def name(self, item: Item, settings: str) -> str:
        """Return a sample's name in the store. Raises DataError where its files cannot be read."""
        label = self._content(item.label) if isinstance(item.label, Path) else item.label
        return salted(self._salt, "sample", settings, *_position(item), self._content(item.image), label)

    def passed(self, item: Item, settings: str) -> bool:
        """Tell whether an item passed the check of these settings before, and its files have not changed since."""
        return self._index.get(self._mark(item, settings)) is not None

    def note_passed(self, item: Item, settings: str) -> None:
        """Remember that an item passed, unless one of its files is so new that a later change would not show."""
        if all(_settled(path) for path in _files(item)):
            self._keep(self._mark(item, settings), salted(self._salt, "passed"))

    def _mark(self, item: Item, settings: str) -> str:
        versions = [part for path in _files(item) for part in (path.absolute(), *_version(path))]
        label = None if isinstance(item.label, Path) else item.label
        return salted(self._salt, "check", settings, *_position(item), label, *versions)

    def _content(self, path: Path) -> str:
        """Return a salted hash of a file's bytes, or of all files of a folder."""
        if path.is_dir():
            files = [one for one in sorted(path.rglob("*")) if one.is_file()]
            return salted(self._salt, "folder", *map(self._content, files))
        check_file(path, most=MOST_SLIDE)
        key = salted(self._salt, "file", path.absolute(), *_version(path))
        if (found := self._index.get(key)) is not None:
            return found
        try:
            with path.open("rb") as file:
                found = salted(self._salt, "content", hashlib.file_digest(file, hashlib.blake2b).hexdigest())
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}); replace it or take it off the list") from None
        if _settled(path) and key == salted(self._salt, "file", path.absolute(), *_version(path)):
            self._keep(key, found)
        return found


def _position(item: Item) -> list[object]:
    """Return the other values that a sample depends on, beside its files' content and the settings."""
    return [VERSION, PIL.__version__, *(getattr(item, one.name) for one in fields(item) if one.name not in _APART)]


def _files(item: Item) -> list[Path]:
    roots = [item.image, *([item.label] if isinstance(item.label, Path) else [])]
    return [one for root in roots for one in (sorted(root.rglob("*")) if root.is_dir() else [root])]


def _version(path: Path) -> tuple[int, ...]:
    """Return numbers that change when a file does; its ctime cannot be set back."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return ()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _settled(path: Path) -> bool:
    version = _version(path)
    return bool(version) and time.time_ns() - max(version[1:3]) > RECENT * 1e9


class _Index:
    """Salted hashes by salted hash in the file `path`, so that a large file is read once. Raises OSError.

    Any number of processes append to it: each line is one write with a check of its own; a torn or altered line is ignored.
    """

    def __init__(self, path: Path, salt: bytes) -> None:
        self._path, self._salt, self._lock, self._known = path, salt, threading.Lock(), dict[str, str]()
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return
        if len(data) > MOST_LINES * _LINE:
            path.unlink(missing_ok=True)
            return
        lines = (line for line in data.decode("ascii", "replace").split("\n") if len(line) == _LINE - 1)
        parts = ((line[: 2 * DIGEST], line[2 * DIGEST : 4 * DIGEST], line[4 * DIGEST :]) for line in lines)
        self._known = {key: value for key, value, check in parts if check == self._check(key, value)}

    def get(self, key: str) -> str | None:
        """Return the value of a key, None if there is none."""
        return self._known.get(key)

    def put(self, key: str, value: str) -> None:
        """Keep a value, here and on disk."""
        with self._lock:
            self._known[key] = value
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, PRIVATE)
            try:
                os.write(file, f"{key}{value}{self._check(key, value)}\n".encode())
            finally:
                os.close(file)

    def _check(self, key: str, value: str) -> str:
        return salted(self._salt, "line", key, value)[: 2 * _CHECK]


# the folder -------------------------------------------------------------------------------------------------------------


def make_folder(folder: Path, salt: bytes | None = None) -> bytes:
    """Make a cache's folder, for this user alone, and return its salt; a new one is `salt`, or drawn. Raises OSError."""
    private_folder(folder)
    if not _is_private(folder):
        raise OSError(1, "it is a link, another user's, or others may write in it")
    folder.chmod(0o700)
    path = folder / "salt"
    if path.is_symlink():
        raise OSError(1, "its salt is a link")
    if not path.is_file() or path.stat().st_size != SALT:
        temporary = folder / f".salt-{threading.get_ident()}.{os.getpid()}"
        with open(temporary, "wb", opener=_private) as file:
            file.write(salt or secrets.token_bytes(SALT))
        try:
            os.link(temporary, path)  # unless another process was faster
        except FileExistsError:
            if path.stat().st_size != SALT:
                os.replace(temporary, path)
        temporary.unlink(missing_ok=True)
    return path.read_bytes()


def _is_private(folder: Path) -> bool:
    """Tell whether a path is a folder of this user in which no other user can put a link or a salt."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _is_cache(folder: Path) -> bool:
    salt = folder / "salt"
    return folder.name == FOLDER and _is_private(folder) and salt.is_file() and salt.stat().st_size == SALT


def _private(name: str, flags: int) -> int:
    """Open as `open` does; a new file is the user's alone."""
    return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), PRIVATE)


def _samples(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield (time of last use, bytes, path) of every sample."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".sample"):
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    yield found.st_atime_ns, found.st_size, Path(entry.path)


def find_cache(folder: Path) -> Path:
    """Return the cache that a folder is, or holds. Raises DataError if neither."""
    for one in (folder / FOLDER, folder):
        if _is_cache(one):
            return one
    raise DataError(f"{folder}: holds no {FOLDER}; give the folder that `cache` of site.yaml names, or the site's state")


def cache_contents(folder: Path) -> tuple[int, int]:
    """Return how many samples a cache holds, and their bytes."""
    sizes = [size for _, size, _ in _samples(folder)]
    return len(sizes), sum(sizes)


def clear_cache(folder: Path) -> None:
    """Remove a cache's own files, and the folder if nothing else is in it. A process that uses it goes on."""
    for path in [path for path in folder.iterdir() if _OWN.fullmatch(path.name) and not path.is_dir()]:
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def discard_cache(root: Path) -> None:
    """Remove the cache that `root` holds, if any."""
    if _is_cache(root / FOLDER):
        clear_cache(root / FOLDER)
