"""What a cell will send, receive and compute, by what `consilium cost` counts."""

import json
import math

from consilium.federation.build import assemble_job
from consilium.federation.cost import moved, own_cost
from consilium.federation.flops import Samples, Work, own_samples, run_flops, work_of
from consilium.federation.participants import site_names
from consilium.study.flops_cache import save_flops
from consilium.study.study import Cell, Study

COUNTING = ("model", "adapter", "task", "strategy")
"""Sections of a job that decide what a sample costs."""


class Computing:
    """Counts FLOPs of cells; jobs that differ in rounds, seeds or noise alone are laid out once."""

    def __init__(self, study: Study) -> None:
        self._published = not study.size
        self._known: dict[str, Work] = {}

    def flops(self, cell: Cell) -> float | None:
        """Return what a cell computes in all; None where neither the study nor its job says how large the data are."""
        config = cell.load()
        names = site_names(cell.sites, None) if cell.sites or config.data.phantoms is not None else []
        given = Samples(**cell.counts.model_dump()) if cell.counts and self._published else None
        samples = own_samples(config, len(names)) or given
        if samples is None:
            return None
        job = assemble_job(config, cell.base)
        said = config.model_dump(mode="json", include=set(COUNTING))
        key = json.dumps([said, config.training.gradient_checkpointing])
        if key not in self._known:
            self._known[key] = work_of(job)
        return run_flops(job, self._known[key], samples)


def count(study: Study) -> float | None:
    """Return the FLOPs of a whole study; None where they cannot be told of each cell. Raises ConfigError."""
    computing, found = Computing(study), 0.0
    for cell in study.cells():
        if (one := computing.flops(cell)) is None:
            return None
        found += one
    return found


def keep(study: Study) -> float | None:
    """Count a study and put it on record; return its FLOPs."""
    flops = count(study)
    save_flops(study, flops)
    return flops


def bytes_of(cell: Cell, count: int = 0) -> int | None:
    """Return the bytes of tensors up and down of a whole run of `count` sites, all together; 0 where data are pooled.

    Without a count the study or generated data say it; None where these do not.
    """
    job = assemble_job(cell.load(), cell.base)
    if not count and (cell.sites or job.config.data.phantoms is not None):
        count = len(site_names(cell.sites, None))
    if not count:
        return None
    if job.strategy.pools_data:
        return 0
    federation = job.config.federation
    asked = min(count, max(federation.min_sites, math.ceil(federation.fraction_train * count)))
    return moved(job, own_cost(job), asked * job.config.training.rounds, count)
