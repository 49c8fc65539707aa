"""The record of what left a site: the guard writes each message's line before the message leaves, and the hospital reads it.

One JSON line per message in audit.jsonl of the run's private folder: tensors by name with shape, type, bytes and norm (as sent,
after clipping and noise), scalars, scores, what it cost in privacy. Every line holds the SHA-256 of the line before it, so a
line changed, added or removed later shows. The hash of the last line is the seal of all: kept elsewhere, it shows whether the
file is whole. A message sent again has one line.
"""

import errno
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from consilium.core.errors import ConfigError, Reason, RefusedError
from consilium.core.storage import file_lock, open_private, private_folder
from consilium.privacy.accounting.accountant import GaussianEvent, check_delta, epsilon_of

FILE = "audit.jsonl"
Line = dict[str, Any]


class AuditLog:
    """One audit.jsonl, to which any number of processes may append. It is read once, and again when another has written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size, self._seal, self._known = 0, "", set[str]()

    def add(self, entry: Mapping[str, Any], again: bool = False) -> None:
        """Append one message, unless it has its line already (`again`: even then).

        Raises RefusedError where that cannot be: then nothing may leave.
        """
        try:
            private_folder(self.path.parent)
            with file_lock(self.path.with_suffix(".lock")), open_private(self.path.resolve(), "a+") as file:
                self._catch_up(file)
                if again or _content(entry) not in self._known:
                    self._append(file, json.dumps({"time": time.time(), **entry, "previous": self._seal}))
        except (OSError, ValueError) as error:
            why = (error.strerror or type(error).__name__) if isinstance(error, OSError) else "a line is damaged"
            what = f"{self.path}: the record of what leaves cannot be written ({why}); nothing was sent; look at it"
            raise RefusedError(what, Reason.LEDGER) from None

    def _append(self, file: TextIO, line: str) -> None:
        content = _content(_line(line))
        data, size = f"{line}\n".encode(), os.fstat(file.fileno()).st_size
        try:
            if os.write(file.fileno(), data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        except OSError:
            os.ftruncate(file.fileno(), size)  # half a line would be damage: with room again the record goes on
            raise
        self._known.add(content)  # not before it is on disk: what is known leaves without a line of its own
        self._seal, self._size = _seal([line]), os.fstat(file.fileno()).st_size

    def _catch_up(self, file: TextIO) -> None:
        """Read the lines written since the last time; all of them where the file has become shorter."""
        if os.fstat(file.fileno()).st_size < self._size:
            self._size, self._seal, self._known = 0, "", set()
        file.seek(self._size)
        text = file.read()
        if text and not text.endswith("\n"):  # the next line would stand in it
            raise ValueError("half a line")
        for line in text.splitlines():
            self._known.add(_content(_line(line)))
            self._seal = _seal([line])
        self._size = file.tell()


def is_void(private: Mapping[str, Any]) -> bool:
    """Return whether the privacy of a line is void, as such a row of the ledger is."""
    return private["unit"] != "site" and private["trust"] != "distributed" and not private.get("mechanism")


def verified(path: Path) -> Line:
    """Return the record of one run as it stands, its seal, and the first line that is not as written, None where all are.

    Takes time by the length of the record only: nothing that is spent in it is counted, see `read`.
    """
    texts = path.read_text(encoding="utf-8").splitlines()
    broken, before, lines = None, "", []
    for number, text in enumerate(texts, start=1):
        try:
            lines.append(_line(text))
        except ValueError:
            lines.append({})
        if broken is None and lines[-1].get("previous") != before:
            broken = number
        before = _seal([text])
    return {"file": str(path), "seal": before, "broken_line": broken, "messages": [x for x in lines if x]}


def lines(path: Path) -> list[Line]:
    """Return the lines of a record. Raises RefusedError for a damaged one: it may be the one that knows."""
    try:
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        found = [None]
    if not all(isinstance(line, dict) and isinstance(line.get("ledger", ""), str) for line in found):
        raise RefusedError(
            f"{path}: a line is damaged; nothing was sent; look at it, or run `consilium privacy accept`", Reason.LEDGER
        )
    return found


def read(path: Path) -> Line:
    """Return what `verified` does, with epsilon after each message that cost any."""
    found, spent = verified(path), dict[tuple[int, int, int], GaussianEvent]()
    total, words = Counter[GaussianEvent](), Counter[tuple[int, int]]()
    for line in found["messages"]:
        if private := line.get("privacy"):
            round, phase = line["round"], line["phase"]
            words[round, phase] += line.get("kind") == "refusal"  # each was another try
            number = -words[round, phase] if line.get("kind") == "refusal" else 0
            place, spend = (round, phase, number), GaussianEvent(**private["spend"])
            if (old := spent.get(place)) is not None:
                total[replace(old, count=1)] -= old.count
            spent[place] = spend
            total[replace(spend, count=1)] += spend.count
            private["epsilon"] = epsilon_of([replace(one, count=n) for one, n in total.items()], private["delta"])
    return found


def _line(text: str) -> Line:
    """Return a line of the record. Raises ValueError for an invalid line, or one with an invalid cost."""
    try:
        found = json.loads(text)
        if private := found.get("privacy"):
            check_delta(private["delta"])
            if not all(type(found[name]) is int for name in ("round", "phase")) or not _counts(**private["spend"]):
                raise ValueError("no cost")
    except (AttributeError, TypeError, KeyError, RecursionError, ConfigError):
        raise ValueError("no line of the record") from None
    return dict(found)


def _counts(noise_multiplier: object, sample_rate: object = 1.0, count: object = 1, slack: object = 0.0) -> bool:
    """Tell whether these are an event's numbers, in whose place anybody may have written others."""
    numbers = [one for one in (noise_multiplier, sample_rate, slack) if isinstance(one, int | float)]
    sizes = len(numbers) == 3 and all(one == 0 or 1e-100 <= one <= 1e100 for one in numbers) and numbers[1] <= 1
    return sizes and type(count) is int and 0 <= count < 2**53


def _content(line: Mapping[str, Any]) -> str:
    """Return the hash of a line's content, without its time, its place in the chain, the ledger's state and FLARE's job."""
    said = {key: value for key, value in line.items() if key not in ("time", "previous", "ledger", "flare_job")}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _seal(lines: list[str]) -> str:
    return hashlib.sha256(lines[-1].encode()).hexdigest() if lines else ""
