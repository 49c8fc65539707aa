"""Failures that data decide together with what the server sent: in a private job such an answer is given once and stays.

Otherwise a server could ask the same round again and again, each time with other values, and learn a bit of the data each time.
"""

import json
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from consilium.errors import Reason, RefusedError
from consilium.privacy.composition import Entry
from consilium.storage import written

ROWS = ".after-word-"
"""Stands in the ledger between a run's name and how many words its round and phase had before."""
BESIDE = ".beside-release-"
"""Stands so for a word beside a release that another process of the run has made of its round and phase."""
ROW = "word"
"""Digest of a row of the ledger for a word; of a former version it has none, at site level."""
TELLING = frozenset({Reason.TRAINING, Reason.RESULT, Reason.ERROR})
"""Words that a site's data may decide together with what the server sent."""


def keeping(run: Path, place: tuple[int, int], reason: Reason) -> AbstractContextManager[None]:
    """Note in the run's folder that this round and phase have ended in a word, if the block, which pays for it, ends well."""
    return written(_file(run, place), json.dumps({"word": reason.value}).encode())


def said(run: Path, place: tuple[int, int]) -> Reason | None:
    """Return the word in which this round and phase have ended, None where they have not."""
    path = _file(run, place)
    return Reason(json.loads(path.read_text(encoding="utf-8"))["word"]) if path.is_file() else None


def check(run: Path, place: tuple[int, int]) -> None:
    """Raise RefusedError, with the same word again, where this round and phase have ended in one."""
    if (word := said(run, place)) is not None:
        what = f"round {place[0]} phase {place[1]} has failed here before, and that answer stays"
        raise RefusedError(f"{what} ({_file(run, place)}); nothing was sent", word)


def attempt(rows: Iterable[Entry], run: str, place: tuple[int, int]) -> str:
    """Return the run's name in the ledger for what is tried at a place now: behind a word that left, another."""
    here = [row for row in rows if (row.round, row.phase) == place and row.run.partition(ROWS)[0] == run]
    said = sum(row.digest == ROW or (row.unit == "site" and row.count > 0 and not row.digest) for row in here)
    return f"{run}{ROWS}{said}" if said else run


def beside(rows: Iterable[Entry], run: str, place: tuple[int, int]) -> str:
    """Return the run's name in the ledger for a word that leaves beside a release of another process of the run."""
    here = [row for row in rows if (row.round, row.phase) == place and row.run.startswith(f"{run}{BESIDE}")]
    return f"{run}{BESIDE}{len(here) + 1}"


def ended(run: Path, place: tuple[int, int]) -> bool:
    """Tell whether this round and phase have ended in a word, so that no release will come of them."""
    return _file(run, place).is_file()


def _file(run: Path, place: tuple[int, int]) -> Path:
    return run / "refused" / "{}-{}.json".format(*place)
