"""FLOPs of studies, cached beside their files: counting lays out every model, and a list must be quick."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from consilium.config.job import job_file
from consilium.core.schema import read_yaml
from consilium.core.storage import write_atomic
from consilium.report.plain_files import read_json
from consilium.study.study import Study, studies_folder

CACHE = "flops.json"
"""In the folder of the studies: FLOPs of each with a digest of its grid; None where they cannot be counted."""


def digest_of(study: Study) -> str:
    """Return a digest of a study's grid, base job and data; comments and published numbers do not count."""
    said = study.config.model_dump(mode="json", include={"base", "set", "axes", "exclude", "counts"})
    base = read_yaml(job_file(study.path.parent / study.config.base))
    return hashlib.sha256(json.dumps([said, base], default=str).encode()).hexdigest()[:16]


def cached_flops(folder: Path | None = None) -> dict[str, Any]:
    """Return the entries of the studies in a folder, by default of our own, by name; {} where there are none."""
    return read_json((folder or studies_folder()) / CACHE)


def known_flops(study: Study, there: Mapping[str, Any]) -> float | None:
    """Return the FLOPs that were counted of a study as it stands now."""
    one = there.get(study.name)
    return float(one["flops"]) if isinstance(one, dict) and one.get("digest") == digest_of(study) and one.get("flops") else None


def save_flops(study: Study, flops: float | None) -> None:
    """Keep the FLOPs of a study."""
    there = cached_flops() | {study.name: {"digest": digest_of(study), "flops": flops}}
    write_atomic(studies_folder() / CACHE, (json.dumps(dict(sorted(there.items())), indent=1) + "\n").encode())
