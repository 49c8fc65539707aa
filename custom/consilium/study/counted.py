"""FLOPs of studies as they were counted, beside their files: counting lays out every model, and a list is to be quick."""

import hashlib
import json
from pathlib import Path
from typing import Any

from consilium.config.job import job_file
from consilium.schema import read_yaml
from consilium.storage import write_atomic
from consilium.study.study import STUDIES, Study

COUNTED = "flops.json"
"""In the folder of the studies: FLOPs of each beside a digest of what was counted; None where they cannot be told."""
Counted = dict[str, dict[str, Any]]


def digest_of(study: Study) -> str:
    """Return what tells a study's grid, base job and data from another's; comments and published numbers do not count."""
    said = study.config.model_dump(mode="json", include={"base", "set", "axes", "exclude", "counts"})
    base = read_yaml(job_file(study.path.parent / study.config.base))
    return hashlib.sha256(json.dumps([said, base], default=str).encode()).hexdigest()[:16]


def counted(folder: Path = STUDIES) -> Counted:
    """Return what was counted of the studies in a folder, by name; {} where nothing was."""
    try:
        found = json.loads((folder / COUNTED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def known_flops(study: Study, there: Counted) -> float | None:
    """Return the FLOPs that were counted of a study as it stands now."""
    one = there.get(study.name)
    return float(one["flops"]) if isinstance(one, dict) and one.get("digest") == digest_of(study) and one.get("flops") else None


def record(study: Study, flops: float | None, folder: Path = STUDIES) -> None:
    """Keep what was counted of a study."""
    there = counted(folder) | {study.name: {"digest": digest_of(study), "flops": flops}}
    write_atomic(folder / COUNTED, (json.dumps(dict(sorted(there.items())), indent=1) + "\n").encode())
