"""What is kept of studies: the record of a cell, `cell.json`, and the FLOPs of whole studies. Loads no torch."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from filelock import FileLock, Timeout
from pydantic import Field, TypeAdapter

from consilium.config.job import job_file
from consilium.core.schema import read_yaml
from consilium.core.storage import file_lock, private_folder, write_atomic
from consilium.report.plain_files import read_json
from consilium.study.definition import Study, studies_folder

RECORD = "cell.json"
State = Literal["waiting", "running", "locked", "interrupted", "failed", "done"]
"""`locked`: another process runs it; `interrupted`: it resumes from its checkpoint, also where its scores are gone."""


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
        return self.state != "locked" and self.code not in ("", code)


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


# FLOPs -----------------------------------------------------------------------------------------------------------------
# Cached beside the studies' files: counting lays out every model, and a list must be quick.

CACHE = "flops.json"
"""In the folder of the studies: FLOPs of each with a digest of its grid; None where they cannot be counted."""


def digest_of(study: Study) -> str:
    """Return a digest of a study's grid, base job and data; comments and published numbers do not count."""
    said = study.config.model_dump(mode="json", include={"base", "set", "axes", "exclude", "counts"})
    base = read_yaml(job_file(study.path.parent / study.config.base))
    return hashlib.sha256(json.dumps([said, base], default=str).encode()).hexdigest()[:16]


def cached_flops(folder: Path | None = None) -> dict[str, Any]:
    """Return the entries of the studies in a folder, by default of our own, by name; {} where there are none."""
    return read_json((folder or studies_folder()) / CACHE)


def known_flops(study: Study, there: Mapping[str, Any]) -> float | None:
    """Return the FLOPs that were counted of a study as it stands now."""
    one = there.get(study.name)
    return float(one["flops"]) if isinstance(one, dict) and one.get("digest") == digest_of(study) and one.get("flops") else None


def save_flops(study: Study, flops: float | None) -> None:
    """Keep the FLOPs of a study."""
    there = cached_flops() | {study.name: {"digest": digest_of(study), "flops": flops}}
    write_atomic(studies_folder() / CACHE, (json.dumps(dict(sorted(there.items())), indent=1) + "\n").encode())
