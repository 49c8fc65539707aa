"""Pictures in a folder per class: `<class>/*.png`, or `{train,val,test}/<class>/*.png`."""

from collections.abc import Iterator
from pathlib import Path

from consilium.core.errors import DataError
from consilium.data.file_kinds import PICTURES

SPLIT_FOLDERS = {"train": "training", "training": "training", "val": "validation", "validation": "validation", "test": "test"}
"""Names a split's folder may have."""


def has_classes(folder: Path) -> bool:
    """Tell whether the folder holds classes, with or without splits: some subfolder, or a split's, has pictures in it."""
    return folder.is_dir() and any(_pictures(one) for _, one in _class_folders(folder))


def read_folders(folder: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield (split, picture, class) by sorted class and file; without split folders all is training. Raises DataError."""
    found = [(split, picture, one.name) for split, one in _class_folders(folder) for picture in _pictures(one)]
    if not found:
        raise DataError(f"{folder}: no pictures in folders there; lay it out as CLASS/a.png or train/CLASS/a.png")
    yield from found


def _class_folders(folder: Path) -> list[tuple[str, Path]]:
    """Return (split, class folder); beside split folders anything else is no class."""
    splits = [one for one in _subfolders(folder) if one.name in SPLIT_FOLDERS]
    if splits:
        return [(SPLIT_FOLDERS[split.name], one) for split in splits for one in _subfolders(split)]
    return [("training", one) for one in _subfolders(folder)]


def _subfolders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _pictures(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.name.lower().endswith(PICTURES))
