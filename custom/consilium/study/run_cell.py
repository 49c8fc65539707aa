"""How one cell of a study is run, or resumed."""

import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from filelock import Timeout

from consilium.core.errors import ConsiliumError
from consilium.core.messages import Observer
from consilium.core.sanitize import shown
from consilium.core.storage import private_folder
from consilium.federation.job import assemble_job
from consilium.report.predictions import PREDICTIONS, join_predictions
from consilium.runtime.engine import simulate
from consilium.server import run_start
from consilium.study.plan import Planned
from consilium.study.records import CellRecord, lock, stored

MOST_REASON = 600
"""Characters of why a cell failed."""


def finished(planned: Planned) -> bool:
    """Tell whether nothing is left to do: the cell is done, with these data, and by this code if that is asked for."""
    record = stored(planned.cell.folder)
    return record.state == "done" and record.data == planned.data and not _unwanted(record, planned)


def _unwanted(record: CellRecord, planned: Planned) -> bool:
    """Tell whether a run is by other code and makes room: a part always, a finished one only if that is asked for."""
    return record.outdated(planned.code) and (planned.rerun or record.state != "done")


def renewed(planned: Planned) -> CellRecord:
    """Return the record of a finished cell, with its present name in the study and the present digest of all its data."""
    before = stored(planned.cell.folder)
    if (now := _described(before, planned)) != before:
        now.save(planned.cell.folder)
    return now


def _described(record: CellRecord, planned: Planned) -> CellRecord:
    """Return a record with the cell's name in its study."""
    cell = planned.cell
    named = replace(record, labels=cell.labels, overrides=tuple(cell.overrides), place=cell.place)
    return replace(named, folder=cell.data, whole=planned.whole)


def run_cell(planned: Planned, observer: Observer) -> CellRecord:
    """Run or resume a cell, unless it is done or locked by another process; return its record."""
    try:
        with lock(planned.cell.folder):
            if not finished(planned):
                set_aside(planned)
            return renewed(planned) if finished(planned) else _run(planned, observer)  # a restored run may be done
    except Timeout:
        return CellRecord("locked")


def fail(planned: Planned, reason: str) -> CellRecord:
    """Record that a cell failed in a process that is gone, unless another one runs it by now, or has done it."""
    try:
        with lock(planned.cell.folder):
            if finished(planned):
                return renewed(planned)
            ended = replace(stored(planned.cell.folder), state="failed", reason=shown(reason))
            ended.save(planned.cell.folder)
            return ended
    except Timeout:
        return CellRecord("locked")


def begun(planned: Planned) -> CellRecord:
    """Return the record of a cell that begins or resumes."""
    described = _described(stored(planned.cell.folder), planned)
    return replace(described, state="running", data=planned.data, code=planned.code)


def _run(planned: Planned, observer: Observer) -> CellRecord:
    """Run a cell; an error is recorded in one line: our own behind the last refusal, which is often its cause."""
    folder, record, start, refused = planned.cell.folder, begun(planned), time.monotonic(), ""
    record.save(folder)

    def hear(event: Mapping[str, Any]) -> None:
        nonlocal refused
        if event["event"] == "refused":
            refused = f"{event['site']} was refused: {event['reason']}; "
        observer(event)

    try:
        simulate_cell(planned, hear)
        ended = replace(record, state="done", reason="")
    except Exception as error:  # the other cells go on
        traceback.print_exc()
        text = " ".join(str(error).split())
        reason = refused + text if isinstance(error, ConsiliumError) else f"{type(error).__name__}: {text}"
        ended = replace(record, state="failed", reason=shown(reason, MOST_REASON))
    ended = replace(ended, seconds=round(record.seconds + time.monotonic() - start, 2))
    ended.save(folder)
    return ended


def set_aside(planned: Planned) -> None:
    """Set a run aside that is on other data, or by other code, and restore an earlier one that ran with these."""
    folder, before = planned.cell.folder, stored(planned.cell.folder)
    aside = folder.parent.parent / "set-aside"
    if before.data not in ("", planned.data) or _unwanted(before, planned):
        place = private_folder(aside) / f"{folder.name}-{before.data}-{before.code}"
        while place.exists():  # an earlier one failed in between
            place = place.with_name(f"{place.name}-former")
        folder.rename(place)
    if not folder.exists():
        with suppress(FileNotFoundError):
            (aside / f"{folder.name}-{planned.data}-{planned.code}").rename(folder)


def simulate_cell(planned: Planned, observer: Observer) -> None:
    """Leave what `consilium simulate --workspace` leaves."""
    folder, log = planned.cell.folder, planned.cell.folder / "metrics.jsonl"
    if not (folder / run_start.FILE).is_file():
        log.unlink(missing_ok=True)  # it ended before its first checkpoint
    job = assemble_job(planned.cell.load(), planned.cell.base)
    simulate(job, planned.sites(), folder, observer, resume=log.exists())
    with suppress(OSError):  # a full disk: the scores are there all the same
        join_predictions({name: folder / "sites" / name / PREDICTIONS for name in planned.names}, folder / PREDICTIONS)
