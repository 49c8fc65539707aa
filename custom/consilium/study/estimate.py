"""What a cell will send and receive, by what `consilium cost` counts."""

import math

from consilium.federation.build import assemble_job
from consilium.federation.cost import compare_unequal, cost_of
from consilium.federation.participants import site_names
from consilium.strategies.unequal.ranks import UnequalRanks
from consilium.study.study import Cell


def bytes_of(cell: Cell) -> int | None:
    """Return the bytes of tensors up and down of a whole run, all sites together; 0 where data are pooled.

    None where neither the study nor generated data say how many sites there are.
    """
    job = assemble_job(cell.load(), cell.base)
    if not cell.sites and job.config.data.phantoms is None:
        return None
    count = len(site_names(cell.sites, None))
    strategy, federation = job.strategy, job.config.federation
    if strategy.pools_data:
        return 0
    if isinstance(strategy, UnequalRanks):
        one = next(row for row in compare_unequal(strategy, job.initial) if row.strategy == f"{strategy.name} mean")
    else:
        one = cost_of(strategy, job.initial, strategy.name)
    asked = min(count, max(federation.min_sites, math.ceil(federation.fraction_train * count)))
    return (one.bytes_up + one.bytes_down) * asked * job.config.training.rounds
