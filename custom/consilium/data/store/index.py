"""What is known of files by their place, size, time and inode, so that a large file is read once and not at every start.

One file of lines, appended by any number of processes: each line is one write and has a check of its own, so that a torn or an
altered one counts for nothing. Keys and values are salted hashes: no path can be read from them.
"""

import hashlib
import os
import threading
from pathlib import Path

from consilium.core.storage import PRIVATE

DIGEST = 16
"""Bytes of a hash."""
_CHECK = 8
_LINE = 2 * (2 * DIGEST + _CHECK) + 1
MOST_LINES = 500_000
"""A longer index is begun anew."""


def salted(salt: bytes, *parts: object) -> str:
    """Return a hash of what the parts are as texts, in order, that means nothing without the salt."""
    found = hashlib.blake2b(key=salt, digest_size=DIGEST)
    for part in parts:
        text = str(part).encode(errors="surrogateescape")
        found.update(len(text).to_bytes(8, "big") + text)
    return found.hexdigest()


class Index:
    """Hashes by hash, kept in the file `path`. Raises OSError where that cannot be read or written."""

    def __init__(self, path: Path, salt: bytes) -> None:
        self._path, self._salt, self._lock = path, salt, threading.Lock()
        self._known = self._load()

    def get(self, key: str) -> str | None:
        """Return the value of a key, None if there is none."""
        return self._known.get(key)

    def put(self, key: str, value: str) -> None:
        """Keep a value, here and on disk."""
        with self._lock:
            self._known[key] = value
            line = f"{key}{value}{self._check(key, value)}\n".encode()
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, PRIVATE)
            try:
                os.write(file, line)
            finally:
                os.close(file)

    def _load(self) -> dict[str, str]:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return {}
        if len(data) > MOST_LINES * _LINE:
            self._path.unlink(missing_ok=True)
            return {}
        lines = (line for line in data.decode("ascii", "replace").split("\n") if len(line) == _LINE - 1)
        parts = ((line[: 2 * DIGEST], line[2 * DIGEST : 4 * DIGEST], line[4 * DIGEST :]) for line in lines)
        return {key: value for key, value, check in parts if check == self._check(key, value)}

    def _check(self, key: str, value: str) -> str:
        return salted(self._salt, "line", key, value)[: 2 * _CHECK]
