"""Runs the cells of a study in worker processes: finished ones never again, broken ones from their checkpoint."""

import os
import time
from collections import deque
from collections.abc import Callable
from multiprocessing import connection

from consilium.study.cell import Record, fail, finished, renewed
from consilium.study.plan import Planned
from consilium.study.worker import Progress, Worker

AGAIN = 1.0
"""Seconds after which a cell that another process runs is asked for again."""
Told = Callable[[Planned, "Progress | Record"], None]
"""Takes how far a cell is, or how it ended."""


def run_study(cells: list[Planned], workers: int, told: Told) -> dict[str, Record]:
    """Run all cells, so many at a time; return how each ended, by its id. No process is left however this ends.

    A cell that another process runs is waited for. With the same number of workers results are the same to the bit.
    """
    left = [one for one in cells if not finished(one)]
    ended = {one.cell.id: renewed(one) for one in cells if one not in left}
    crew = Crew(workers, deque(left), told)
    try:
        return ended | crew.run()
    finally:
        crew.end()


class Crew:
    """The workers of a study and the cells that are left for them."""

    def __init__(self, count: int, left: deque[Planned], told: Told) -> None:
        self.left, self.told, self.ended = left, told, dict[str, Record]()
        self.later: deque[tuple[float, Planned]] = deque()
        self.workers: list[Worker] = []
        self.count, self.threads = min(count, len(left)), max(1, (os.cpu_count() or 1) // count)

    def run(self) -> dict[str, Record]:
        """Run all that is left; return how each cell ended."""
        while self._hand_out():
            busy = {worker.pipe: worker for worker in self.workers if worker.planned}
            for pipe in connection.wait(list(busy), AGAIN) if busy else []:
                self._hear(busy[pipe])  # type: ignore[index]
            if not busy:
                time.sleep(AGAIN / 10)
        return self.ended

    def end(self) -> None:
        """End all processes."""
        for worker in self.workers:
            worker.process.terminate()
        for worker in self.workers:
            worker.end()

    def _hand_out(self) -> bool:
        """Give idle workers cells, with as many workers as are of use; tell whether anything is left to wait for."""
        while self.later and self.later[0][0] <= time.monotonic():
            self.left.append(self.later.popleft()[1])
        while self.left:
            idle = next((worker for worker in self.workers if not worker.planned), None)
            if idle is None and len(self.workers) >= self.count:
                break
            if idle is None:
                self.workers.append(idle := Worker(self.threads))
            idle.give(self.left.popleft())
        return bool(self.left or self.later or any(worker.planned for worker in self.workers))

    def _hear(self, worker: Worker) -> None:
        said, planned = worker.take(), worker.planned
        if planned is None:
            return
        if said is None:
            self.workers.remove(worker)
            said = fail(planned, worker.end())
        self.told(planned, said)
        if isinstance(said, Record):
            worker.planned = None
            self._ended(planned, said)

    def _ended(self, planned: Planned, record: Record) -> None:
        if record.state == "elsewhere":
            self.later.append((time.monotonic() + AGAIN, planned))
        else:
            self.ended[planned.cell.id] = record
