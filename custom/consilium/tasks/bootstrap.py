"""How sure a site's mean is: 95 % intervals by a bootstrap over its patients. Only their ends leave the site."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from consilium.data.datalist import Item
from consilium.tasks.registry import HIGH, LOW

RESAMPLES = 1000
SEED = 0
"""The same everywhere: a site's interval depends on its own scores and on nothing else."""
_AT_ONCE = 2**22

Statistic = Callable[[np.ndarray], dict[str, np.ndarray]]
"""Returns every score (B,) of a data set that has each group as often as weights (B, G) say; NaN where it has none."""


def group_of(item: Item) -> str:
    """Return the unit that a bootstrap draws: the patient, else the volume, else the picture."""
    return item.patient or str(item.image or item.name)


def numbered(groups: Sequence[str]) -> np.ndarray:
    """Return the number of each one's group, counted from 0 in the order in which groups appear first."""
    seen: dict[str, int] = {}
    return np.array([seen.setdefault(group, len(seen)) for group in groups], np.int64)


def grouped(values: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return the sums (G, ...) of values (N, ...) by group."""
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
    found = {name: np.concatenate([part[name] for part in drawn]) for name in drawn[0]}
    return {f"{name}{end}": value for name, values in found.items() for end, value in _ends(values).items()}


def intervals_of_means(values: Mapping[str, Sequence[float]], groups: Sequence[str]) -> dict[str, float]:
    """Return intervals of the means over samples of scores, of N values and N groups."""
    whose = numbered(groups)
    sums, sizes = grouped(np.array(list(values.values())).T, whose), grouped(np.ones(len(whose)), whose)

    def means(weights: np.ndarray) -> dict[str, np.ndarray]:
        return dict(zip(values, (weights @ sums / (weights @ sizes)[:, None]).T, strict=True))

    return intervals(len(sizes), means)


def _weights(drawn: np.ndarray) -> np.ndarray:
    """Return how often each of G groups is in each of B samples (B, G)."""
    count, groups = drawn.shape
    flat = (drawn + groups * np.arange(count)[:, None]).ravel()
    return np.bincount(flat, minlength=count * groups).reshape(count, groups).astype(np.float64)


def _ends(values: np.ndarray) -> dict[str, float]:
    known = values[~np.isnan(values)]
    if not len(known):
        return {}
    low, high = np.quantile(known, [0.025, 0.975])
    return {LOW: float(low), HIGH: float(high)}
