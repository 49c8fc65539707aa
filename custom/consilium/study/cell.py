"""One cell of a study: what its `cell.json` says, and how it is run, or gone on with."""

import json
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from filelock import FileLock, Timeout
from pydantic import Field, TypeAdapter

from consilium.errors import ConsiliumError
from consilium.federation import checkpoint
from consilium.federation.build import assemble_job
from consilium.federation.engine import simulate
from consilium.messages import Observer
from consilium.report.clean import shown
from consilium.report.predictions import PREDICTIONS, join_predictions
from consilium.storage import file_lock, private_folder, write_atomic
from consilium.study.plan import Planned

RECORD = "cell.json"
MOST_REASON = 600
"""Characters of why a cell failed."""
State = Literal["waiting", "running", "elsewhere", "broken", "failed", "done", "other data"]
"""`elsewhere`: another process is at it; `broken`: it was interrupted, or its scores are gone, and goes on from its checkpoint;
`other data`: it will run anew, see `held`."""


@dataclass(frozen=True)
class Record:
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


def record_of(folder: Path) -> Record:
    """Return how far the cell in a folder is."""
    found = _stored(folder)
    if found.state != "running":
        return found
    try:
        with _lock(folder):
            return replace(found, state="broken")
    except Timeout:
        return replace(found, state="elsewhere")


def _stored(folder: Path) -> Record:
    try:
        record = TypeAdapter(Record).validate_json((folder / RECORD).read_bytes(), strict=True)
    except (OSError, ValueError):  # none yet, or damaged: it runs again
        return Record()
    return replace(record, state="broken") if record.state == "done" and not _scored(folder) else record


def _scored(folder: Path) -> bool:
    """Tell whether the scores are there, and whole: a copy may have been interrupted."""
    try:
        return isinstance(json.loads((folder / "results.json").read_text(encoding="utf-8")), dict)
    except (OSError, ValueError):
        return False


def _lock(folder: Path) -> FileLock:
    """Return the lock of a cell; it lies beside the folder, which may be set aside."""
    return file_lock(folder.with_name(f".{folder.name}.lock"), wait=False)


def held(record: Record, data: str) -> Record:
    """Return a record as it stands to these data: what ran on others will run anew."""
    other = record.state in ("done", "failed", "broken") and record.data not in ("", data)
    return replace(record, state="other data") if other else record


def log_of(folder: Path) -> Path:
    """Return where the texts go that a cell's process prints; beside the folder, as it may be set aside."""
    return private_folder(folder.parent) / f"{folder.name}.log"


def finished(planned: Planned) -> bool:
    """Tell whether nothing is left to do: the cell is done, with these data, and by this code if that is asked for."""
    record = _stored(planned.cell.folder)
    return record.state == "done" and record.data == planned.data and not _unwanted(record, planned)


def _unwanted(record: Record, planned: Planned) -> bool:
    """Tell whether a run is by other code and makes room: a part always, what is done only if that is asked for."""
    return outdated(record, planned.code) and (planned.again or record.state != "done")


def renewed(planned: Planned) -> Record:
    """Return the record of a finished cell, with what the study calls it now and what its data are part of now."""
    before = _stored(planned.cell.folder)
    if (now := _described(before, planned)) != before:
        now.save(planned.cell.folder)
    return now


def outdated(record: Record, code: str) -> bool:
    """Tell whether a cell ran by other code than this, to its end or not. One of a version that noted none did not."""
    return record.state not in ("elsewhere", "other data") and record.code not in ("", code)


def run_cell(planned: Planned, observer: Observer) -> Record:
    """Run a cell, or go on with it, unless it is done or another process is at it; return how far it is then."""
    private_folder(planned.cell.folder.parent)
    try:
        with _lock(planned.cell.folder):
            if not finished(planned):
                _set_aside(planned)
            return renewed(planned) if finished(planned) else _run(planned, observer)  # what came back may be done
    except Timeout:
        return Record("elsewhere")


def fail(planned: Planned, reason: str) -> Record:
    """Record that a cell failed in a process that is gone, unless another one is at it by now, or has done it."""
    private_folder(planned.cell.folder.parent)
    try:
        with _lock(planned.cell.folder):
            if finished(planned):
                return renewed(planned)
            ended = replace(_stored(planned.cell.folder), state="failed", reason=shown(reason))
            ended.save(planned.cell.folder)
            return ended
    except Timeout:
        return Record("elsewhere")


def _run(planned: Planned, observer: Observer) -> Record:
    record, began, refused = _begun(planned), time.monotonic(), list[str]()
    record.save(planned.cell.folder)

    def hear(event: Mapping[str, Any]) -> None:
        if event["event"] == "refused":
            refused[:] = [f"{event['site']} was refused: {event['reason']}; "]
        observer(event)

    try:
        _simulate(planned, hear)
        ended = replace(record, state="done", reason="")
    except Exception as error:  # the other cells go on
        traceback.print_exc()
        ended = replace(record, state="failed", reason=_reason(error, "".join(refused)))
    ended = replace(ended, seconds=round(record.seconds + time.monotonic() - began, 2))
    ended.save(planned.cell.folder)
    return ended


def _reason(error: Exception, refused: str) -> str:
    """Return one line: our own errors behind the last refusal, which is often their cause; others with their kind."""
    text = " ".join(str(error).split())
    return shown(refused + text if isinstance(error, ConsiliumError) else f"{type(error).__name__}: {text}", MOST_REASON)


def _set_aside(planned: Planned) -> None:
    """Set a run aside that is on other data, or by other code, and bring back what ran with these."""
    folder, before = planned.cell.folder, _stored(planned.cell.folder)
    if not folder.exists():
        before = _brought_back(folder, (planned.data, f"{planned.data}-{planned.code}"))
    if before.data and before.data != planned.data:
        before = _exchanged(folder, before.data, planned.data)
    if _unwanted(before, planned):
        _exchanged(folder, f"{planned.data}-{before.code}", f"{planned.data}-{planned.code}")


def _begun(planned: Planned) -> Record:
    """Return the record of a cell that begins or goes on."""
    before = _stored(planned.cell.folder)
    return replace(_described(before, planned), state="running", data=planned.data, code=planned.code)


def _described(record: Record, planned: Planned) -> Record:
    """Return a record with what a study says of its cell."""
    cell = planned.cell
    named = replace(record, labels=cell.labels, overrides=tuple(cell.overrides), place=cell.place)
    return replace(named, folder=cell.data, whole=planned.whole)


def _exchanged(folder: Path, old: str, new: str) -> Record:
    """Set a cell's folder aside under what it ran with, bring that of `new` back where there is one, and return its record."""
    aside = private_folder(folder.parent.parent / "set-aside")
    place = aside / f"{folder.name}-{old}"
    while place.exists():  # an earlier one failed in between
        place = place.with_name(f"{place.name}-former")
    folder.rename(place)
    return _brought_back(folder, (new,))


def _brought_back(folder: Path, names: Sequence[str]) -> Record:
    """Bring back the first run that was set aside under one of these names, where there is one; return the cell's record."""
    for name in names:
        with suppress(FileNotFoundError):
            (folder.parent.parent / "set-aside" / f"{folder.name}-{name}").rename(folder)
            break
    return _stored(folder)


def _simulate(planned: Planned, observer: Observer) -> None:
    """Leave what `consilium simulate --workspace` leaves."""
    folder, log = planned.cell.folder, planned.cell.folder / "metrics.jsonl"
    if not (folder / checkpoint.FILE).is_file():
        log.unlink(missing_ok=True)  # it ended before there was anything to go on with
    job = assemble_job(planned.cell.load(), planned.cell.base)
    simulate(job, planned.sites(), folder, observer, resume=log.exists())
    with suppress(OSError):  # a damaged picture, a full disk: the scores are there all the same
        join_predictions({name: folder / "sites" / name / PREDICTIONS for name in planned.names}, folder / PREDICTIONS)
