"""Folders of runs in a startup kit: their names, what is kept of them, and how one is deleted."""

import getpass
import json
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from filelock import Timeout

from consilium.core.errors import ConfigError
from consilium.core.sanitize import shown
from consilium.core.storage import file_lock, locked, private_folder, write_atomic
from consilium.privacy.ledger.audit import FILE, Record, verified
from consilium.report.run_log import LOCK

RUNS, OWNER = "runs", "owner.json"
LENGTH = 64
STATE = "_consilium"
"""The folder of all our files in a kit. FLARE deletes KIT/<job id> whenever a server says so, and no job id begins with _."""
ERRORS = "errors"
"""In it: what errors said of a site's data, a file for each of FLARE's jobs."""
ATTENDANCE = "attendance.json"
"""In it at the server: which sites were here, and when."""
RESERVED = frozenset({RUNS, "server", "sites", "consilium"})
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9_-])?")
_FILE = re.compile(r".*\.(sqlite|jsonl?|ya?ml|safetensors|lock)", re.IGNORECASE)


def check_name(name: str) -> str:
    """Return a run's name if it may become a folder's. Raises ConfigError."""
    if not _NAME.fullmatch(name) or len(name) > LENGTH:
        rule = f"at most {LENGTH} letters, digits and ._-, a letter or digit first, no dot last"
        raise ConfigError(f"experiment: {shown(name, 80)!r}: expected {rule}; give the run another name")
    if name.lower() in RESERVED or _FILE.fullmatch(name):
        raise ConfigError(f"experiment: {name!r} is the name of a file or folder of ours; give the run another name")
    return name


def default_name(job: str, job_id: str) -> str:
    """Return the name of a run whose submission gives none: every submission is a run of its own."""
    return f"{job[: LENGTH - 9]}-{job_id[:8]}"


def run_folder(state: Path, name: str, submitter: str, site: str = "") -> Path:
    """Return STATE/runs/NAME, made if need be, and from then on `submitter`'s and, at a state of its own, the `site`'s.

    Raises ConfigError for a name that cannot be, that is another submitter's or site's, or that differs from another in case
    only.
    """
    runs = private_folder(state / RUNS)
    runs.chmod(0o700)
    folder = runs / check_name(name)
    with locked(runs):
        twins = [p.name for p in runs.iterdir() if p.name != name and p.name.casefold() == name.casefold()]
        if twins:
            raise ConfigError(f"experiment: {name!r}: there is a run {twins[0]!r}; give this one a name that differs more")
        owner = _owner(folder)
        if owner is not None and owner["submitter"] != submitter:
            who = f"{shown(owner['submitter'])}, not of {shown(submitter)}"
            raise ConfigError(f"experiment: {name!r} is a run of {who}; give another name")
        _check_site(folder, owner, site)
        if (told := {"submitter": submitter} | ({"site": site} if site else {})) != owner:
            write_atomic(folder / OWNER, json.dumps(told).encode())
    return folder


def known_run(state: Path, name: str, submitter: str, site: str = "") -> Path | None:
    """Return STATE/runs/NAME if it is there. Raises ConfigError for a name that cannot be, or another's run; see run_folder."""
    folder = state / RUNS / check_name(name)
    if (owner := _owner(folder)) is None:
        return None
    if owner["submitter"] != submitter:
        who = f"{shown(owner['submitter'])}, not of {shown(submitter)}"
        raise ConfigError(f"cross_site.run: {name!r} is a run of {who}; give one of yours")
    _check_site(folder, owner, site)
    return folder


def _check_site(folder: Path, owner: dict[str, str] | None, site: str) -> None:
    """Raise ConfigError where a run's folder is another site's than `site`; a former version's is whose record lies in it."""
    if owner is None or not site:
        return
    known = {owner["site"]} if "site" in owner else _recorded_sites(folder)
    if known and site not in known:
        what = f"is the state of {shown(min(known))}, not of {shown(site)}, in this run"
        remedy = f"give each site a `state` of its own in its site.yaml, or name {shown(site)} in {OWNER} if it is its own"
        raise ConfigError(f"{folder}: {what}; {remedy}")


def _recorded_sites(folder: Path) -> set[str]:
    """Return the sites whose messages a run's records hold."""
    found = set[str]()
    for path in folder.rglob(FILE):
        try:
            found |= {str(line["site"]) for line in verified(path)["messages"] if "site" in line}
        except (OSError, ValueError, TypeError, AttributeError):
            raise ConfigError(f"{path}: cannot be read, so whose run it is of is not known; restore it") from None
    return found


def _owner(folder: Path) -> dict[str, str] | None:
    try:
        found = json.loads((folder / OWNER).read_text(encoding="utf-8"))
        told = {key: found[key] for key in ("submitter", "site") if key in found or key == "submitter"}
        if not all(isinstance(one, str) for one in told.values()):
            raise ValueError
        return told
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f'{folder / OWNER}: is damaged; restore it, or write {{"submitter": NAME}} into it') from None


# delete run ------------------------------------------------------------------------------------------------------------
# A run that a site or the server forgets: what it keeps is deleted, on record.
#
# At a site the record of what left and the ledger stay: budgets are for ever.

KIND = "forgotten"
KEPT = frozenset({FILE, OWNER})
"""Of a run's folder: what left, and whose the name is, so that no other run takes it."""
STAYS = "the record of what left (audit.jsonl) and the ledger's rows"
AT_SERVER = "the run's name, with whose it is"
RECEIVED = "what sites received and keep, and what people downloaded: ask them to delete it"
_JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""FLARE's job ids: what a record names as one becomes a folder's name here."""


def expired_runs(state: Path, days: int, now: float | None = None) -> list[str]:
    """Return the runs in which nothing was written for so many days, and of which there is something to forget."""
    runs = sorted(p for p in (state / RUNS).iterdir() if p.is_dir()) if (state / RUNS).is_dir() else []
    ends = (now or time.time()) - days * 86400
    return [one.name for one in runs if (files := list(_files(one))) and max(p.lstat().st_mtime for p in files) < ends]


def forget(kit: Path, folder: Path, state: Path, reason: str) -> dict[str, Any]:
    """Delete a run's files at a site, FLARE's copies of its jobs in the kit included, and put that on record in `state`.

    Returns what was recorded. Raises ConfigError for a run that goes on.
    """
    messages = [line for path in folder.rglob(FILE) for line in verified(path)["messages"]]
    jobs = sorted({job for one in messages if _JOB.fullmatch(job := str(one.get("flare_job", "")))})
    if going := next((one for one in jobs if _runs(one)), None):
        raise ConfigError(f"{folder.name}: job {going} is at it; wait for its end, or `consilium abort` it")
    flares = [kit / job for job in jobs if (kit / job).is_dir() and not (kit / job).is_symlink()]
    flares += [path for job in jobs for path in sorted((kit / STATE / ERRORS).glob(f"{job}.log*"))]
    return _delete(folder, flares, state, {"reason": reason, "jobs": jobs, "stays": STAYS, "left": _left(messages)})


def forget_at_server(folder: Path, stored: Sequence[Path], state: Path, reason: str) -> dict[str, Any]:
    """Delete a run's files at the server, `stored`, where FLARE keeps its jobs, included, and put that on record in `state`.

    Returns what was recorded. Raises ConfigError for a run that goes on.
    """
    jobs, lock = sorted(path.name for path in stored), file_lock(folder / LOCK, wait=False)
    try:
        with lock:
            return _delete(folder, stored, state, {"reason": reason, "jobs": jobs, "stays": AT_SERVER, "left": RECEIVED})
    except Timeout:
        raise ConfigError(f"{folder.name}: is going on; wait for its end, or `consilium abort` it") from None


def _delete(folder: Path, flares: Sequence[Path], state: Path, said: dict[str, Any]) -> dict[str, Any]:
    """Delete a run's files, with the files and folders that its jobs have elsewhere, and record it; empty folders go too."""
    inside = [path for one in flares for path in (one, *(() if one.is_symlink() else one.rglob("*")))]
    others = [path for path in inside if path.is_symlink() or path.is_file()]
    files = [*_files(folder), *others]
    size = sum(path.lstat().st_size for path in files)
    for path in files:
        path.unlink()
    for one in flares:
        if one.is_dir():
            shutil.rmtree(one)
    for place in sorted((p for p in folder.rglob("*") if p.is_dir() and not p.is_symlink()), reverse=True):
        if not any(place.iterdir()):
            place.rmdir()
    said = {"run": folder.name, "files": len(files), "bytes": size} | said
    Record(state / FILE).add({"kind": KIND, "by": getpass.getuser(), **said}, again=True)
    return said | {"record": str(state / FILE)}


def _files(folder: Path) -> Iterator[Path]:
    """Yield what is there to forget in a run's folder; links themselves, never what they lead to."""
    found = [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
    return (path for path in found if path.name not in KEPT and path.suffix != ".lock")


def _left(messages: list[dict[str, Any]]) -> str:
    sent = [one for one in messages if one.get("tensors")]
    if not sent:
        return "nothing: no update has left in this run"
    return f"{len(sent)} updates that the server had, and the models that it and other sites made of them"


def _runs(job: str) -> bool:
    """Tell whether a process of this machine works at a job of FLARE."""
    return any(job in word for one in psutil.process_iter(["cmdline"]) for word in one.info["cmdline"] or ())
