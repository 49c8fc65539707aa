"""How a site loads its samples, and work that threads do ahead of its use.

Threads, not processes: decoding, numpy and torch release Python's lock, nothing is copied between processes, and FLARE's own
processes stay the only ones. A sample depends on its file, its index and a seed, never on the thread that reads it.
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
    """`folder`: below which decoded samples are kept, None for in memory only, at most `most` bytes of them.

    `workers`: threads that read, 0 for none. `skip`: unreadable samples are left out instead of being an error. `decode_all`:
    all samples are decoded before training, not only checked by their headers. `prechecked`: another process has checked them.
    `ignore_unfit`: a sample that does not fit the job (UnfitError) counts as empty: it is neither trained on nor scored.
    """

    folder: Path | None = None
    most: int = 0
    workers: int = 0
    skip: bool = False
    decode_all: bool = False
    prechecked: bool = False
    ignore_unfit: bool = False

    @property
    def ahead(self) -> int:
        """Batches to make ready ahead."""
        return AHEAD if self.workers else 0


NOTHING_LEFT = "no training sample can be read; see the site's log, and repair the data"
IN_MEMORY = Loading()
"""Nothing is kept on disk, and the caller's thread reads."""


def ahead(calls: Iterator[Callable[[], T]], count: int) -> Generator[T, None, None]:
    """Yield what the calls return, in order; one thread begins `count` of them before they are asked for.

    With 0 each call is made when it is asked for. What a call raises is raised in its place. Closing the iterator ends the
    thread.
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
