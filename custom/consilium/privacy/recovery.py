"""A lost or altered ledger: it stops every job, until the administrator has looked at it and said so on record.

The records of what left (audit.jsonl) hold the ledger's last seal at every message. A seal that the ledger does not know means
that rows are gone. Whoever can rewrite the ledger and all records can hide that; the seals in jobs' results at the server are
beyond their reach.
"""

import getpass
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from consilium.errors import Reason, RefusedError
from consilium.privacy.audit import FILE, Record
from consilium.privacy.ledger import Ledger

ACCEPTANCE = "acceptance"


def check(records: Path, ledger: Ledger) -> None:
    """Raise RefusedError if a record under `records` names a seal that the ledger has lost, and nobody has accepted that."""
    for path, seal in _lost(records, ledger):
        what = "is gone" if not ledger.path.is_file() else "lacks rows"
        raise RefusedError(
            f"{ledger.path}: the privacy ledger {what}: {path} names the seal {seal[:16]}; nothing was sent; restore the file "
            "from a backup, or run `consilium privacy accept` to go on with what is left",
            Reason.LEDGER,
        )


def accept(records: Path, ledger: Ledger, reason: str) -> dict[str, Any]:
    """Let the ledger count as it stands, and put that on record in `records`/audit.jsonl; return the record's values.

    The file as it was is kept beside it. One that is no ledger at all is replaced by an empty one.
    """
    copy = ledger.path.with_name(f"{ledger.path.name}.{time.strftime('%Y%m%d-%H%M%S')}")
    if ledger.path.is_file():
        shutil.copy2(ledger.path, copy)
    changed = _reseal(ledger)
    lost = sorted({seal for _, seal in _lost(records, ledger)})
    said = {"kind": ACCEPTANCE, "by": getpass.getuser(), "reason": reason, "rows": len(ledger.seals()), "lost": lost}
    said |= {"rows_with_new_seals": changed, "kept": str(copy) if copy.is_file() else None, "ledger": ledger.seal()}
    Record(records / FILE).add(said, again=True)
    return said


def _reseal(ledger: Ledger) -> int:
    try:
        return ledger.reseal()
    except RefusedError:
        ledger.path.unlink()
        return ledger.reseal()


def _lost(records: Path, ledger: Ledger) -> Iterator[tuple[Path, str]]:
    """Yield every record whose last seal is neither in the ledger nor accepted as lost."""
    known = {"", *ledger.seals(), *_accepted(records)}
    for path in sorted(records.rglob(FILE)):
        if (seal := _last(path).get("ledger", "")) not in known:
            yield path, seal


def _accepted(records: Path) -> set[str]:
    path = records / FILE
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    return {seal for line in lines if line.get("kind") == ACCEPTANCE for seal in line["lost"]}


def _last(path: Path) -> dict[str, Any]:
    """Return the last line of a record. Raises RefusedError for a damaged one: it may be the one that knows."""
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        return json.loads(lines[-1]) if lines else {}
    except ValueError:
        raise RefusedError(f"{path}: the last line is damaged; nothing was sent; look at it", Reason.LEDGER) from None
