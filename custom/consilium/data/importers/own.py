"""A folder of one's own: a folder per site with images/ and masks/, pictures and masks of the same names."""

import re
from pathlib import Path

import numpy as np

from consilium.data.importers.base import (
    NO_PATIENTS,
    PICTURE_ENDINGS,
    UNREADABLE,
    Found,
    Importer,
    Options,
    Reading,
    by_stem,
    check_sizes,
    child,
    files,
    partner,
    slug,
    wrong_layout,
)
from consilium.data.opening import open_picture, reading
from consilium.errors import DataError

LAYOUT = "a folder per site with images/ and masks/, a mask for every picture under the same name; PNG, one channel, 0 outside"
MODES = ("1", "L", "P", "I;16", "I")
"""Pillow's names of pictures with one channel of whole numbers."""
MOST = 32
"""A mask with more values than these is a photograph, or was saved as JPEG."""


def read_own(source: Path, options: Options) -> Reading:
    """Read pictures with their masks; each value of the masks becomes a class. Patients are not known, so pictures are split.

    Raises DataError for another layout, a picture without a mask, sizes that differ, and masks that are no label pictures.
    """
    found = [one for folder in sorted(source.iterdir()) if folder.is_dir() for one in _site(folder)]
    _check_names(source)
    if not found:
        raise wrong_layout(source, LAYOUT)
    values = sorted(set().union(*(_values(one.label) for one in found if isinstance(one.label, Path))) - {0})
    if not values:
        raise DataError(f"{source}: all masks are empty; a mask has 0 for background and other values for classes")
    classes = {"object": values} if len(values) == 1 else {f"value-{value}": [value] for value in values}
    return Reading(
        found,
        classes,
        [f"a folder of pictures {NO_PATIENTS}; name them as `patient` in the lists and cut again by `data split`"],
    )


def _check_names(source: Path) -> None:
    """Raise DataError for two folders that would become one site."""
    known: dict[str, str] = {}
    for folder in sorted(one for one in source.iterdir() if one.is_dir()):
        if (before := known.setdefault(_name(folder).casefold(), folder.name)) != folder.name:
            raise DataError(f"{source}: {before!r} and {folder.name!r} would both be site {_name(folder)!r}; rename one")


def _name(folder: Path) -> str:
    return folder.name if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", folder.name) else slug(folder.name)


def _site(folder: Path) -> list[Found]:
    images, masks = child(folder, "images"), child(folder, "masks")
    if images is None or masks is None:
        return []
    name = _name(folder)
    if not name:
        raise DataError(f"{folder}: its name has no letter or digit of a site's name; rename it")
    known, found = by_stem(files(masks, PICTURE_ENDINGS)), by_stem(files(images, PICTURE_ENDINGS))
    pairs = [(image, partner(stem, known, image, "mask")) for stem, image in found.items()]
    for image, mask in pairs:
        check_sizes(image, mask)
    return [Found(name, image.stem, image, mask) for image, mask in pairs]


def _values(mask: Path) -> set[int]:
    """Return the values of a label picture. Raises DataError for a picture that is none."""
    with reading(mask, *UNREADABLE), open_picture(mask) as picture:
        mode = picture.mode
        values = {int(value) for value in np.unique(np.asarray(picture))} if mode in MODES else set()
    if mode not in MODES or len(values) > MOST:
        raise DataError(f"{mask}: is no label picture (mode {mode}); save it as PNG with one channel and a value per class")
    return values


SETS = {"own": Importer(LAYOUT, read_own)}
