"""Pictures with a table: a CSV file that says of each its class and, where known, site, patient and split."""

import csv
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from consilium.core.errors import ConfigError, DataError
from consilium.core.schema import nearest
from consilium.data.file_kinds import place_of
from consilium.data.identifiers import check_identifier
from consilium.data.importers.base import (
    NO_PATIENTS,
    Importer,
    ImportResult,
    Options,
    SourceSample,
    renamed_notes,
    renamed_sites,
)
from consilium.data.safe_open import text_lines

LAYOUT = (
    "a CSV file with a picture a line: columns image (a path from the file's folder) and label (its class), "
    "and where known site, patient and split; --column image=NAME for another heading"
)
FIELDS = ("image", "label", "site", "patient", "split")
NEEDED = FIELDS[:2]
MISSING = frozenset({"nan", "na", "n/a", "#n/a", "null", "none", "nil", "-", "?", ".", "unknown", "missing"})
SEPARATOR = re.compile(r"\s*\"?sep=(.)\"?[\s,;]*", re.IGNORECASE)
"""Excel's line that says which character separates its columns."""
SPLITS = {"": None, "train": "training", "training": "training", "test": "test"}
SPLITS |= dict.fromkeys(("val", "valid", "validation"), "validation")
ONE = "one list for all, no sites: share it out with `consilium data partition` of its datalist.json"


@dataclass(frozen=True)
class Row:
    """One line of the table, with its number as an editor counts."""

    number: int
    values: Mapping[str, str]


def read_table(source: Path, options: Options) -> ImportResult:
    """Read pictures by their lines; the labels become the classes, sorted. Raises DataError, and ConfigError for a column."""
    rows, notes = _rows(source, options.columns)
    sites = renamed_sites({row.values.get("site", "") or source.stem for row in rows}, source)
    found = [_sample(source, row, sites) for row in rows]
    _check_once(source, rows, found)
    notes += renamed_notes(sites) + ([] if "site" in rows[0].values else [ONE])
    notes += [] if all(one.is_patient for one in found) else [f"{source.name} {NO_PATIENTS}"]
    classes = Counter(row.values["label"] for row in rows)
    return ImportResult(found, sorted(classes), notes + _doubts(source, classes))


def _doubts(source: Path, classes: Mapping[str, int]) -> list[str]:
    """Return a note for classes that differ in case and blanks alone, and for those that look like a missing value."""
    alike: dict[str, list[str]] = {}
    for name in sorted(classes):
        alike.setdefault(" ".join(name.split()).casefold(), []).append(name)
    found = [
        f"classes {' and '.join(map(repr, names))} differ in case or blanks alone: write them alike if they are one"
        for names in alike.values()
        if len(names) > 1
    ]
    empty = [
        f"class {name!r} of {classes[name]} lines looks like a missing value: if it is one, take the lines out of {source.name}"
        for name in sorted(classes)
        if name.casefold() in MISSING
    ]
    return found + empty


def _rows(source: Path, columns: Mapping[str, str]) -> tuple[list[Row], list[str]]:
    """Return the table's lines by field, and a note of lines left out; of fields without a column nothing is there.

    Excel may write a line `sep=;` before the headings, and lines of separators alone behind the last.
    """
    lines = text_lines(source, "save it as CSV in UTF-8", newline="")
    before, first, said = 0, next(lines, ""), None
    while first and (not first.strip() or SEPARATOR.fullmatch(first.strip("\r\n"))):
        said = said or SEPARATOR.fullmatch(first.strip("\r\n"))
        before, first = before + 1, next(lines, "")
    reader = csv.DictReader(chain([first], lines), delimiter=said[1] if said else max(",;\t", key=first.count))
    named = _columns(source, columns, [name.strip() for name in reader.fieldnames or []])
    reader.fieldnames = [name.strip() for name in reader.fieldnames or []]
    try:
        rows = [Row(reader.line_num + before, {f: (raw[name] or "").strip() for f, name in named.items()}) for raw in reader]
    except csv.Error as error:
        raise DataError(f"{source}: line {reader.line_num + before + 1}: {error}; save it as CSV anew") from None
    filled = [row for row in rows if any(row.values.values())]
    if not filled:
        raise DataError(f"{source}: has no line below its headings; give a line per picture")
    empty = len(rows) - len(filled)
    return filled, [f"{source.name}: {empty} lines without any value are left out"] if empty else []


def _columns(source: Path, columns: Mapping[str, str], there: list[str]) -> dict[str, str]:
    """Return the heading of each field that the table has. Raises ConfigError."""
    if wrong := [field for field in columns if field not in FIELDS]:
        raise ConfigError(f"--column: {wrong[0]!r}: expected one of {', '.join(FIELDS)}{nearest(wrong[0], FIELDS)}")
    exact = {name.casefold(): name for name in reversed(there)}
    named = {field: columns.get(field) or exact.get(field, field) for field in FIELDS}
    for field, name in named.items():
        if name not in there and (field in columns or field in NEEDED):
            what = f"{source}: no column {name!r}; there are {', '.join(there)}"
            raise ConfigError(f"--column: {what}; write --column {field}=NAME")
    return {field: name for field, name in named.items() if name in there}


def _sample(source: Path, row: Row, sites: Mapping[str, str]) -> SourceSample:
    """Return one line's picture. Raises DataError, which names the line."""
    values, where = row.values, f"{source}: line {row.number}"
    if not values["label"]:
        raise DataError(f"{where}: no label; give the picture's class, or take the line out")
    if (split := values.get("split", "").lower()) not in SPLITS:
        raise DataError(f"{where}: split {values['split']!r}: expected training, validation or test, or nothing")
    image = place_of(source.parent, values["image"])
    if not image.is_file():
        raise DataError(f"{where}: image {values['image']!r}: no such file; paths start at the table's folder")
    who = check_identifier(where, "patient", values.get("patient", ""))
    site = sites[values.get("site", "") or source.stem]
    return SourceSample(site, who or values["image"], image, values["label"], split=SPLITS[split], is_patient=bool(who))


def _check_once(source: Path, rows: list[Row], found: list[SourceSample]) -> None:
    """Raise DataError for a picture of two lines: it could be in two splits, or of two classes."""
    known: dict[str, int] = {}
    for row, sample in zip(rows, found, strict=True):
        if (before := known.setdefault(str(sample.image), row.number)) != row.number:
            what = f"image {row.values['image']!r} is that of line {before}; keep one of the two"
            raise DataError(f"{source}: line {row.number}: {what}")


SETS = {"csv": Importer(LAYOUT, read_table, is_file=True)}
