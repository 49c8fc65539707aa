"""Files that studies store: each cell's record, `cell.json`, and a cache of the FLOPs of whole studies. Imports no torch."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from filelock import FileLock, Timeout
from pydantic import Field, TypeAdapter

from consilium.config.job import job_file
from consilium.core.schema import read_yaml
from consilium.core.storage import file_lock, make_private_folder, write_atomic
from consilium.report.untrusted_files import read_json
from consilium.study.definition import Study, studies_folder

RECORD = "cell.json"
State = Literal["waiting", "running", "locked", "interrupted", "failed", "done"]
"""State of a cell. `locked`: another process runs it. `interrupted`: it resumes from its checkpoint.

A finished cell whose results.json is missing is `interrupted` too.
"""


@dataclass(frozen=True)
class CellRecord:
    """The state of a cell, and the job, data and code with which it ran.

    `reason`: why it failed. `seconds`: its run time, without interrupted parts. `data`, `whole` and `code`: see Planned; "" in
    records of former versions. `source`: the path of `--data`; "" without it, and in records of former versions. `folder`: the
    folder of its data in `--data`; None in records of former versions. `labels`, `overrides`, `place`: see Cell.
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
    source: str = ""

    def save(self, folder: Path) -> None:
        """Write the record into a cell's folder atomically."""
        write_atomic(folder / RECORD, json.dumps(asdict(self), indent=1).encode())

    def is_outdated(self, code: str) -> bool:
        """Tell whether a cell ran, finished or not, by other code than `code`; False if its record has no digest of code."""
        return self.state != "locked" and self.code not in ("", code)


_RECORD = TypeAdapter(CellRecord)


def current_record(folder: Path) -> CellRecord:
    """Return the record of the cell in a folder, with `locked` or `interrupted` in place of `running`."""
    found = stored_record(folder)
    if found.state != "running":
        return found
    try:
        with cell_lock(folder):
            return replace(found, state="interrupted")
    except Timeout:
        return replace(found, state="locked")


def stored_record(folder: Path) -> CellRecord:
    """Return the record as stored in a folder. Its state may be `running` even if no process runs the cell any more."""
    try:
        record = _RECORD.validate_json((folder / RECORD).read_bytes(), strict=True)
    except (OSError, ValueError):  # missing or damaged, so the cell runs again
        return CellRecord()
    try:  # a copied folder may lack its results
        scored = record.state != "done" or isinstance(json.loads((folder / "results.json").read_bytes()), dict)
    except (OSError, ValueError):
        scored = False
    return record if scored else replace(record, state="interrupted")


def cell_lock(folder: Path) -> FileLock:
    """Return the lock of a cell. Its file is beside the folder, because the folder may be renamed."""
    return file_lock(make_private_folder(folder.parent) / f".{folder.name}.lock", wait=False)


def log_of(folder: Path) -> Path:
    """Return the log file of a cell's process. It is beside the folder, because the folder may be renamed."""
    return make_private_folder(folder.parent) / f"{folder.name}.log"


# FLOPs -----------------------------------------------------------------------------------------------------------------
# They are cached beside the studies' files, because counting builds every model, and `study list` must be quick.

CACHE = "flops.json"
"""File in the folder of the studies: by name each study's FLOPs, None if uncountable, and a digest of its grid."""


def digest_of(study: Study) -> str:
    """Return a digest of a study's grid, base job and size of data. Comments and published numbers do not change it."""
    said = study.config.model_dump(mode="json", include={"base", "set", "axes", "exclude", "counts"})
    base = read_yaml(job_file(study.path.parent / study.config.base))
    return hashlib.sha256(json.dumps([said, base], default=str).encode()).hexdigest()[:16]


def known_flops(study: Study) -> float | None:
    """Return the cached FLOPs of a study; None if there are none, or the study has changed since."""
    one = read_json(studies_folder() / CACHE).get(study.name)
    return float(one["flops"]) if isinstance(one, dict) and one.get("digest") == digest_of(study) and one.get("flops") else None


def save_flops(study: Study, flops: float | None) -> None:
    """Write the FLOPs of a study to the cache."""
    path = studies_folder() / CACHE
    there = read_json(path) | {study.name: {"digest": digest_of(study), "flops": flops}}
    write_atomic(path, (json.dumps(dict(sorted(there.items())), indent=1) + "\n").encode())
