"""Importer of tables: CSV files with a row per picture or text, its label and, where known, site, patient and split."""

import csv
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path

from consilium.core.errors import ConfigError, ConsiliumError, DataError
from consilium.core.grouping import group_by_key
from consilium.core.schema import did_you_mean
from consilium.data import volumes
from consilium.data.class_checks import EACH_ITS_OWN, doubtful_name_findings
from consilium.data.folders import describe_renames, select_sites, split_of, valid_site_names
from consilium.data.importers.base import (
    Importer,
    ImportResult,
    Options,
    SourceSample,
    TextRecord,
    csv_lines,
    find_files,
)
from consilium.data.importers.labels import result_of_labels
from consilium.data.pairs import compose_unicode, role_of_name, without_ending
from consilium.data.patients import check_identifier
from consilium.data.safe_open import DICOM, PICTURES, is_there, is_volume, path_in_any_unicode_form, volume_format

LAYOUT = (
    "a CSV file with a picture a line: columns image (a path from the file's folder) and label (its class, or the path of its "
    "mask), and where known site, patient and split; --column image=NAME for another heading"
)
TEXT_LAYOUT = (
    "a CSV file with a text a line: columns text and label (its class), and where known site, patient and split; "
    "--column text=NAME for another heading"
)
TEXT_FIELDS = ("text", "label", "site", "patient", "split")
FIELDS = ("image", "label", "site", "patient", "split")
SEPARATOR = re.compile(r"\s*\"?sep=(.)\"?[\s,;]*", re.IGNORECASE)
"""Excel's line that names the separator of columns."""
ONE = "one list for all, no sites: share it out with `consilium data partition` of its datalist.json"
_FLAGS = {"0": False, "0.0": False, "false": False, "no": False, "1": True, "1.0": True, "true": True, "yes": True}
_ENDINGS = (*PICTURES, *DICOM)
_OTHER = {"image": "mask", "label": "image"}
"""By field, the kind of folder in which its files are not searched."""
_TOLD = 5
"""The most missing files that a message names."""
_LOOKED_AT = 20
"""The number of lines whose cells show what a column holds."""


@dataclass(frozen=True)
class Row:
    """One line of the table, with its number in a text editor."""

    number: int
    values: Mapping[str, str]


@dataclass(frozen=True)
class Table:
    """The lines of a table of pictures. `has_masks`: labels are paths of masks, not classes."""

    path: Path
    rows: Sequence[Row]
    has_masks: bool
    notes: list[str] = field(default_factory=list)

    def samples(self, site: str, options: Options) -> list[SourceSample]:
        """Return the samples of the sites in `options.only`, or all. Lines that name no site belong to `site`.

        Raises DataError for a line with an unusable value or a repeated picture, and names the line.
        """
        sites = [row.values.get("site", "") or site for row in self.rows]
        asked = select_sites(set(sites), options.only, options.rename)
        rows = [row for row, own in zip(self.rows, sites, strict=True) if own in asked]
        files = _find_files_and_note(self, rows)
        found, known = list[SourceSample](), dict[str, int]()
        for row in rows:
            values, (who, split) = row.values, _patient_and_split(self.path, row)
            label = files["label", values["label"]] if self.has_masks else values["label"]
            own, image = values.get("site", "") or site, files["image", values["image"]]
            group = who or values["image"]
            if not who and volume_format(image) == "dicom":  # the file names its patient; the list will not
                with suppress(DataError):
                    group = volumes.header(image).patient or group
            one = SourceSample(own, group, image, label, split=split, is_patient=bool(who))
            place = os.path.realpath(str(one.image))  # one file under two names might get into two splits
            if (before := known.setdefault(place, row.number)) != row.number:
                raise DataError(
                    f"{self.path}: line {row.number}: image {row.values['image']!r} is that of line {before}; "
                    "keep one of the two"
                )
            found.append(one)
        return found


def read_table(source: Path, options: Options) -> ImportResult:
    """Read a table of pictures. The classes are the sorted labels. Raises DataError, and ConfigError for a missing column."""
    table = open_table(source, options.columns)
    return result_of_labels(
        source, table.samples(source.stem, options), [*table.notes, *([] if "site" in table.rows[0].values else [ONE])], options
    )


def read_text_table(source: Path, options: Options) -> ImportResult:
    """Read a table of texts: text, label and, where known, site, patient and split. Raises DataError and ConfigError."""
    there, lines = _read_csv(source)
    named, notes = _match_columns(source, options.columns, there, (), TEXT_FIELDS)
    rows = [Row(row.number, {one: row.values[name] for one, name in named.items()}) for row in lines]
    kept = [row for row in rows if row.values["text"] and row.values["label"]]
    if not kept:
        raise DataError(f"{source}: no line has a {named['text']} and a {named['label']}; give a line per text, with its label")
    counts = Counter(row.values["label"] for row in kept)
    _check_labels(source, named["label"], counts)
    of_row = [row.values.get("site") or source.stem for row in kept]
    asked = select_sites(set(of_row), options.only, options.rename)
    sites = valid_site_names(asked, source, new_names={} if options.sites else options.rename)
    found = list[TextRecord]()
    for row, site in ((row, site) for row, site in zip(kept, of_row, strict=True) if site in asked):
        patient, split = _patient_and_split(source, row)
        record = {one: row.values[one] for one in TEXT_FIELDS[:2]} | ({"patient": patient} if patient else {})
        found.append(TextRecord(sites[site], patient or f"line {row.number}", record, split))
    if lost := len(rows) - len(kept):
        notes.append(f"{lost} of {len(rows)} lines without text or label are left out")
    if again := len(found) - len({(one.site, one.record["text"]) for one in found}):
        notes.append(f"{again} texts are there before; equal texts of several patients may be in two splits: keep one of each")
    notes += [*describe_renames(sites), *([] if "site" in named else [ONE.replace("datalist.json", "folder")])]
    return ImportResult(found, sorted(counts), [*notes, *(f"{kind}: {line}" for kind, line in doubtful_name_findings(counts))])


def find_table(folder: Path) -> Table | None:
    """Return the table of pictures in a folder, None if no CSV file is one. Raises DataError if two are."""
    found = []
    for path in sorted(folder.glob("[!.]*.[cC][sS][vV]")):
        try:
            found.append(open_table(path, {}))
        except ConsiliumError:  # a table of something else
            continue
    if len(found) > 1:
        raise DataError(
            f"{folder}: {found[0].path.name} and {found[1].path.name} are both tables of its pictures; "
            "take one out, or read each by `consilium data import csv`"
        )
    return found[0] if found else None


def open_table(source: Path, columns: Mapping[str, str]) -> Table:
    """Return a table of pictures with its lines by field. Raises DataError, and ConfigError for a missing column."""
    there, lines = _read_csv(source)
    head = list(islice(lines, _LOOKED_AT))
    named, notes = _match_columns(source, columns, there, head)
    every = [*head, *lines]
    flags = _split_column_names(named["label"], there) if named["label"] not in there else []
    if flags:
        every = [row for row in every if any(row.values[name] for name in (named["image"], *flags))]
        ones = [[name for name in flags if _FLAGS.get(row.values[name].casefold())] for row in every]
        if wrong := [(row.number, own) for row, own in zip(every, ones, strict=True) if len(own) != 1]:
            line, own = wrong[0]
            raise DataError(
                f"{source}: {len(wrong)} of {len(every)} lines do not have exactly one 1 in {', '.join(flags)}, the first is "
                f"line {line} with {' and '.join(own) or 'none'}; a picture has one class: name one class's columns alone by "
                "--column label=A,B, or give a column with one class a line"
            )
        every = [replace(row, values={**row.values, "label": own[0]}) for row, own in zip(every, ones, strict=True)]
        named["label"] = "label"
    every = [Row(row.number, {one: row.values[name] for one, name in named.items()}) for row in every]
    rows = [row for row in every if any(row.values.values())]
    if len(rows) < len(every):
        notes.append(f"{source.name}: {len(every) - len(rows)} lines without any value are left out")
    has_masks = any(_is_picture_path(source, row.values["label"]) for row in rows[:_LOOKED_AT])
    kept = [row for row in rows if row.values["label"]]
    if lost := [row.number for row in rows if not row.values["label"]]:
        notes.append(f"{len(lost)} of {len(rows)} lines have no label and are left out, the first is line {lost[0]}")
    if not kept:
        what = f"column {named['label']!r} is empty" if rows else "has no line below its headings"
        raise DataError(f"{source}: {what}; give a line per picture, with its label")
    if not has_masks:
        _check_labels(source, named["label"], Counter(row.values["label"] for row in kept))
    return Table(source, kept, has_masks, notes)


def _read_csv(source: Path) -> tuple[list[str], Iterator[Row]]:
    """Return the headings, and the lines with cells by heading. Excel may write a line `sep=;` before the headings.

    Raises DataError if the first line is a picture's instead of headings, or two headings have the same name.
    """
    lines = csv_lines(source, "save it as CSV in UTF-8")
    before, first, said = 0, next(lines, ""), None
    while first and (not first.strip() or SEPARATOR.fullmatch(first.strip("\r\n"))):
        said = said or SEPARATOR.fullmatch(first.strip("\r\n"))
        before, first = before + 1, next(lines, "")
    bare = re.sub(r'"[^"]*"', "", first)  # quoted headings may hold any of the separators
    reader = csv.DictReader(chain([first], lines), delimiter=said[1] if said else max(",;\t", key=bare.count))
    there = reader.fieldnames = [name.strip() for name in reader.fieldnames or []]
    if picture := next((name for name in there if _is_picture_path(source, name)), None):
        raise DataError(
            f"{source}: line 1 names a picture, {picture!r}, and no columns; put a line of headings before it, such as "
            "image,label"
        )
    named = Counter(name.casefold() for name in there if name)
    if twice := next((name for name in there if named[name.casefold()] > 1), None):
        raise DataError(f"{source}: two columns are called {twice!r}; rename or delete one")

    def rows() -> Iterator[Row]:
        try:
            for raw in reader:
                if any(map(str.strip, raw.pop(None, None) or ())):  # type: ignore[call-overload]
                    raise DataError(
                        f"{source}: line {reader.line_num + before}: more cells than the {len(there)} headings; "
                        f"put a cell with a {reader.reader.dialect.delimiter!r} in it into quotes"
                    )
                yield Row(reader.line_num + before, {name: (raw[name] or "").strip() for name in there})
        except csv.Error as error:
            raise DataError(f"{source}: line {reader.line_num + before + 1}: {error}; save it as CSV anew") from None

    return there, rows()


def _match_columns(
    source: Path, columns: Mapping[str, str], there: Sequence[str], rows: Sequence[Row], fields: Sequence[str] = FIELDS
) -> tuple[dict[str, str], list[str]]:
    """Return the heading of each field, and notes. Headings are found by the user's `columns`, by name, or by their cells.

    Raises ConfigError for an unknown field or heading, and for a needed field without a heading.
    """
    wrong = [
        f"{name!r}: expected one of {', '.join(fields)}{did_you_mean(name, fields)}" for name in columns if name not in fields
    ]
    exact = {name.casefold(): name for name in reversed(there)}
    named = {one: columns.get(one) or exact[one] for one in fields if one in columns or one in exact}
    absent = {one: [part for part in _split_column_names(name, there) if part not in there] for one, name in named.items()}
    if absent := {one: parts for one, parts in absent.items() if parts}:
        what = ", ".join(f"{part!r}{did_you_mean(part, there)}" for parts in absent.values() for part in parts)
        remedy = " ".join(f"--column {one}=NAME" for one in absent)
        wrong.append(f"{source}: no column {what}; there are {', '.join(there)}; write {remedy}")
    if wrong:
        raise ConfigError(f"--column: {'; '.join(wrong)}")
    paths = list[str]()
    for name in there:
        cells = [row.values[name] for row in rows[:_LOOKED_AT] if row.values[name] and name not in named.values()]
        if cells and all(_find_picture(source.parent, cell) for cell in cells):
            paths.append(name)
    paths.sort(key=lambda name: role_of_name(name) == "mask")
    notes, lacking = list[str](), dict[str, str]()
    for one in fields[:2]:
        left = [name for name in there if name not in named.values()]
        # the columns that have yes or no, or 1 or 0, for every picture
        flags = [name for name in left if rows and all(row.values[name].casefold() in _FLAGS for row in rows)]
        if one not in named and paths:
            named[one] = paths.pop(0)
            notes.append(f"--column {one}={named[one]}: its cells are paths of {'pictures' if one == 'image' else 'masks'}")
        elif one == "label" and one not in named and len(flags) > 1:
            # another column may hold the classes, or these columns may be splits
            others = [name for name in left if name not in flags and len({row.values[name] for row in rows} - {""}) > 1]
            own, every = _propose_column("label", others, rows), ",".join(flags)
            if own != "NAME" or any(split_of(word) for name in flags for word in re.split(r"[\W_]+", name)):
                choice = " or ".join(f"--column {shlex.quote(f'label={name}')}" for name in (own, every))
                raise ConfigError(
                    f"--column: {source}: no column 'label', and the classes may be in {own!r} or in the columns of 0 and 1; "
                    f"write {choice}"
                )
            named[one] = every
            notes.append(f"--column {shlex.quote(f'label={named[one]}')}: these columns of 0 and 1 are the classes")
        elif one not in named:
            lacking[one] = _propose_column(one, [name for name in left if name not in lacking.values()], rows)
    if lacking:
        remedy = " ".join(f"--column {shlex.quote(f'{one}={name}')}" for one, name in lacking.items())
        raise ConfigError(
            f"--column: {source}: no column {' and no column '.join(map(repr, lacking))}; there are {', '.join(there)}; "
            f"write {remedy}"
        )
    return named, notes


def _split_column_names(name: str, there: Sequence[str]) -> list[str]:
    """Return the columns that a user names: one column, or several columns of 0 and 1, separated by commas."""
    return [name] if name in there else [part.strip() for part in name.split(",")]


def _propose_column(what: str, there: Sequence[str], rows: Sequence[Row]) -> str:
    """Return the column that may hold field `what`, by its cells: names of pictures, or few classes. "NAME" if none does."""
    kinds = {name: len({row.values[name] for row in rows}) for name in there}
    files = [name for name in there if any(row.values[name].lower().endswith(_ENDINGS) for row in rows[:_LOOKED_AT])]
    classes = sorted((name for name, count in kinds.items() if 1 < count <= len(rows) // 2), key=kinds.__getitem__)
    return next(iter([*files, *(classes if what == "label" else [])]), "NAME")


def _is_picture_path(source: Path, cell: str) -> bool:
    return cell.lower().endswith(_ENDINGS) or (
        bool(re.search(r"[/\\]", cell)) and _find_picture(source.parent, cell) is not None
    )


def _check_labels(source: Path, column: str, counts: Mapping[str, int]) -> None:
    """Raise DataError if no class has two samples. `counts`: samples per class."""
    for kind, line in doubtful_name_findings(counts):
        if kind == EACH_ITS_OWN:
            raise DataError(
                f"{source}: column {column!r} has {kind}, {line}; name the column of classes by --column label=NAME"
            )


def _find_files_and_note(table: Table, rows: Sequence[Row]) -> dict[tuple[str, str], Path]:
    """Return the files by (field, cell). A file that is not at its path is searched by name below the table's folder.

    It is used if it is the only one with that name. Raises DataError with the missing files.
    """
    fields = FIELDS[:2] if table.has_masks else FIELDS[:1]
    lines = {(one, row.values[one]): row.number for row in reversed(rows) for one in fields}
    found = {key: path for key in lines if (path := _find_picture(table.path.parent, key[1]))}
    if len(found) == len(lines):
        return found
    there = find_files(table.path.parent, _ENDINGS)
    names = ((name, path) for path in there for name in {path.name, path.stem, without_ending(path.name)})
    below = group_by_key((compose_unicode(name).casefold(), path) for name, path in names)
    lost, taken = list[str](), set(found.values())
    for one, cell in sorted(lines.keys() - found.keys(), key=lambda key: (lines[key], key)):
        name = compose_unicode(cell.replace("\\", "/").rpartition("/")[2]).casefold()
        # only names without a folder are searched, and a picture is not taken as its own mask
        named = below.get(name, []) if name == compose_unicode(cell).casefold() else []
        alike = [path for path in named if role_of_name(path.parent.name) != _OTHER[one]]
        if len(alike) == 1 and alike[0] not in taken:
            found[one, cell] = alike[0]
            taken.add(alike[0])
            continue
        lost.append(f"line {lines[one, cell]}: {one} {cell!r}")
    if lost:
        more = f" and {len(lost) - _TOLD} more of {len(lines)}" if len(lost) > _TOLD else ""
        raise DataError(f"{table.path}: {', '.join(lost[:_TOLD])}{more}: no such file; paths start at the table's folder")
    moved = next(key for key in lines if not _find_picture(table.path.parent, key[1]))
    table.notes.append(f"files are found by name below {table.path.parent}, such as {moved[1]} in {found[moved].parent}")
    return found


def _patient_and_split(source: Path, row: Row) -> tuple[str, str | None]:
    """Return a line's patient, "" for none, and its split, None for none. Raises DataError with the number of the line."""
    where, said = f"{source}: line {row.number}", row.values.get("split", "")
    if said and split_of(said) is None:
        raise DataError(f"{where}: split {said[:80]!r} is none of training, validation, test; write one of them, or nothing")
    return check_identifier(where, "patient", row.values.get("patient", "")), split_of(said)


def _find_picture(folder: Path, cell: str) -> Path | None:
    """Return the path of the file, or of the folder with a DICOM series, that a cell names; None if it does not exist."""
    path = path_in_any_unicode_form(folder, cell)
    return path if cell and is_there(path) and (path.is_file() or (path.is_dir() and is_volume(path))) else None


SETS = {
    "csv": Importer(LAYOUT, read_table, ("columns", "exact_values"), is_own=True),
    "csv-text": Importer(TEXT_LAYOUT, read_text_table, ("columns",), is_own=True),
}
