"""Samples as a task sees them: read once, kept on disk or in memory as bytes, several at a time, ahead of who needs them."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from consilium.core.errors import DataError, UnfitError
from consilium.data import volumes
from consilium.data.datalist import DataList, Item
from consilium.data.header_check import NAMED, Check, faults
from consilium.data.images import Sample
from consilium.data.loading import NOTHING_LEFT, ahead
from consilium.data.store import Raw, Store, open_store

CACHE_BYTES = 2 * 1024**3
"""Samples that the disk has no room for are kept in memory up to here; beyond it they are read again."""
T = TypeVar("T")
Change = Callable[[int, Raw], T]
"""Makes of a sample's bytes, which it must not change, what a batch needs; called with the index, in any thread."""
_log = logging.getLogger(__name__)


def to_float(index: int, raw: Raw) -> Sample:
    """Return a sample's bytes as tensors of float32."""
    return {key: torch.from_numpy(array.astype(np.float32)) for key, array in raw.items()}


class SampleCache:
    """A site's samples; call it with a split and an index, or ask for `many` or for `parts` of a split.

    `read` must return values that are whole numbers of 0..255 up to rounding. `check` raises DataError for what is bad at a
    look, and every sample is looked at before this returns; without it, or where the list's loading says `decode`, every one is
    read too. Where it says `skip`, who made the list has looked already, and what cannot be read is left out and counted;
    where it says `quiet`, what does not fit the job is left out; where it says `looked`, nobody looks again.
    `settings`: all that `read` does with an item, as a text; without it nothing is kept on disk. Raises what `read` and `check`
    raise.
    """

    def __init__(self, data: DataList, read: Callable[[Item], Sample], check: Check | None = None, settings: str = "") -> None:
        self._data, self._read, self._settings, self._room = data, read, settings, CACHE_BYTES
        self._store = open_store(data.loading.folder, data.loading.most) if settings else None
        self._kept: dict[tuple[str, int], Raw] = {}
        self._lost, self._unfit = set[tuple[str, int]](), set[tuple[str, int]]()
        self._lock = threading.RLock()
        self._pool = ThreadPoolExecutor(data.loading.workers, "consilium-read") if data.loading.workers else None
        self._planes = _planes(data)
        self._locks = {path: threading.Lock() for path in self._planes}
        if data.loading.decode or not (data.loading.skip or data.loading.looked):
            self._look(check)

    def _look(self, check: Check | None) -> None:
        if check is not None and not self._data.loading.skip:
            for _, error in faults(self._data, check, self._settings, self._store):
                raise error
        if check is not None and not self._data.loading.decode:
            return
        for split, items in self._data.splits.items():
            self.many(split, range(len(items)), lambda index, raw: None)
        if self.all_lost:
            raise DataError(NOTHING_LEFT)
        if self._unfit:
            what = f"{len(self._unfit):,} samples do not fit the job, which learns and scores nothing of them"
            _log.warning(f"{self._data.path}: {what}; `consilium data check --job` names them")

    @property
    def store(self) -> Store | None:
        """Where samples are kept on disk, None for nowhere."""
        return self._store

    @property
    def skipped(self) -> int:
        """How many samples were left out so far because they cannot be read."""
        return self._data.skipped + len(self._lost)

    @property
    def all_lost(self) -> bool:
        """Whether there are training samples, and none that can be read."""
        lost = sum(split == "training" for split, _ in self._lost)
        return 0 < lost == len(self._data.splits["training"])

    def __call__(self, split: str, index: int) -> Sample:
        """Return a decoded sample as float32. Raises DataError."""
        return to_float(index, self.raw(split, index))

    def many(self, split: str, indices: Sequence[int], change: Change[T]) -> list[tuple[int, T]]:
        """Return (index, what `change` makes of the sample), in order, without samples that are left out. Raises DataError."""
        one = partial(self._one, split, change=change)
        found = self._pool.map(one, indices) if self._pool and len(indices) > 1 else map(one, indices)
        return [made for made in found if made is not None]

    def parts(self, split: str, size: int, order: Sequence[int] | None = None) -> Iterator[list[tuple[int, Sample]]]:
        """Yield the split, in this order of its indices, in parts of `size` samples, as (index, sample).

        The next ones are read meanwhile.
        """
        wanted = range(len(self._data.splits[split])) if order is None else order
        starts = range(0, len(wanted), size)
        calls = (partial(self.many, split, wanted[start : start + size], to_float) for start in starts)
        yield from ahead(calls, self._data.loading.ahead)

    def _one(self, split: str, index: int, change: Change[T]) -> tuple[int, T] | None:
        if (split, index) in self._unfit:
            return None
        try:
            return index, change(index, self.raw(split, index))
        except DataError as error:
            unfit = self._data.loading.quiet and isinstance(error, UnfitError)
            if not (unfit or self._data.loading.skip):
                raise
            self._leave_out((split, index), error, unfit)
            return None

    def _leave_out(self, place: tuple[str, int], error: DataError, unfit: bool) -> None:
        """Note a sample that is left out, once. One that does not fit is not counted: how many these are, nobody may ask."""
        with self._lock:
            known = self._unfit if unfit else self._lost
            if place not in known and len(known) < NAMED:
                _log.warning(f"left out of {place[0]}: {error}")
            known.add(place)

    def read_again(self, split: str, index: int) -> None:
        """Read a sample from its files, whatever is kept of it. Raises DataError."""
        self._read(self._data.splits[split][index])

    def raw(self, split: str, index: int) -> Raw:
        """Return a sample's bytes. Raises DataError."""
        item = self._data.splits[split][index]
        if (lock := self._locks.get(item.image)) is None:
            return self._look_up(split, index) or self._make(split, index)[0]
        if (found := self._look_up(split, index)) is not None:
            return found
        with lock:
            return self._look_up(split, index) or self._fill(split, index)

    def _look_up(self, split: str, index: int) -> Raw | None:
        if (found := self._kept.get((split, index))) is not None:
            return found
        return self._store.get(self._name(split, index)) if self._store else None

    def _name(self, split: str, index: int) -> str:
        assert self._store is not None
        return self._store.fingerprints.name(self._data.splits[split][index], self._settings)

    def _make(self, split: str, index: int) -> tuple[Raw, bool]:
        """Return a sample read from its files, and whether there was room to keep it."""
        name = self._name(split, index) if self._store else ""
        raw = {key: _bytes(tensor) for key, tensor in self._read(self._data.splits[split][index]).items()}
        if self._store and name == self._name(split, index) and self._store.put(name, raw):  # no file changed meanwhile
            return raw, True
        return raw, self._remember(split, index, raw)

    def _remember(self, split: str, index: int, raw: Raw) -> bool:
        size = sum(array.nbytes for array in raw.values())
        with self._lock:
            fits = size < self._room
            if fits:
                self._room -= size
                self._kept[split, index] = raw
        return fits

    def _fill(self, split: str, index: int) -> Raw:
        """Return a plane of a volume, and keep all its planes while it is unpacked, if there is room for them."""
        with volumes.held():
            found, room = self._make(split, index)
            for place in self._planes[self._data.splits[split][index].image]:
                if not room:
                    break
                if place != (split, index):
                    room = self._keep_too(*place)
        return found

    def _keep_too(self, split: str, index: int) -> bool:
        try:
            return self._look_up(split, index) is not None or self._make(split, index)[1]
        except DataError:  # it is told when its turn comes
            return True


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    found: np.ndarray = (tensor if tensor.dtype == torch.uint8 else tensor.round().to(torch.uint8)).contiguous().numpy()
    return found


def _planes(data: DataList) -> dict[Path, list[tuple[str, int]]]:
    """Return where the planes of each volume are that has several in the list."""
    found: dict[Path, list[tuple[str, int]]] = {}
    for split, items in data.splits.items():
        for index, item in enumerate(items):
            if isinstance(item, Item) and item.slice is not None:
                found.setdefault(item.image, []).append((split, index))
    return {path: places for path, places in found.items() if len(places) > 1}
