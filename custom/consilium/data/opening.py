"""Opening what others made: plain files of a sane size only, and one clear line whatever is in them.

A data list may name any file this user can read, wherever it lies: pictures stay where a hospital keeps them. Who writes the
list is trusted that far; what is no picture is refused without a word of its content.
"""

import math
import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from consilium.errors import DataError, UnfitError

FORMATS = ("PNG", "JPEG", "TIFF", "BMP")
"""What pictures may be, whatever their names end in: PIL's other readers start other programs, or read what nobody needs."""
MOST_BYTES = 2 * 1024**3
"""A file larger than this is not opened."""
MOST_SLIDE = 1024**4
"""The same of a TIFF or a slide, of which only parts are read at once."""
MOST_PIXELS = 100_000_000
"""Pixels of a picture that is decoded as one: about 400 MB."""
MOST_VOLUME = 4 * 1024**3
"""Bytes that a NIfTI volume may take in memory."""
MOST_VOLUME_FILE = MOST_VOLUME + 2**20
"""Bytes of a volume's file that is not compressed, with its header."""
Stamp = tuple[tuple[int, ...], ...]
"""Of every file: inode, size, and when content and inode changed last."""
TAKE_OFF = "replace it or take it off the list"


def check_file(path: Path, remedy: str = TAKE_OFF, most: int = MOST_BYTES) -> None:
    """Raise DataError unless `path` is a plain file of at most `most` bytes: a pipe or a device would never end."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        why = error.strerror if isinstance(error, OSError) else "no file can have this name"
        raise DataError(f"{path}: cannot be read ({why}); {remedy}") from None
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe or a device"
        raise DataError(f"{path}: cannot be read ({kind}, not a file); {remedy}")
    if found.st_size > most:
        raise DataError(f"{path}: cannot be read ({found.st_size:,} bytes, at most {most:,} are); {remedy}")


def check_opens(path: Path) -> None:
    """Raise DataError unless a file, or every plain file of a folder, can be opened and read from."""
    try:
        files = [one for one in path.iterdir() if one.is_file()] if path.is_dir() else [path]
        for file in files:
            check_file(file, most=MOST_SLIDE)
            with file.open("rb") as opened:
                opened.read(1)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {TAKE_OFF}") from None


def stamp(path: Path) -> Stamp:
    """Return what changes when a file does, or any file of a folder: a folder's own time stays when one is written over.

    () of what is not there.
    """
    try:
        if not path.is_dir():
            return (_told(path.stat()),)
        with os.scandir(path) as entries:
            return tuple(sorted(_told(entry.stat()) for entry in entries))
    except (OSError, ValueError):
        return ()


def _told(found: os.stat_result) -> tuple[int, ...]:
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read_text(path: Path, remedy: str, most: int = MOST_BYTES) -> str:
    """Return a file's text in UTF-8, without a byte order mark. Raises DataError."""
    check_file(path, remedy, most)
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: cannot be read (not UTF-8 at byte {error.start}); {remedy}") from None


@contextmanager
def reading(path: Path, what: str, remedy: str = TAKE_OFF, most: int = MOST_BYTES) -> Iterator[None]:
    """Turn whatever a decoder of `path` raises in the block into a DataError: damaged files make them raise anything."""
    check_file(path, remedy, most)
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{path}: {what} ({why}); {remedy}") from None


def open_picture(path: Path) -> Image.Image:
    """Return an opened picture of one of FORMATS, not yet decoded. Use within `reading`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # check_pixels says it, at a limit of our own
        try:
            return Image.open(path, formats=FORMATS)
        except Image.DecompressionBombError:
            raise _too_large(path, f"over {MOST_PIXELS:,} pixels") from None


def check_pixels(path: Path, picture: Image.Image) -> None:
    """Raise UnfitError for a picture of several pages, or of more than MOST_PIXELS, before it is decoded."""
    if (pages := getattr(picture, "n_frames", 1)) > 1:
        raise UnfitError(f"{path}: has {pages} pages; save each as a picture of its own", "several pages")
    if picture.width * picture.height > MOST_PIXELS:
        raise _too_large(path, f"{picture.width}x{picture.height} pixels, at most {MOST_PIXELS:,}")


def _too_large(path: Path, found: str) -> DataError:
    what = f"cannot be read as one picture ({found})"
    return UnfitError(f"{path}: {what}; save it as a tiled TIFF and set task.tiles to read it by parts", "too large")


def check_volume(path: Path, volume: Any) -> None:
    """Raise DataError for a NIfTI volume without voxels, or whose header asks for more than MOST_VOLUME bytes."""
    scaled = any(value not in (None, 0.0, 1.0) for value in volume.header.get_slope_inter())
    needed = math.prod(volume.shape) * (8 if scaled else volume.get_data_dtype().itemsize)
    if min(volume.shape, default=0) < 1 or needed > MOST_VOLUME:
        found = f"{'x'.join(map(str, volume.shape))} voxels, {needed:,} bytes"
        raise DataError(
            f"{path}: cannot be read as NIfTI ({found}; at most {MOST_VOLUME:,} are); cut it into smaller ones", "too large"
        )


def whole(text: str) -> bool:
    """Tell whether a text is one that can be written down: JSON may hold halves of characters (surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
