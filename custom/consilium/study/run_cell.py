"""Run or resume one cell of a study."""

import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import Timeout

from consilium.core.errors import ConsiliumError
from consilium.core.messages import Observer
from consilium.core.sanitize import shown
from consilium.core.storage import make_private_folder
from consilium.federation.job import assemble_job
from consilium.report.predictions import PREDICTIONS, join_predictions
from consilium.runtime.engine import simulate
from consilium.server import run_start
from consilium.study.preflight import Planned
from consilium.study.records import CellRecord, cell_lock, stored_record

MOST_REASON = 600
"""Characters of the reason for a cell's failure, at most."""


def is_finished(planned: Planned) -> bool:
    """Tell whether a cell is done with its present data and, if `rerun` asks for it, with the present code."""
    record = stored_record(planned.cell.folder)
    return record.state == "done" and record.data == planned.data and not _must_set_aside(record, planned)


def _must_set_aside(record: CellRecord, planned: Planned) -> bool:
    """Tell whether a run must be set aside because its code has changed. A finished run is set aside only with `rerun`."""
    return record.is_outdated(planned.code) and (planned.rerun or record.state != "done")


def has_other_data(record: CellRecord, planned: Planned) -> bool:
    """Tell whether a run has read other data than the cell would read now, so that it must be set aside."""
    return record.data not in ("", planned.data)


def is_restorable(planned: Planned) -> bool:
    """Tell whether a run with the cell's present data and code has been set aside, and can take its place again."""
    return _set_aside_folder(planned).is_dir()


def _set_aside_folder(planned: Planned) -> Path:
    """Return the folder to which a run with the cell's present data and code is moved when it is set aside."""
    folder = planned.cell.folder
    return folder.parent.parent / "set-aside" / f"{folder.name}-{planned.data}-{planned.code}"


def update_record(planned: Planned) -> CellRecord:
    """Update and return the record of a finished cell, whose labels or place in the study may have changed."""
    before = stored_record(planned.cell.folder)
    if (now := _with_description(before, planned)) != before:
        now.save(planned.cell.folder)
    return now


def _with_description(record: CellRecord, planned: Planned) -> CellRecord:
    """Return a record with the cell's present labels, overrides, place and data in its study."""
    cell = planned.cell
    named = replace(record, labels=cell.labels, overrides=tuple(cell.overrides), place=cell.place)
    return replace(named, folder=cell.data, whole=planned.whole, source=str(planned.source or ""))


def run_cell(planned: Planned, observer: Observer) -> CellRecord:
    """Run or resume a cell, and return its record. A cell that is done or locked by another process is not run."""
    try:
        with cell_lock(planned.cell.folder):
            if not is_finished(planned):
                swap_stored_run(planned)
            return (
                update_record(planned) if is_finished(planned) else _run(planned, observer)
            )  # a run that swap_stored_run restored may be done
    except Timeout:
        return CellRecord("locked")


def record_failure(planned: Planned, reason: str) -> CellRecord:
    """Record that a cell failed because its process died. Return its record.

    If another process has finished the cell or runs it meanwhile, nothing is written.
    """
    try:
        with cell_lock(planned.cell.folder):
            if is_finished(planned):
                return update_record(planned)
            ended = replace(stored_record(planned.cell.folder), state="failed", reason=shown(reason))
            ended.save(planned.cell.folder)
            return ended
    except Timeout:
        return CellRecord("locked")


def running_record(planned: Planned) -> CellRecord:
    """Return the record of a cell at the beginning of its run, or when it resumes."""
    described = _with_description(stored_record(planned.cell.folder), planned)
    return replace(described, state="running", data=planned.data, code=planned.code)


def _run(planned: Planned, observer: Observer) -> CellRecord:
    """Run a cell and return its record. An error becomes the record's reason, in one line.

    The last refusal of a site comes before a ConsiliumError, because it is often the cause.
    """
    folder, record, start, refused = planned.cell.folder, running_record(planned), time.monotonic(), ""
    record.save(folder)

    def forward_event(event: Mapping[str, Any]) -> None:
        nonlocal refused
        if event["event"] == "refused":
            refused = f"{event['site']} was refused: {event['reason']}; "
        observer(event)

    try:
        simulate_cell(planned, forward_event)
        ended = replace(record, state="done", reason="")
    except Exception as error:  # the other cells still run
        traceback.print_exc()
        text = " ".join(str(error).split())
        reason = refused + text if isinstance(error, ConsiliumError) else f"{type(error).__name__}: {text}"
        ended = replace(record, state="failed", reason=shown(reason, MOST_REASON))
    ended = replace(ended, seconds=round(record.seconds + time.monotonic() - start, 2))
    ended.save(folder)
    return ended


def swap_stored_run(planned: Planned) -> None:
    """Move away a run with other data or other code, and restore an earlier run with the present data and code."""
    folder, before, aside = planned.cell.folder, stored_record(planned.cell.folder), _set_aside_folder(planned)
    if has_other_data(before, planned) or _must_set_aside(before, planned):
        place = make_private_folder(aside.parent) / f"{folder.name}-{before.data}-{before.code}"
        while place.exists():  # the folder already has a run with these data and code
            place = place.with_name(f"{place.name}-former")
        folder.rename(place)
    if not folder.exists():
        with suppress(FileNotFoundError):
            aside.rename(folder)


def simulate_cell(planned: Planned, observer: Observer) -> None:
    """Run a cell's job. Its folder gets the files that `consilium simulate --workspace` writes."""
    folder, log = planned.cell.folder, planned.cell.folder / "metrics.jsonl"
    if not (folder / run_start.FILE).is_file():
        log.unlink(missing_ok=True)  # the run ended before its first checkpoint
    job = assemble_job(planned.cell.load(), planned.cell.base)
    simulate(job, planned.sites(), folder, observer, resume=log.exists())
    with suppress(OSError):  # if the disk is full, the scores are complete without the picture
        join_predictions({name: folder / "sites" / name / PREDICTIONS for name in planned.names}, folder / PREDICTIONS)
