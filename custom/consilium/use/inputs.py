"""Inputs of `consilium predict`: finds the files in a path that the user gives, and reads prompts (boxes or points)."""

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilium.core.errors import ConfigError, DataError
from consilium.core.sanitize import shown
from consilium.data import volumes
from consilium.data.safe_open import PICTURES, parse_json, read_text
from consilium.tasks.segmentation import PROMPTS

TEXTS = (".jsonl",)
TABLE = "DICOMDIR"
"""The table of contents on a DICOM disc, which is a DICOM file but no image."""
MOST_PROMPTS = 2**26
"""Largest size of a file of prompts in bytes, which is enough for over a million prompts."""
Place = tuple[str, int | None, str]
Prompts = Mapping[Place, tuple[float, ...]]
"""Boxes (left, top, right, bottom) or points (x, y) in pixels, by (input's name, plane, class). Plane None: all planes."""


@dataclass(frozen=True)
class Input:
    """A picture, a volume, a folder with a DICOM series, or a file of texts. `name`: its path relative to the user's folder."""

    path: Path
    name: str


def find_inputs(given: Path, texts: bool, out: Path, companions: list[Path] | None = None) -> list[Input]:
    """Return the inputs in the file or folder `given`, sorted by name. Raises ConfigError if there are none.

    `texts`: look for records instead of images. Files in `out` are ignored. DICOM objects that are not images, such as earlier
    segmentations and reports, are appended to `companions`.
    """
    if not given.exists():
        raise ConfigError(f"{shown(given)}: no such file or folder; give pictures, volumes or a folder of them")
    if not given.is_dir() and not given.is_file():
        raise ConfigError(f"{shown(given)}: is a device or a pipe; give a file or a folder")
    ends, companions = TEXTS if texts else PICTURES, [] if companions is None else companions
    if not given.is_dir():
        return [Input(given, given.name)]
    paths = _find_under(given, ends, {out.resolve(), given.resolve()}, companions)
    found = [Input(path, given.resolve().name if path == given else path.relative_to(given).as_posix()) for path in paths]
    if not found:
        wanted = "records (.jsonl)" if texts else "pictures, NIfTI or DICOM images"
        raise ConfigError(f"{shown(given)}: holds no {wanted}; give another folder")
    return sorted(found, key=lambda one: one.name)


def _find_under(folder: Path, ends: tuple[str, ...], seen: set[Path], companions: list[Path]) -> Iterator[Path]:
    """Yield the inputs under a folder and its subfolders. Folders in `seen` are skipped, so that links cannot form a loop.

    Broken links are yielded too, so that they are reported as unusable inputs.
    """
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    files = [path for path in entries if path.is_file()]
    dicom = (
        [
            path
            for path in files
            if path.name.upper() != TABLE and (volumes.is_volume(path) and not path.name.lower().endswith(PICTURES))
        ]
        if ends is not TEXTS
        else []
    )
    yield from _dicom_images(folder, dicom, companions)
    lost = [path for path in entries if path.is_symlink() and not path.exists()]
    yield from (path for path in [*files, *lost] if path.name.lower().endswith(ends))
    for path in sorted((path for path in entries if path.is_dir()), key=Path.is_symlink):
        if (resolved := path.resolve()) not in seen:
            seen.add(resolved)
            yield from _find_under(path, ends, seen, companions)


def _dicom_images(folder: Path, files: list[Path], companions: list[Path]) -> list[Path]:
    """Return the inputs among a folder's DICOM files.

    If each image has a series of its own, such as radiographs, these are the files. Otherwise this is [folder], as one series.
    """
    if not files:
        return []
    try:
        from consilium.data.dicom.files import is_companion_object, open_file, wrap_dicom_errors
    except ImportError:  # without pydicom, reading the input fails later with a clear error
        return files if len(files) == 1 else [folder]
    images = {}
    for path in files:
        try:
            with wrap_dicom_errors(path):
                found = open_file(path)
                other, series = is_companion_object(found), str(found.get("SeriesInstanceUID"))
        except DataError:  # a damaged file counts as an image in a series of its own
            other, series = False, str(path)
        if other:
            companions.append(path)
        else:
            images[path] = series
    return list(images) if len(set(images.values())) == len(images) else [folder]


def read_prompts(path: Path, kind: str, classes: list[str]) -> Prompts:
    """Return the prompts of a `kind` (box or point) from a CSV file, or from a JSON file with a list of objects.

    The columns are image, class, the numbers of the kind, and optionally slice for one plane of a volume. Raises DataError with
    the number of the row.
    """
    text = read_text(path, f"give a CSV or JSON file of {kind} prompts", MOST_PROMPTS)
    columns = ("image", "class", *PROMPTS[kind].numbers)
    found: dict[Place, tuple[float, ...]] = {}
    for number, row in enumerate(_read_rows(path, text, columns), start=1):
        place, prompt = _parse_prompt(f"{path}: {kind} {number}", row, columns, classes)
        if place in found:
            raise DataError(f"{path}: {kind} {number}: {shown(place[0])} has two for {place[2]!r}; keep one")
        found[place] = prompt
    if not found:
        raise DataError(f"{path}: holds no {kind}; write {','.join(columns)}")
    return found


def _read_rows(path: Path, text: str, columns: tuple[str, ...]) -> Iterator[Any]:
    if path.suffix.lower() != ".json":
        try:
            yield from csv.DictReader(io.StringIO(text))
        except csv.Error as error:
            raise DataError(f"{path}: not valid CSV ({error}); write {','.join(columns)}") from None
        return
    found = parse_json(str(path), text, "write a list of objects")
    if not isinstance(found, list):
        example = json.dumps(dict.fromkeys(columns, 1) | {"image": "a.png", "class": "disc"})
        raise DataError(f"{path}: is not a list; write [{example}, ...]")
    yield from found


def _parse_prompt(where: str, row: Any, columns: tuple[str, ...], classes: list[str]) -> tuple[Place, tuple[float, ...]]:
    if not isinstance(row, dict) or (missing := [key for key in columns if row.get(key) in (None, "")]):
        raise DataError(f"{where}: lacks {missing[0] if isinstance(row, dict) else 'all fields'}; write {','.join(columns)}")
    if row["class"] not in classes:
        raise DataError(f"{where}: class {shown(row['class'], 80)!r} is none of the model's: {', '.join(classes)}")
    try:
        found = tuple(float(row[key]) for key in columns[2:])
        number = int(row["slice"]) if row.get("slice") not in (None, "") else None
        if number is not None and number != float(row["slice"]):  # int() cuts 1.7 to 1
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise DataError(f"{where}: has a value that is not a number; write pixels from the left and the top") from None
    # Raise DataError for numbers that are no valid point or box.
    remedy = "write pixels from the left and the top"
    if len(found) == 2 and not all(math.isfinite(one) and one >= 0 for one in found):
        raise DataError(f"{where}: x and y are not 0 or more; {remedy}")
    if len(found) == 4 and not (all(map(math.isfinite, found)) and found[0] < found[2] and found[1] < found[3]):
        raise DataError(f"{where}: its sides are not left < right and top < bottom; {remedy}")
    return (str(row["image"]), number, str(row["class"])), found
