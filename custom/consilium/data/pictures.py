"""Pictures: PNG, JPEG, TIFF and BMP by PIL."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from consilium.core.errors import DataError
from consilium.data.labels import Labels
from consilium.data.pixel_values import check_numbers, whole_numbers
from consilium.data.safe_open import check_pixels, open_picture, reading

ORIENTATION = 0x0112
"""EXIF's tag: 5 to 8 exchange rows and columns."""
MODES = ("L", "I;16", "I;16B", "I;16L", "I", "F", "RGB", "1")
"""PIL's modes that are read unchanged: grey of 1, 8, 16 or 32 bits, and RGB. Other modes become RGB."""


def size(path: Path) -> tuple[int, int]:
    """Return (rows, columns) by the header, turned as the camera's EXIF tag says. Raises DataError for one not to be read."""
    with reading(path, "image cannot be read"), open_picture(path) as picture:
        check_pixels(path, picture)
        _check_turn(path, picture)
        # a TIFF's size is upright already; PIL finds a tag behind a PNG's pixels only by decoding them
        told = picture.format != "TIFF" and "exif" in picture.info
        turned = told and picture.getexif().get(ORIENTATION, 1) >= 5
        return (picture.width, picture.height) if turned else (picture.height, picture.width)


def _check_turn(path: Path, picture: Image.Image) -> None:
    """Raise DataError for a TIFF that PIL decodes wrongly: without compression, rows and columns to be exchanged."""
    if picture.format == "TIFF" and picture.getexif().get(ORIENTATION, 1) >= 5 and picture.info.get("compression") == "raw":
        raise DataError(f"{path}: is an uncompressed TIFF that its orientation tag lays on its side; save it upright")


def turned(path: Path) -> bool:
    """Tell whether a picture is shown turned or mirrored by the camera's EXIF tag. Raises DataError."""
    with reading(path, "image cannot be read"), open_picture(path) as picture:
        return picture.getexif().get(ORIENTATION, 1) > 1


def read(path: Path, what: str = "image") -> np.ndarray:
    """Return (H, W) or (H, W, 3) real, finite numbers, turned as the camera's EXIF tag says. Raises DataError."""
    with reading(path, f"{what} cannot be read"), open_picture(path) as picture:
        check_pixels(path, picture)
        _check_turn(path, picture)
        upright = ImageOps.exif_transpose(picture)
        wanted = upright.mode in MODES or (what == "mask" and upright.mode == "P")
        array = np.asarray(upright if wanted else upright.convert("RGB"))
    return check_numbers(path, array.astype(np.uint8) * (255 if what == "image" else 1) if array.dtype == bool else array)


def labels(path: Path) -> Labels:
    """Return the label values (H, W) of a mask. Raises DataError for a colour picture, or values that are no whole numbers."""
    array = read(path, "mask")
    if array.ndim != 2:
        what = f"mask has {array.shape[2]} channels"
        raise DataError(f"{path}: {what}; save it as one channel of label values", "mask of colours")
    return Labels(values=whole_numbers(path, array))
