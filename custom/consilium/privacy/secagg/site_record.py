"""A site's record of a run with secure aggregation: its keys, and its answers, written before they leave.

A repeated question gets the same bytes. A different question for the same step of an attempt is refused, because with two
answers a server could remove a mask. Only the file's owner can read it, and the secrets are deleted at the end of the run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from consilium.core.errors import Reason, RefusedError
from consilium.core.storage import lock_folder, read_json, write_json
from consilium.privacy.secagg.sealing import canonical_json, hash_message
from consilium.privacy.secagg.terms import Message, refusal_error

FILE = "masks.json"


class SiteRecord:
    """One site's record of one run, in its own folder. Use its values only inside a `with record.opened()` block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.values: dict[str, Any] = {}

    @contextmanager
    def opened(self) -> Iterator[dict[str, Any]]:
        """Read the values and lock the record for the block. Raises RefusedError for a damaged record or an ended run."""
        with lock_folder(self.folder):
            self.values = self._read()
            if self.values.get("ended"):
                raise refusal_error("this run has ended and its keys are gone; start a new run")
            yield self.values

    def _read(self) -> dict[str, Any]:
        path = self.folder / FILE
        if not path.exists():
            return {}
        try:
            found = read_json(path)
            if isinstance(found, dict) and found:
                return found
            raise ValueError("no record")
        except (OSError, ValueError):
            raise RefusedError(
                f"{path}: the record of secure aggregation cannot be read; this site cannot go on with this run; "
                "nothing was sent",
                Reason.LEDGER,
            ) from None

    def save(self) -> None:
        """Write the values to disk. Call it before any of them leave the site."""
        write_json(self.folder / FILE, self.values)

    def answer_once(self, attempt: dict[str, Any], step: str, question: Message, make: Callable[[], Message]) -> Message:
        """Return the answer of a step. The first question makes and stores it; a repeated question gets the same answer.

        Raises RefusedError for a different question.
        """
        asked = hash_message(step, canonical_json(question)).hex()
        if (kept := attempt.get(step)) is None:
            kept = attempt[step] = {"question": asked, "answer": make()}
            self.save()
        if kept["question"] != asked:
            raise refusal_error(f"this site has answered {step} of this attempt, and this is another question")
        return dict(kept["answer"])

    def end(self) -> None:
        """Delete all secrets. The record then says only that the run has ended."""
        if not self.folder.is_dir():
            return
        with lock_folder(self.folder):
            write_json(self.folder / FILE, {"ended": True})
