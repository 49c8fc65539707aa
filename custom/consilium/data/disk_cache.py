"""The cache of decoded samples on the site's disk, for any number of threads and processes: 8-bit arrays, memory-mapped.

The name of a sample is a salted hash of its sources: paths and states of its files, the settings, the version of the code. So
a changed file, or a job with other settings, has another name. Nothing is unpickled. Every file has a checksum; a damaged or
altered file is deleted and written again. If the disk is full or cannot be written to, training goes on without the cache.
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
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import PIL

from consilium.core.errors import DataError
from consilium.core.storage import PRIVATE, make_private_folder
from consilium.data.datalist import Item
from consilium.data.safe_open import MOST_SLIDE, check_file, stamp, wrap_read_errors

CachedSample = dict[str, np.ndarray]
"""A sample's 8-bit arrays by key."""
FOLDER = "consilium-samples"
"""Name of the cache's folder, within the folder that `cache` of site.yaml names."""
VERSION = 5
"""Version of the code that reads samples. Raise it when the same file gives another sample."""
SPARE = 2**30
"""Bytes of the disk that are left free."""
RECENT = 2.0
"""Seconds within which a file may change without a new time stamp. A file changed so recently is identified by its content."""
SALT, DIGEST = 32, 16
"""Bytes of the salt, and of a salted hash."""
_MAGIC = b"consmp01"
_HEAD = len(_MAGIC) + 32
_APART = frozenset({"image", "label", "patient", "study", "fold"})
"""Fields of an item that do not go into the name as they are: a sample does not depend on them, or only through their files."""
_OWN = re.compile(r"salt|index|[0-9a-f]{32}\.(sample|passed)|\.(salt|[0-9a-f]{32})-\d+\.\d{1,9}")
_log = logging.getLogger(__name__)


class DiskCache:
    """The cache in `folder`, of at most `most` bytes. The constructor raises OSError.

    The least recently used samples are evicted, but none that was used since this process began. Otherwise a data set larger
    than the cache would be rewritten in every epoch.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self._most, self._began = folder, most, time.time_ns()
        self._lock, self._writes, self._full = threading.RLock(), True, False
        self.salt = make_folder_and_salt(folder)
        self._used = sum(size for _, size, _ in _cache_files(folder))
        self._verified: dict[str, tuple[int, int, int]] = {}

    def name(self, item: Item, settings: str, what: str = "sample") -> str:
        """Return the name of an item's sample under these settings; of its passed check, a sample of no arrays, for "check".

        Raises DataError if the item's files cannot be read.
        """
        label = self._file_hash(item.label) if isinstance(item.label, Path) else item.label
        return salted_hash(
            self.salt,
            what,
            settings,
            VERSION,
            PIL.__version__,
            *(getattr(item, one.name) for one in fields(item) if one.name not in _APART),
            self._file_hash(item.image),
            label,
        )

    def _file_hash(self, path: Path) -> str:
        """Return a salted hash of a path and the state of its file or files; of their content if one changed just now.

        A folder is listed once, because every plane of a series asks for the state of all its files.
        """
        if not (is_folder := path.is_dir()):
            check_file(path, most=MOST_SLIDE)
        state = stamp(path)
        if state and time.time_ns() - max(max(times) for _, _, *times in state) > RECENT * 1e9:  # ctime cannot be set back
            return salted_hash(self.salt, "file", path.absolute(), *state)
        found = hashlib.blake2b()
        with wrap_read_errors(path):
            for one in sorted(one for one in path.iterdir() if one.is_file()) if is_folder else [path]:
                with one.open("rb") as file:
                    found.update(hashlib.file_digest(file, hashlib.blake2b).digest())
        return salted_hash(self.salt, "content", found.hexdigest())

    def get(self, name: str) -> CachedSample | None:
        """Return a sample as read-only memory-mapped arrays; None if it is missing or damaged."""
        path = self.folder / f"{name}.sample"
        try:
            with path.open("rb") as file:
                found, data = os.fstat(file.fileno()), mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # ValueError: an empty file
            return None
        content, version = memoryview(data), (found.st_ino, found.st_size, found.st_mtime_ns)
        if self._verified.get(name) != version:  # verify the checksum once per process
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
            os.utime(path, ns=(time.time_ns(), found.st_mtime_ns))  # set the access time; few file systems do
        return sample

    def put(self, name: str, sample: CachedSample) -> bool:
        """Write a sample to the cache, and tell whether there was room."""
        path = self.folder / f"{name}.sample"
        header = json.dumps({key: array.shape for key, array in sample.items()}).encode()
        body: list[bytes | memoryview] = [len(header).to_bytes(4, "big"), header]
        body += [np.ascontiguousarray(array).reshape(-1).data for array in sample.values()]
        if path.exists():  # another process has written it, or it comes from an equal file
            return True
        if not self._writes or not self._reserve_bytes(_HEAD + sum(map(len, body))):
            return False
        return self._write(path, [_MAGIC, self._digest(name, body), *body])

    def _digest(self, name: str, parts: Iterable[bytes | memoryview]) -> bytes:
        found = hashlib.blake2b(name.encode(), key=self.salt, digest_size=_HEAD - len(_MAGIC))
        for part in parts:
            found.update(part)
        return found.digest()

    def _write(self, path: Path, parts: Iterable[bytes | memoryview]) -> bool:
        """Write a file under a hidden name, rename it, and tell whether this succeeded.

        It is not flushed to disk, because a file that a crash damages fails its checksum. After an error of the disk, nothing
        more is written.
        """
        temporary = path.with_name(f".{path.stem}-{threading.get_ident()}.{os.getpid()}")
        try:
            if not self.folder.is_dir():  # the cache was cleared during the run
                make_folder_and_salt(self.folder, self.salt)
            with open(temporary, "wb", opener=_open_private) as file:
                file.writelines(parts)
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            self._stop_writing(error.strerror or "error")
            return False
        return True

    def _reserve_bytes(self, size: int) -> bool:
        """Reserve `size` bytes and tell whether cache and disk have room. A full cache evicts its least recently used files."""
        with self._lock:
            if not self._full and self._used + size > self._most:
                kept = sorted(_cache_files(self.folder))
                self._used = sum(each for _, each, _ in kept)
                for last, each, path in kept:
                    if self._used <= self._most - size - self._most // 20 or last >= self._began:
                        break
                    path.unlink(missing_ok=True)
                    self._used -= each
                self._full = self._used + size > self._most
            if self._full:
                return False
            with contextlib.suppress(OSError):  # if the disk is gone, the write fails
                if shutil.disk_usage(self.folder.parent).free < size + SPARE:
                    self._stop_writing(f"under {SPARE // 2**30} GiB of the disk are free")
                    return False
            self._used += size
            return True

    def _stop_writing(self, why: str) -> None:
        with self._lock:
            warned, self._writes = not self._writes, False
        if not warned:
            _log.warning(f"{self.folder}: decoded samples are no longer kept ({why}); training goes on, slower")


def open_disk_cache(folder: Path | None, most: int) -> DiskCache | None:
    """Return the cache below `folder`; None without a folder or without room.

    Also None, with a warning in the log, if the folder cannot be created.
    """
    if folder is None or most <= 0:
        return None
    try:
        return DiskCache(folder / FOLDER, most)
    except OSError as error:
        _log.warning(f"{folder / FOLDER}: decoded samples are not kept ({error.strerror}); training goes on, slower")
        return None


# names ------------------------------------------------------------------------------------------------------------------


def salted_hash(salt: bytes, *parts: object) -> str:
    """Return a hash of the texts of `parts`, in order. Without the salt, it reveals nothing about them."""
    found = hashlib.blake2b(key=salt, digest_size=DIGEST)
    for part in parts:
        text = str(part).encode(errors="surrogateescape")
        found.update(len(text).to_bytes(8, "big") + text)
    return found.hexdigest()


# the folder -------------------------------------------------------------------------------------------------------------


def make_folder_and_salt(folder: Path, salt: bytes | None = None) -> bytes:
    """Create a cache's folder for this user alone, unless it exists, and return its salt. Raises OSError.

    A new folder gets `salt`, or a random salt.
    """
    make_private_folder(folder)
    if not _is_private(folder):
        raise OSError(1, "it is a link, another user's, or others may write in it")
    folder.chmod(0o700)
    path = folder / "salt"
    if path.is_symlink():
        raise OSError(1, "its salt is a link")
    if not path.is_file() or path.stat().st_size != SALT:
        temporary = folder / f".salt-{threading.get_ident()}.{os.getpid()}"
        with open(temporary, "wb", opener=_open_private) as file:
            file.write(salt or secrets.token_bytes(SALT))
        try:
            os.link(temporary, path)  # fails if another process was faster
        except FileExistsError:
            if path.stat().st_size != SALT:
                os.replace(temporary, path)
        temporary.unlink(missing_ok=True)
    return path.read_bytes()


def _is_private(folder: Path) -> bool:
    """Tell whether a path is a folder of this user that no other user can write to."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _is_cache(folder: Path) -> bool:
    salt = folder / "salt"
    return folder.name == FOLDER and _is_private(folder) and salt.is_file() and salt.stat().st_size == SALT


def _open_private(name: str, flags: int) -> int:
    """Open a file for `open(opener=)`. A new file can be read by this user only, and links are not followed."""
    return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), PRIVATE)


def _cache_files(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield (time of last use, bytes, path) of every sample and passed check. A check is a sample without arrays."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".sample"):
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    yield found.st_atime_ns, found.st_size, Path(entry.path)


def find_cache(folder: Path) -> Path:
    """Return the path of the cache that is in `folder`, or is `folder` itself. Raises DataError if there is none."""
    for one in (folder / FOLDER, folder):
        if _is_cache(one):
            return one
    raise DataError(f"{folder}: holds no {FOLDER}; give the folder that `cache` of site.yaml names, or the site's state")


def cache_count_and_bytes(folder: Path) -> tuple[int, int]:
    """Return the number of entries in a cache, and their bytes."""
    sizes = [size for _, size, _ in _cache_files(folder)]
    return len(sizes), sum(sizes)


def clear_cache(folder: Path) -> None:
    """Delete a cache's own files, and the folder if it is then empty. A process that uses the cache goes on."""
    for path in [path for path in folder.iterdir() if _OWN.fullmatch(path.name) and not path.is_dir()]:
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def clear_cache_if_present(root: Path) -> None:
    """Delete the cache in `root`, if there is one."""
    if _is_cache(root / FOLDER):
        clear_cache(root / FOLDER)
