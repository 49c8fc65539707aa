"""Decoded samples on the site's disk: bytes that are mapped into memory, named by what they were made of.

A name is a salted hash, see fingerprint.py: a file that changes, or a job that reads it in another way, makes another sample.
A file takes its name when it is whole, and has a checksum: a torn or altered one is made again. Where the disk is full, or not
ours to write to, samples are simply not kept.
"""

import contextlib
import hashlib
import json
import logging
import math
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from consilium.data.store import folder as cache_folder
from consilium.data.store.fingerprint import Fingerprints
from consilium.data.store.index import Index

Raw = dict[str, np.ndarray]
"""A sample's arrays of 8 bits."""
SPARE = 2**30
"""Bytes of the disk that are left free."""
_MAGIC, _DIGEST = b"consmp01", 32
_HEAD = len(_MAGIC) + _DIGEST
_log = logging.getLogger(__name__)


class Store:
    """Samples under `folder`, at most `most` bytes, for any number of threads and processes. Raises OSError.

    Where there is no room, samples go that were used longest ago, but none that was used since this process began: a data set
    larger than the cache would else be written anew in every epoch.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self._most, self._began = folder, most, time.time_ns()
        self._lock, self._writes, self._full = threading.RLock(), True, False
        self.salt = cache_folder.make(folder)
        self._index = Index(folder / "index", self.salt)
        self.fingerprints = Fingerprints(self._index, self.salt, self._keep_line)
        self._used = cache_folder.contents(folder)[1]
        self._whole: dict[str, tuple[int, int, int]] = {}

    def get(self, name: str) -> Raw | None:
        """Return a sample, arrays on mapped memory that cannot be written to; None if it is not there, or not whole."""
        path = self._path(name)
        try:
            with path.open("rb") as file:
                found, data = os.fstat(file.fileno()), mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # ValueError: an empty file
            return None
        try:
            sample = self._unpacked(name, data, found)
        except ValueError:
            path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(path, ns=(time.time_ns(), found.st_mtime_ns))  # the time of use alone, which few file systems keep
        return sample

    def put(self, name: str, sample: Raw) -> bool:
        """Keep a sample; tell whether there was room."""
        path = self._path(name)
        header = json.dumps({key: array.shape for key, array in sample.items()}).encode()
        body: list[bytes | memoryview] = [len(header).to_bytes(4, "big"), header]
        body += [np.ascontiguousarray(array).reshape(-1).data for array in sample.values()]
        size = _HEAD + sum(map(len, body))
        if path.exists():  # of another process, or of an equal file
            return True
        if not self._writes or not self._make_room(size):
            return False
        return self._tried(lambda: self._write(path, [_MAGIC, self._digest(name, body), *body]))

    def _keep_line(self, key: str, value: str) -> None:
        if self._writes:
            self._tried(lambda: self._index.put(key, value))

    def _tried(self, write: Callable[[], None]) -> bool:
        """Tell whether writing went well. After a disk that is full, or will not be written to, nothing is tried again."""
        try:
            if not self.folder.is_dir():  # cleared while we run
                cache_folder.make(self.folder, self.salt)
            write()
        except OSError as error:
            self._stop(error.strerror or "error")
            return False
        return True

    def _write(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        """Write a file that takes its name when it is whole; not flushed: what a crash leaves of it fails its checksum."""
        temporary = path.with_name(f".{path.stem}-{threading.get_ident()}.{os.getpid()}")
        try:
            with open(temporary, "wb", opener=cache_folder.private) as file:
                file.writelines(parts)
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def _unpacked(self, name: str, data: mmap.mmap, found: os.stat_result) -> Raw:
        """Return the arrays of a file. Raises ValueError where it was altered, which is looked at once a process."""
        whole, stamp = memoryview(data), (found.st_ino, found.st_size, found.st_mtime_ns)
        if self._whole.get(name) != stamp:
            if bytes(whole[:_HEAD]) != _MAGIC + self._digest(name, [whole[_HEAD:]]):
                raise ValueError("altered")
            self._whole[name] = stamp
        at = _HEAD + 4 + int.from_bytes(whole[_HEAD : _HEAD + 4], "big")
        sample: Raw = {}
        for key, shape in json.loads(bytes(whole[_HEAD + 4 : at])).items():
            sample[key] = np.frombuffer(whole[at : at + math.prod(shape)], np.uint8).reshape(shape)
            at += math.prod(shape)
        return sample

    def _digest(self, name: str, parts: Iterable[bytes | memoryview]) -> bytes:
        found = hashlib.blake2b(name.encode(), key=self.salt, digest_size=_DIGEST)
        for part in parts:
            found.update(part)
        return found.digest()

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.sample"

    # room -----------------------------------------------------------------------------------------------------------------

    def _make_room(self, size: int) -> bool:
        with self._lock:
            if not self._full and self._used + size > self._most:
                self._used = self._evict(self._most - size - self._most // 20)
                self._full = self._used + size > self._most
            if self._full or not self._spares(size):
                return False
            self._used += size
            return True

    def _evict(self, wanted: int) -> int:
        """Remove what was used longest ago and not since this process began, until `wanted` bytes are left; return them."""
        kept = sorted(cache_folder.samples(self.folder))
        used = sum(size for _, size, _ in kept)
        for last, size, path in kept:
            if used <= wanted or last >= self._began:
                break
            path.unlink(missing_ok=True)
            used -= size
        return used

    def _spares(self, size: int) -> bool:
        """Tell whether the disk has room left for others too."""
        try:
            free = shutil.disk_usage(self.folder.parent).free
        except OSError:
            return True  # writing will tell
        if free < size + SPARE:
            self._stop(f"under {SPARE // 2**30} GiB of the disk are free")
        return free >= size + SPARE

    def _stop(self, why: str) -> None:
        with self._lock:
            said, self._writes = not self._writes, False
        if not said:
            _log.warning(f"{self.folder}: decoded samples are no longer kept ({why}); training goes on, slower")


def open_store(folder: Path | None, most: int) -> Store | None:
    """Return the store below `folder`; None for no room at all, and, with a warning, where there can be none."""
    if folder is None or most <= 0:
        return None
    try:
        return Store(folder / cache_folder.FOLDER, most)
    except OSError as error:
        _log.warning(
            f"{folder / cache_folder.FOLDER}: decoded samples are not kept ({error.strerror}); training goes on, slower"
        )
        return None
