"""Records the deletion of a run's files at a site or the server, and then deletes them.

At a site the audit log of sent updates and the privacy ledger are not deleted, because spent budgets must remain known.
"""

import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from filelock import Timeout

from consilium.core.errors import ConfigError
from consilium.core.storage import file_lock
from consilium.federation.run_folders import ERRORS, OWNER, RUNS, STATE, all_runs
from consilium.privacy.audit_log import FILE, AuditLog, load_record, local_user
from consilium.report import untrusted_files
from consilium.report.run_files import LOCK

KIND = "forgotten"
KEPT = frozenset({FILE, OWNER})
"""Files in a run's folder that are not deleted: the audit log, and the run's owner, so that no other run takes the name."""
STAYS = "the record of what left (audit.jsonl) and the ledger's rows"
AT_SERVER = "the run's name and its owner"
RECEIVED = "what sites received and keep, and what people downloaded: ask them to delete it"
_JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""The format of FLARE's job ids. An id from a record becomes part of a path here, so it is checked."""


def expired_runs(state: Path, days: int, received: Mapping[str, Sequence[Path]]) -> list[str]:
    """Return the runs in which no file was written for `days` days and which have files to delete.

    `received`: FLARE's folders of jobs by run. They count for a run without other files: the site refused its jobs.
    """
    ends, runs = time.time() - days * 86400, {one.name for one in all_runs(state)}
    return [
        name
        for name in sorted({*runs, *received})
        if (
            files := list(_files_to_delete(state / RUNS / name) if name in runs else ())
            or [path for job in received.get(name, ()) for path in job.rglob("*") if path.is_symlink() or path.is_file()]
        )
        and max(p.lstat().st_mtime for p in files) < ends
    ]


def delete_at_site(kit: Path, folder: Path, state: Path, reason: str, received: Sequence[Path] = ()) -> dict[str, Any]:
    """Delete a run's files at a site, with FLARE's copies of its jobs in the kit, and record it in the audit log of `state`.

    `folder`: of the run; it does not exist if the site refused the job before it began. `received`: FLARE's folders of jobs;
    the run's messages may not name them. Return the record. Raises ConfigError if one of the run's jobs is still running.
    """
    messages = [line for path in folder.rglob(FILE) for line in load_record(path)["messages"]]
    named = [str(one.get("flare_job", "")) for one in messages] + [one.name for one in received]
    jobs = sorted({job for job in named if _JOB.fullmatch(job)})
    # a running job has its id in the command lines of its processes
    words = [word for one in psutil.process_iter(["cmdline"]) for word in one.info["cmdline"] or ()]
    if going := next((job for job in jobs if any(job in word for word in words)), None):
        raise ConfigError(f"{folder.name}: job {going} is still running; wait for its end, or `consilium abort` it")
    flares = [kit / job for job in jobs if untrusted_files.is_folder(kit / job)]
    flares += [path for job in jobs for path in sorted((kit / STATE / ERRORS).glob(f"{job}.log*"))]
    left = "nothing: no update has left in this run"
    if sent := sum(1 for one in messages if one.get("tensors")):
        left = f"{sent} updates that the server had, and the models that it and other sites made of them"
    return _delete(folder, flares, state, {"reason": reason, "jobs": jobs, "stays": STAYS, "left": left})


def delete_at_server(folder: Path, stored: Sequence[Path], state: Path, reason: str) -> dict[str, Any]:
    """Delete a run's files at the server and record it in the audit log of `state`.

    `stored`: FLARE's folders of the run's jobs, which are deleted too. Return the record. Raises ConfigError for a running run.
    """
    jobs, lock = sorted(path.name for path in stored), file_lock(folder / LOCK, wait=False)
    # FLARE leaves the folder of a job in the kit if the server's process died
    left = [state.parent / job for job in jobs if _JOB.fullmatch(job) and untrusted_files.is_folder(state.parent / job)]
    said = {"reason": reason, "jobs": jobs, "stays": AT_SERVER, "left": RECEIVED}
    try:
        with lock:
            return _delete(folder, [*stored, *left], state, said)
    except Timeout:
        raise ConfigError(f"{folder.name}: is still running; wait for its end, or `consilium abort` it") from None


def _delete(folder: Path, job_folders: Sequence[Path], state: Path, said: dict[str, Any]) -> dict[str, Any]:
    """Record, and then delete, a run's files, emptied folders and `job_folders` of its jobs elsewhere. Return the record.

    So a deletion that breaks off is on record too, and another one deletes and records the rest.
    """
    inside = [path for one in job_folders for path in (one, *(() if one.is_symlink() else one.rglob("*")))]
    files = [*_files_to_delete(folder), *[path for path in inside if path.is_symlink() or path.is_file()]]
    said = {"run": folder.name, "files": len(files), "bytes": sum(path.lstat().st_size for path in files)} | said
    AuditLog(state / FILE).add({"kind": KIND, "by": local_user(), **said}, again=True)
    for path in sorted(files, key=lambda path: path.name.startswith("meta")):  # FLARE's metadata last: it names the run
        path.unlink()
    for one in filter(Path.is_dir, job_folders):
        shutil.rmtree(one)
    for place in sorted((p for p in folder.rglob("*") if p.is_dir() and not p.is_symlink()), reverse=True):
        if not any(place.iterdir()):
            place.rmdir()
    return said | {"record": str(state / FILE)}


def _files_to_delete(folder: Path) -> Iterator[Path]:
    """Return the files to delete in a run's folder. A symbolic link is deleted itself, not its target."""
    found = [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
    return (path for path in found if path.name not in KEPT and path.suffix != ".lock")
