"""Files as they were when their samples were read: before a round is paid for, what it reads must still be readable."""

from collections.abc import Callable
from pathlib import Path

from consilium.core.errors import DataError, UnfitError
from consilium.data.datalist import DataList, files_of
from consilium.data.safe_open import Stamp, check_opens, stamp

Read = Callable[[str, int], object]
"""Reads the sample of a split at a place from its files. Raises DataError."""


class Watch:
    """The files of these `splits` of a list, to be made before anybody reads them.

    `skip`: samples that cannot be read are left out, as long as one is left to train on.
    """

    def __init__(self, data: DataList, splits: tuple[str, ...], skip: bool) -> None:
        self._samples = {split: tuple(map(files_of, data.splits[split])) for split in (("training",) if skip else splits)}
        self._skip = skip
        self._seen = {file: stamp(file) for samples in self._samples.values() for files in samples for file in files}

    def check(self, read: Read) -> None:
        """Raise DataError where a sample can no longer be read: its files must open, and one that has changed is read again."""
        now: dict[Path, Stamp] = {}
        for split, samples in self._samples.items():
            wrong = None
            for place, files in enumerate(samples):
                wrong = self._wrong(split, place, files, now, read)
                if (wrong is None) is self._skip:  # one that is good is enough, or one that is not is too much
                    break
            if wrong is not None:
                raise wrong
        if not self._skip:
            self._seen |= now

    def _wrong(self, split: str, place: int, files: list[Path], now: dict[Path, Stamp], read: Read) -> DataError | None:
        try:
            for file in files:
                if file not in now:
                    check_opens(file)
                    now[file] = stamp(file)
            if any(now[file] != self._seen[file] for file in files):
                read(split, place)
        except UnfitError:
            return None
        except DataError as error:
            return error
        return None
