"""How a site loads its samples, and the prefetching of batches in a thread.

Threads are used instead of processes: decoding, numpy and torch release Python's lock, nothing is copied between processes, and
FLARE's processes stay the only ones. A sample depends on its file, its index and a seed, never on the thread that reads it.
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
"""Batches that are prefetched while one is in use."""
MOST_WORKERS = 8
"""The most threads that a site starts if its site.yaml does not give a number."""


@dataclass(frozen=True)
class Loading:
    """A site's settings for loading.

    `folder`: holds the cache of decoded samples on disk, None for memory only. `most`: the cache's limit in bytes. `workers`:
    threads that read, 0 for none. `skip`: unreadable samples are left out instead of raising an error. `decode_all`: all
    samples are decoded before training, not only checked by their headers. `prechecked`: another process has checked them.
    `ignore_unfit`: a sample that does not fit the job (UnfitError) is neither trained on nor scored, without an error.
    """

    folder: Path | None = None
    most: int = 0
    workers: int = 0
    skip: bool = False
    decode_all: bool = False
    prechecked: bool = False
    ignore_unfit: bool = False

    @property
    def prefetch_batch_count(self) -> int:
        """The number of batches to prefetch."""
        return AHEAD if self.workers else 0


NOTHING_LEFT = "no training sample can be read; see the site's log, and repair the data"
IN_MEMORY = Loading()
"""No cache on disk, and the caller's thread reads."""


def prefetch(calls: Iterator[Callable[[], T]], count: int) -> Generator[T, None, None]:
    """Yield the results of calls, in order. A thread makes up to `count` calls ahead of the consumer.

    With a `count` of 0, each call is made when its result is asked for. An exception of a call is raised in place of its
    result. Closing the iterator ends the thread.
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
