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
    """One sample.

    `slice` picks an axial plane of a NIfTI volume: 0 is the one nearest the feet, whichever way the file stores its axes.
    """

    image: Path
    label: Path | None
    slice: int | None = None

    @property
    def name(self) -> str:
        """The image's file name, with the slice if there is one."""
        return self.image.name if self.slice is None else f"{self.image.name}[{self.slice}]"

    @property
    def missing(self) -> tuple[Path, ...]:
        """The files named that are not there."""
        return tuple(file for file in (self.image, self.label) if file is not None and not file.is_file())


@dataclass(frozen=True)
class DataList:
    """A site's samples by split; every split of SPLITS is present, possibly empty."""

    path: Path
    splits: dict[str, tuple[Item, ...]]


def read_datalist(path: Path) -> DataList:
    """Read a data list whose files are all there. Raises DataError, naming file, entry and remedy."""
    data = parse_datalist(path)
    for split, items in data.splits.items():
        for index, item in enumerate(items):
            if item.missing:
                remedy = "paths are relative to the data list's folder"
                raise DataError(f"{path}: {split}[{index}]: {item.missing[0]}: no such file; {remedy}")
    return data


def parse_datalist(path: Path) -> DataList:
    """Read a data list without looking for the files it names; relative paths start at its folder. Raises DataError."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8-sig"))  # editors on Windows put a byte order mark in front
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give the path of a data list") from None
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON ({error}); mend the place named") from None
    _check_keys(path, raw)
    return DataList(path, {split: tuple(_items(path, split, raw.get(split, []))) for split in SPLITS})


def pool(lists: Iterable[DataList]) -> DataList:
    """Return all samples of several sites as one list, for a centralized reference run."""
    lists = list(lists)
    return DataList(lists[0].path, {split: tuple(i for one in lists for i in one.splits[split]) for split in SPLITS})


def _check_keys(path: Path, raw: Any) -> None:
    """Refuse a misspelt split, which would otherwise be lost without a word; other keys are the list's own metadata."""
    for key, value in raw.items() if isinstance(raw, dict) else ():
        if key not in SPLITS and isinstance(value, list) and key.lower().startswith(("train", "val", "test")):
            raise DataError(f"{path}: {key!r} is no split; rename it to one of {', '.join(SPLITS)} or take it out")
    if not isinstance(raw, dict) or "training" not in raw:
        raise DataError(f'{path}: has no key "training"; a data list is {{"training": [{{"image": ..., "label": ...}}]}}')


def _items(path: Path, split: str, entries: Any) -> Iterable[Item]:
    if not isinstance(entries, list):
        raise DataError(f"{path}: {split}: is a {type(entries).__name__}, not a list of entries; write it in brackets")
    for index, entry in enumerate(entries):
        where = f"{path}: {split}[{index}]"
        yield _item(path, where, {"image": entry} if isinstance(entry, str) else entry)


def _item(path: Path, where: str, entry: Any) -> Item:
    if not isinstance(entry, dict) or not isinstance(entry.get("image"), str):
        raise DataError(f'{where}: has no "image" path; write {{"image": "a.png", "label": "b.png"}}')
    if unknown := sorted(entry.keys() - ENTRY_KEYS):
        raise DataError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(ENTRY_KEYS))}")
    label, plane = entry.get("label"), entry.get("slice")
    if not isinstance(label, str | None):
        raise DataError(f"{where}: label: {label!r} is no path; name the file of the mask")
    if plane is not None and (type(plane) is not int or plane < 0):
        raise DataError(f"{where}: slice: {plane!r} is no plane of a volume; write a number, 0 is the lowest plane")
    return Item(path.parent / entry["image"], path.parent / label if label else None, plane)
