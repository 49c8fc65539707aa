"""Code that all importers use: types of samples, functions that find files and folders, label pictures, one-line errors."""

import csv
import io
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from consilium.core.errors import DataError
from consilium.core.sanitize import first_names_text
from consilium.data.folders import walk_folders
from consilium.data.pairs import Pattern, compose_unicode
from consilium.data.safe_open import MOST_CHARACTERS, check_file, check_line, open_picture, text_lines, wrap_decoding_errors

NO_PATIENTS = "names no patients, so one patient's pictures may be in two splits"
GIVE = "give the publisher's file"
UNREADABLE = ("cannot be read as a picture", "replace it")
MOST_XML = 2**24
"""Bytes of an XML file. MoNuSeg's largest have a few MB."""
MOST_PAGE = 2**22
"""Bytes of an XML file with texts. MedQuAD's files are one web page each, of at most a few hundred kB."""
MOST_NODES = 2**21
"""Elements and attributes of an XML file. Each may take up to 400 bytes of memory although it has only 4 bytes in the file."""
DEEPEST = 64
"""Elements of an XML file within each other. An element's text is that of all below it, so time grows with the depth."""
PICTURE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
csv.field_size_limit(MOST_CHARACTERS)  # Python's own limit is an eighth of it


@dataclass(frozen=True)
class Options:
    """A user's options of an import.

    `validation` and `test`: the shares of splits that the publisher does not have. `sites`: pool all samples and deal patients
    out to this number of sites; 0 keeps the set's own sites. `minimum`: the fewest samples of a site. `types`: a label
    value per class of cell. `resplit`: ignore the
    publisher's splits. `size`: which of several training sets to read. `only`: the sites to import, all if empty. `rename`: new
    names of sites. `columns`: a table's headings by field. `mask_patterns`: how names of masks follow from those of pictures.
    `exact_values`: every value of a mask is a label. `patient_folders`: whether folders are patients; None decides by names.
    """

    validation: float = 0.1
    test: float = 0.2
    seed: int = 0
    sites: int = 0
    minimum: int = 1
    types: bool = False
    resplit: bool = False
    size: str = ""
    only: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    mask_patterns: tuple[Pattern, ...] = ()
    exact_values: bool = False
    patient_folders: bool | None = None


@dataclass(frozen=True)
class DerivedFile:
    """A file to write into the site's folder: `name` under `folder`, with the bytes that `make` returns."""

    folder: str
    name: str
    make: Callable[[], bytes]


@dataclass(frozen=True)
class SourceSample:
    """One sample of the source. All samples of a `group` stay in one split. `split`: the publisher's, if any.

    `is_patient`: the group is one patient, slide or video, as far as the set tells, and becomes `patient` in the list. `more`:
    further masks that are parts of the label.
    """

    site: str
    group: str
    image: Path | DerivedFile
    label: Path | DerivedFile | str
    slice: int | None = None
    split: str | None = None
    is_patient: bool = False
    more: tuple[Path, ...] = ()

    @property
    def masks(self) -> list[Path]:
        """The files of the masks that the label consists of; [] for a class, or a mask to write."""
        return [mask for mask in (self.label, *self.more) if isinstance(mask, Path)]


@dataclass(frozen=True)
class TextRecord:
    """One record of a text set, as a JSONL file holds it. `group` and `split` are as in SourceSample."""

    site: str
    group: str
    record: dict[str, Any]
    split: str | None = None


Sample = SourceSample | TextRecord


@dataclass(frozen=True)
class ImportResult:
    """The result of an importer. `classes`: task.classes of a job for this set, None for texts. `notes`: for the user.

    `beside`: a second result, for sites with class labels, when `samples` holds the sites with masks. A job has one kind of
    label.
    """

    samples: Sequence[Sample]
    classes: dict[str, list[int]] | list[str] | None
    notes: list[str] = field(default_factory=list)
    beside: "ImportResult | None" = None


@dataclass(frozen=True)
class Importer:
    """A data set: its layout in one line, and its reader. A result without samples means that the source has another layout.

    `takes`: the fields of Options that only some importers take. `is_own`: the labels are a user's, not a publisher's.
    `sizes`: names of its training sets, the default first.
    """

    layout: str
    read: Callable[[Path, Options], ImportResult]
    takes: tuple[str, ...] = ()
    is_own: bool = False
    sizes: tuple[str, ...] = ()


def wrong_layout(source: Path, expected: str) -> DataError:
    """Return the error for a folder that differs from the `expected` layout. It lists the folder's entries."""
    names = sorted(p.name + "/" * p.is_dir() for p in source.iterdir() if not p.name.startswith(".")) if source.is_dir() else []
    found = first_names_text(names, 6) or ("nothing" if source.is_dir() else "no such folder")
    return DataError(f"{source}: expected {expected}; found {found}")


def find_files(root: Path, endings: Sequence[str]) -> list[Path]:
    """Return the files below a folder whose names have one of the `endings`, in any case, sorted by path."""
    wanted = tuple(endings)
    found = (p for folder in walk_folders(root) for p in folder.iterdir() if p.name.lower().endswith(wanted))
    return sorted(p for p in found if not p.name.startswith(".") and p.is_file())


def find_subfolder(folder: Path, name: str) -> Path | None:
    """Return the subfolder with this name, in any case, or None."""
    return next((p for p in sorted(folder.iterdir()) if p.name.lower() == name.lower() and p.is_dir()), None)


def by_stem(paths: Iterable[Path]) -> dict[str, Path]:
    """Return files by their name without ending, in Unicode's composed form. Raises DataError if two names are equal."""
    found: dict[str, Path] = {}
    for path in paths:
        if (stem := compose_unicode(path.stem)) in found:
            raise DataError(f"{path}: has the same name as {found[stem]}; keep one of the two")
        found[stem] = path
    return found


def find_partner(stem: str, among: dict[str, Path], image: Path, what: str) -> Path:
    """Return the file of `among` with this stem, else with this stem in another case.

    Raises DataError, which names the picture, if there is none. `what`: what the file is, for the message.
    """
    if (wanted := compose_unicode(stem)) in among:
        return among[wanted]
    alike = [path for name, path in among.items() if name.lower() == wanted.lower()]
    if len(alike) != 1:
        raise DataError(f"{image}: expected a {what} named {stem}; found none among {len(among)}; complete the set")
    return alike[0]


def csv_lines(path: Path, remedy: str) -> Iterator[str]:
    """Yield the lines of a table with their ends. Raises DataError, also for a line of more than MOST_CHARACTERS."""
    for number, line in enumerate(text_lines(path, remedy, newline=""), start=1):
        check_line(f"{path}:{number}", line)
        yield line


def numbered_csv_rows(path: Path) -> list[tuple[int, list[str]]]:
    """Return the rows of a publisher's table, each with its line number. Raises DataError."""
    reader = csv.reader(csv_lines(path, GIVE))
    try:
        return [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: expected rows of CSV; found otherwise ({error}); {GIVE}") from None


def csv_rows_if_complete(path: Path, *columns: str) -> list[dict[str, str]]:
    """Return the rows of a publisher's table by heading; [] if one of `columns` is missing. Raises DataError."""
    (_, head), *rows = numbered_csv_rows(path) or [(0, [])]
    return [dict(zip_longest(head, row[: len(head)], fillvalue="")) for _, row in rows] if set(columns) <= set(head) else []


class _BoundedBuilder(ElementTree.TreeBuilder):
    """Build a tree of at most MOST_NODES and DEEPEST, without a document type."""

    nodes = depth = 0

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise ValueError("it declares a document type, whose entities can expand to gigabytes")

    def start(self, tag: str, attrs: dict[str, str], /) -> ElementTree.Element:  # type: ignore[override]
        self.nodes, self.depth = self.nodes + 1 + len(attrs), self.depth + 1
        if self.nodes > MOST_NODES:
            raise ValueError(f"it has over {MOST_NODES:,} elements and attributes")
        if self.depth > DEEPEST:
            raise ValueError(f"its elements are nested over {DEEPEST} deep")
        return super().start(tag, attrs)

    def end(self, tag: str, /) -> ElementTree.Element:
        self.depth -= 1
        return super().end(tag)


def read_xml(path: Path, expected: str, most: int = MOST_XML) -> ElementTree.Element:
    """Return the root of an XML file. `expected`: what the file should hold, for the message.

    Raises DataError for a damaged file, a document type, and beyond `most` bytes, MOST_NODES and DEEPEST.
    """
    check_file(path, GIVE, most)
    try:
        return ElementTree.parse(path, ElementTree.XMLParser(target=_BoundedBuilder())).getroot()
    except (OSError, ValueError, LookupError, ElementTree.ParseError) as error:  # LookupError: an unknown encoding
        raise DataError(f"{path}: expected {expected}; found otherwise ({error}); {GIVE}") from None


def frame_order(path: Path) -> tuple[int, str]:
    """Return a sort key that puts frame 2 before frame 10."""
    digits = re.findall(r"\d+", path.stem)
    return (int(digits[-1]) if digits else -1, path.name)


def grey_values(path: Path) -> np.ndarray:
    """Return a picture's grey values (H, W), 0..255. A palette is read by its colours. Raises DataError."""
    with wrap_decoding_errors(path, *UNREADABLE), open_picture(path) as picture:
        return np.asarray(picture.convert("L"))


def is_usable_mask(path: Path, allowed: Sequence[int]) -> bool:
    """Tell whether a mask can be used as it is: lossless, one channel, only `allowed` label values. Raises DataError."""
    if path.suffix.lower() in (".jpg", ".jpeg"):
        return False
    with wrap_decoding_errors(path, *UNREADABLE), open_picture(path) as picture:
        return picture.mode in ("L", "P") and not any(n for v, n in enumerate(picture.histogram()) if v not in allowed)


def encode_png(array: np.ndarray, **how: int) -> bytes:
    """Return the bytes of a PNG: (H, W) with values of up to 16 bits, or (H, W, 3) in 0..255. `how`: options for PIL."""
    buffer = io.BytesIO()
    Image.fromarray(array.astype(np.uint16 if array.max(initial=0) > 255 else np.uint8)).save(buffer, format="PNG", **how)
    return buffer.getvalue()


def mask_png(name: str, make: Callable[..., np.ndarray], *arguments: Any) -> DerivedFile:
    """Return a label picture that will be written as masks/NAME.png with the values of `make(*arguments)`."""
    # on label pictures, run lengths are twice as fast as zlib's default strategy, and the files are smaller
    return DerivedFile("masks", f"{name}.png", lambda: encode_png(make(*arguments), compress_level=1, compress_type=zlib.Z_RLE))
