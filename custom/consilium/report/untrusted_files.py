"""Read files of a run that others may have written: only plain files, never through a link, up to a size limit.

The second part reads the events of metrics.jsonl.
"""

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model

from consilium.core.errors import ConfigError

MOST_BYTES = 64 * 1024**2
"""Largest file that is read as a whole."""
LARGEST = 3.4028234663852886e38
"""The largest number that a site may report, because TensorBoard stores single precision."""


def open_plain(path: Path) -> BufferedReader | None:
    """Return a plain file, opened for reading; None if it is missing, unreadable, a link, a folder or a pipe."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    return None


def read_plain(path: Path, most: int = MOST_BYTES) -> bytes | None:
    """Return a plain file's bytes; None if there is no such file or it has more than `most` bytes."""
    if (file := open_plain(path)) is None:
        return None
    with file:
        found = file.read(most + 1)
    return found if len(found) <= most else None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if the file is missing or damaged, or holds another kind of value."""
    try:
        found = json.loads(read_plain(path) or b"null")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def is_folder(path: Path) -> bool:
    """Tell whether a path is a folder itself, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def subfolders(path: Path) -> list[Path]:
    """Return the folders in a folder, sorted by name, without links."""
    return sorted(one for one in path.iterdir() if is_folder(one)) if is_folder(path) else []


def plain_file_hashes(folder: Path, names: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return (name, SHA-256) of the plain files among `names` in a folder."""
    found = []
    for name in names:
        if not (folder / name).parent.is_symlink() and (file := open_plain(folder / name)) is not None:
            with file:
                found.append((name, hashlib.file_digest(file, "sha256").hexdigest()))
    return found


def as_finite_float(value: Any) -> float | None:
    """Return a number as a float; None if it is no number, a bool, NaN, or too large for single precision."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if abs(value) <= LARGEST else None  # NaN compares false
    except OverflowError:
        return None


# metrics file ----------------------------------------------------------------------------------------------------------
# Read metrics.jsonl, the events of a run. Others may have written it, and a crash may have cut off its last line.
# Run records, progress displays and a running server's metrics use this part. It does not import torch.

Line = dict[str, Any]
"""One event of metrics.jsonl."""
MOST_RECORD, LONGEST_LINE = 2 * 1024**3, 16 * 1024**2
"""Bytes of a metrics.jsonl and of one of its lines, at most."""
REPEATED = ("started", "result", "held_out", "concluded", "diagnostics", "figure", "final", "ended")
"""Events that a resumed run writes again."""

Number = Annotated[float, AfterValidator(lambda value: value if abs(value) <= LARGEST else math.nan)]
"""A metric. A value too large for single precision becomes NaN."""
_Count = Annotated[int, Field(ge=-1, le=10**6)]
_Size = Annotated[int, Field(ge=0, le=10**15)]
_PLACE: dict[str, Any] = {"round": _Count, "phase": _Count}
_SITE: dict[str, Any] = {"site": str, "round": _Count}
_METRICS: dict[str, Any] = _SITE | {"metrics": dict[str, Number]}
_FIELDS: dict[str, dict[str, Any]] = {
    "started": _PLACE | {"sites": list[str]}, "concluded": _PLACE | {"sites": list[str]}, "joined": _SITE,
    "result": _METRICS | {"phase": _Count}, "held_out": _METRICS, "final": _METRICS, "refused": _SITE | {"reason": str},
    "stopped": {"reason": str}, "resumed": _PLACE, "diagnostics": _PLACE | {"values": dict[str, Number]},
    "ended": dict.fromkeys(("round", "rounds", "validations", "best_round"), _Count),
    "parameters": _PLACE | dict.fromkeys(("shared", "local", "frozen"), _Size),
}  # fmt: skip


def strict_model(name: str, fields: dict[str, Any]) -> type[BaseModel]:
    """Return a pydantic model that converts no types: "1" and true are not numbers. Unknown fields are allowed."""
    return create_model(name, __config__=ConfigDict(strict=True, extra="allow"), **fields)


LINES: dict[str, type[BaseModel]] = {
    event: strict_model(event, {name: (kind, ...) for name, kind in fields.items()}) for event, fields in _FIELDS.items()
}
"""A model of each event of metrics.jsonl that is read. run_files.py writes the events. A line may have more fields."""


def read_events(path: Path) -> tuple[list[Line], int, int]:
    """Return (events, damaged lines, wrong lines) of a metrics.jsonl.

    The events are those in LINES, as an uninterrupted run would have written them; each has a `time`, which may be None. The
    wrong lines are events with a value that no run writes; the number of damaged lines includes them.
    """
    raw, torn = read_lines(path)
    found: list[Line] = []
    wrong = 0
    for line in (line for line in raw if line["event"] in LINES):
        try:
            read = LINES[line["event"]].model_validate(line).model_dump()
            found.append(line | read | {"time": as_finite_float(line.get("time"))})
        except (ValidationError, OverflowError):
            wrong += 1
    return without_replaced_events(found), torn + wrong, wrong


def read_lines(path: Path) -> tuple[list[Line], int]:
    """Return the events of a metrics.jsonl and the number of invalid lines. Raises ConfigError if the file is too large."""
    found: list[Line] = []
    damaged = 0
    if (file := open_plain(path)) is None:
        return found, damaged
    with file:
        if os.fstat(file.fileno()).st_size > MOST_RECORD:
            raise ConfigError(f"{path}: has more than {MOST_RECORD // 1024**3} GiB, no record of ours; give another folder")
        for text in iter(lambda: file.readline(LONGEST_LINE), b""):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            if isinstance(line, dict) and isinstance(line.get("event"), str):
                found.append(line)
            else:
                damaged += bool(text.strip())
    return found, damaged


def without_replaced_events(lines: Iterable[Line]) -> list[Line]:
    """Return the events as an uninterrupted run would have written them: of those that a resumed run wrote again, the last."""
    found: list[Line] = []
    for line in lines:
        if line["event"] == "resumed":
            found = [one for one in found if one["event"] not in REPEATED or place_of(one) < place_of(line)]
        found.append(line)
    return found


def place_of(line: Line) -> tuple[int, int]:
    """Return an event's round and phase."""
    return line["round"], line.get("phase", 0)
