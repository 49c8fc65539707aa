"""A site's privacy ledger: SQLite, append-only, one file for all jobs, so that a budget outlives every job.

A row is one release (or one block of equal releases). Rows of one data set and unit compose; a budget is checked and the row
written in one exclusive transaction, so concurrent jobs cannot spend the same budget twice. A row's key is (data set, unit,
run, round, phase): writing it again spends nothing.
"""

import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from consilium.errors import RefusedError
from consilium.privacy.accounting import Spend, epsilon_of
from consilium.storage import open_private, private_folder

WHOLE_RUN = -1
"""Round and phase of a row that stands for a whole run, written before it starts."""


@dataclass(frozen=True)
class Entry:
    """One row. `private` is False where the noise came from a seed, so that somebody could take it off again."""

    dataset: str
    unit: str
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

    @property
    def spend(self) -> Spend:
        """What the row costs."""
        return Spend(self.noise_multiplier, self.sample_rate, self.count)

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        """What makes a row the same release."""
        return self.dataset, self.unit, self.run, self.round, self.phase


@dataclass(frozen=True)
class Budget:
    """How much a data set may spend in all, in one unit of privacy."""

    epsilon: float
    delta: float


COLUMNS = [field.name for field in fields(Entry)]
_CREATE = f"""CREATE TABLE IF NOT EXISTS releases (time REAL NOT NULL, {", ".join(f'"{c}" NOT NULL' for c in COLUMNS)},
UNIQUE (dataset, unit, run, round, phase))"""
_INSERT = f"INSERT INTO releases (time, {', '.join(COLUMNS)}) VALUES (?{', ?' * len(COLUMNS)})"
_SELECT = f"SELECT {', '.join(COLUMNS)} FROM releases"


class Ledger:
    """The ledger in one file, made when first written. Any number of processes may use it at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self, dataset: str | None = None, unit: str | None = None) -> list[Entry]:
        """Return all rows, oldest first, of one data set and unit where given."""
        if not self.path.is_file():
            return []
        with self._connect() as db:
            rows = self._select(db)
        return [e for e in rows if dataset in (None, e.dataset) and unit in (None, e.unit)]

    def times(self) -> list[float]:
        """Return the rows' times in seconds since 1970, in the order of `entries`."""
        if not self.path.is_file():
            return []
        with self._connect() as db:
            return [row[0] for row in db.execute("SELECT time FROM releases ORDER BY rowid")]

    def has(self, entry: Entry) -> bool:
        """Tell whether this release is in the ledger already."""
        return any(row.key == entry.key for row in self.entries(entry.dataset, entry.unit))

    def check(self, planned: list[Entry], budget: Budget | None) -> float:
        """Return the epsilon after `planned` (rows that are here already count once), at the budget's delta.

        Raises RefusedError, with the numbers, where that exceeds `budget`. Writes nothing. Without a budget returns 0.
        """
        rows = self.entries(planned[0].dataset, planned[0].unit) if planned else []
        return self._after(rows, planned, budget)

    def spend(self, entry: Entry, budget: Budget | None) -> None:
        """Write one release, before it leaves the site; once, however often it is asked. Raises RefusedError as `check`."""
        private_folder(self.path.parent)
        with self._connect() as db:
            db.execute("BEGIN IMMEDIATE")  # no other process reads or writes between the check and the row
            db.execute(_CREATE)
            rows = [e for e in self._select(db) if (e.dataset, e.unit) == (entry.dataset, entry.unit)]
            if all(row.key != entry.key for row in rows):
                self._after(rows, [entry], budget)
                db.execute(_INSERT, (time.time(), *asdict(entry).values()))
            db.execute("COMMIT")

    @staticmethod
    def _after(rows: list[Entry], planned: list[Entry], budget: Budget | None) -> float:
        if budget is None:
            return 0.0
        known = {row.key for row in rows}
        spends = [row.spend for row in rows] + [entry.spend for entry in planned if entry.key not in known]
        after = epsilon_of(merge(spends), budget.delta)
        if after > budget.epsilon * (1 + 1e-6):
            before = epsilon_of(merge([row.spend for row in rows]), budget.delta)
            raise RefusedError(
                f"privacy budget: data set {planned[0].dataset!r} (unit {planned[0].unit}) has spent epsilon {before:.4g} of "
                f"{budget.epsilon:g} at delta {budget.delta:g}; with this it would be {after:.4g}; nothing was sent; plan "
                "fewer rounds or more noise, or raise `privacy.budgets` in site.yaml"
            )
        return after

    @staticmethod
    def _select(db: sqlite3.Connection) -> list[Entry]:
        found = db.execute(f"{_SELECT} ORDER BY rowid").fetchall()
        return [Entry(*row[:-1], private=bool(row[-1])) for row in found]

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """Open the file; anything wrong with it is a refusal: without a ledger nothing leaves."""
        try:
            if not self.path.exists():
                open_private(self.path, "a").close()
            with closing(sqlite3.connect(self.path, timeout=60, isolation_level=None)) as db:
                db.execute("PRAGMA synchronous = FULL")  # a committed row survives a power cut
                yield db
        except (sqlite3.Error, OSError) as error:
            raise RefusedError(f"{self.path}: the privacy ledger cannot be used ({error}); nothing was sent; mend it") from None


def merge(spends: list[Spend]) -> list[Spend]:
    """Return the same total with equal spends counted together: accountants are quick in kinds, not in releases."""
    counts: dict[tuple[float, float], int] = {}
    for one in spends:
        key = (one.noise_multiplier, one.sample_rate)
        counts[key] = counts.get(key, 0) + one.count
    return [Spend(sigma, rate, count) for (sigma, rate), count in counts.items()]


def weakest(adjacencies: Iterable[str]) -> str:
    """Return what all rows together guarantee: `replace` includes `zero-out` (its worst neighbour), not the other way."""
    found = set(adjacencies)
    return "zero-out" if "zero-out" in found else found.pop()


def summary(ledger: Ledger, deltas: tuple[float, ...] = (1e-5,)) -> list[dict[str, Any]]:
    """Return, per data set and unit, rows, jobs and epsilon at every delta, named by unit, adjacency and trust."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in ledger.entries():
        groups.setdefault((entry.dataset, entry.unit), []).append(entry)
    return [
        {
            "dataset": dataset,
            "unit": unit,
            "adjacency": weakest(row.adjacency for row in rows),
            "trust": sorted({row.trust for row in rows}),
            "releases": sum(row.count for row in rows),
            "jobs": sorted({row.job for row in rows}),
            "private": all(row.private for row in rows),
            "epsilon": {f"{d:g}": epsilon_of(merge([row.spend for row in rows]), d) for d in deltas},
        }
        for (dataset, unit), rows in groups.items()
    ]
