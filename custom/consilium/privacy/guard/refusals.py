"""Failures that data decide together with what the server sent: in a private job such an answer is given once and stays.

Otherwise a server could ask the same round again and again, each time with other values, and learn a bit of the data each time.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from consilium.core.errors import Reason
from consilium.core.storage import noted, room_for, unreadable, write_atomic
from consilium.privacy.accounting.composition import Entry

ROWS = ".after-word-"
"""Stands in the ledger between a run's name and how many words its round and phase had before."""
ROW = "word"
"""Digest of a row of the ledger for a word; of a former version it has none, at site level."""
TELLING = frozenset({Reason.TRAINING, Reason.RESULT, Reason.ERROR, Reason.LEDGER, Reason.CHECKPOINT})
"""Words that a site's data may decide together with what the server sent.

`ledger` is one: a disk may have room for a word and none for what a training that went well leaves. `checkpoint` is one: what
such a training has left may be what the tensors that the server sends lack.
"""


class Said(NamedTuple):
    """A word, and the run's name in the ledger's row that pays for it; "" for one of a former version, which paid first.

    `terms`: that row, but for the digest, as it was when the word came; None for one of a former version.
    """

    word: Reason
    row: str
    terms: Entry | None = None


def keep(run: Path, place: tuple[int, int], said: Said) -> None:
    """Note in the run's folder that this round and phase end in a word. Raises RefusedError where it cannot.

    It is kept before it is paid for, and names its row: so whatever ends the process between them, the word that is repeated
    is paid, and once. A word that was paid and not kept would be paid again at every ask.
    """
    told = {"word": said.word.value, "row": said.row, "terms": asdict(said.terms) if said.terms else None}
    with room_for(_file(run, place)):
        write_atomic(_file(run, place), json.dumps(told).encode())


def said(run: Path, place: tuple[int, int]) -> Said | None:
    """Return the word in which this round and phase have ended, None where they have not. Raises RefusedError."""
    if not (file := _file(run, place)).is_file():
        return None
    remedy = "restore it; to remove it allows another try until a newer round has begun, and what is then released costs again"
    found = noted(file, remedy)
    try:
        terms, row = found.get("terms"), found.get("row", "")
        if not isinstance(row, str):
            raise TypeError
        return Said(Reason(found["word"]), row, None if terms is None else Entry.of(terms))
    except (KeyError, ValueError, TypeError):
        raise unreadable(file, remedy) from None


def attempt(rows: Iterable[Entry], run: str, place: tuple[int, int]) -> str:
    """Return the run's name in the ledger for what is tried at a place now: behind a word that left, another."""
    here = [row for row in rows if (row.round, row.phase) == place and run_of(row) == run]
    said = sum(row.digest == ROW or (row.unit == "site" and row.count > 0 and not row.digest) for row in here)
    return f"{run}{ROWS}{said}" if said else run


def run_of(row: Entry) -> str:
    """Return the run's name without the number of its words."""
    return row.run.partition(ROWS)[0]


def _file(run: Path, place: tuple[int, int]) -> Path:
    return run / "refused" / "{}-{}.json".format(*place)
