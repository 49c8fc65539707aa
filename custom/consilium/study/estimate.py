"""What a cell will send, receive and compute, by what `consilium cost` counts."""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from consilium.config.job import JobConfig, job_file
from consilium.core.schema import read_yaml
from consilium.core.storage import write_atomic
from consilium.estimates.communication import moved, own_cost
from consilium.estimates.flops import Samples, Work, own_samples, run_flops, work_of
from consilium.federation.job import assemble_job
from consilium.federation.sites import site_names
from consilium.report.plain_files import read_json
from consilium.study.study import Cell, Study, studies_folder

# flops cache -----------------------------------------------------------------------------------------------------------
# FLOPs of studies, cached beside their files: counting lays out every model, and a list must be quick.

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


# estimate --------------------------------------------------------------------------------------------------------------

COUNTING = ("model", "adapter", "task", "strategy")
"""Sections of a job that decide what a sample costs."""


def count_flops(study: Study) -> float | None:
    """Count the FLOPs of a whole study, cache and return them; None where a cell's data have no known size.

    Jobs that differ in rounds, seeds or noise alone are laid out once.
    """
    known: dict[str, Work] = {}
    total = 0.0
    for cell in study.cells():
        config = cell.load()
        given = Samples(**cell.counts.model_dump()) if cell.counts and not study.size else None
        if (samples := own_samples(config, _sites_of(cell, config)) or given) is None:
            save_flops(study, None)
            return None
        job, said = assemble_job(config, cell.base), config.model_dump(mode="json", include=set(COUNTING))
        key = json.dumps([said, config.training.gradient_checkpointing])
        if key not in known:
            known[key] = work_of(job)
        total += run_flops(job, known[key], samples)
    save_flops(study, total)
    return total


def bytes_of(cell: Cell) -> int | None:
    """Return the bytes of tensors up and down of a whole run, of all sites together; 0 where data are pooled.

    The study or generated data say how many sites there are; None where these do not.
    """
    job = assemble_job(cell.load(), cell.base)
    count = _sites_of(cell, job.config)
    if not count:
        return None
    if job.strategy.traits.pools_data:
        return 0
    federation = job.config.federation
    asked = min(count, max(federation.min_sites, math.ceil(federation.fraction_train * count)))
    return moved(job, own_cost(job), asked * job.config.training.rounds, count)


def _sites_of(cell: Cell, config: JobConfig) -> int:
    """Return how many sites the study or generated data say a cell has; 0 where these do not."""
    if cell.sites or config.data.phantoms is not None:
        return len(site_names(cell.sites, None))
    return cell.counts.sites if cell.counts else 0
