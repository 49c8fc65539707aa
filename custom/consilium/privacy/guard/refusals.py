"""Stored refusals: failures that depend on the data and on what the server sends. In a private job such an answer is final.

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

ATTEMPT_SEPARATOR = ".after-word-"
"""Stands in the ledger between a run's name and how many refusals its round and phase had before."""
REFUSAL_DIGEST = "word"
"""Digest of a refusal's row in the ledger; of a former version it has none, at site level."""
DATA_DEPENDENT_REASONS = frozenset({Reason.TRAINING, Reason.RESULT, Reason.ERROR, Reason.LEDGER, Reason.CHECKPOINT})
"""Reasons that may depend on a site's data together with what the server sent.

`ledger` is one: a disk may have room for a refusal and none for a release. `checkpoint` is one: successful training may have
left tensors that those of the server do not fit.
"""


class StoredRefusal(NamedTuple):
    """A refusal, and the run's name in the ledger's row that pays for it; "" for one of a former version, which paid first.

    `terms`: that row, without its digest, as it was when training failed; None for one of a former version.
    """

    reason: Reason
    row: str
    terms: Entry | None = None


def save_refusal(run: Path, place: tuple[int, int], refusal: StoredRefusal) -> None:
    """Write the refusal of a round and phase into the run's folder. Raises RefusedError where it cannot.

    It is stored before it is paid, and names its row. So a process that ends between the two pays at the next ask, and once. A
    refusal that was paid and not stored would be paid again at every ask.
    """
    terms = asdict(refusal.terms) if refusal.terms else None
    with room_for(_file(run, place)):
        values = {"word": refusal.reason.value, "row": refusal.row, "terms": terms}
        write_atomic(_file(run, place), json.dumps(values).encode())


def load_refusal(run: Path, place: tuple[int, int]) -> StoredRefusal | None:
    """Return the refusal that answers this round and phase, None without one. Raises RefusedError for an unreadable file."""
    if not (file := _file(run, place)).is_file():
        return None
    remedy = "restore it; to remove it allows another try until a newer round has begun, and what is then released costs again"
    found = noted(file, remedy)
    try:
        terms, row = found.get("terms"), found.get("row", "")
        if not isinstance(row, str):
            raise TypeError
        return StoredRefusal(Reason(found["word"]), row, None if terms is None else Entry.of(terms))
    except (KeyError, ValueError, TypeError):
        raise unreadable(file, remedy) from None


def ledger_run_id(rows: Iterable[Entry], run: str, place: tuple[int, int]) -> str:
    """Return the run's name in the ledger for the next attempt at a place: another after each refusal that left."""
    here = [row for row in rows if (row.round, row.phase) == place and run_of(row) == run]
    refused = sum(row.digest == REFUSAL_DIGEST or (row.unit == "site" and row.count > 0 and not row.digest) for row in here)
    return f"{run}{ATTEMPT_SEPARATOR}{refused}" if refused else run


def run_of(row: Entry) -> str:
    """Return the run's name without the number of its refusals."""
    return row.run.partition(ATTEMPT_SEPARATOR)[0]


def _file(run: Path, place: tuple[int, int]) -> Path:
    return run / "refused" / "{}-{}.json".format(*place)
