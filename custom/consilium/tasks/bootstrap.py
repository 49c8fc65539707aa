"""95 % confidence intervals of a site's mean scores by a bootstrap over its patients. Only their ends leave the site."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from consilium.data.datalist import Item
from consilium.data.text import Text
from consilium.tasks.registry import HIGH, LOW

RESAMPLES = 1000
SEED = 0
"""The same at all sites, so that a site's interval depends only on its own scores."""
_AT_ONCE = 2**22

Statistic = Callable[[np.ndarray], dict[str, np.ndarray]]
"""Maps weights (B, G), how often each group is drawn in each of B resamples, to every score (B,); NaN if undefined."""


def bootstrap_unit(item: Item | Text) -> str:
    """Return the unit that a bootstrap draws: the patient, else the volume, else the picture, else the text."""
    return item.patient or str(item.image or item.name)


def number_groups(groups: Sequence[str]) -> np.ndarray:
    """Return for each entry the number of its group (N,), counted from 0 in the order of first appearance."""
    seen: dict[str, int] = {}
    return np.array([seen.setdefault(group, len(seen)) for group in groups], np.int64)


def sum_by_group(values: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return the sums (G, ...) of values (N, ...) by group; `numbers` (N,): the group of each value."""
    found = np.zeros((int(numbers.max()) + 1, *values.shape[1:]), np.float64)
    np.add.at(found, numbers, values)
    return found


def intervals(groups: int, statistic: Statistic) -> dict[str, float]:
    """Return the 2.5 and 97.5 percentiles of every score over resamples of the groups; {} for fewer than two groups."""
    if groups < 2:
        return {}
    random, rest, drawn = np.random.default_rng(SEED), RESAMPLES, []
    while rest:
        count = min(rest, max(1, _AT_ONCE // groups))
        drawn.append(statistic(_weights(random.integers(0, groups, (count, groups)))))
        rest -= count
    found: dict[str, float] = {}
    for name in drawn[0]:
        values = np.concatenate([part[name] for part in drawn])
        known = values[~np.isnan(values)]
        if len(known):
            low, high = np.quantile(known, [0.025, 0.975])
            found |= {f"{name}{LOW}": float(low), f"{name}{HIGH}": float(high)}
    return found


def intervals_of_means(values: Mapping[str, Sequence[float]], groups: Sequence[str]) -> dict[str, float]:
    """Return the intervals of each score's mean over samples. `values`: N values by score; `groups`: the N samples' groups."""
    whose = number_groups(groups)
    sums, sizes = sum_by_group(np.array(list(values.values())).T, whose), sum_by_group(np.ones(len(whose)), whose)

    def means(weights: np.ndarray) -> dict[str, np.ndarray]:
        return dict(zip(values, (weights @ sums / (weights @ sizes)[:, None]).T, strict=True))

    return intervals(len(sizes), means)


def _weights(drawn: np.ndarray) -> np.ndarray:
    """Return how often each of G groups was drawn in each of B resamples (B, G); `drawn` (B, G): the drawn groups."""
    count, groups = drawn.shape
    flat = (drawn + groups * np.arange(count)[:, None]).ravel()
    return np.bincount(flat, minlength=count * groups).reshape(count, groups).astype(np.float64)
