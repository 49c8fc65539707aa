"""Text lists for tests."""

import json
from pathlib import Path


def write(folder: Path, name: str, *records: object) -> Path:
    """Write a list of records, texts as they are, and return its folder."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return folder
