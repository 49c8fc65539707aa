"""The cache of a site's samples as a task reads them: decoded once, stored as bytes on disk or in memory, and prefetched.

Threads are used instead of processes: decoding, numpy and torch release Python's lock, nothing is copied between processes, and
FLARE's processes stay the only ones. A sample depends on its file, its index and a seed, never on the thread that reads it.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TypeVar

import numpy as np
import torch

from consilium.core.errors import DataError, UnfitError
from consilium.core.grouping import group_by_key
from consilium.data import volumes
from consilium.data.check_samples import Check, Place, find_errors
from consilium.data.datalist import NAMED, NOTHING_LEFT, DataList, Item
from consilium.data.disk_cache import CachedSample, DiskCache, open_disk_cache
from consilium.data.images import Sample

AHEAD = 2
"""Batches that are prefetched while one is in use."""
CACHE_BYTES = 2 * 1024**3
"""Bytes in memory for samples that find no room on disk. Further samples are read again."""
T = TypeVar("T")
Transform = Callable[[int, CachedSample], T]
"""A function of (index, sample) that makes a sample's part of a batch. It may run in any thread and must not change the
sample."""
_log = logging.getLogger(__name__)


def to_float(index: int, raw: CachedSample) -> Sample:
    """Return a sample's uint8 arrays as float32 tensors."""
    return {key: torch.from_numpy(array.astype(np.float32)) for key, array in raw.items()}


class SampleCache:
    """A site's samples, by split and index: call it for one sample, or use `map` or `parts` for many.

    `read`: returns a sample's tensors, with whole numbers in 0..255 up to rounding. `check`: raises DataError for a sample with
    bad headers or labels. `settings`: a text of everything that determines what `read` returns for an item; without it, no
    cache on disk is used.

    The constructor checks all samples. It also decodes them if the list says `decode_all`, or if there is no `check` and no
    `skip`: a list with `skip` was checked when it was made. For a `prechecked` list without `decode_all`, it does neither.
    Raises the exceptions of `read` and `check`.
    """

    def __init__(self, data: DataList, read: Callable[[Item], Sample], check: Check | None = None, settings: str = "") -> None:
        self._data, self._read, self._settings, self._room = data, read, settings, CACHE_BYTES
        self.store: DiskCache | None = open_disk_cache(data.loading.folder, data.loading.most) if settings else None
        self._kept: dict[Place, CachedSample] = {}
        self._lost, self._unfit = set[Place](), set[Place]()
        self._vanished: list[tuple[str, str]] = []
        self._lock = threading.RLock()
        self._pool = ThreadPoolExecutor(data.loading.workers, "consilium-read") if data.loading.workers else None
        samples = (((split, index), item) for split, items in data.splits.items() for index, item in enumerate(items))
        planes = group_by_key(
            (item.image, place) for place, item in samples if isinstance(item, Item) and item.slice is not None
        )
        self._planes = {path: places for path, places in planes.items() if len(places) > 1}
        self._locks = {path: threading.Lock() for path in self._planes}
        loading = data.loading
        if loading.prechecked and not loading.decode_all:
            return
        for _, error in find_errors(data, check, settings, self.store, self._vanished) if check else ():
            if not loading.skip:
                raise error
        if not loading.decode_all and (loading.skip or check is not None):
            return
        for split, items in data.splits.items():
            self.map(split, range(len(items)), lambda index, raw: None)
        if self.all_lost:
            raise DataError(NOTHING_LEFT)
        if self._unfit:
            _log.warning(
                f"{self._data.path}: {len(self._unfit):,} samples do not fit the job, which learns and scores nothing of "
                "them; `consilium data check --job` names them"
            )

    @property
    def vanished_classes(self) -> Counter[tuple[str, str]]:
        """How many samples lose all pixels of a class when they are resized, by (split, class)."""
        return Counter(self._vanished)

    @property
    def skipped(self) -> int:
        """The number of unreadable samples skipped so far."""
        return self._data.skipped + len(self._lost)

    @property
    def all_lost(self) -> bool:
        """Whether there are training samples, but none can be read."""
        return 0 < sum(split == "training" for split, _ in self._lost) == len(self._data.splits["training"])

    def __call__(self, split: str, index: int) -> Sample:
        """Return a decoded sample as float32. Raises DataError."""
        return to_float(index, self.raw(split, index))

    def map(self, split: str, indices: Sequence[int], transform: Transform[T]) -> list[tuple[int, T]]:
        """Return (index, transformed sample) pairs, in order, without the samples that are left out. Raises DataError."""
        one = partial(self._try_transform, split, transform=transform)
        found = self._pool.map(one, indices) if self._pool and len(indices) > 1 else map(one, indices)
        return [made for made in found if made is not None]

    def parts(self, split: str, size: int, order: Sequence[int] | None = None) -> Iterator[list[tuple[int, Sample]]]:
        """Yield a split in parts of `size` samples, as (index, sample) pairs. The next parts are prefetched.

        `order`: the indices to yield; without it, all in the list's order.
        """
        wanted = range(len(self._data.splits[split])) if order is None else order
        calls = (partial(self.map, split, wanted[start : start + size], to_float) for start in range(0, len(wanted), size))
        yield from prefetch(calls, AHEAD if self._data.loading.workers else 0)

    def _try_transform(self, split: str, index: int, transform: Transform[T]) -> tuple[int, T] | None:
        """Return (index, transformed sample), or None if the sample is left out. The log names the first such samples."""
        place = (split, index)
        if place in self._unfit:
            return None
        try:
            return index, transform(index, self.raw(split, index))
        except DataError as error:
            unfit = self._data.loading.ignore_unfit and isinstance(error, UnfitError)
            if not (unfit or self._data.loading.skip):
                raise
            with self._lock:
                known = self._unfit if unfit else self._lost  # unfit samples are not counted: their number would reveal data
                if place not in known and len(known) < NAMED:
                    _log.warning(f"left out of {split}: {error}")
                known.add(place)
            return None

    def read_again(self, split: str, index: int) -> None:
        """Read a sample from its files, even if it is cached. Raises DataError."""
        self._read(self._data.splits[split][index])

    def raw(self, split: str, index: int) -> CachedSample:
        """Return a sample's uint8 arrays, from the cache or from its files. Raises DataError."""
        found, image = self._look_up(split, index), self._data.splits[split][index].image
        lock = self._locks.get(image)
        if found is not None or lock is None:
            return found or self._read_and_cache(split, index)[0]
        with lock:
            if (found := self._look_up(split, index)) is not None:
                return found
            # all planes in the list are cached while their volume is unpacked, as long as there is room
            with volumes.hold_volumes():
                found, room = self._read_and_cache(split, index)
                for place in self._planes[image]:
                    with suppress(DataError):  # raised again when this plane is asked for
                        room = room and (self._look_up(*place) is not None or self._read_and_cache(*place)[1])
            return found

    def _look_up(self, split: str, index: int) -> CachedSample | None:
        if (found := self._kept.get((split, index))) is not None:
            return found
        return self.store.get(self.store.name(self._data.splits[split][index], self._settings)) if self.store else None

    def _read_and_cache(self, split: str, index: int) -> tuple[CachedSample, bool]:
        """Return a sample read from its files, and whether there was room to cache it, on disk or in memory."""
        item = self._data.splits[split][index]
        name = self.store.name(item, self._settings) if self.store else ""
        read = {key: one if one.dtype == torch.uint8 else one.round().to(torch.uint8) for key, one in self._read(item).items()}
        raw = {key: one.contiguous().numpy() for key, one in read.items()}
        if self.store and name == self.store.name(item, self._settings) and self.store.put(name, raw):  # no file has changed
            return raw, True
        size = sum(array.nbytes for array in raw.values())
        with self._lock:
            fits = size < self._room
            if fits:
                self._room -= size
                self._kept[split, index] = raw
        return raw, fits


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
