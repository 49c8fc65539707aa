"""Estimate the bytes that a cell communicates and the FLOPs of a study, as `consilium cost` counts them."""

import json
import math

from consilium.config.job import JobConfig
from consilium.estimates.communication import bytes_moved, own_cost
from consilium.estimates.flops import Samples, Work, flops_per_sample, generated_samples, run_flops
from consilium.federation.job import assemble_job
from consilium.federation.simulated_sites import site_names
from consilium.study.definition import Cell, Study
from consilium.study.records import save_flops

COUNTING = ("model", "adapter", "task", "strategy")
"""Sections of a job that decide how many FLOPs a sample takes."""


def count_and_cache_flops(study: Study) -> float | None:
    """Count, cache and return the FLOPs of a whole study; None if the size of a cell's data is unknown.

    Jobs that differ only in rounds, seeds or noise are counted with one model, built without weights.
    """
    known: dict[str, Work] = {}
    total = 0.0
    for cell in study.cells():
        config = cell.load()
        given = Samples(**cell.counts.model_dump()) if cell.counts and not study.size else None
        if (samples := generated_samples(config, assumed_sites(cell, config)) or given) is None:
            save_flops(study, None)
            return None
        job, said = assemble_job(config, cell.base), config.model_dump(mode="json", include=set(COUNTING))
        key = json.dumps([said, config.training.gradient_checkpointing])
        if key not in known:
            known[key] = flops_per_sample(job)
        total += run_flops(job, known[key], samples)
    save_flops(study, total)
    return total


def bytes_of(cell: Cell) -> int | None:
    """Return the bytes of tensors sent up and down in a whole run, of all sites together; 0 for pooled data.

    None if neither the study nor generated data say how many sites there are.
    """
    job = assemble_job(cell.load(), cell.base)
    count = assumed_sites(cell, job.config)
    if not count:
        return None
    if job.strategy.traits.pools_data:
        return 0
    federation = job.config.federation
    asked = min(count, max(federation.min_sites, math.ceil(federation.fraction_train * count)))
    return bytes_moved(job, own_cost(job), asked * job.config.training.rounds, count)


def assumed_sites(cell: Cell, config: JobConfig) -> int:
    """Return a cell's number of sites, as the study or generated data say; 0 if they do not."""
    if cell.sites or config.data.phantoms is not None:
        return len(site_names(cell.sites, None))
    return cell.counts.sites if cell.counts else 0
