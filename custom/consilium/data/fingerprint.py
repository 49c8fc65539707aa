"""A fingerprint of a site's data that reads no pictures: it covers the list, and the names and sizes of its files."""

import hashlib
import json
from pathlib import Path
from typing import Any

from consilium.core.errors import ConsiliumError
from consilium.data.datalist import SPLITS, read_datalist_json
from consilium.data.folders import list_class_pictures
from consilium.data.safe_open import path_in_any_unicode_form, read_text
from consilium.data.text import has_texts, split_files


def fingerprint(path: Path) -> str:
    """Return 16 hexadecimal digits for a data list, a folder of texts or a folder of classes; "" if it cannot be read.

    The path itself does not count. Texts count by content, pictures and masks by name and size. So a picture with other pixels
    and the same number of bytes is not noticed. Why a list cannot be read is reported by the job.
    """
    found: Any
    folder = path if path.is_dir() else path.parent
    try:
        if not path.is_dir() and path.suffix != ".jsonl":
            found = read_datalist_json(path)
            for entries in (found.setdefault(split, []) for split in SPLITS):
                for number, entry in enumerate(entries):  # names and sizes replace paths; a label that is not a file stays
                    entry = {"image": entry} if isinstance(entry, str) else entry
                    named = {key: entry[key] for key in ("image", "label") if isinstance(entry.get(key), str)}
                    places = {key: path_in_any_unicode_form(folder, name) for key, name in named.items()}
                    entries[number] = entry | {key: _name_and_size(one) for key, one in places.items() if one.exists()}
        elif has_texts(folder):
            files = split_files(folder)
            found = [read_text(files[split], "") if split in files else None for split in SPLITS]
        else:
            found = [[split, name, *_name_and_size(picture)] for split, picture, name in list_class_pictures(folder)]
    except (ConsiliumError, OSError, ValueError, AttributeError, TypeError, RecursionError):
        return ""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def _name_and_size(path: Path) -> list[Any]:
    """Return [name, [[file name, size]]] of a file; for a folder of DICOM files, of its files that are not hidden."""
    files = [path]
    if path.is_dir():  # file browsers write hidden files, such as macOS's .DS_Store
        files = sorted(one for one in path.iterdir() if one.is_file() and not one.name.startswith("."))
    return [path.name, [[one.name, one.stat().st_size] for one in files]]
