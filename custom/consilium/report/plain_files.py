"""Files of unknown origin, for pages and records: plain files only, read up to a bound, never through a link."""

import hashlib
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

MOST_BYTES = 64 * 1024**2
"""Of a file that is read as a whole."""
LARGEST = 3.4028234663852886e38
"""The largest number a site may report: TensorBoard keeps single precision."""


def open_plain(path: Path) -> BufferedReader | None:
    """Return a plain file, opened; None for a missing file, a link, a folder, a pipe, or one that may not be read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    return None


def read_plain(path: Path, most: int = MOST_BYTES) -> bytes | None:
    """Return a plain file's bytes; None where there is none or it has more than `most` bytes."""
    if (file := open_plain(path)) is None:
        return None
    with file:
        found = file.read(most + 1)
    return found if len(found) <= most else None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; {} where there is no such file, it is damaged, or it holds another value."""
    try:
        found = json.loads(read_plain(path) or b"null")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def is_folder(path: Path) -> bool:
    """Tell whether a path is a folder itself, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def subfolders(path: Path) -> list[Path]:
    """Return the folders in a folder, by name; links are left out."""
    return sorted(one for one in path.iterdir() if is_folder(one)) if is_folder(path) else []


def hashes(folder: Path, names: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return (name, SHA-256) of the plain files among `names` in a folder."""
    found = []
    for name in names:
        if not (folder / name).parent.is_symlink() and (file := open_plain(folder / name)) is not None:
            with file:
                found.append((name, hashlib.file_digest(file, "sha256").hexdigest()))
    return found


def finite(value: Any) -> float | None:
    """Return a number of single precision as a float; None for anything else, NaN and bool among it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if abs(value) <= LARGEST else None  # NaN compares false
    except OverflowError:
        return None
