"""Estimate the FLOPs of a study, as `consilium cost` counts them."""

import json

from consilium.estimates.flops import Samples, Work, flops_per_sample, generated_samples, run_flops
from consilium.federation.job import assemble_job
from consilium.federation.simulated_sites import site_names
from consilium.study.definition import Study
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
        if (samples := generated_samples(config, len(site_names(cell.sites, None))) or given) is None:
            save_flops(study, None)
            return None
        job, said = assemble_job(config, cell.base), config.model_dump(mode="json", include=set(COUNTING))
        key = json.dumps([said, config.training.gradient_checkpointing])
        if key not in known:
            known[key] = flops_per_sample(job)
        total += run_flops(job, known[key], samples)
    save_flops(study, total)
    return total
