"""A site's privacy ledger: one append-only SQLite file for all jobs, so that a budget outlasts every job.

A row is one release, or one block of equal releases. The budget check and the write of the row are one exclusive transaction,
so concurrent jobs cannot spend the same budget twice. A row's key is (data set, unit, run, round, phase). `run` is the site's
own name for a job (see task_schedule.py). Writing a known key again spends nothing; writing it on other terms is refused.

Every row names the mechanism of its noise. Rows of versions that named none keep their seals and an empty name. Every row holds
a seal: the SHA-256 of the previous seal and its own content. An edited row breaks the chain of seals. Missing rows at the end,
or a missing file, are detected because the record of sent messages (audit_log.py) and the server's results hold the last seal.

accounting.py computes the cost of the rows for one record, one patient and the whole site.
"""

import hashlib
import json
import shutil
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from consilium.core.errors import Reason, RefusedError
from consilium.core.grouping import group_by_key
from consilium.core.storage import make_private_folder, open_private, refuse_if_unwritable
from consilium.privacy.accounting import UNITS, Budgets, Entry, epsilon_for, weakest
from consilium.privacy.audit_log import FILE, AuditLog, Line, lines, local_user
from consilium.privacy.secagg import sum_ledger

Sealed = tuple[float, Entry, str]
"""Time, row, seal."""

COLUMNS = [field.name for field in fields(Entry)]
LATER = "mechanism"
"""The column that ledgers of versions up to 0.2.0 lack. It is empty in their rows, and their seals do not include it."""
_CREATE = f"""CREATE TABLE IF NOT EXISTS releases (time REAL NOT NULL, {", ".join(f'"{c}" NOT NULL' for c in COLUMNS)},
seal NOT NULL)"""
_STEP, _STEPS = 10_000, 10**7
"""SQLite's virtual machine may take _STEPS steps plus 4 per byte of the file. The limit is checked every _STEP steps."""
_LONGEST = 2**20
"""The largest size in bytes of a row, or of a table definition in the file."""
_NUMBERS = frozenset(field.name for field in fields(Entry) if field.type in (int, float, bool))
_MACHINE = tuple(f"SQLITE_{kind}" for kind in ("BUSY", "LOCKED", "FULL", "READONLY", "IOERR", "CANTOPEN", "PERM", "NOMEM"))
"""How SQLite's names of errors begin that say nothing about the content of the file."""
_REMEDY = "restore it from a backup, or look at it and run `consilium privacy accept`"
_INSERT = f"INSERT INTO releases (time, {', '.join(COLUMNS)}, seal) VALUES (?{', ?' * (len(COLUMNS) + 1)})"


class Ledger:
    """The privacy ledger in one file, created at the first write. Any number of processes may use it at once.

    Every method that reads it raises RefusedError if it cannot be read or its chain of seals is broken.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last = ""

    def entries(self, dataset: str | None = None) -> list[Entry]:
        """Return the rows of one data set, or all rows for None, oldest first."""
        return [entry for _, entry in self.rows() if dataset in (None, entry.dataset)]

    def rows(self) -> list[tuple[float, Entry]]:
        """Return every row with its time in seconds since 1970, oldest first."""
        return [(when, entry) for when, entry, _ in self._sealed_rows()]

    def seals(self) -> list[str]:
        """Return the seals of all rows, oldest first."""
        return [seal for *_, seal in self._sealed_rows()]

    def seal(self) -> str:
        """Return the last row's seal, which stands for the whole ledger; "" for an empty ledger."""
        return next(reversed(self.seals()), "")

    def is_released(self, entry: Entry) -> bool:
        """Tell whether this release was made. If so, only its stored bytes may be sent again."""
        keys = (entry.key, replace(entry, count=0).key)
        return any(row.key in keys and row.digest for row in self.entries(entry.dataset))

    def check_budget(self, planned: list[Entry], budgets: Budgets) -> None:
        """Raise RefusedError if the `planned` rows would exceed a budget, or if one is in the ledger on other terms.

        Planned rows that the ledger already has are not counted again. Writes nothing.
        """
        if planned:
            _check_new_rows(self.entries(planned[0].dataset), planned, budgets)

    def charge_once(self, entry: Entry, budgets: Budgets) -> bool:
        """Write the row of one release before it leaves the site; do nothing if it is known. Return whether it is new.

        Raises RefusedError as `check_budget` does.
        """
        with self._write_transaction() as db:
            sealed = self._check_last_row(_read_rows(db, self.path))
            rows = [row for _, row, _ in sealed if row.dataset == entry.dataset]
            new = _check_new_rows(rows, [entry], budgets)
            last = _insert(db, entry, self._last, time.time()) if new else self._last
        self._last = last  # after the transaction, which may fail to its very end
        return new

    def reseal(self, rows: list[Sealed] | None = None) -> int:
        """Recompute the seals of all rows, so that the ledger is valid with its present rows. Return how many seals changed.

        `rows`: instead of those in the file. Only for an administrator who has examined a broken chain: `accept` calls this and
        puts it on record.
        """
        with self._write_transaction() as db:
            sealed = _read_rows(db, self.path, whole=False) if rows is None else rows
            db.execute("DELETE FROM releases")
            before, changed = "", 0
            for when, entry, old in sealed:
                before = _insert(db, entry, before, when)
                changed += before != old
            return changed

    def readable_rows(self) -> tuple[list[Sealed], int | None]:
        """Return the rows of a damaged file that can be read, and how many cannot: None if that is unknown.

        Whatever else the file holds is left out. Raises RefusedError only if the file cannot be read at present.
        """
        found, whole = dict[int, Sealed | None](), True
        for order in ("ASC", "DESC"):  # from both ends, each up to a damaged page
            last: int | None = None
            try:
                with self._connect(whole=False) as db:
                    for rowid, row in _rows(db, order):
                        # cells of a damaged page may all have one number, or that of another row
                        whole &= last is None or (rowid > last if order == "ASC" else rowid < last)
                        last = rowid
                        found[rowid] = found.get(rowid) or _checked_row(row)
            except RefusedError as error:
                if _is_of_machine(error.__context__):
                    raise
                whole = False
        rows = [found[rowid] for rowid in sorted(found)]
        kept = [row for row in rows if row is not None]
        return kept, len(rows) - len(kept) if whole else None

    def _sealed_rows(self) -> list[Sealed]:
        if not self.path.is_file():
            return self._check_last_row([])
        with self._connect() as db:
            return self._check_last_row(_read_rows(db, self.path))

    def _check_last_row(self, sealed: list[Sealed]) -> list[Sealed]:
        """Return `sealed`. Raises RefusedError if it lacks the last row that this process saw: the file was replaced."""
        if self._last and self._last not in {seal for *_, seal in sealed}:
            raise RefusedError(
                f"{self.path}: the privacy ledger lacks rows that it had a moment ago; nothing was sent; restore it",
                Reason.LEDGER,
            )
        self._last = sealed[-1][2] if sealed else ""
        return sealed

    @contextmanager
    def _write_transaction(self) -> Iterator[sqlite3.Connection]:
        """Open the file, created if needed, for one transaction: no other process writes until the block ends."""
        with refuse_if_unwritable(self.path):
            make_private_folder(self.path.parent)
            open_private(self.path.resolve(), "a").close()
        with self._connect() as db:
            db.execute("BEGIN IMMEDIATE")
            db.execute(_CREATE)
            if LATER not in _columns(db):
                db.execute(f"ALTER TABLE releases ADD COLUMN {LATER} NOT NULL DEFAULT ''")
            yield db
            db.execute("COMMIT")

    @contextmanager
    def _connect(self, whole: bool = True) -> Iterator[sqlite3.Connection]:
        """Open the file. Raises RefusedError for any error of SQLite, because nothing may leave without a ledger.

        `whole`: see _check_plain.
        """
        try:
            with closing(sqlite3.connect(self.path, timeout=60, isolation_level=None)) as db:
                db.text_factory = _text_or_bytes
                if not whole:
                    db.execute("PRAGMA writable_schema = ON")  # else SQLite reads nothing of a file that was cut
                _check_plain(db, self.path, whole)  # before any statement that reads the definitions in the file
                # A committed row survives a power cut. With FULL, the default, it could be rolled back, because the deletion of
                # the journal is not flushed.
                db.execute("PRAGMA synchronous = EXTRA")
                yield db
        except sqlite3.Error as error:
            remedy = "make room, or end the program that uses it" if _is_of_machine(error) else _REMEDY
            raise RefusedError(
                f"{self.path}: the privacy ledger cannot be used ({error}); nothing was sent; {remedy}", Reason.LEDGER
            ) from None


def _text_or_bytes(raw: bytes) -> str | bytes:
    """Return a text cell; as bytes, which no row may hold, if it is no text."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _is_of_machine(error: BaseException | None) -> bool:
    return isinstance(error, OSError) or str(getattr(error, "sqlite_errorname", "")).startswith(_MACHINE)


def _check_plain(db: sqlite3.Connection, path: Path, whole: bool) -> None:
    """Raise RefusedError unless the file is empty or holds the ledger's one plain table; limit the time and memory of reading.

    The file may come from a stranger, for example in an archive of evidence. A view or a computed column would run its author's
    expressions when it is read. Without `whole`, to read only the table, plain columns and other tables may be there too.
    """
    for limit in (sqlite3.SQLITE_LIMIT_LENGTH, sqlite3.SQLITE_LIMIT_SQL_LENGTH):
        db.setlimit(limit, _LONGEST)
    left = iter(range((_STEPS + 4 * path.stat().st_size) // _STEP))
    db.set_progress_handler(lambda: next(left, None) is None, _STEP)  # pages of a damaged file may form a cycle
    db.execute("PRAGMA trusted_schema = OFF")
    which = "" if whole else "WHERE name = 'releases' COLLATE NOCASE "
    found = [sql for (sql,) in db.execute(f"SELECT sql FROM sqlite_master {which}LIMIT 2")]
    columns = db.execute("PRAGMA table_xinfo(releases)").fetchall()
    plain = len(found) == 1 and str(found[0]).startswith("CREATE TABLE releases") and found[0].count("(") == 1
    known = {"time", *COLUMNS, "seal"}
    if found and not (plain and all((name in known or not whole) and not hidden for _, name, *_, hidden in columns)):
        raise RefusedError(
            f"{path}: the privacy ledger cannot be used (it holds something other than its one table, releases); "
            f"nothing was sent; {_REMEDY}",
            Reason.LEDGER,
        )


def _read_rows(db: sqlite3.Connection, path: Path, whole: bool = True) -> list[Sealed]:
    """Return time, row and seal of all rows. `whole`: raise RefusedError if the chain of seals is broken."""
    found, before = [], ""
    if not path.stat().st_size:
        return []  # the file is created before its table; seals in the records reveal lost rows
    for number, (_, row) in enumerate(_rows(db), start=1):
        if (sealed := _checked_row(row)) is None:
            raise RefusedError(
                f"{path}: row {number} of the privacy ledger is none of this version; nothing was sent; {_REMEDY}",
                Reason.LEDGER,
            )
        when, entry, seal = sealed
        before = _row_seal(before, when, entry)
        if whole and seal != before:
            raise RefusedError(
                f"{path}: row {number} of the privacy ledger was altered; nothing was sent; {_REMEDY}", Reason.LEDGER
            )
        found.append(sealed)
    return found


def _rows(db: sqlite3.Connection, order: str = "ASC") -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield SQLite's number of each row, and the unchecked row by column."""
    known = _columns(db)
    columns = ["time", *(name for name in COLUMNS if name != LATER or LATER in known), "seal"]
    for rowid, *values in db.execute(f"SELECT rowid, {', '.join(columns)} FROM releases ORDER BY rowid {order}"):
        yield rowid, dict(zip(columns, values, strict=True))


def _checked_row(row: dict[str, Any]) -> Sealed | None:
    """Return time, row and seal; None for a row that this version does not write."""
    when, seal = row.pop("time"), row.pop("seal")
    right = all(isinstance(value, int | float if name in _NUMBERS else str) for name, value in row.items())
    right = right and isinstance(when, float) and row["unit"] in UNITS and 0 <= row["noise_multiplier"] <= 1e100
    if not right or row["count"] < 0 or not 0 <= row["sample_rate"] <= 1:  # no row lowers the cost
        return None
    # also a row with a cell of another type, such as 4.0 for 4: it is altered, and `accept` keeps it
    return when, Entry(**row | {"private": bool(row["private"])}), seal


def _columns(db: sqlite3.Connection) -> set[str]:
    return {name for _, name, *_ in db.execute("PRAGMA table_info(releases)")}


def _insert(db: sqlite3.Connection, entry: Entry, before: str, when: float) -> str:
    """Append a row and return its seal."""
    seal = _row_seal(before, when, entry)
    db.execute(_INSERT, (when, *asdict(entry).values(), seal))
    return seal


def _row_seal(before: str, when: float, entry: Entry) -> str:
    values = asdict(entry)
    if not entry.mechanism:
        del values[LATER]  # former versions sealed their rows without it
    return hashlib.sha256(json.dumps([before, when, values]).encode()).hexdigest()


def _check_new_rows(rows: list[Entry], planned: list[Entry], budgets: Budgets) -> bool:
    """Return whether any `planned` row is new. Raises RefusedError for a known row on other terms, and over a budget."""
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
        after = epsilon_for(unit, [*rows, *new], budget.delta)
        if after <= budget.epsilon * (1 + 1e-6):
            continue
        before = epsilon_for(unit, rows, budget.delta)
        why = "fewer rounds or more noise, or raise `privacy.budgets` in site.yaml"
        if new[0].unit != unit:
            why = f"the job is {new[0].unit} level: {why}"
        raise RefusedError(
            f"privacy budget: one {unit} of data set {new[0].dataset!r} has spent epsilon {before:.4g} of {budget.epsilon:g} "
            f"at delta {budget.delta:g}; with this it would be {after:.4g}; nothing was sent; {why}",
            Reason.BUDGET,
            "the privacy budget does not allow the job",
        )
    return bool(new)


def summary(ledger: Ledger, deltas: tuple[float, ...] = (1e-5,)) -> list[dict[str, Any]]:
    """Return, per data set, the number of releases, the jobs, and the epsilon that they cost each unit at `deltas`.

    A release is the charged reply to one phase of a round. `steps`: how often noise was added in all releases; DP-SGD adds it
    in each local step, other mechanisms once a release. A unit's epsilon is infinite if a job with a finer unit ran (see
    `cost`). `void`: the number of rows that promise nothing.
    """
    return [
        {
            "dataset": dataset,
            "adjacency": weakest(row.adjacency for row in rows),
            "trust": sorted({row.trust for row in rows}),
            "releases": sum(row.count > 0 for row in rows),
            "steps": sum(row.count for row in rows),
            "jobs": sorted({row.job for row in rows}),
            "units": sorted({row.unit for row in rows}),
            "private": all(row.private for row in rows),
            "void": sum(row.is_void and row.count > 0 for row in rows),
            "epsilon": {unit: {f"{d:g}": epsilon_for(unit, rows, d) for d in deltas} for unit in UNITS},
        }
        for dataset, rows in group_by_key((entry.dataset, entry) for entry in ledger.entries()).items()
    ]


# ledger recovery -------------------------------------------------------------------------------------------------------
# Recovery of a lost or altered privacy ledger or ledger of sums. Such a ledger stops all jobs until the administrator accepts
# it, which is put on record.
#
# Every message in the records of what left (audit.jsonl) holds the ledger's last seal. A seal that the ledger does not have
# means that rows are lost. A site cannot detect that ledger and records were restored together from an older state. So the
# server stores the last seal of each site and sends it with the next hello. A server that sends a wrong seal excludes the site,
# which a server can do in any case.

ACCEPTANCE = "acceptance"


def check_no_lost_rows(records: Path, ledger: Ledger, read: Mapping[Path, list[Line]] = {}) -> None:
    """Raise RefusedError if a record under `records` names a seal that the ledger lacks, unless its loss was accepted.

    `read`: the lines of intact records that the caller has read already.
    """
    for path, seal in _lost_seals(records, ledger, read):
        what = "is gone" if not ledger.path.is_file() else "lacks rows"
        raise RefusedError(
            f"{ledger.path}: the privacy ledger {what}: {path} names the seal {seal[:16]}; nothing was sent; check `state` in "
            "site.yaml, restore the file from a backup, or run `consilium privacy accept` to go on with what is left",
            Reason.LEDGER,
        )


def check_has_seal(records: Path, ledger: Ledger, seal: str) -> None:
    """Raise RefusedError if the ledger lacks the `seal` that the server has received, unless its loss was accepted."""
    if seal and seal not in {*ledger.seals(), *read_accepted_seals(records)}:
        raise RefusedError(
            f"{ledger.path}: the privacy ledger lacks rows: the server has received its seal {seal}; ledger and records are "
            "older or others; nothing was sent; check `state` in site.yaml, restore the newest or run `consilium privacy "
            f"accept KIT --seal {seal} --reason TEXT` to go on without what is lost",
            Reason.LEDGER,
        )


def check_dataset_name(who: str, dataset: str, list_path: str, ledger: Ledger) -> None:
    """Raise RefusedError if the ledger has rows under the path of the data list, `list_path`, and not under its name `dataset`.

    Under the name the account would start again from zero. `who`: the site, for the message.
    """
    if list_path and list_path != dataset and ledger.entries(list_path):
        raise RefusedError(
            f"{who}: the ledger has rows of this list under its path, not as {dataset!r}; "
            f"give the data set `patients: {list_path}` in site.yaml",
            Reason.LEDGER,
            "the ledger has rows of the data list under its path",
        )


def accept(records: Path, ledger: Ledger, reason: str, received_seals: Collection[str] = ()) -> dict[str, Any]:
    """Accept both ledgers with their present rows, put that on record in `records`/audit.jsonl, and return the record's values.

    `received_seals`: seals that the server has received and that no record here names; their loss is accepted too. The former
    files are kept under other names. A ledger that cannot be used is replaced by one with its readable rows.
    """
    stamp = f"{time.strftime('%Y%m%d-%H%M%SZ', time.gmtime())}-{time.time_ns() % 10**9:09}"  # a suffix for former files
    copy, aside = ledger.path.with_name(f"{ledger.path.name}.{stamp}"), []
    for path in sorted(records.rglob(FILE)):  # damaged records are kept under other names, but no longer read
        try:
            lines(path)
        except RefusedError:
            aside.append(str(path.rename(path.with_name(f"{FILE}.{stamp}"))))
    if ledger.path.is_file():
        shutil.copy2(ledger.path, copy)
    rows_lost: int | None = 0
    try:
        changed = ledger.reseal()
    except RefusedError as error:
        if _is_of_machine(error.__context__):
            raise  # it may be a valid ledger: a job is writing to it, the disk is full, or this user may not write it
        rows, rows_lost = ledger.readable_rows()
        new = Ledger(copy.with_name(f"{copy.name}.new"))
        changed = new.reseal(rows)
        new.path.replace(ledger.path)  # no job has written meanwhile: none can use the former file
    lost = sorted({seal for _, seal in _lost_seals(records, ledger)} | (set(received_seals) - {*ledger.seals()}))
    said = {
        "kind": ACCEPTANCE,
        "by": local_user(),
        "reason": reason,
        "rows": len(ledger.seals()),
        "rows_lost": rows_lost,
        "lost": lost,
        "rows_with_new_seals": changed,
        "kept": str(copy) if copy.is_file() else None,
        "records_set_aside": aside,
        "ledger": ledger.seal(),
        **sum_ledger.accept_ledger(records, stamp),
    }
    AuditLog(records / FILE).add(said, again=True)
    return said


def _lost_seals(records: Path, ledger: Ledger, read: Mapping[Path, list[Line]] = {}) -> Iterator[tuple[Path, str]]:
    """Yield (record, seal) for every seal in the records that the ledger neither has nor lists as accepted loss."""
    known = {"", *ledger.seals(), *read_accepted_seals(records, read)}
    for path in sorted(records.rglob(FILE)):
        found = read[path] if path in read else lines(path)
        yield from ((path, seal) for seal in (line.get("ledger", "") for line in found) if seal not in known)


def read_accepted_seals(records: Path, read: Mapping[Path, list[Line]] = {}) -> set[str]:
    """Return the seals whose loss was accepted, from `records`/audit.jsonl. Raises RefusedError for a damaged record."""
    path = records / FILE
    own = read[path] if path in read else lines(path) if path.is_file() else []
    found = [line for line in own if line.get("kind") == ACCEPTANCE]
    return {seal for line in found for seal in line.get("lost", []) if isinstance(seal, str)}
