"""Run the cells of a study in worker processes, and show them. Finished cells are skipped, and interrupted cells resume."""

import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from multiprocessing import connection
from pathlib import Path
from typing import Any, Self, TextIO

from filelock import Timeout
from rich.console import Console, Group
from rich.text import Text

from consilium.core.child_process import ChildProcess, exit_with_parent
from consilium.core.errors import ConsiliumError
from consilium.core.messages import Observer
from consilium.core.sanitize import shown
from consilium.core.storage import make_private_folder, open_private
from consilium.federation.job_assembly import assemble_job
from consilium.report.live_view import LiveScreen, RunFraction
from consilium.report.predictions import PREDICTIONS, join_predictions
from consilium.report.tables import Column, Table, duration_text
from consilium.runtime.engine import simulate
from consilium.server import run_start
from consilium.study.definition import Cell
from consilium.study.preflight import Planned
from consilium.study.records import CellRecord, cell_lock, current_record, log_of, stored_record

# one cell ---------------------------------------------------------------------------------------------------------------

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


def set_aside_folder(planned: Planned) -> Path:
    """Return the folder to which a run with the cell's present data and code is moved when it is set aside."""
    folder = planned.cell.folder
    return folder.parent.parent / "set-aside" / f"{folder.name}-{planned.data}-{planned.code}"


def update_description(planned: Planned) -> CellRecord:
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
                update_description(planned) if is_finished(planned) else _run(planned, observer)
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
                return update_description(planned)
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
    folder, before, aside = planned.cell.folder, stored_record(planned.cell.folder), set_aside_folder(planned)
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
    simulate(assemble_job(planned.cell.load(), planned.cell.base), planned.sites(), folder, observer, resume=log.exists())
    with suppress(OSError):  # if the disk is full, the scores are complete without the picture
        join_predictions({name: folder / "sites" / name / PREDICTIONS for name in planned.names}, folder / PREDICTIONS)


# worker ----------------------------------------------------------------------------------------------------------------
# A worker process, which calls functions one after another, and the object by which the study's process controls it.
#
# The worker exits when the study's process exits, also after a crash. Its run can then resume from the last checkpoint.


class Worker(ChildProcess):
    """A worker process, which starts at once with this many `threads`. `task`: the cell that it runs; None if it is idle."""

    def __init__(self, threads: int) -> None:
        super().__init__(serve, threads)
        self.task: Any = None

    def give(self, function: Callable[..., None], task: Any) -> None:
        """Have the worker process call `function(task, pipe)`, which sends its result through the pipe."""
        self.task = task
        with suppress(OSError):  # the process died; `take` will find out
            self.pipe.send((function, task))

    def take(self) -> Any:
        """Return the next object that the worker sent; None if its process died."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            return None


def serve(pipe: connection.Connection) -> None:
    """Call each function that arrives, until the study's process exits.

    Output is muted before the functions' modules are imported, because imports may print.
    """
    exit_with_parent()
    with open(os.devnull, "a") as nothing:
        redirect(nothing)
    with suppress(EOFError, OSError):
        while True:
            function, task = pipe.recv()
            function(task, pipe)


def redirect(file: TextIO) -> None:
    """Send this process's standard output and error to a file, because they would garble the study's table."""
    for number in (1, 2):
        os.dup2(file.fileno(), number)


# runner ----------------------------------------------------------------------------------------------------------------

RETRY = 1.0
"""Seconds to wait before trying again a cell that another process runs."""
OFTEN = 0.2
"""Seconds between two reports of a cell's progress, at least."""
Progress = tuple[float, str]
"""The fraction of a cell that is done, from 0 to 1, and its round as a text."""


def run_study(
    cells: list[Planned], workers: int, on_update: Callable[[Planned, Progress | CellRecord], None]
) -> dict[str, CellRecord]:
    """Run all cells, `workers` at a time, and return each cell's record by its id. All worker processes are ended, always.

    A cell that another process runs is waited for. Results are equal to the bit for the same number of workers. `on_update` is
    called with each cell's progress and record.
    """
    left = deque((0.0, one) for one in cells if not is_finished(one))
    waiting = {one.cell.id for _, one in left}
    ended = {one.cell.id: update_description(one) for one in cells if one.cell.id not in waiting}
    count, threads = min(workers, len(left)), max(1, (os.cpu_count() or 1) // workers)
    crew: list[Worker] = []
    try:
        while left or any(worker.task for worker in crew):
            while left and left[0][0] <= time.monotonic():
                idle = next((worker for worker in crew if not worker.task), None)
                if idle is None and len(crew) >= count:
                    break
                if idle is None:
                    crew.append(idle := Worker(threads))
                idle.give(run_and_report_cell, left.popleft()[1])
            busy: dict[Any, Worker] = {worker.pipe: worker for worker in crew if worker.task}
            for worker in [busy[pipe] for pipe in connection.wait(list(busy), RETRY)] if busy else ():
                said, planned = worker.take(), worker.task
                if said is None:
                    crew.remove(worker)
                    said = record_failure(planned, worker.end())
                on_update(planned, said)
                if isinstance(said, CellRecord):
                    worker.task = None
                    if said.state == "locked":
                        left.append((time.monotonic() + RETRY, planned))
                    else:
                        ended[planned.cell.id] = said
            if not busy:
                time.sleep(RETRY / 10)
        return ended
    finally:
        for worker in crew:
            worker.process.terminate()
        for worker in crew:
            worker.end()


def run_and_report_cell(planned: Planned, pipe: connection.Connection) -> None:
    """Run a cell in a worker process. Output goes to the cell's log; progress and the record go through the pipe."""
    with open_private(log_of(planned.cell.folder), "a") as log:
        redirect(log)
    pipe.send(run_cell(planned, ProgressReporter(pipe, planned.cell)))


class ProgressReporter:
    """An observer that sends the progress of a cell's run through a pipe, at most every OFTEN seconds."""

    def __init__(self, pipe: connection.Connection, cell: Cell) -> None:
        self.pipe, self.cell, self.last = pipe, cell, 0.0

    @cached_property
    def run(self) -> RunFraction:
        """What is done of the run. Made at the first event, so that an unusable job fails as a part of its run."""
        return RunFraction(self.cell.load().training.rounds)

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take one event of a Coordinator or a Site."""
        self.run(event)
        if event["event"] in ("round", "step") and time.monotonic() - self.last > OFTEN:
            self.last = time.monotonic()
            with suppress(OSError):  # the study's process died, so this one will exit too
                self.pipe.send((self.run.fraction, f"round {self.run.round + 1}/{self.run.rounds}"))


# view -------------------------------------------------------------------------------------------------------------------

LINE_EVERY = 30.0
"""Seconds between two lines about running cells where there is no terminal, at least."""


class StudyView(LiveScreen):
    """Shows the progress of `run_study`: a bar, an ETA, and a line per running cell."""

    def __init__(self, console: Console, title: str, cells: Sequence[Planned]) -> None:
        self.title, self.cells = title, [one.cell for one in cells]
        self.records = {one.cell.id: current_record(one.cell.folder) if is_finished(one) else CellRecord() for one in cells}
        self.parts: dict[str, tuple[float, str]] = {}  # fraction done, round as a text
        self.said_at = time.monotonic()
        super().__init__(console, title, len(cells))  # calls render, so it comes last
        self._update()

    def __enter__(self) -> Self:
        if (done := self._count("done")) and not self._live:
            self.say(f"{done} of {len(self.cells)} cells are done already")
        return super().__enter__()

    def __call__(self, planned: Planned, said: Progress | CellRecord) -> None:
        """Take a cell's progress, or its record at the end."""
        cell = planned.cell
        if not isinstance(said, CellRecord):
            self.parts[cell.id] = said
            self._update()
            if not self._live and time.monotonic() - self.said_at >= LINE_EVERY:
                running = ", ".join(f"{c.display_name}: {self.parts[c.id][1]}" for c in self.cells if c.id in self.parts)
                self.say(f"{self._done_of_total()} {running}{self._comma_eta()}")
            return
        before = self.records[cell.id].state
        self.records[cell.id] = said
        self.parts.pop(cell.id, None)
        self._update()
        if said.state == "failed":
            self.say(f"{self._done_of_total()} {cell.display_name}: failed: {said.reason}", "red")
        elif said.state == "done" and not self._live:
            self.say(f"{self._done_of_total()} {cell.display_name}: done in {duration_text(said.seconds)}{self._comma_eta()}")
        elif said.state == "locked" != before:
            self.say(f"{cell.display_name}: another process runs this cell; waiting", "yellow")

    def _count(self, *states: str) -> int:
        return sum(self.records[cell.id].state in states for cell in self.cells)

    def _done_of_total(self) -> str:
        return f"{self._count('done', 'failed')}/{len(self.cells)}"

    def say(self, text: str, style: str = "") -> None:
        """Print a whole line, and note the time."""
        self.said_at = time.monotonic()
        super().say(text, style)

    def _comma_eta(self) -> str:
        return f", {self.eta}" if self.eta else ""

    def _update(self) -> None:
        """Set the bar to the number of cells that have ended, and the parts that are done of those that run."""
        failed = f", {count} failed" if (count := self._count("failed")) else ""
        done = self._count("done", "failed") + sum(part for part, *_ in self.parts.values())
        self.update_bar(done, f"{shown(self.title, 40)} {self._done_of_total()}{failed}")

    def render(self) -> Group:
        """Return the bar and a line per running cell."""
        running = [f"{c.display_name}: {self.parts[c.id][1]}" for c in self.cells if c.id in self.parts]
        return Group(self._bar, *[Text(shown(text), no_wrap=True, overflow="ellipsis") for text in running])


def cells_table(title: str, cells: Sequence[Cell], records: Mapping[str, CellRecord]) -> Table:
    """Return a row per cell: its values on the axes, its state, its run time, its folder. `records`: by cell id."""
    axes = [Column(axis, right=False) for axis in cells[0].labels]
    heads = [*axes, Column("state", right=False), Column("took"), Column("folder", right=False)]
    rows = []
    for cell in cells:
        record = records[cell.id]
        rows.append([*cell.labels.values(), record.state, duration_text(record.seconds) if record.seconds else "", cell.id])
    return Table(title, heads, rows)
