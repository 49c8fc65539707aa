"""A fingerprint of a site's data without reading pictures: the list, and the names and sizes of its files."""

import hashlib
import json
from pathlib import Path
from typing import Any

from consilium.core.errors import ConsiliumError
from consilium.data.datalist import SPLITS
from consilium.data.folders import read_folders
from consilium.data.safe_open import read_text
from consilium.data.text import FILES, has_texts


def fingerprint(path: Path) -> str:
    """Return 16 hexadecimal digits for a data list, or a folder of texts or of classes, wherever it lies.

    "" for a list that cannot be read: the job reports why. Of texts the content counts, of pictures and masks names and sizes:
    a picture with other pixels and the same number of bytes is not noticed.
    """
    try:
        found = _folder_content(path) if path.is_dir() or path.suffix == ".jsonl" else _list_content(path)
    except (ConsiliumError, OSError, ValueError, AttributeError, TypeError, RecursionError):
        return ""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def _folder_content(path: Path) -> list[Any]:
    """Return the contents of a folder of texts, or the names and sizes in a folder of classes."""
    folder = path if path.is_dir() else path.parent
    if not has_texts(folder):
        return [[split, name, *_name_and_size(picture)] for split, picture, name in read_folders(folder)]
    files = [next((folder / name for name in names if (folder / name).is_file()), None) for names in FILES.values()]
    return [None if file is None else read_text(file, "") for file in files]


def _list_content(path: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(read_text(path, ""))
    for split in SPLITS:
        entries = raw.get(split, [])
        for number, entry in enumerate(entries):  # names and sizes in place of paths; a label that is not a file stays
            places = {key: path.parent / entry[key] for key in ("image", "label") if isinstance(entry.get(key), str)}
            entries[number] = entry | {key: _name_and_size(place) for key, place in places.items() if place.exists()}
    return raw | {split: raw.get(split, []) for split in SPLITS}


def _name_and_size(path: Path) -> list[Any]:
    """Return a file's name and size; of a folder of DICOM files those of its files."""
    files = sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]
    return [path.name, [[one.name, one.stat().st_size] for one in files]]
