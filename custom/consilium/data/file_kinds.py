"""The kind of a file (picture, slide, volume), by its name or its first bytes. Loads neither numpy nor torch."""

import unicodedata
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Literal

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
    path = folder / name
    return next((place for one in (name, *spellings) if is_there(place := folder / one)), path)


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

    A folder is examined again when its modification time changes: while a network share is not mounted, it looks empty.
    """
    try:
        return _format_at(path, path.stat().st_mtime_ns if path.is_dir() else 0)
    except OSError:
        return None


@lru_cache(maxsize=65536)
def _format_at(path: Path, time: int) -> VolumeFormat | None:
    if path.name.lower().endswith(NIFTI):
        return "nifti"
    if path.name.lower().endswith(RAW_VOLUMES):
        return "mha_nrrd"
    return "dicom" if is_dicom(path) else None


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
    _format_at.cache_clear()
