"""The record of one cell of a study, `cell.json`: how far the cell is. Loads no torch."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from filelock import FileLock, Timeout
from pydantic import Field, TypeAdapter

from consilium.core.storage import file_lock, private_folder, write_atomic

RECORD = "cell.json"
State = Literal["waiting", "running", "locked", "interrupted", "failed", "done", "other data"]
"""`locked`: another process runs it; `interrupted`: it resumes from its checkpoint, also where its scores are gone; `other
data`: it will run anew, see `held`."""


@dataclass(frozen=True)
class CellRecord:
    """How far a cell is.

    `data`, `whole` and `code`: see Planned, "" in records of former versions; `folder`: of its data, in `--data`, None in
    those; `place`: see Cell; `seconds`: what it took, without parts that were interrupted.
    """

    state: State = "waiting"
    reason: str = ""
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    data: str = ""
    labels: Mapping[str, str] | None = None
    overrides: tuple[str, ...] = ()
    place: int = 0
    folder: str | None = None
    code: str = ""
    whole: str = ""

    def save(self, folder: Path) -> None:
        """Write it, whole or not at all."""
        write_atomic(folder / RECORD, json.dumps(asdict(self), indent=1).encode())

    def outdated(self, code: str) -> bool:
        """Tell whether a cell ran by other code than this, to its end or not. One of a version that noted none did not."""
        return self.state not in ("locked", "other data") and self.code not in ("", code)

    def held(self, data: str) -> "CellRecord":
        """Return the record as it stands to these data: a run on others will run anew."""
        other = self.state in ("done", "failed", "interrupted") and self.data not in ("", data)
        return replace(self, state="other data") if other else self


_RECORD = TypeAdapter(CellRecord)


def record_of(folder: Path) -> CellRecord:
    """Return how far the cell in a folder is."""
    found = stored(folder)
    if found.state != "running":
        return found
    try:
        with lock(folder):
            return replace(found, state="interrupted")
    except Timeout:
        return replace(found, state="locked")


def stored(folder: Path) -> CellRecord:
    """Return the record in a folder; of a running cell, whether or not a process runs it."""
    try:
        record = _RECORD.validate_json((folder / RECORD).read_bytes(), strict=True)
    except (OSError, ValueError):  # none yet, or damaged: it runs again
        return CellRecord()
    try:  # a copy may have been interrupted
        scored = record.state != "done" or isinstance(json.loads((folder / "results.json").read_bytes()), dict)
    except (OSError, ValueError):
        scored = False
    return record if scored else replace(record, state="interrupted")


def lock(folder: Path) -> FileLock:
    """Return the lock of a cell; it lies beside the folder, which may be set aside."""
    return file_lock(private_folder(folder.parent) / f".{folder.name}.lock", wait=False)


def log_of(folder: Path) -> Path:
    """Return the file for the output of a cell's process; beside the folder, as it may be set aside."""
    return private_folder(folder.parent) / f"{folder.name}.log"
