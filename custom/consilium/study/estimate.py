"""What a cell will send, receive and compute, by what `consilium cost` counts."""

import json
import math
from collections.abc import Sequence

from consilium.config.job import JobConfig
from consilium.estimates.communication import moved, own_cost
from consilium.estimates.flops import Samples, Work, own_samples, run_flops, work_of
from consilium.federation.job import assemble_job
from consilium.federation.sites import site_names
from consilium.study.records import save_flops
from consilium.study.study import Cell, Study

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


def bytes_of(cell: Cell, count: int = 0) -> int | None:
    """Return the bytes of tensors up and down of a whole run of `count` sites, all together; 0 where data are pooled.

    Without a count the study or generated data say it; None where these do not.
    """
    job = assemble_job(cell.load(), cell.base)
    count = count or _sites_of(cell, job.config)
    if not count:
        return None
    if job.strategy.traits.pools_data:
        return 0
    federation = job.config.federation
    asked = min(count, max(federation.min_sites, math.ceil(federation.fraction_train * count)))
    return moved(job, own_cost(job), asked * job.config.training.rounds, count)


def _sites_of(cell: Cell, config: JobConfig) -> int:
    """Return how many sites the study or generated data say a cell has; 0 where these do not."""
    return len(site_names(cell.sites, None)) if cell.sites or config.data.phantoms is not None else 0


def fewer_steps(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells on pooled data that see fewer samples a round than the sites of a federated cell do together.

    A cell is held against those that differ from it on one axis. Epochs, and a number of sites that is not known, are left out.
    """
    pooled: list[tuple[Cell, float]] = []
    others: list[tuple[Cell, float]] = []
    for cell in cells:
        config = cell.load()
        seen = (config.training.local_steps or 0) * config.training.batch_size
        if config.strategy.traits.pools_data:
            pooled.append((cell, seen))
        else:
            sites = _sites_of(cell, config) or (cell.counts.sites if cell.counts else 0)
            others.append((cell, seen * sites * config.federation.fraction_train))
    return [cell for cell, seen in pooled if any(0 < seen < whole and _near(cell, other) for other, whole in others)]


def _near(one: Cell, other: Cell) -> bool:
    """Tell whether two cells of a study differ on one axis."""
    return sum(one.labels[axis] != other.labels[axis] for axis in one.labels) == 1
