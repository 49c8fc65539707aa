"""Pictures: PNG, JPEG, TIFF and BMP by PIL."""

from pathlib import Path

import numpy as np
from PIL import ImageOps

from consilium.data.labels import Labels
from consilium.data.opening import check_numbers, check_pixels, open_picture, reading, whole_numbers
from consilium.errors import DataError

MODES = ("L", "I;16", "I;16B", "I;16L", "I", "F", "RGB", "1")
"""How PIL calls what is taken as it is: grey of 1, 8, 16 or 32 bits, and colours. Others become colours."""


def size(path: Path) -> tuple[int, int]:
    """Return (rows, columns) by the header, turned as the camera's EXIF tag says. Raises DataError."""
    with reading(path, "image cannot be read"), open_picture(path) as picture:
        turned = picture.getexif().get(0x0112, 1) >= 5
        return (picture.width, picture.height) if turned else (picture.height, picture.width)


def turned(path: Path) -> bool:
    """Tell whether a picture is shown turned or mirrored by the camera's EXIF tag. Raises DataError."""
    with reading(path, "image cannot be read"), open_picture(path) as picture:
        return picture.getexif().get(0x0112, 1) > 1


def read(path: Path, what: str = "image") -> np.ndarray:
    """Return (H, W) or (H, W, 3) real, finite numbers, turned as the camera's EXIF tag says. Raises DataError."""
    with reading(path, f"{what} cannot be read"), open_picture(path) as picture:
        check_pixels(path, picture)
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
