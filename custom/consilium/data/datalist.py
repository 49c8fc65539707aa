"""MONAI / Decathlon data lists: JSON with `training`, `validation`, `test`, each a list of {"image": ..., "label": ...}."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilium.errors import DataError

SPLITS = ("training", "validation", "test")
ENTRY_KEYS = {"image", "label", "slice", "fold"}


@dataclass(frozen=True)
class Item:
    """One sample; `slice` picks a plane of a NIfTI volume along its last axis."""

    image: Path
    label: Path | None
    slice: int | None = None

    @property
    def name(self) -> str:
        """The image's file name, with the slice if there is one."""
        return self.image.name if self.slice is None else f"{self.image.name}[{self.slice}]"


@dataclass(frozen=True)
class DataList:
    """A site's samples by split; every split of SPLITS is present, possibly empty."""

    path: Path
    splits: dict[str, tuple[Item, ...]]


def read_datalist(path: Path) -> DataList:
    """Read a data list; relative paths start at its folder. Raises DataError, naming file, entry and remedy."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give the path of a data list") from None
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON ({error}); mend the place named") from None
    if not isinstance(raw, dict) or "training" not in raw:
        raise DataError(f'{path}: has no key "training"; a data list is {{"training": [{{"image": ..., "label": ...}}]}}')
    return DataList(path, {split: tuple(_items(path, split, raw.get(split, []))) for split in SPLITS})


def pool(lists: Iterable[DataList]) -> DataList:
    """Return all samples of several sites as one list, for a centralized reference run."""
    lists = list(lists)
    return DataList(lists[0].path, {split: tuple(i for one in lists for i in one.splits[split]) for split in SPLITS})


def _items(path: Path, split: str, entries: Any) -> Iterable[Item]:
    if not isinstance(entries, list):
        raise DataError(f"{path}: {split}: is a {type(entries).__name__}, not a list of entries")
    for index, entry in enumerate(entries):
        where = f"{path}: {split}[{index}]"
        yield _item(path, where, {"image": entry} if isinstance(entry, str) else entry)


def _item(path: Path, where: str, entry: Any) -> Item:
    if not isinstance(entry, dict) or not isinstance(entry.get("image"), str):
        raise DataError(f'{where}: has no "image" path; write {{"image": "a.png", "label": "b.png"}}')
    if unknown := sorted(entry.keys() - ENTRY_KEYS):
        raise DataError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(ENTRY_KEYS))}")
    image, label = path.parent / entry["image"], entry.get("label")
    found = path.parent / label if label is not None else None
    for file in (image, found):
        if file is not None and not file.is_file():
            raise DataError(f"{where}: {file}: no such file; paths are relative to the data list's folder")
    return Item(image, found, entry.get("slice"))
