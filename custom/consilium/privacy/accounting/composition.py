"""The joint cost of all releases on one data set, over all jobs and units, for one record, one patient and the whole site."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self, get_args

from consilium.config.privacy import BudgetConfig, Unit
from consilium.privacy.accounting.accountant import SLACK, GaussianEvent, epsilon_of

UNITS: tuple[Unit, ...] = get_args(Unit)
DISCRETE = "discrete gaussian"
"""The mechanism of a release: clipped integers plus exact discrete Gaussians from randomness.py (discrete_gaussian.py)."""
VOID = (
    "void: made by a version that drew the noise of DP-SGD from a seed of 32 bits (on a GPU 63). Whoever has such a release "
    "can find the seed and take the noise off"
)
"""The text that describes void rows, see `Entry.is_void`."""


_TYPES: dict[Any, tuple[type, ...]] = {int: (int,), float: (int, float), bool: (bool,)}
"""The types that a field of a row accepts; a field of any other type holds text."""


@dataclass(frozen=True)
class Entry:
    """One row of the ledger. `private` is False if the noise came from a seed, so that it could be subtracted again.

    `mechanism` is DISCRETE, or "" in rows of versions that did not name one. Those versions drew the noise of DP-SGD at the
    sites from a PyTorch generator, which on a CPU keeps 32 bits of its seed, see `is_void`.

    `digest` is the SHA-256 of the released tensors. With DP-SGD the training itself is the cost, so it is charged before the
    release exists. Such a release has two rows: one with its `count` and no digest, and later one with count 0 and the digest.
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
        """Whether this row promises nothing: its record- or patient-level noise can be subtracted by anyone with the release.

        With trust distributed, and at site level, the noise always came from the operating system's generator.
        """
        return self.unit != "site" and self.trust != "distributed" and not self.mechanism

    @property
    def terms(self) -> Self:
        """The row without its digest and its mechanism."""
        return replace(self, digest="", mechanism="")

    @classmethod
    def of(cls, raw: Any) -> Self:
        """Return the row that `asdict` converted to `raw`. Raises TypeError for other keys, or values of another type."""
        found = cls(**raw)
        for field in fields(cls):
            if type(getattr(found, field.name)) not in _TYPES.get(field.type, (str,)):
                raise TypeError(f"{field.name} is of another type")
        return found

    @property
    def key(self) -> tuple[str, str, str, int, int, bool]:
        """The identity of a row's release: two rows with the same key are the same release."""
        return self.dataset, self.unit, self.run, self.round, self.phase, self.count > 0

    def pays_for(self, release: Self) -> bool:
        """Tell whether this row's charge covers `release`: same terms, and no less noise than was charged.

        The noise may be up to a millionth larger, for example by another version's rounding. It then costs less than was
        charged.
        """
        same = replace(release.terms, noise_multiplier=self.noise_multiplier) == self.terms
        return same and self.noise_multiplier <= release.noise_multiplier <= self.noise_multiplier * (1 + 1e-6)

    @property
    def name(self) -> str:
        """The release in words."""
        return f"round {self.round} phase {self.phase} of job {self.job!r} (run {self.run})"


Budgets = Mapping[Unit, BudgetConfig]
"""The budgets of a site, by unit."""


def cost(entry: Entry, unit: str) -> GaussianEvent:
    """Return the cost of one row for one `unit` of its data set. This rule lets rows of different units compose.

    - The row's own unit: as planned.
    - A finer unit (a record or patient in a site-level row, a record in a patient-level row): two data sets that differ in the
      finer unit may have any two contributions within the clip C, up to 2 C apart. Noise sized for `replace` (2 C) covers that.
      Noise sized for `zero-out` (C) counts with half its multiplier. Sampling does not lower the cost of the finer unit.
    - A coarser unit (a site or patient in a record-level row): there is no bound, so the row counts as without noise.
    """
    if entry.unit == unit:
        return GaussianEvent(entry.noise_multiplier, entry.sample_rate, entry.count, SLACK)
    if UNITS.index(entry.unit) < UNITS.index(unit):
        return GaussianEvent(0.0, 1.0, entry.count)
    return GaussianEvent(noise_multiplier_for_part(entry.noise_multiplier, entry.adjacency), 1.0, entry.count, SLACK)


def noise_multiplier_for_part(noise_multiplier: float, adjacency: str) -> float:
    """Return the noise multiplier that holds for a part of the unit, such as a record of a site; see `cost`."""
    return noise_multiplier / 2 if adjacency == "zero-out" else noise_multiplier


def epsilon_for(unit: str, rows: Iterable[Entry], delta: float) -> float:
    """Return the epsilon of all `rows` together for one `unit` of their data set: the smallest bound that can be proved."""
    counted = [row for row in rows if row.count]
    whole = epsilon_of(merge([cost(row, unit) for row in counted]), delta)
    steps = [row for row in counted if row.unit == "patient"]
    return min(whole, _epsilon_by_group_privacy(counted, steps, delta)) if unit == "record" and steps else whole


def _epsilon_by_group_privacy(rows: list[Entry], steps: list[Entry], delta: float) -> float:
    """Return a record's epsilon by group privacy in two steps: remove its patient, then add the patient without the record.

    `steps`: the patient-level rows among `rows`. The first step costs what `steps` cost a patient. The second costs that again,
    plus all other rows. Steps that cost (e1, d1) and (e2, d2) cost (e1 + e2, d1 + exp(e1) d2) together.
    """
    first = epsilon_of(merge([cost(row, row.unit) for row in steps]), delta / 2)
    if first > 500:
        return math.inf
    drawn = [cost(row, row.unit if row.unit == "patient" else "record") for row in rows]
    return first + epsilon_of(merge(drawn), delta / 2 * math.exp(-first))


def merge(spends: list[GaussianEvent]) -> list[GaussianEvent]:
    """Merge equal spends into one with a larger count. The time of an accountant grows with the number of different spends."""
    counts: dict[tuple[float, float, float], int] = {}
    for one in spends:
        key = (one.noise_multiplier, one.sample_rate, one.slack)
        counts[key] = counts.get(key, 0) + one.count
    return [GaussianEvent(sigma, rate, count, slack) for (sigma, rate, slack), count in counts.items()]


def weakest(adjacencies: Iterable[str]) -> str:
    """Return the adjacency that all rows together guarantee. `replace` implies `zero-out`, but not the reverse."""
    found = set(adjacencies)
    return "zero-out" if "zero-out" in found else found.pop()
