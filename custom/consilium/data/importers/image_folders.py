"""A folder of one's own: a folder per site with images/ and masks/, pictures and masks of the same names."""

from pathlib import Path

import numpy as np

from consilium.core.errors import DataError
from consilium.data.importers.base import (
    NO_PATIENTS,
    PICTURE_ENDINGS,
    UNREADABLE,
    Importer,
    ImportResult,
    Options,
    SourceSample,
    by_stem,
    check_sizes,
    child,
    files,
    partner,
    renamed_notes,
    renamed_sites,
    wrong_layout,
)
from consilium.data.safe_open import open_picture, reading

LAYOUT = "a folder per site with images/ and masks/, a mask for every picture under the same name; PNG, one channel, 0 outside"
MODES = ("1", "L", "P", "I;16", "I")
"""Pillow's names of pictures with one channel of whole numbers."""
MOST = 32
"""A mask with more values than these is a photograph, or was saved as JPEG."""


def read_own(source: Path, options: Options) -> ImportResult:
    """Read pictures with their masks; each value of the masks becomes a class. Patients are not known, so pictures are split.

    Raises DataError for another layout, a picture without a mask, sizes that differ, and masks that are no label pictures.
    """
    pairs = {folder.name: some for folder in sorted(source.iterdir()) if folder.is_dir() and (some := _pairs(folder))}
    if not pairs:
        raise wrong_layout(source, LAYOUT)
    names = renamed_sites(pairs, source)
    found = [SourceSample(names[folder], image.stem, image, mask) for folder, some in pairs.items() for image, mask in some]
    values = sorted(set().union(*(_values(one.label) for one in found if isinstance(one.label, Path))) - {0})
    if not values:
        raise DataError(f"{source}: all masks are empty; a mask has 0 for background and other values for classes")
    classes = {"object": values} if len(values) == 1 else {f"value-{value}": [value] for value in values}
    note = f"a folder of pictures {NO_PATIENTS}; name them as `patient` in the lists and cut again by `data split`"
    return ImportResult(found, classes, [*renamed_notes(names), note])


def _pairs(folder: Path) -> list[tuple[Path, Path]]:
    """Return a site's pictures with their masks, none for a folder that is no site's. Raises DataError."""
    images, masks = child(folder, "images"), child(folder, "masks")
    if images is None or masks is None:
        return []
    known, found = by_stem(files(masks, PICTURE_ENDINGS)), by_stem(files(images, PICTURE_ENDINGS))
    pairs = [(image, partner(stem, known, image, "mask")) for stem, image in found.items()]
    for image, mask in pairs:
        check_sizes(image, mask)
    return pairs


def _values(mask: Path) -> set[int]:
    """Return the values of a label picture. Raises DataError for a picture that is none."""
    with reading(mask, *UNREADABLE), open_picture(mask) as picture:
        mode = picture.mode
        values = {int(value) for value in np.unique(np.asarray(picture))} if mode in MODES else set()
    if mode not in MODES or len(values) > MOST:
        raise DataError(f"{mask}: is no label picture (mode {mode}); save it as PNG with one channel and a value per class")
    return values


SETS = {"own": Importer(LAYOUT, read_own)}
