"""Kinds of files, and opening of untrusted ones: only plain files of bounded size, and one clear line for any error.

The kind of a file is known by its name or its first bytes. A data list may name any file that the user who runs Consilium can
read, because a hospital's pictures stay where they are. So the list's author is trusted. A file that is not a picture is
refused, and the error quotes nothing of it. This module loads neither numpy nor torch.
"""

import gzip
import json
import os
import re
import stat
import struct
import unicodedata
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from math import prod
from pathlib import Path
from typing import IO, Any, Generic, Literal, TypeVar

from PIL import ExifTags, Image, UnidentifiedImageError

from consilium.core.errors import DataError, UnfitError

FORMATS = ("PNG", "JPEG", "TIFF", "BMP", "GIF")
"""PIL's formats that are read, recognised by content. Some of PIL's other readers start other programs."""
MOST_BYTES = 2 * 1024**3
"""Most bytes of a file; a larger one is not opened."""
MOST_SLIDE = 1024**4
"""Most bytes of a TIFF or a slide, which is read in parts."""
MOST_PIXELS = 100_000_000
"""Pixels of a picture that is decoded as one: about 400 MB."""
MOST_VOLUME = 4 * 1024**3
"""Bytes that a volume may take in memory, and that all masks of one file may take."""
MOST_UNPACKED = 1024**3
"""Bytes that a file of any size may unpack to. A CT of 512 x 512 x 1000 in float32 takes less."""
LARGEST_RATIO = 64
"""A larger file may unpack to this multiple of its own bytes, up to MOST_VOLUME."""
MOST_CHARACTERS = 1024**2
"""Characters of one line of records or of a table: more than any model reads. A tokenizer takes a second for them."""
MOST_VALUES = 2**24
"""Values in a JSON file. Python needs up to 70 bytes for a value of 3 characters."""
MOST_SCANS = 32
"""Scans, passes over the whole picture, in a JPEG. Cameras and web sites write 1 to 12."""
MOST_PAGES = 4096
"""Pages of a TIFF."""
MOST_TAGS = 256
"""Tags of a page of a TIFF whose tags are read. Scanners write about 30."""
TIFF_TILE = (322, 323)
"""TIFF's tags of the width and the length of stored tiles."""
_TIFF_COLOURS, _TIFF_FORMAT, _TIFF_OFFSETS = 262, 339, (324, 273)
"""TIFF's tags of the meaning of values, where 0 is inverted grey; of the format of numbers, where 2 has a sign; and of the
places of tiles and of strips."""
_TIFF_NUMBERS = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 16: "Q", 17: "q"}
"""Formats for struct of TIFF's types of whole numbers."""
MOST_VOLUME_FILE = MOST_VOLUME + 2**20
"""Bytes of a volume's file: an uncompressed volume and its header."""
T = TypeVar("T")
Stamp = tuple[tuple[int, ...], ...]
"""For every file: its inode, size, and the times of the last change of content and inode."""
CONVERT = "convert it to NIfTI: nibabel.save(nibabel.load(FILE), 'NAME.nii.gz') in Python, or 3D Slicer"
FOREIGN = {
    (".mgz", ".mgh"): ("FreeSurfer's volumes", CONVERT),
    (".mnc",): ("MINC", CONVERT),
    (".par", ".rec"): ("Philips PAR/REC", CONVERT),
    (".brik", ".brik.gz", ".head"): ("AFNI", CONVERT),
    (".hdr", ".img", ".img.gz"): ("ANALYZE, or of NIfTI in two files", CONVERT),
    (".v",): ("ECAT", CONVERT),
    (".trk", ".tck"): ("tracts, which are not images", "take it off the list"),
    (".gz", ".zip", ".tar", ".7z", ".bz2"): ("a packed file", "unpack it, and name the file that is in it"),
    (".npy", ".npz", ".mat", ".h5", ".hdf5"): ("arrays of numbers", "save each picture as PNG or TIFF"),
}
"""Formats that are not read, and a remedy for each, by the endings of file names."""
_PROGRAMMERS = re.compile(
    r"Error -?\d|[<>{}\[\]_]|\b(NoneType|object|dtype|attribute|argument|unpack|buffer|tuple|codec|literal|array|reshape)\b"
    r"|\b(Python|int|float|str)\b"
)
"""Words in libraries' messages that only programmers understand. Such messages are replaced."""
TAKE_OFF = "replace it or take it off the list"


def raise_first_fault(where: object, *faults: tuple[object, str]) -> None:
    """Raise DataError for the first fault that is present. Each fault is (whether it is present, its description)."""
    if what := next((what for there, what in faults if there), ""):
        raise DataError(f"{where}: {what}")


def check_file(path: Path, remedy: str = TAKE_OFF, most: int = MOST_BYTES) -> None:
    """Raise DataError unless `path` is a plain file of at most `most` bytes, because a pipe or a device might never end."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        why = error.strerror if isinstance(error, OSError) else "no file can have this name"
        raise DataError(f"{path}: cannot be read ({why}); {remedy}") from None
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe or a device"
        raise DataError(f"{path}: cannot be read ({kind}, not a file); {remedy}")
    if found.st_size > most:
        raise DataError(f"{path}: cannot be read ({found.st_size:,} bytes, at most {most:,} are allowed); {remedy}")


@contextmanager
def wrap_read_errors(path: Path, remedy: str = TAKE_OFF) -> Iterator[None]:
    """Turn errors of the operating system, and bytes that are not UTF-8, into a DataError within the block."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: cannot be read (not UTF-8 at byte {error.start}); {remedy}") from None


def check_opens(path: Path) -> None:
    """Raise DataError unless a file, or every plain file in a folder, can be opened and read."""
    with wrap_read_errors(path):
        for file in [one for one in path.iterdir() if one.is_file()] if path.is_dir() else [path]:
            check_file(file, most=MOST_SLIDE)
            with file.open("rb") as opened:
                opened.read(1)


class FileResultCache(Generic[T]):
    """A function of a path and further arguments that caches its last `most` results.

    A cached result is used as long as the path's files do not change.
    """

    def __init__(self, read: Callable[..., T], most: int) -> None:
        self._read = lru_cache(most)(lambda state, *args: read(*args))
        self.cache_clear = self._read.cache_clear

    def __call__(self, path: Path, *args: Any) -> T:
        """Return the function's result, which may be cached."""
        return self._read(stamp(path), path, *args)


def stamp(path: Path) -> Stamp:
    """Return numbers that change when a file, or any file in a folder, changes. () for a missing path.

    The files directly in a folder are examined, because overwriting a file does not change the time of its folder.
    """
    try:
        if not path.is_dir():
            found = [path.stat()]
        else:
            with os.scandir(path) as entries:
                # a broken link is no file; os.path.isfile has no error for a link to itself
                found = [one.stat() for one in entries if one.is_file(follow_symlinks=False) or os.path.isfile(one)]
    except (OSError, ValueError):
        return ()
    return tuple(sorted((one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in found))


def most_unpacked(packed: int) -> int:
    """Return the most bytes that files of `packed` bytes may take when unpacked."""
    return min(MOST_VOLUME, max(MOST_UNPACKED, LARGEST_RATIO * packed))


def check_unpacked(path: Path, shape: Sequence[int], voxel_bytes: int, what: str) -> None:
    """Raise DataError for a volume without voxels, or with more bytes, `voxel_bytes` per voxel, than its file may take."""
    needed, most = prod(shape) * voxel_bytes, most_unpacked(path.stat().st_size)
    if not 0 < needed <= most:
        raise DataError(
            f"{path}: {what} ({'x'.join(map(str, shape))} voxels, {needed:,} bytes; "
            f"at most {most:,} are allowed for a file of this size); cut it into smaller ones",
            "too large",
        )


def volume_shape(path: Path, sizes: Sequence[int]) -> tuple[int, int, int]:
    """Return the shape (i, j, k) of a volume of two or three dimensions. Raises DataError for a further dimension over 1."""
    if len(sizes) < 2 or any(n != 1 for n in sizes[3:]):
        raise DataError(
            f"{path}: has {len(sizes)} dimensions, {'x'.join(map(str, sizes))}; save its sequences or times as volumes of "
            "three",
            "not three dimensions",
        )
    i, j, k = (*sizes, 1)[:3]
    return int(i), int(j), int(k)


def text_lines(path: Path, remedy: str, newline: str | None = None) -> Iterator[str]:
    """Yield the lines of a text in UTF-8, without a byte order mark. Only one line is in memory at a time.

    A line of over MOST_CHARACTERS is cut a few characters above this limit, so that `check_line` refuses it. `newline` is as
    in open(): None turns every end of a line into "\\n". Raises DataError.
    """
    check_file(path, remedy)
    number = 0
    with wrap_read_errors(path, remedy):
        try:
            with path.open(encoding="utf-8-sig", newline=newline) as file:
                while line := file.readline(MOST_CHARACTERS + 2):
                    number, rest = number + 1, line
                    while len(rest) == MOST_CHARACTERS + 2 and not rest.endswith(("\r", "\n")):
                        rest = file.readline(MOST_CHARACTERS + 2)
                    yield line
        except UnicodeDecodeError:
            raise DataError(f"{path}: cannot be read (not UTF-8 in or behind line {number + 1}); {remedy}") from None


def check_line(where: str, line: str) -> None:
    """Raise DataError for a line with over MOST_CHARACTERS."""
    if len(line.rstrip("\r\n")) > MOST_CHARACTERS:
        raise DataError(f"{where}: a record has at most {MOST_CHARACTERS:,} characters; cut it up")


def parse_json(where: str, text: str, remedy: str) -> Any:
    """Return the parsed JSON of a text. Raises DataError; more values than MOST_VALUES are refused before parsing."""
    if sum(map(text.count, "[{,")) > MOST_VALUES:
        raise DataError(f"{where}: holds more than {MOST_VALUES:,} values; cut it up")
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON ({str(error)[:200]}); {remedy}") from None
    except RecursionError:
        raise DataError(f"{where}: not valid JSON (nested too deep); {remedy}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for a key that occurs twice, of which Python would keep the last one's value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice!r} occurs twice in one object")
    return found


def read_text(path: Path, remedy: str, most: int = MOST_BYTES) -> str:
    """Return a file's text in UTF-8, without a byte order mark. Raises DataError."""
    check_file(path, remedy, most)
    with wrap_read_errors(path, remedy):
        return path.read_text(encoding="utf-8-sig")


@contextmanager
def wrap_decoding_errors(path: Path, what: str, remedy: str = TAKE_OFF, most: int = MOST_BYTES) -> Iterator[None]:
    """Check the kind and size of `path`, and turn any exception in the block into a DataError: damaged files may cause any."""
    check_file(path, remedy, most)
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        why = (error.strerror if isinstance(error, OSError) else "") or " ".join(str(error).split())[:200]
        if isinstance(error, EOFError | zlib.error | gzip.BadGzipFile):
            never_packed = isinstance(error, gzip.BadGzipFile) and "CRC" not in why and "length" not in why
            why = (
                "its name ends in .gz, and its content is not packed by gzip"
                if never_packed
                else "its packed content is cut off or damaged; copy or download it again"
            )
        why = "it is damaged, or of another kind than it says" if not why or _PROGRAMMERS.search(why) else why
        raise DataError(f"{path}: {what} ({why}); {remedy}") from None


def open_picture(path: Path) -> Image.Image:
    """Return an opened picture of one of FORMATS, not decoded yet. Use within `wrap_decoding_errors`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # check_pixels has a limit of its own
        try:
            found = Image.open(path, formats=FORMATS)
        except Image.DecompressionBombError:
            raise _too_large_error(path, f"over {MOST_PIXELS:,} pixels") from None
        except UnidentifiedImageError:
            name = path.name.lower()
            kind, remedy = next((found for endings, found in FOREIGN.items() if name.endswith(endings)), ("", ""))
            if not kind:  # `wrap_decoding_errors` turns it into one line
                raise OSError(f"cannot identify image file: its content is none of {', '.join(FORMATS)}") from None
            raise DataError(
                f"{path}: image cannot be read (its ending is that of {kind}); {remedy}", "format that is not read"
            ) from None
    if found.format in ("JPEG", "MPO"):  # a scan of 20 bytes makes the decoder pass over the whole picture
        scans, last = 0, b""
        with path.open("rb") as file:
            while block := file.read(2**20):
                scans += (last + block).count(b"\xff\xda")
                last = block[-1:]
        if scans > MOST_SCANS:
            raise DataError(f"{path}: is a JPEG of {scans:,} scans, at most {MOST_SCANS} are read; save it anew")
    return found


def page_count(path: Path) -> int:
    """Return the number of pages of a TIFF. Raises UnfitError for more than MOST_PAGES."""
    return sum(1 for _ in tiff_pages(path, ()))


def tiff_pages(path: Path, tags: Collection[int]) -> Iterator[dict[int, int]]:
    """Yield the first number of each of `tags` for every page of a TIFF, by following its chain of pages.

    Raises UnfitError for more than MOST_PAGES, and for a page of more than MOST_TAGS if tags are read.
    """
    with path.open("rb") as file:
        head = file.read(16)
        order = "<" if head[:2] == b"II" else ">"
        large = struct.unpack(f"{order}H", head[2:4])[0] == 43
        count, entry, offset = ("Q", 20, "Q") if large else ("H", 12, "I")
        at = struct.unpack_from(f"{order}{offset}", head, 8 if large else 4)[0]
        seen = set[int]()
        while at and at not in seen:
            seen.add(at)
            if len(seen) > MOST_PAGES:
                raise UnfitError(f"{path}: has over {MOST_PAGES:,} pages; save each as a picture of its own", "several pages")
            file.seek(at)
            entries = _read_number(file, order + count)
            if tags and entries > MOST_TAGS:
                raise UnfitError(f"{path}: a page has {entries:,} tags, at most {MOST_TAGS} are read; save it anew")
            start, found = file.tell(), dict[int, int]()
            for number in range(entries if tags else 0):
                file.seek(start + number * entry)
                tag, kind, length = (_read_number(file, order + form) for form in ("H", "H", offset))
                if tag in tags and kind in _TIFF_NUMBERS:
                    form = order + _TIFF_NUMBERS[kind]
                    if struct.calcsize(form) * length > struct.calcsize(offset):
                        file.seek(_read_number(file, order + offset))
                    found.setdefault(tag, _read_number(file, form))  # of several, decoders take the first
            yield found
            file.seek(start + entry * entries)
            at = _read_number(file, order + offset)


def _read_number(file: IO[bytes], form: str) -> int:
    """Return the number at a file's position, 0 behind its end. `form`: the format for struct."""
    data = file.read(struct.calcsize(form))
    return int(struct.unpack(form, data)[0]) if len(data) == struct.calcsize(form) else 0


def check_pixels(path: Path, picture: Image.Image) -> None:
    """Raise UnfitError for a picture of several pages, or of more than MOST_PIXELS, before it is decoded.

    Raises DataError for an uncompressed TIFF whose tag exchanges rows and columns, because PIL decodes it wrongly.
    """
    # PIL's own count takes minutes for 50,000 pages, and reads all frames of a GIF
    count = page_count(path) if picture.format == "TIFF" else 1 + getattr(picture, "is_animated", False)
    if count > 1:
        told = count if picture.format == "TIFF" else "several"
        raise UnfitError(f"{path}: has {told} pages; save each as a picture of its own", "several pages")
    if picture.width * picture.height > MOST_PIXELS:
        raise _too_large_error(path, f"{picture.width}x{picture.height} pixels, at most {MOST_PIXELS:,}")
    if picture.format == "TIFF":
        columns, rows = (int(picture.tag_v2.get(tag) or 0) for tag in TIFF_TILE)  # type: ignore[attr-defined]
        if columns * rows > MOST_PIXELS:
            raise UnfitError(f"{path}: is stored in tiles of {columns}x{rows} pixels; save it in smaller ones", "too large")
        if picture.tag_v2.get(_TIFF_COLOURS) == 0 and picture.mode not in ("1", "L"):  # type: ignore[attr-defined]
            raise UnfitError(
                f"{path}: has values of over 8 bits of which 0 is white, which is not read; save it with 0 as black"
            )
        if picture.mode == "L" and 2 in picture.tag_v2.get(_TIFF_FORMAT, ()):  # type: ignore[attr-defined]
            raise UnfitError(f"{path}: has values of 8 bits with a sign, of which -1 would become 255; save it without")
        if any(0 in picture.tag_v2.get(tag, ()) for tag in _TIFF_OFFSETS):  # type: ignore[attr-defined]
            raise UnfitError(f"{path}: has parts that are not stored; save it anew, or set task.tiles if it is tiled")
    on_side = picture.format == "TIFF" and picture.getexif().get(ExifTags.Base.Orientation, 1) >= 5
    if on_side and picture.info.get("compression") == "raw":
        raise DataError(f"{path}: is an uncompressed TIFF that its orientation tag lays on its side; save it upright")


def _too_large_error(path: Path, found: str) -> DataError:
    return UnfitError(
        f"{path}: cannot be read as one picture ({found}); save it as a tiled, little-endian TIFF and set task.tiles to read "
        "it by parts",
        "too large",
    )


def is_encodable(text: str) -> bool:
    """Tell whether a text can be encoded. JSON may hold half a character (a lone surrogate), which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# kinds of files ---------------------------------------------------------------------------------------------------------------

SLIDES = (".svs", ".ndpi", ".mrxs", ".scn", ".vms", ".vmu", ".bif", ".svslide")
"""Endings of whole slides, which no picture reader opens."""
NIFTI = (".nii", ".nii.gz")
RAW_VOLUMES = (".mha", ".mhd", ".nrrd", ".nhdr")
"""MetaImage and NRRD."""
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".gif", *NIFTI, *RAW_VOLUMES, *SLIDES)
DICOM = (".dcm", ".dicom")
"""Endings of DICOM files, which may lack the usual first bytes."""
MOST_FILES = 20_000
"""Files of a folder, and frames of a series."""
VolumeFormat = Literal["nifti", "dicom", "mha_nrrd"]
"""The module of this package that reads a volume."""


def path_in_any_unicode_form(folder: Path, name: str) -> Path:
    """Return the path of `name` below `folder`. Without such a file, the path is returned as written.

    The name may have Windows' backslashes, and its letters and accents may be composed or decomposed (NFC or NFD): a Mac's disk
    may have either form.
    """
    spellings = (unicodedata.normalize(form, one) for one in (name, name.replace("\\", "/")) for form in ("NFC", "NFD"))
    return next((place for one in (name, *spellings) if is_there(place := folder / one)), folder / name)


def absolute_path(path: Path) -> Path:
    """Return a file's absolute path without links to folders. A link to the file keeps its name, whose ending is its format."""
    return path.parent.resolve() / path.name


def is_there(path: Path) -> bool:
    """Tell whether a path is a file or a folder."""
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def is_volume(path: Path) -> bool:
    """Tell whether a path is a volume (NIfTI, MetaImage, NRRD, DICOM file or series folder) and not a picture."""
    return volume_format(path) is not None


def volume_format(path: Path) -> VolumeFormat | None:
    """Return the format of a volume, None for any other path.

    A path is examined again when its modification time changes: while a network share is not mounted, it is missing or empty.
    """
    name = path.name.lower()
    if name.endswith(NIFTI):
        return "nifti"
    if name.endswith(RAW_VOLUMES):
        return "mha_nrrd"
    try:
        return "dicom" if _is_dicom_at(path, path.stat().st_mtime_ns) else None
    except (OSError, ValueError):
        return None


@lru_cache(maxsize=65536)
def _is_dicom_at(path: Path, time: int) -> bool:
    return is_dicom(path)


def is_dicom(path: Path) -> bool:
    """Tell whether a path is a DICOM file, by its first bytes or its name, or a folder that holds one."""
    try:
        for one in islice(path.iterdir(), MOST_FILES) if path.is_dir() else [path]:
            if one.is_file():  # a pipe would never end
                with one.open("rb") as file:
                    if file.read(132)[128:] == b"DICM" or one.name.lower().endswith(DICOM):
                        return True
    except (OSError, ValueError):
        pass
    return False


def forget_formats() -> None:
    """Forget the formats found so far, so that every path is examined again."""
    _is_dicom_at.cache_clear()
