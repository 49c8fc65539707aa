"""What a sample is made of, as a name that tells nothing: content of its files, its place in them, settings, reading code."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import PIL

from consilium.core.errors import DataError
from consilium.data.datalist import Item
from consilium.data.safe_open import MOST_SLIDE, check_file
from consilium.data.store.index import Index, salted

VERSION = 1
"""Of the code that reads: raise it when the same file becomes another sample."""
RECENT = 2.0
"""Seconds in which a file may change again without its time telling."""
_APART = frozenset({"image", "label", "patient", "study"})
"""Fields of an item that a sample does not depend on, or by their files' content only."""


class Fingerprints:
    """Names by content, and which items have passed a check. What is known of a file is kept in `index`.

    `keep` writes a line of it, and deals with a disk that is full.
    """

    def __init__(self, index: Index, salt: bytes, keep: Callable[[str, str], None]) -> None:
        self._index, self._salt, self._keep = index, salt, keep

    def name(self, item: Item, settings: str) -> str:
        """Return what a sample is called. Raises DataError where its files cannot be read."""
        label = self._content(item.label) if isinstance(item.label, Path) else item.label
        return salted(self._salt, "sample", settings, *_place(item), self._content(item.image), label)

    def passed(self, item: Item, settings: str) -> bool:
        """Tell whether an item has passed the check of these settings before, and its files are as they were then."""
        return self._index.get(self._mark(item, settings)) is not None

    def note_passed(self, item: Item, settings: str) -> None:
        """Remember that an item has passed, unless a file of it is so new that a change would not show."""
        if all(_settled(path) for path in _files(item)):
            self._keep(self._mark(item, settings), salted(self._salt, "passed"))

    def _mark(self, item: Item, settings: str) -> str:
        stamps = [part for path in _files(item) for part in (path.absolute(), *_stamp(path))]
        label = None if isinstance(item.label, Path) else item.label
        return salted(self._salt, "check", settings, *_place(item), label, *stamps)

    def _content(self, path: Path) -> str:
        """Return a salted hash of a file's bytes, or of all files of a folder."""
        if not path.is_dir():
            return self._file(path)
        return salted(self._salt, "folder", *(self._file(one) for one in sorted(path.rglob("*")) if one.is_file()))

    def _file(self, path: Path) -> str:
        check_file(path, most=MOST_SLIDE)
        key = salted(self._salt, "file", path.absolute(), *_stamp(path))
        if (found := self._index.get(key)) is not None:
            return found
        try:
            with path.open("rb") as file:
                found = salted(self._salt, "content", hashlib.file_digest(file, hashlib.blake2b).hexdigest())
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}); replace it or take it off the list") from None
        if _settled(path) and key == salted(self._salt, "file", path.absolute(), *_stamp(path)):
            self._keep(key, found)
        return found


def _place(item: Item) -> list[object]:
    """Return what decides about a sample beside its files' content and the settings."""
    return [VERSION, PIL.__version__, *(getattr(item, one.name) for one in fields(item) if one.name not in _APART)]


def _files(item: Item) -> list[Path]:
    roots = [item.image, *([item.label] if isinstance(item.label, Path) else [])]
    return [one for root in roots for one in (sorted(root.rglob("*")) if root.is_dir() else [root])]


def _stamp(path: Path) -> tuple[int, ...]:
    """Return what changes when a file does; its ctime cannot be set back."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return ()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _settled(path: Path) -> bool:
    stamp = _stamp(path)
    return bool(stamp) and time.time_ns() - max(stamp[1:3]) > RECENT * 1e9
