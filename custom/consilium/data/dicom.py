"""Volumes in DICOM: one file, several frames in one file, or a folder that holds a series."""

from pathlib import Path


def is_own(path: Path) -> bool:
    """Tell whether a path is a DICOM file, by how it starts, or a folder with such a file in it."""
    try:
        return any(map(_starts, sorted(path.iterdir()))) if path.is_dir() else _starts(path)
    except (OSError, ValueError):
        return False


def _starts(path: Path) -> bool:
    if not path.is_file():  # a pipe would never end
        return False
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"
