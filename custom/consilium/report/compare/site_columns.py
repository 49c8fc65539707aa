"""What a table of scores has a column for: each site, or of many sites the worst, the one in the middle and the best."""

from collections.abc import Sequence

import numpy as np

from consilium.report.compare.table import Table

MOST_SITES = 20
"""Over so many sites a page is too narrow for a column each."""
SPREAD = {"worst site": 0.0, "median site": 0.5, "best site": 1.0}
"""Headings where sites are many, and which quantile of the sites' scores stands there, from the worst to the best."""


def site_columns(table: Table) -> list[str]:
    """Return the headings of a table's columns of scores; sites that only test have one each however many train."""
    return table.sites if len(table.inside) <= MOST_SITES else [*SPREAD, *sorted(table.apart)]


def scores_under(table: Table, method: str, heading: str) -> list[float]:
    """Return a method's scores in such a column, by seed. Of many sites only seeds that lack none count."""
    if heading not in SPREAD or len(table.inside) <= MOST_SITES:
        return table.at(method, heading)
    share = 1 - SPREAD[heading] if table.lower else SPREAD[heading]
    seeds = [[table.cells[method, seed, site] for site in table.inside] for seed in table.whole_seeds(method)]
    return [float(np.quantile(scores, share)) for scores in seeds]


def column_notes(headings: Sequence[str]) -> list[str]:
    """Return what a table must say of its columns."""
    return ["too many sites for a column each: .csv and .json have them"] if set(SPREAD) <= set(headings) else []
