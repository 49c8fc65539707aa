"""Files of unknown origin: read up to a bound, never by way of a link, and nothing but plain files."""

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from consilium.errors import ConfigError
from consilium.report.lines import LARGEST

MOST_BYTES = 64 * 1024**2
"""Of a file that is read as a whole."""
MOST_RECORD, LONGEST_LINE = 2 * 1024**3, 16 * 1024**2
"""Bytes of a record that is read line by line, and of one line."""
Line = dict[str, Any]


def opened(path: Path) -> BufferedReader | None:
    """Return a plain file, opened; None for what is missing, a link, a folder, a pipe, or may not be read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    return None


def read(path: Path, most: int = MOST_BYTES) -> bytes | None:
    """Return a plain file's bytes; None where there is none or it has more than `most`."""
    file = opened(path)
    if file is None:
        return None
    with file:
        found = file.read(most + 1)
    return found if len(found) <= most else None


def read_json(path: Path, most: int = MOST_BYTES) -> Any:
    """Return what a JSON file holds; None where there is no such file or it is damaged."""
    try:
        return json.loads(read(path, most) or b"null")
    except (ValueError, RecursionError):
        return None


def read_lines(path: Path) -> tuple[list[Line], int]:
    """Return the objects of a file of JSON lines, and how many lines are none. Raises ConfigError for one without end."""
    found: list[Line] = []
    damaged, file = 0, opened(path)
    if file is None:
        return found, damaged
    with file:
        if os.fstat(file.fileno()).st_size > MOST_RECORD:
            raise ConfigError(f"{path}: has more than {MOST_RECORD // 1024**3} GiB, no record of ours; give another folder")
        for text in _lines(file):
            if (line := _object(text)) is None:
                damaged += 1
            else:
                found.append(line)
    return found, damaged


def _lines(file: BufferedReader) -> Iterator[bytes]:
    while text := file.readline(LONGEST_LINE):
        if text.strip():
            yield text


def _object(text: bytes) -> Line | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def is_folder(path: Path) -> bool:
    """Tell whether a path is a folder itself, not by way of a link."""
    return path.is_dir() and not path.is_symlink()


def folders(path: Path) -> list[Path]:
    """Return the folders in a folder, by name; none by way of a link."""
    return sorted(one for one in path.iterdir() if is_folder(one)) if is_folder(path) else []


def sha256(path: Path) -> str | None:
    """Return a plain file's SHA-256; None where there is none."""
    file = opened(path)
    if file is None:
        return None
    with file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def number(value: Any) -> float | None:
    """Return a finite number as such; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if abs(value) <= LARGEST else None  # which NaN is not either
    except OverflowError:
        return None
