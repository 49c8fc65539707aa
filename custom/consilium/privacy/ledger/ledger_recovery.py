"""Recovery of a lost or altered ledger, of privacy or of sums. It stops all jobs until the administrator accepts it on record.

The records of what left (audit.jsonl) hold the ledger's last seal at every message. A seal that the ledger does not know means
that rows are gone. A site cannot detect that ledger and records were restored together from an older state. The server keeps
the last seal of each site and sends it with the next hello. A server that sends a wrong one keeps the site out, which it can in
any case.
"""

import getpass
import shutil
import time
from collections.abc import Collection, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from consilium.core.errors import Reason, RefusedError
from consilium.privacy.ledger.audit import FILE, Record, lines
from consilium.privacy.ledger.ledger import Ledger
from consilium.privacy.secagg import sum_ledger

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
    is no ledger at all is replaced by an empty one.
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
    Record(records / FILE).add(said, again=True)
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
