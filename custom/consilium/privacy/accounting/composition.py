"""What releases on one data set cost together: all jobs and all units count, for one record and for the whole site."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self, get_args

from consilium.config.privacy import BudgetConfig, Unit
from consilium.privacy.accounting.accountant import SLACK, GaussianEvent, epsilon_of

UNITS: tuple[Unit, ...] = get_args(Unit)
DISCRETE = "discrete gaussian"
"""The mechanism of a release: clipped integers and an exact discrete Gaussian of secret randomness (distributed_noise.py)."""
VOID = (
    "void: made by a version that drew the noise of DP-SGD from a seed of 32 bits (on a GPU 63). Whoever has such a release "
    "can find the seed and take the noise off"
)
"""What is said of rows that are void, see `Entry.is_void`."""


_TYPES: dict[Any, tuple[type, ...]] = {int: (int,), float: (int, float), bool: (bool,)}
"""What a row's number may be read as; all else is a text."""


@dataclass(frozen=True)
class Entry:
    """One row. `private` is False where the noise came from a seed, so that somebody could take it off again.

    `mechanism` is DISCRETE, or "" in rows of versions that named none. Those drew the noise of DP-SGD at the sites from a
    generator of torch, which on a CPU keeps 32 bits of a seed, see `is_void`.

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
    mechanism: str = ""

    @property
    def is_void(self) -> bool:
        """Whether this row promises nothing: record or patient level with noise that whoever has the release can take off.

        With trust distributed, and at site level, noise came from the operating system's generator all along.
        """
        return self.unit != "site" and self.trust != "distributed" and not self.mechanism

    @property
    def terms(self) -> Self:
        """The row without its digest, and without what names the version that made it."""
        return replace(self, digest="", mechanism="")

    @classmethod
    def of(cls, raw: Any) -> Self:
        """Return the row that `asdict` wrote as `raw`. Raises TypeError for other keys, or values of another type."""
        found = cls(**raw)
        for field in fields(cls):
            if type(getattr(found, field.name)) not in _TYPES.get(field.type, (str,)):
                raise TypeError(f"{field.name} is of another type")
        return found

    @property
    def key(self) -> tuple[str, str, str, int, int, bool]:
        """What makes a row the same release."""
        return self.dataset, self.unit, self.run, self.round, self.phase, self.count > 0

    def pays_for(self, release: Self) -> bool:
        """Tell whether this row, once charged, covers a release: same terms, and noise not under what is charged.

        Noise may be a millionth more, as of another version's rounding: then it costs less than is charged.
        """
        same = replace(release.terms, noise_multiplier=self.noise_multiplier) == self.terms
        return same and self.noise_multiplier <= release.noise_multiplier <= self.noise_multiplier * (1 + 1e-6)

    @property
    def name(self) -> str:
        """The release in words."""
        return f"round {self.round} phase {self.phase} of job {self.job!r} (run {self.run})"


Budgets = Mapping[Unit, BudgetConfig]
"""By unit."""


def cost(entry: Entry, unit: str) -> GaussianEvent:
    """Return what one row costs one `unit` of its data set: the rule by which rows of different units compose.

    - The row's own unit: as it was planned.
    - A finer unit (a record or a patient under a site-level release, a record under a patient-level one): two data sets that
      differ in it may have any two contributions within the clip, which lie up to 2 C apart. Noise sized for `replace` (2 C)
      covers that; noise sized for `zero-out` (C) counts as half its multiplier. That a unit was drawn hides nothing of it then.
    - A coarser unit (a site or a patient under record-level training): no bound, so no noise: the job ends such a claim.
    """
    if entry.unit == unit:
        return GaussianEvent(entry.noise_multiplier, entry.sample_rate, entry.count, SLACK)
    if UNITS.index(entry.unit) < UNITS.index(unit):
        return GaussianEvent(0.0, 1.0, entry.count)
    return GaussianEvent(within(entry.noise_multiplier, entry.adjacency), 1.0, entry.count, SLACK)


def within(noise_multiplier: float, adjacency: str) -> float:
    """Return the noise multiplier that one of a unit's parts has, such as a record of a site; see `cost`."""
    return noise_multiplier / 2 if adjacency == "zero-out" else noise_multiplier


def epsilon_for(unit: str, rows: Iterable[Entry], delta: float) -> float:
    """Return the epsilon of all `rows` together for one `unit` of their data set: the least of what can be shown."""
    counted = [row for row in rows if row.count]
    whole = epsilon_of(merge([cost(row, unit) for row in counted]), delta)
    steps = [row for row in counted if row.unit == "patient"]
    return min(whole, _by_two_steps(counted, steps, delta)) if unit == "record" and steps else whole


def _by_two_steps(rows: list[Entry], steps: list[Entry], delta: float) -> float:
    """Return a record's epsilon where patients were drawn, by group privacy: leave its patient out, and bring it back changed.

    The first step costs what the patient-level rows cost a patient. The second costs that again, and all other rows. With
    (e1, d1) and (e2, d2), both together are (e1 + e2, d1 + exp(e1) d2).
    """
    first = epsilon_of(merge([cost(row, row.unit) for row in steps]), delta / 2)
    if first > 500:
        return math.inf
    drawn = [cost(row, row.unit if row.unit == "patient" else "record") for row in rows]
    return first + epsilon_of(merge(drawn), delta / 2 * math.exp(-first))


def merge(spends: list[GaussianEvent]) -> list[GaussianEvent]:
    """Return the same total with equal spends counted together: accountants are quick in kinds, not in releases."""
    counts: dict[tuple[float, float, float], int] = {}
    for one in spends:
        key = (one.noise_multiplier, one.sample_rate, one.slack)
        counts[key] = counts.get(key, 0) + one.count
    return [GaussianEvent(sigma, rate, count, slack) for (sigma, rate, slack), count in counts.items()]


def weakest(adjacencies: Iterable[str]) -> str:
    """Return what all rows together guarantee: `replace` includes `zero-out` (its worst neighbour), not the other way."""
    found = set(adjacencies)
    return "zero-out" if "zero-out" in found else found.pop()
