"""Runs the cells of a study in worker processes: finished ones never again, interrupted ones from their checkpoint."""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import connection
from typing import Any, TextIO

from consilium.core.child_process import ChildProcess, exit_with_parent
from consilium.core.storage import open_private
from consilium.study.preflight import Planned
from consilium.study.records import CellRecord, log_of
from consilium.study.run_cell import finished, record_failure, renewed, run_cell

# worker ----------------------------------------------------------------------------------------------------------------
# A process of a study that runs functions one after another, and the end of it that its study holds.
#
# It ends when the study's process does, however that ends: its run then stands at its last checkpoint.


class Worker(ChildProcess):
    """A process of its own, started at once with so many `threads`. `task`: what it is busy with, for its study."""

    def __init__(self, threads: int) -> None:
        super().__init__(serve, threads)
        self.task: Any = None

    def give(self, function: Callable[..., None], task: Any) -> None:
        """Have the worker process call `function(task, pipe)`, which sends its result through the pipe."""
        self.task = task
        with suppress(OSError):  # it is gone, as `take` will find
            self.pipe.send((function, task))

    def take(self) -> Any:
        """Return an answer; None if its process is gone."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            return None


def serve(pipe: connection.Connection) -> None:
    """Call the functions that come, until the study is gone. Their modules are loaded here, after all output is muted."""
    exit_with_parent()
    with open(os.devnull, "a") as nothing:
        redirect(nothing)
    with suppress(EOFError, OSError):
        while True:
            function, task = pipe.recv()
            function(task, pipe)


def redirect(file: TextIO) -> None:
    """Write this process's output there: libraries would print through the study's table."""
    for number in (1, 2):
        os.dup2(file.fileno(), number)


# runner ----------------------------------------------------------------------------------------------------------------

RETRY = 1.0
"""Seconds after which a cell that another process runs is tried again."""
OFTEN = 0.2
"""Seconds between two reports of a cell's progress."""
Progress = tuple[float, str]
"""How much of a cell is done, from 0 to 1, and where it is, in words."""
Told = Callable[[Planned, Progress | CellRecord], None]
"""Takes how far a cell is, or how it ended."""


def run_study(cells: list[Planned], workers: int, told: Told) -> dict[str, CellRecord]:
    """Run all cells, so many at a time; return how each ended, by its id. No process is left however this ends.

    A cell that another process runs is waited for. With the same number of workers results are the same to the bit.
    """
    left = deque((0.0, one) for one in cells if not finished(one))
    waiting = {one.cell.id for _, one in left}
    ended = {one.cell.id: renewed(one) for one in cells if one.cell.id not in waiting}
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
                idle.give(report_cell, left.popleft()[1])
            busy: dict[Any, Worker] = {worker.pipe: worker for worker in crew if worker.task}
            for worker in [busy[pipe] for pipe in connection.wait(list(busy), RETRY)] if busy else ():
                said, planned = worker.take(), worker.task
                if said is None:
                    crew.remove(worker)
                    said = record_failure(planned, worker.end())
                told(planned, said)
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


def report_cell(planned: Planned, pipe: connection.Connection) -> None:
    """Run a cell in a worker: its output goes to the cell's log, its progress and its record through the pipe."""
    with open_private(log_of(planned.cell.folder), "a") as log:
        redirect(log)
    pipe.send(run_cell(planned, ProgressReporter(pipe, planned.cell.load().training.rounds)))


class ProgressReporter:
    """An observer that reports how far a run of so many rounds is, not too often."""

    def __init__(self, pipe: connection.Connection, rounds: int) -> None:
        self.pipe, self.rounds, self.last = pipe, rounds, 0.0
        self.round: Mapping[str, Any] = {"round": 0, "phase": 0, "phases": 1, "sites": ()}
        self.parts: dict[str, float] = {}

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take one event of a Coordinator or a Site."""
        if event["event"] == "round":
            self.round, self.parts = event, {}
        elif event["event"] == "step":
            self.parts[event["site"]] = event["step"] / event["steps"]
        if event["event"] in ("round", "step") and time.monotonic() - self.last > OFTEN:
            self.last, number = time.monotonic(), self.round["round"]
            done = sum(self.parts.values()) / max(len(self.round["sites"]), 1)
            part = (number + (self.round["phase"] + done) / self.round["phases"]) / self.rounds
            with suppress(OSError):  # the study is gone, and this process will be
                self.pipe.send((part, f"round {number + 1}/{self.rounds}"))
