"""Run the cells of a study in worker processes. Finished cells are skipped, and interrupted cells resume."""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import connection
from typing import Any, TextIO

from consilium.core.child_process import ChildProcess, exit_with_parent
from consilium.core.storage import open_private
from consilium.report.live_view import RunFraction
from consilium.study.preflight import Planned
from consilium.study.records import CellRecord, log_of
from consilium.study.run_cell import is_finished, record_failure, run_cell, update_record

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
Told = Callable[[Planned, Progress | CellRecord], None]
"""A function that is called with a cell's progress, or with its record at the end."""


def run_study(cells: list[Planned], workers: int, on_update: Told) -> dict[str, CellRecord]:
    """Run all cells, `workers` at a time, and return each cell's record by its id. All worker processes are ended, always.

    A cell that another process runs is waited for. Results are equal to the bit for the same number of workers. `on_update` is
    called with each cell's progress and record.
    """
    left = deque((0.0, one) for one in cells if not is_finished(one))
    waiting = {one.cell.id for _, one in left}
    ended = {one.cell.id: update_record(one) for one in cells if one.cell.id not in waiting}
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
    pipe.send(run_cell(planned, ProgressReporter(pipe, planned.cell.load().training.rounds)))


class ProgressReporter:
    """An observer that sends the progress of a run of `rounds` rounds through a pipe, at most every OFTEN seconds."""

    def __init__(self, pipe: connection.Connection, rounds: int) -> None:
        self.pipe, self.run, self.last = pipe, RunFraction(rounds), 0.0

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take one event of a Coordinator or a Site."""
        self.run(event)
        if event["event"] in ("round", "step") and time.monotonic() - self.last > OFTEN:
            self.last = time.monotonic()
            with suppress(OSError):  # the study's process died, so this one will exit too
                self.pipe.send((self.run.fraction, f"round {self.run.round + 1}/{self.run.rounds}"))
