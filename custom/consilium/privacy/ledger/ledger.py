"""A site's privacy ledger: SQLite, append-only, one file for all jobs, so that a budget outlives every job.

A row is one release (or one block of equal releases). A budget is checked and the row written in one exclusive transaction, so
concurrent jobs cannot spend the same budget twice. A row's key is (data set, unit, run, round, phase), `run` being the site's
own name for a job (see guard.py): writing it again spends nothing, writing it on other terms is refused.

Every row names the mechanism of its noise; rows of versions that named none keep their seals and an empty name. Every row
holds a seal, the SHA-256 of the seal before it and its own content. An edited row breaks the chain; a row cut off,
or a file that is gone, shows because the record of what left (audit.py) and the server's results hold the last seal.

What the rows cost one record or one whole site stands in composition.py.
"""

import getpass
import hashlib
import json
import shutil
import sqlite3
import time
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, fields, replace
from itertools import count
from pathlib import Path
from typing import Any

from consilium.config.privacy import BudgetConfig
from consilium.core.errors import Reason, RefusedError
from consilium.core.storage import open_private, private_folder
from consilium.privacy.accounting.composition import UNITS, Budgets, Entry, epsilon_for, weakest
from consilium.privacy.ledger.audit import FILE, AuditLog, lines
from consilium.privacy.secagg import sum_ledger

Sealed = tuple[float, Entry, str]
"""Time, row, seal."""

COLUMNS = [field.name for field in fields(Entry)]
LATER = "mechanism"
"""The column that ledgers of versions up to 0.2.0 lack. It is empty in their rows, whose seals are made without it."""
_CREATE = f"""CREATE TABLE IF NOT EXISTS releases (time REAL NOT NULL, {", ".join(f'"{c}" NOT NULL' for c in COLUMNS)},
seal NOT NULL)"""
_STEP, _STEPS = 10_000, 10**7
"""Steps of SQLite's machine between two looks at their number, and steps allowed beyond 4 for each byte of the file."""
_LONGEST = 2**20
"""Bytes of a row, or of a definition in the file."""
_INSERT = f"INSERT INTO releases (time, {', '.join(COLUMNS)}, seal) VALUES (?{', ?' * (len(COLUMNS) + 1)})"


class Ledger:
    """The ledger in one file, made when first written. Any number of processes may use it at once.

    Everything that reads it raises RefusedError if it cannot be read or its chain of seals is broken.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last = ""

    def entries(self, dataset: str | None = None) -> list[Entry]:
        """Return all rows, oldest first, of one data set where given."""
        return [entry for _, entry in self.rows() if dataset in (None, entry.dataset)]

    def rows(self) -> list[tuple[float, Entry]]:
        """Return every row with its time in seconds since 1970, oldest first."""
        return [(when, entry) for when, entry, _ in self._sealed()]

    def seals(self) -> list[str]:
        """Return the seals of all rows, oldest first."""
        return [seal for *_, seal in self._sealed()]

    def seal(self) -> str:
        """Return the last row's seal, which stands for the whole ledger; "" for an empty one."""
        return next(reversed(self.seals()), "")

    def released(self, entry: Entry) -> bool:
        """Tell whether this release has been made: then only its kept bytes may be sent again."""
        keys = (entry.key, replace(entry, count=0).key)
        return any(row.key in keys and row.digest for row in self.entries(entry.dataset))

    def check(self, planned: list[Entry], budgets: Budgets) -> None:
        """Raise RefusedError, with the numbers, where `planned` exceeds a budget; known rows count once.

        Also for a known row on other terms. Writes nothing.
        """
        if planned:
            _check(self.entries(planned[0].dataset), planned, budgets)

    def spend(self, entry: Entry, budgets: Budgets) -> bool:
        """Write one release, before it leaves the site; once, however often it is asked. Return whether it is new.

        Raises RefusedError as `check`.
        """
        with self._writing() as db:
            sealed = self._whole(_select(db, self.path))
            rows = [row for _, row, _ in sealed if row.dataset == entry.dataset]
            if new := _check(rows, [entry], budgets):
                self._last = _insert(db, entry, self._last, time.time())
        return new

    def reseal(self) -> int:
        """Give every row a new seal, so that the file counts as it stands; return how many seals have changed.

        For an administrator who has looked at a broken chain; see `accept`, which records it.
        """
        with self._writing() as db:
            sealed = _select(db, self.path, whole=False)
            db.execute("DELETE FROM releases")
            before = ""
            for when, entry, _ in sealed:
                before = _insert(db, entry, before, when)
            return sum(old != new for (*_, old), (*_, new) in zip(sealed, _select(db, self.path), strict=True))

    def _sealed(self) -> list[Sealed]:
        if not self.path.is_file():
            return self._whole([])
        with self._connect() as db:
            return self._whole(_select(db, self.path))

    def _whole(self, sealed: list[Sealed]) -> list[Sealed]:
        """Return the rows, if the last one that this process saw is among them: a file put back in between lacks it."""
        if self._last and self._last not in {seal for *_, seal in sealed}:
            what = f"{self.path}: the privacy ledger lacks rows that it had a moment ago; nothing was sent; restore it"
            raise RefusedError(what, Reason.LEDGER)
        self._last = sealed[-1][2] if sealed else ""
        return sealed

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Open the file, made if need be, so that no other process reads or writes until the block ends."""
        private_folder(self.path.parent)
        open_private(self.path.resolve(), "a").close()
        with self._connect() as db:
            db.execute("BEGIN IMMEDIATE")
            db.execute(_CREATE)
            if LATER not in _columns(db):
                db.execute(f"ALTER TABLE releases ADD COLUMN {LATER} NOT NULL DEFAULT ''")
            yield db
            db.execute("COMMIT")

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """Open the file; anything wrong with it is a refusal: without a ledger nothing leaves."""
        try:
            if not self.path.exists():
                open_private(self.path.resolve(), "a").close()
            with closing(sqlite3.connect(self.path, timeout=60, isolation_level=None)) as db:
                _check_plain(db, self.path)  # first: any other statement reads the definitions in the file
                db.execute("PRAGMA synchronous = FULL")  # a committed row survives a power cut
                yield db
        except sqlite3.Error as error:
            what = f"{self.path}: the privacy ledger cannot be used ({error}); nothing was sent; restore it"
            raise RefusedError(what, Reason.LEDGER) from None


def _check_plain(db: sqlite3.Connection, path: Path) -> None:
    """Raise RefusedError unless the file holds a ledger's one plain table, or nothing yet; bound what reading it may take.

    The file may be a stranger's, as in an archive of evidence. Reading a view or a computed column runs what its author wrote.
    """
    for limit in (sqlite3.SQLITE_LIMIT_LENGTH, sqlite3.SQLITE_LIMIT_SQL_LENGTH):
        db.setlimit(limit, _LONGEST)
    left = iter(range((_STEPS + 4 * path.stat().st_size) // _STEP))
    db.set_progress_handler(lambda: next(left, None) is None, _STEP)  # pages of a damaged file may lead to each other
    db.execute("PRAGMA trusted_schema = OFF")
    found = [sql for (sql,) in db.execute("SELECT sql FROM sqlite_master LIMIT 2")]
    columns = db.execute("PRAGMA table_xinfo(releases)").fetchall()
    plain = len(found) == 1 and str(found[0]).startswith("CREATE TABLE releases") and found[0].count("(") == 1
    if found and not (plain and all(name in {"time", *COLUMNS, "seal"} and not hidden for _, name, *_, hidden in columns)):
        why = "it holds something other than its one table, releases"
        raise RefusedError(f"{path}: the privacy ledger cannot be used ({why}); nothing was sent; restore it", Reason.LEDGER)


def _select(db: sqlite3.Connection, path: Path, whole: bool = True) -> list[Sealed]:
    """Return time, row and seal of all rows. Raises RefusedError unless the chain is `whole`, where that is wanted."""
    found, before = [], ""
    if not path.stat().st_size:
        return []  # the file is made before its table: seals in the records tell where there were rows
    known = _columns(db)
    columns = [name for name in COLUMNS if name != LATER or LATER in known]
    for number, (when, *values, seal) in enumerate(_rows(db, columns), start=1):
        row = dict(zip(columns, values, strict=True))
        entry = _entry(row, number, path)
        before = _seal(before, when, entry)
        if whole and seal != before:
            raise RefusedError(
                f"{path}: row {number} of the privacy ledger was altered; nothing was sent; restore the file from a backup, or "
                "look at it and run `consilium privacy accept`",
                Reason.LEDGER,
            )
        found.append((when, entry, seal))
    return found


def _columns(db: sqlite3.Connection) -> set[str]:
    return {name for _, name, *_ in db.execute("PRAGMA table_info(releases)")}


def _rows(db: sqlite3.Connection, columns: list[str]) -> sqlite3.Cursor:
    return db.execute(f"SELECT time, {', '.join(columns)}, seal FROM releases ORDER BY rowid")


def _entry(row: dict[str, Any], number: int, path: Path) -> Entry:
    """Return a row as an entry. Raises RefusedError for values of another kind, which nothing could be counted with."""
    numbers = [row[name] for name in ("round", "phase", "noise_multiplier", "sample_rate", "count", "clip", "private")]
    named = ("run", "job", "dataset", "unit", LATER)
    texts = [value for name, value in row.items() if name in named and value is not None]
    right = all(isinstance(value, int | float) for value in numbers) and all(isinstance(value, str) for value in texts)
    if row["unit"] not in UNITS or not right:
        raise RefusedError(
            f"{path}: row {number} of the privacy ledger is none of this version; nothing was sent", Reason.LEDGER
        )
    return Entry(**row | {"private": bool(row["private"])})


def _insert(db: sqlite3.Connection, entry: Entry, before: str, when: float) -> str:
    """Append a row and return its seal."""
    seal = _seal(before, when, entry)
    db.execute(_INSERT, (when, *asdict(entry).values(), seal))
    return seal


def _seal(before: str, when: float, entry: Entry) -> str:
    values = asdict(entry)
    if not entry.mechanism:
        del values[LATER]  # as former versions, which had none, have sealed their rows
    return hashlib.sha256(json.dumps([before, when, values]).encode()).hexdigest()


def _check(rows: list[Entry], planned: list[Entry], budgets: Budgets) -> bool:
    """Return whether any of `planned` is new. Raises RefusedError for known ones on other terms, and over a budget."""
    known = {row.key: row for row in rows}
    for entry in planned:
        row = known.get(entry.key, entry)
        if not row.pays_for(entry):
            raise RefusedError(
                f"{entry.name} is in the ledger with other noise, clip or data (noise multiplier {row.noise_multiplier:.6g}, "
                f"now {entry.noise_multiplier:.6g}); nothing was sent; give the new job a run of its own",
                Reason.LEDGER,
            )
        if row.digest and entry.digest and row.digest != entry.digest:
            raise RefusedError(f"{entry.name} was released with other bytes; nothing was sent", Reason.LEDGER)
    new = [entry for entry in planned if entry.key not in known]
    for unit, budget in budgets.items() if any(entry.count for entry in new) else ():
        _check_budget(unit, budget, rows, new)
    return bool(new)


def _check_budget(unit: str, budget: BudgetConfig, rows: list[Entry], planned: list[Entry]) -> None:
    after = epsilon_for(unit, [*rows, *planned], budget.delta)
    if after <= budget.epsilon * (1 + 1e-6):
        return
    before = epsilon_for(unit, rows, budget.delta)
    why = "fewer rounds or more noise, or raise `privacy.budgets` in site.yaml"
    if planned[0].unit != unit:
        why = f"the job is {planned[0].unit} level: {why}"
    raise RefusedError(
        f"privacy budget: one {unit} of data set {planned[0].dataset!r} has spent epsilon {before:.4g} of {budget.epsilon:g} "
        f"at delta {budget.delta:g}; with this it would be {after:.4g}; nothing was sent; {why}",
        Reason.BUDGET,
        "the privacy budget does not allow the job",
    )


def summary(ledger: Ledger, deltas: tuple[float, ...] = (1e-5,)) -> list[dict[str, Any]]:
    """Return, per data set, what all jobs together have cost one record and one site, with rows and jobs.

    A unit's epsilon is infinite where a job of a finer unit ran (see `cost`). `void`: how many rows promise nothing.
    """
    groups: dict[str, list[Entry]] = {}
    for entry in ledger.entries():
        groups.setdefault(entry.dataset, []).append(entry)
    return [_summary(dataset, rows, deltas) for dataset, rows in groups.items()]


def _summary(dataset: str, rows: list[Entry], deltas: tuple[float, ...]) -> dict[str, Any]:
    return {
        "dataset": dataset,
        "adjacency": weakest(row.adjacency for row in rows),
        "trust": sorted({row.trust for row in rows}),
        "releases": sum(row.count for row in rows),
        "jobs": sorted({row.job for row in rows}),
        "units": sorted({row.unit for row in rows}),
        "private": all(row.private for row in rows),
        "void": sum(row.is_void and row.count > 0 for row in rows),
        "epsilon": {unit: {f"{d:g}": epsilon_for(unit, rows, d) for d in deltas} for unit in UNITS},
    }


# ledger recovery -------------------------------------------------------------------------------------------------------
# Recovery of a lost or altered ledger, of privacy or of sums. It stops all jobs until the administrator accepts it on record.
#
# The records of what left (audit.jsonl) hold the ledger's last seal at every message. A seal that the ledger does not know
# means that rows are gone. A site cannot detect that ledger and records were restored together from an older state. The server
# keeps the last seal of each site and sends it with the next hello. A server that sends a wrong one keeps the site out, which
# it can in any case.

ACCEPTANCE = "acceptance"


def check(records: Path, ledger: Ledger) -> None:
    """Raise RefusedError if a record under `records` names a seal that the ledger lacks and that is not accepted as lost."""
    for path, seal in _lost(records, ledger):
        what = "is gone" if not ledger.path.is_file() else "lacks rows"
        raise RefusedError(
            f"{ledger.path}: the privacy ledger {what}: {path} names the seal {seal[:16]}; nothing was sent; restore the file "
            "from a backup, or run `consilium privacy accept` to go on with what is left",
            Reason.LEDGER,
        )


def check_seal(records: Path, ledger: Ledger, seal: str) -> None:
    """Raise RefusedError if the ledger lacks the `seal` that the server has received, unless it is accepted as lost."""
    if seal and seal not in {*ledger.seals(), *accepted(records)}:
        raise RefusedError(
            f"{ledger.path}: the privacy ledger lacks rows: the server has received its seal {seal}; ledger and records are "
            "older, or others; nothing was sent; restore the newest, or run `consilium privacy accept KIT "
            f"--seal {seal} --reason TEXT` to go on without what is lost",
            Reason.LEDGER,
        )


def check_name(who: str, dataset: str, listed: str, ledger: Ledger) -> None:
    """Raise RefusedError where the ledger knows data by their list's path, `listed`: under a name they would begin anew."""
    if listed and listed != dataset and ledger.entries(listed):
        what = f"the ledger has rows of this list under its path, not as {dataset!r}"
        remedy = f"give the data set `patients: {listed}` in site.yaml"
        raise RefusedError(f"{who}: {what}; {remedy}", Reason.LEDGER, "the ledger has rows of the data list under its path")


def accept(records: Path, ledger: Ledger, reason: str, told: Collection[str] = ()) -> dict[str, Any]:
    """Let both ledgers count as they stand, and put that on record in `records`/audit.jsonl; return the record's values.

    `told`: seals that the server has received and no record here knows. The files as they were are kept beside them. One that
    is not a ledger at all is replaced by an empty one.
    """
    stamp = _stamp(records, ledger)
    copy, aside = ledger.path.with_name(f"{ledger.path.name}.{stamp}"), _set_aside(records, stamp)
    if ledger.path.is_file():
        shutil.copy2(ledger.path, copy)
    changed = _reseal(ledger)
    lost = sorted({seal for _, seal in _lost(records, ledger)} | (set(told) - {*ledger.seals()}))
    said = {"kind": ACCEPTANCE, "by": getpass.getuser(), "reason": reason, "rows": len(ledger.seals()), "lost": lost}
    said |= {
        "rows_with_new_seals": changed,
        "kept": str(copy) if copy.is_file() else None,
        "records_set_aside": aside,
        "ledger": ledger.seal(),
        **sum_ledger.accept(records, stamp),
    }
    AuditLog(records / FILE).add(said, again=True)
    return said


def _stamp(records: Path, ledger: Ledger) -> str:
    """Return the time in UTC as the end of a file's name, with a number where files of another acceptance have it."""
    now = time.strftime("%Y%m%d-%H%M%SZ", time.gmtime())
    files = (
        *records.rglob(f"{FILE}.*"),
        *records.glob(f"{sum_ledger.FILE}.*"),
        *ledger.path.parent.glob(f"{ledger.path.name}.*"),
    )
    taken = {path.name for path in files}
    names = (now if number == 1 else f"{now}-{number}" for number in count(1))
    kinds = FILE, sum_ledger.FILE, ledger.path.name
    return next(name for name in names if not taken & {f"{kind}.{name}" for kind in kinds})


def _reseal(ledger: Ledger) -> int:
    try:
        return ledger.reseal()
    except RefusedError as error:
        if getattr(error.__context__, "sqlite_errorname", "") == "SQLITE_BUSY":
            raise  # a job is writing it: it is whole
        ledger.path.unlink(missing_ok=True)
        return ledger.reseal()


def _lost(records: Path, ledger: Ledger) -> Iterator[tuple[Path, str]]:
    """Yield every seal of every record that is neither in the ledger nor accepted as lost, with the record."""
    known = {"", *ledger.seals(), *accepted(records)}
    for path in sorted(records.rglob(FILE)):
        yield from ((path, seal) for seal in (line.get("ledger", "") for line in lines(path)) if seal not in known)


def accepted(records: Path) -> set[str]:
    """Return the seals of rows whose loss is on record under `records`. Raises RefusedError for a damaged record."""
    path = records / FILE
    found = [line for line in lines(path) if line.get("kind") == ACCEPTANCE] if path.is_file() else []
    return {seal for line in found for seal in line.get("lost", []) if isinstance(seal, str)}


def _set_aside(records: Path, stamp: str) -> list[str]:
    """Rename damaged records, so that they stay and no longer count; return their new names."""
    found = []
    for path in sorted(records.rglob(FILE)):
        try:
            lines(path)
        except RefusedError:
            found.append(str(path.rename(path.with_name(f"{FILE}.{stamp}"))))
    return found
