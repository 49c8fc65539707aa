"""A site's record of a run with masks: its keys, the questions, and its answers, written before an answer leaves.

A repeated question gets the same bytes. Another question in the same attempt is refused: with two answers a server could remove
a mask. Only the user can read the files, and all their secrets are deleted when the run has ended.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from consilium.core.errors import Reason, RefusedError
from consilium.core.storage import locked, write_atomic
from consilium.privacy.secagg.sealing import canonical, hashed
from consilium.privacy.secagg.terms import Message, refused

FILE = "masks.json"


class SiteRecord:
    """One site's record of one run, in a folder of its own. Its values count in a `with record:` block only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.values: dict[str, Any] = {}

    @contextmanager
    def opened(self) -> Iterator[dict[str, Any]]:
        """Let one process at a time read and write the values. Raises RefusedError for a damaged record or an ended run."""
        with locked(self.folder):
            self.values = self._read()
            if self.values.get("ended"):
                what = "has ended and its keys are gone; start a new run"
                raise refused(f"this run {what}")
            yield self.values

    def _read(self) -> dict[str, Any]:
        path = self.folder / FILE
        if not path.exists():
            return {}
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(found, dict) and found:
                return found
            raise ValueError("no record")
        except (OSError, ValueError):
            what = "the record of secure aggregation cannot be read; this site cannot go on with this run"
            raise RefusedError(f"{path}: {what}; nothing was sent", Reason.LEDGER) from None

    def save(self) -> None:
        """Write the values. Call it before anything of them leaves."""
        write_atomic(self.folder / FILE, json.dumps(self.values).encode())

    def once(self, attempt: dict[str, Any], step: str, question: Message, make: Callable[[], Message]) -> Message:
        """Return the answer of a step: made and stored at its first question, the same at every repetition.

        Raises RefusedError for another question.
        """
        asked = hashed(step, canonical(question)).hex()
        if (kept := attempt.get(step)) is None:
            kept = attempt[step] = {"question": asked, "answer": make()}
            self.save()
        if kept["question"] != asked:
            what = f"has answered {step} of this attempt, and this is another question"
            raise refused(f"this site {what}")
        return dict(kept["answer"])

    def end(self) -> None:
        """Delete all secrets; only the end of the run stays noted."""
        if not self.folder.is_dir():
            return
        with locked(self.folder):
            write_atomic(self.folder / FILE, json.dumps({"ended": True}).encode())
