"""What a model is to be asked about: files and folders, found as a user names them; boxes that somebody drew."""

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilium.data import volumes
from consilium.data.folders import PICTURES
from consilium.data.opening import read_text
from consilium.errors import ConfigError, DataError
from consilium.report.clean import shown

TEXTS = (".jsonl",)
TABLE = "DICOMDIR"
"""A disc's table of contents, which is DICOM and no image."""
Box = tuple[float, float, float, float]
Boxes = Mapping[tuple[str, int | None, str], Box]
"""Boxes (left, top, right, bottom), in pixels of the picture, by input, plane (None: all) and class."""


@dataclass(frozen=True)
class Input:
    """A picture, a volume, a folder with a DICOM series, or a file of texts. `name`: its path from what the user gave."""

    path: Path
    name: str


def find_inputs(given: Path, texts: bool, out: Path) -> list[Input]:
    """Return what is there to predict, sorted by name; nothing in `out` counts. Raises ConfigError where there is nothing."""
    if not given.exists():
        raise ConfigError(f"{shown(given)}: no such file or folder; give pictures, volumes or a folder of them")
    ends = TEXTS if texts else PICTURES
    if not given.is_dir():
        return [Input(given, given.name)]
    found = [Input(path, path.relative_to(given).as_posix()) for path in _walk(given, ends, {out.resolve(), given.resolve()})]
    found = [one if one.name != "." else Input(given, given.resolve().name) for one in found]
    if not found:
        wanted = "records (.jsonl)" if texts else "pictures, NIfTI or DICOM"
        raise ConfigError(f"{shown(given)}: holds no {wanted}; give another folder")
    return sorted(found, key=lambda one: one.name)


def _walk(folder: Path, ends: tuple[str, ...], seen: set[Path]) -> Iterator[Path]:
    """Yield the inputs under a folder; of folders that links lead to, those not `seen` yet, so that no loop is endless."""
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    files = [path for path in entries if path.is_file()]
    series = [path for path in files if path.name.upper() != TABLE and _is_dicom(path)] if ends is not TEXTS else []
    yield from series if _apart(series) else [folder]
    yield from (path for path in files if path not in series and path.name.lower().endswith(ends))
    for path in sorted((path for path in entries if path.is_dir()), key=Path.is_symlink):
        if (resolved := path.resolve()) not in seen:
            seen.add(resolved)
            yield from _walk(path, ends, seen)


def _is_dicom(path: Path) -> bool:
    return volumes.is_volume(path) and not path.name.lower().endswith(PICTURES)


def _apart(files: list[Path]) -> bool:
    """Tell whether DICOM files of a folder are images of their own, such as radiographs, and no series; so is none at all."""
    if len(files) < 2:
        return True
    try:
        from consilium.data.dicom.files import open_file, reading

        with reading(files[0].parent):
            told = [open_file(path).get("SeriesInstanceUID") for path in files]
    except Exception:  # a damaged file, or no pydicom: what reads the folder says so
        return False
    return len(set(told)) == len(files)


def read_boxes(path: Path, classes: list[str]) -> Boxes:
    """Return the boxes of a CSV (image, class, left, top, right, bottom, and slice for planes) or a JSON list of the same.

    Raises DataError, naming the row.
    """
    text = read_text(path, "give a CSV or JSON file of boxes")
    rows = list(_rows(path, text))
    found: dict[tuple[str, int | None, str], Box] = {}
    for number, row in enumerate(rows, start=1):
        place, box = _box(f"{path}: box {number}", row, classes)
        if place in found:
            raise DataError(f"{path}: box {number}: {shown(place[0])} has two boxes of {place[2]!r}; keep one")
        found[place] = box
    if not found:
        raise DataError(f"{path}: holds no box; write image,class,left,top,right,bottom")
    return found


def _rows(path: Path, text: str) -> Iterator[Any]:
    if path.suffix.lower() != ".json":
        yield from csv.DictReader(io.StringIO(text))
        return
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise DataError(f"{path}: not valid JSON; write a list of boxes") from None
    if not isinstance(found, list):
        raise DataError(f'{path}: is no list; write [{{"image": "a.png", "class": "disc", "left": 1, ...}}]')
    yield from found


def _box(where: str, row: Any, classes: list[str]) -> tuple[tuple[str, int | None, str], Box]:
    keys = ("image", "class", "left", "top", "right", "bottom")
    if not isinstance(row, dict) or (missing := [key for key in keys if row.get(key) in (None, "")]):
        raise DataError(f"{where}: lacks {missing[0] if isinstance(row, dict) else 'all fields'}; write {','.join(keys)}")
    if row["class"] not in classes:
        raise DataError(f"{where}: class {shown(row['class'], 80)!r} is none of the model's: {', '.join(classes)}")
    try:
        left, top, right, bottom = (float(row[key]) for key in keys[2:])
        number = int(row["slice"]) if row.get("slice") not in (None, "") else None
    except (TypeError, ValueError):
        raise DataError(f"{where}: has a side that is no number; write pixels from the left and the top") from None
    if not all(map(math.isfinite, (left, top, right, bottom))) or left >= right or top >= bottom:
        raise DataError(f"{where}: its sides are not left < right and top < bottom; write pixels from the left and the top")
    return (str(row["image"]), number, str(row["class"])), (left, top, right, bottom)
