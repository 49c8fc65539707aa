"""What releases on one data set cost together: all jobs and all units count, for one record and for the whole site."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from consilium.config.privacy import BudgetConfig
from consilium.privacy.accounting import GaussianEvent, epsilon_of

Unit = Literal["site", "record"]
UNITS: tuple[Unit, ...] = ("record", "site")
"""What a claim may be about, the finer first."""


@dataclass(frozen=True)
class Entry:
    """One row. `private` is False where the noise came from a seed, so that somebody could take it off again.

    `digest` is the SHA-256 of the released tensors. A release that is charged before it is made (record level: training itself
    is the cost) has two rows: one with its `count` and no digest, and later one with count 0 and the digest.
    """

    dataset: str
    unit: Unit
    adjacency: str
    trust: str
    job: str
    run: str
    round: int
    phase: int
    noise_multiplier: float
    sample_rate: float
    count: int
    clip: float
    private: bool = True
    digest: str = ""

    @property
    def key(self) -> tuple[str, str, str, int, int, bool]:
        """What makes a row the same release."""
        return self.dataset, self.unit, self.run, self.round, self.phase, self.count > 0

    @property
    def name(self) -> str:
        """The release in words."""
        return f"round {self.round} phase {self.phase} of job {self.job!r} (run {self.run})"


Budgets = Mapping[Unit, BudgetConfig]
"""By unit."""


def cost(entry: Entry, unit: str) -> GaussianEvent:
    """Return what one row costs one `unit` of its data set: the rule by which rows of different units compose.

    - The row's own unit: as it was planned.
    - A finer unit (a record under a site-level release): two data sets that differ in one record may have any two site updates
      within the clip, which lie up to 2 C apart. Noise sized for `replace` (2 C) covers that; noise sized for `zero-out` (C)
      counts as half its multiplier.
    - A coarser unit (a site under record-level training): no bound, so no noise: a record-level job ends a site-level claim.
    """
    if entry.unit == unit:
        return GaussianEvent(entry.noise_multiplier, entry.sample_rate, entry.count)
    if UNITS.index(entry.unit) < UNITS.index(unit):
        return GaussianEvent(0.0, 1.0, entry.count)
    halved = entry.noise_multiplier / 2 if entry.adjacency == "zero-out" else entry.noise_multiplier
    return GaussianEvent(halved, 1.0, entry.count)


def epsilon_for(unit: str, rows: Iterable[Entry], delta: float) -> float:
    """Return the epsilon of all `rows` together for one `unit` of their data set."""
    return epsilon_of(merge([cost(row, unit) for row in rows if row.count]), delta)


def merge(spends: list[GaussianEvent]) -> list[GaussianEvent]:
    """Return the same total with equal spends counted together: accountants are quick in kinds, not in releases."""
    counts: dict[tuple[float, float], int] = {}
    for one in spends:
        key = (one.noise_multiplier, one.sample_rate)
        counts[key] = counts.get(key, 0) + one.count
    return [GaussianEvent(sigma, rate, count) for (sigma, rate), count in counts.items()]


def weakest(adjacencies: Iterable[str]) -> str:
    """Return what all rows together guarantee: `replace` includes `zero-out` (its worst neighbour), not the other way."""
    found = set(adjacencies)
    return "zero-out" if "zero-out" in found else found.pop()
