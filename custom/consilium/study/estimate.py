"""What a cell will send, receive and compute, by what `consilium cost` counts."""

import json
import math

from consilium.config.job import JobConfig
from consilium.estimates.communication import moved, own_cost
from consilium.estimates.flops import Samples, Work, own_samples, run_flops, work_of
from consilium.federation.job import assemble_job
from consilium.federation.sites import site_names
from consilium.study.definition import Cell, Study
from consilium.study.records import save_flops

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
