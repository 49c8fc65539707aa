"""How a site loads its samples, and work that is done ahead of who asks for it.

Threads, not processes: decoding, numpy and torch let go of Python's lock, nothing is copied from one process to another, and
FLARE's own processes stay the only ones. What a sample is depends on its file, its index and a seed, never on who reads it.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
AHEAD = 2
"""Batches that are made ready ahead of the one in use."""
MOST_WORKERS = 8
"""Threads that a site starts unless its site.yaml says how many."""


@dataclass(frozen=True)
class Loading:
    """`folder`: under which decoded samples are kept, None for in memory only, and `most` bytes of them there.

    `workers`: threads that read, 0 for none. `skip`: a sample that cannot be read is left out instead of being an error.
    `decode`: all samples are read before anything is trained on them, not only looked at. `looked`: another process has done
    so, and this one reads none. `quiet`: a sample that does not fit the job (UnfitError) is an empty one: it is counted, and
    nothing is learned or scored of it.
    """

    folder: Path | None = None
    most: int = 0
    workers: int = 0
    skip: bool = False
    decode: bool = False
    looked: bool = False
    quiet: bool = False

    @property
    def ahead(self) -> int:
        """Batches to make ready ahead."""
        return AHEAD if self.workers else 0


NOTHING_LEFT = "no training sample can be read; see the site's log, and repair the data"
IN_MEMORY = Loading()
"""Nothing is kept on disk, and who asks reads."""


def ahead(calls: Iterator[Callable[[], T]], count: int) -> Generator[T, None, None]:
    """Yield what the calls return, in order, `count` of them begun before they are asked for, by one thread.

    With 0 each is made when it is asked for. What a call raises is raised in its place. Closing the iterator ends the thread.
    """
    if not count:
        yield from (call() for call in calls)
        return
    with ThreadPoolExecutor(1, "consilium-ahead") as pool:
        waiting: deque[Future[T]] = deque(pool.submit(call) for call in islice(calls, count))
        try:
            while waiting:
                first = waiting.popleft()
                waiting.extend(pool.submit(call) for call in islice(calls, 1))
                yield first.result()
        finally:
            for future in waiting:
                future.cancel()
