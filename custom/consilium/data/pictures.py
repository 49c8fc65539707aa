"""Reads pictures: PNG, JPEG, TIFF, BMP and GIF files."""

import struct
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps

from consilium.core.errors import DataError
from consilium.data.pixel_values import Labels, check_numbers, is_anti_aliased, to_integers
from consilium.data.safe_open import check_pixels, open_picture, wrap_decoding_errors
from consilium.data.settings import Value

MODES = ("L", "I;16", "I;16B", "I;16L", "I", "F", "RGB", "1")
"""PIL's modes that are read unchanged: grey of 1, 8, 16 or 32 bits, and RGB. Pictures of other modes become RGB."""
_TAGS = {"exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif"}
"""PIL's keys of metadata that may hold the orientation tag."""
_TEXTS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")
"""Types of a PNG's chunks that hold such metadata."""


def picture_shape(path: Path) -> tuple[int, int]:
    """Return the (rows, columns) of what `read` returns, from the header. Raises DataError for a picture that is not read."""
    with wrap_decoding_errors(path, "image cannot be read"), open_picture(path) as picture:
        check_pixels(path, picture)
        # PIL has exchanged a TIFF's width and height already
        return (
            (picture.width, picture.height)
            if (picture.format != "TIFF" and _orientation(path, picture) >= 5)
            else (picture.height, picture.width)
        )


def size_text(shape: Sequence[int]) -> str:
    """Return the text WIDTHxHEIGHT, as in messages, for a picture's (rows, columns)."""
    return f"{shape[1]}x{shape[0]}"


def _orientation(path: Path, picture: Image.Image) -> int:
    """Return the value of EXIF's orientation tag, 1 without one.

    PIL decodes a PNG to find metadata behind its pixels, so this is done only if the file has such a chunk.
    """
    if picture.format == "PNG" and not _TAGS & picture.info.keys():
        behind = False
        with path.open("rb") as file:
            file.seek(8)
            while len(head := file.read(8)) == 8:
                length, kind = struct.unpack(">I4s", head)
                behind = behind or kind == b"IDAT"
                if behind and kind in _TEXTS:
                    break
                file.seek(length + 4, 1)
            else:
                return 1
    return int(picture.getexif().get(ExifTags.Base.Orientation, 1))


def exif_orientation(path: Path) -> int:
    """Return the value of a picture's EXIF orientation tag: 1 for upright, 5 to 8 if rows and columns are exchanged."""
    with wrap_decoding_errors(path, "image cannot be read"), open_picture(path) as picture:
        return _orientation(path, picture)


def read(path: Path, what: str = "image") -> np.ndarray:
    """Return a picture as real, finite numbers (H, W) or (H, W, 3), turned upright by its EXIF tag. Raises DataError.

    `what`: for a "mask", its label values (H, W) are returned, see `_label_values`.
    """
    with wrap_decoding_errors(path, f"{what} cannot be read"), open_picture(path) as picture:
        check_pixels(path, picture)
        upright = ImageOps.exif_transpose(picture)
        if what == "mask":
            array = _label_values(path, upright, picture.format == "GIF")
        else:
            array = np.asarray(upright if upright.mode in MODES else upright.convert("RGB"))
    return check_numbers(path, array.astype(np.uint8) * (255 if what == "image" else 1) if array.dtype == bool else array)


def _label_values(path: Path, picture: Image.Image, is_gif: bool) -> np.ndarray:
    """Return the label values (H, W) of a mask: its one channel, or the grey that all its channels or its palette have.

    In a picture with a palette, the numbers are the labels. The greys are the labels instead if all colours used are grey, and
    either number 0 is not black or the file is a GIF: GIF writers number colours arbitrarily. Raises DataError for colours, and
    for a mask that is drawn by its transparency.
    """
    by_number = picture.mode in MODES and picture.mode != "RGB"
    if picture.mode == "P":
        palette = np.reshape(picture.getpalette() or [0, 0, 0], (-1, 3))
        used = palette[np.flatnonzero(picture.histogram()[: len(palette)])]
        by_number = bool((used != used[:, :1]).any()) or not (is_gif or palette[0].any())
    if by_number:
        return np.asarray(picture)
    array = np.asarray(picture.convert("RGBA"))
    grey, alpha = array[..., 0], array[..., 3]
    if (off := (array[..., :3] != grey[..., None]).any(2)).any():
        colour = ", ".join(map(str, array[off][0, :3].tolist()))
        raise DataError(
            f"{path}: mask has colours, such as ({colour}); save it as one channel of label values", "mask of colours"
        )
    if alpha.min() < alpha.max() and (alpha != grey).any() and ((grey[alpha < 255] > 0).any() or not grey.any()):
        raise DataError(
            f"{path}: mask is drawn by its transparency, which is not read; save it as one channel of label values, without "
            "transparency",
            "mask of colours",
        )
    return grey


def labels(path: Path) -> Labels:
    """Return the label values (H, W) of a mask. Raises DataError for colours, and values that are not whole numbers."""
    return Labels(values=to_integers(path, read(path, "mask")))


def why_altered(path: Path, values: np.ndarray, declared: Collection[Value]) -> str:
    """Return why the values of a mask that are not `declared` are no labels: it was smoothed, or saved as JPEG. Else ""."""
    every = {int(value) for value in np.unique(values)}
    if not (odd := sorted(every - set(declared))) or not path.is_file():
        return ""
    with path.open("rb") as file:
        if len(every) > 2 and file.read(3) == b"\xff\xd8\xff":
            return f"mask is a JPEG, which changes values: {len(odd)} such as {odd[0]} are of no class"
    smoothed = f"mask is anti-aliased: {len(odd)} values such as {odd[0]} lie on edges alone"
    return smoothed if is_anti_aliased(values, declared) else ""
