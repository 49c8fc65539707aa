"""The record of everything that left a site. The guard writes one line per message before the message leaves.

The file is audit.jsonl in the run's private folder. Each line is a JSON object: tensors by name with shape, type, bytes and
norm (as sent, after clipping and noise), scalars, scores, and the privacy cost. Every line holds the SHA-256 of the line before
it, so a line that is changed, added or removed later is detected. The hash of the last line is the seal of the whole file. A
copy of the seal kept elsewhere shows whether lines were cut off at the end. A message that is sent again has one line.
"""

import errno
import getpass
import hashlib
import json
import os
import stat
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from consilium.core.errors import ConfigError, Reason, RefusedError
from consilium.core.storage import file_lock, make_private_folder, open_private, sync_folder
from consilium.privacy.accounting import GaussianEvent, check_delta, epsilon_of

FILE = "audit.jsonl"
Line = dict[str, Any]


def local_user() -> str:
    """Return the name of this machine's user for a record, or the user's number if it has no name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


class AuditLog:
    """An audit.jsonl file to which any number of processes may append. Each write first reads the lines of other processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size, self._seal, self._known = 0, "", set[str]()

    def add(self, entry: Mapping[str, Any], again: bool = False) -> None:
        """Append the line of one message, unless the file has it already. `again`: append it in any case.

        Raises RefusedError if it cannot be written; the message must then not leave.
        """
        try:
            make_private_folder(self.path.parent)
            with file_lock(self.path.with_suffix(".lock")), open_private(self.path.resolve(), "a+") as file:
                self._read_new_lines(file)
                if again or _content_hash(entry) not in self._known:
                    self._append(file, json.dumps({"time": time.time(), **entry, "previous": self._seal}))
        except (OSError, ValueError) as error:
            why = (error.strerror or type(error).__name__) if isinstance(error, OSError) else "a line is damaged"
            raise RefusedError(
                f"{self.path}: the record of what leaves cannot be written ({why}); nothing was sent; look at it", Reason.LEDGER
            ) from None

    def _append(self, file: TextIO, line: str) -> None:
        content = _content_hash(_parse_line(line))
        data, size = f"{line}\n".encode(), os.fstat(file.fileno()).st_size
        try:
            if os.write(file.fileno(), data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
            if not size:  # a new file's name must survive a power cut too
                sync_folder(self.path.resolve().parent)
        except OSError:
            os.ftruncate(file.fileno(), size)  # half a line would damage the file and block later writes
            raise
        self._known.add(content)  # only once it is on disk: a known message leaves without a new line
        self._seal, self._size = _seal(line), os.fstat(file.fileno()).st_size

    def _read_new_lines(self, file: TextIO) -> None:
        """Read the lines written since the last read, or all lines if the file has become shorter."""
        if os.fstat(file.fileno()).st_size < self._size:
            self._size, self._seal, self._known = 0, "", set()
        file.seek(self._size)
        text = file.read()
        if text and not text.endswith("\n"):  # the next line would be appended to it
            raise ValueError("half a line")
        for line in text.splitlines():
            self._known.add(_content_hash(_parse_line(line)))
            self._seal = _seal(line)
        self._size = file.tell()


def is_void(private: Mapping[str, Any]) -> bool:
    """Return whether a line's privacy promises nothing, by the rule of `Entry.is_void` for rows of the ledger."""
    return private["unit"] != "site" and private["trust"] != "distributed" and not private.get("mechanism")


def load_record(path: Path) -> Line:
    """Return the record of one run: its file, seal, messages and `broken_line`.

    `broken_line` is the number of the first line that breaks the chain, None for an intact file. The time is linear in the
    file's length, because no epsilon is computed; see `read_with_epsilon`.
    """
    texts = _read_text(path).splitlines()
    broken, before, lines = None, "", []
    for number, text in enumerate(texts, start=1):
        try:
            lines.append(_parse_line(text))
        except ValueError:
            lines.append({})
        if broken is None and lines[-1].get("previous") != before:
            broken = number
        before = _seal(text)
    return {"file": str(path), "seal": before, "broken_line": broken, "messages": [x for x in lines if x]}


def lines(path: Path) -> list[Line]:
    """Return the lines of a record. Raises RefusedError for a damaged line: it may be the one that names a lost seal."""
    try:
        found = [json.loads(line) for line in _read_text(path).splitlines()]
    except (OSError, ValueError):
        found = [None]
    kinds: dict[str, type] = {"ledger": str, "sums": str, "lost": list}
    if not all(isinstance(line, dict) and all(isinstance(line.get(n, k()), k) for n, k in kinds.items()) for line in found):
        raise RefusedError(
            f"{path}: a line is damaged; nothing was sent; look at it, or run `consilium privacy accept`", Reason.LEDGER
        )
    return found


def read_with_epsilon(path: Path) -> Line:
    """Return the result of `load_record`, with the epsilon spent so far added to each message that costs privacy."""
    found, spent = load_record(path), dict[tuple[int, int, int], GaussianEvent]()
    total, words = Counter[GaussianEvent](), Counter[tuple[int, int]]()
    for line in found["messages"]:
        if private := line.get("privacy"):
            round, phase = line["round"], line["phase"]
            words[round, phase] += line.get("kind") == "refusal"  # each refusal was another attempt
            number = -words[round, phase] if line.get("kind") == "refusal" else 0
            place, spend = (round, phase, number), GaussianEvent(**private["spend"])
            if (old := spent.get(place)) is not None:
                total[replace(old, count=1)] -= old.count
            spent[place] = spend
            total[replace(spend, count=1)] += spend.count
            private["epsilon"] = epsilon_of([replace(one, count=n) for one, n in total.items()], private["delta"])
    return found


def _read_text(path: Path) -> str:
    """Return a record's text. Raises OSError for a pipe, a socket or a device, because reading one might never end."""
    with open(path, encoding="utf-8", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a plain file")
        return file.read()


def _parse_line(text: str) -> Line:
    """Parse a line of the record. Raises ValueError for an invalid line, or one with an invalid privacy cost."""
    try:
        found = json.loads(text)
        if private := found.get("privacy"):
            check_delta(private["delta"])
            if not all(type(found[name]) is int for name in ("round", "phase")) or not _is_valid_event(**private["spend"]):
                raise ValueError("no cost")
    except (AttributeError, TypeError, KeyError, RecursionError, ConfigError):
        raise ValueError("no line of the record") from None
    return dict(found)


def _is_valid_event(noise_multiplier: object, sample_rate: object = 1.0, count: object = 1, slack: object = 0.0) -> bool:
    """Tell whether the numbers are valid for a GaussianEvent. The file may have been edited, so they can be anything."""
    numbers = [one for one in (noise_multiplier, sample_rate, slack) if isinstance(one, int | float)]
    sizes = len(numbers) == 3 and all(one == 0 or 1e-100 <= one <= 1e100 for one in numbers) and numbers[1] <= 1
    return sizes and type(count) is int and 0 <= count < 2**53


def _content_hash(line: Mapping[str, Any]) -> str:
    """Return the hash of a line's content, without its time, the previous hash, the ledger's seal and FLARE's job id."""
    said = {key: value for key, value in line.items() if key not in ("time", "previous", "ledger", "flare_job")}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _seal(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()
