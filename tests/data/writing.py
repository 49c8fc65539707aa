"""Text lists for tests."""

import json
import os
from pathlib import Path

REAL_TEXTS = os.environ.get("CONSILIUM_TEST_TEXTS", "")
"""A folder of real texts as JSONL, with e2e/ and medquad/SOURCE/, where a developer has one."""
NO_TEXTS = "CONSILIUM_TEST_TEXTS names no folder of real texts"


def write(folder: Path, name: str, *records: object) -> Path:
    """Write a list of records, texts as they are, and return its folder."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return folder
