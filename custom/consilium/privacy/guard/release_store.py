"""The stored releases of a site in a run: a replayed task gets the same bytes again.

A release is stored before it is paid, in a file of its own ("pending"). When it is paid, it replaces the last paid one. Until
then the site can still repeat the last paid one, so its answer does not show whether a newer release is pending.
"""

import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from consilium.core.errors import CheckpointError, Reason, RefusedError
from consilium.core.messages import Payload
from consilium.core.storage import load_state, noted, room_for, save_state, unreadable, write_atomic
from consilium.privacy.accounting.composition import Entry

FILE = "released.safetensors"
"""The last paid release."""
BEGUN = "begun.json"
"""The newest round and phase in which training has begun, whatever its outcome."""
NONE = (-1, -1)
"""Before any training."""
REMEDY_PAID = "to remove it gives up the answer of its round alone"
REMEDY_PENDING = "to remove it lets its round be trained anew, until a newer one has begun"
"""The other remedy where the last paid release, or a pending one, cannot be read."""
PENDING = re.compile(r"unpaid-(\d+)-(\d+)\.safetensors")
"""The file name of a pending release, by round and phase."""


class StoredRelease(NamedTuple):
    """A release, and the row that is to pay for it, without its digest; None in a file of a former version."""

    payload: Payload
    terms: Entry | None


def save_pending(folder: Path, released: Payload, terms: Entry) -> None:
    """Write an unpaid release into the run's private folder. Raises RefusedError where it cannot."""
    meta = {"round": released.round, "phase": released.phase, "scalars": released.scalars, "metrics": released.metrics}
    path = _pending(folder, (released.round, released.phase))
    with room_for(path):
        save_state(path, released.tensors, meta | {"terms": asdict(terms)})


def mark_paid(folder: Path, place: tuple[int, int]) -> None:
    """Replace the last paid release with the pending one of this place; delete older pending ones."""
    with room_for(folder / FILE):
        if _pending(folder, place).is_file():
            for path in folder.glob("unpaid-*"):  # first: an older one must not come later
                if (found := PENDING.fullmatch(path.name)) and (int(found[1]), int(found[2])) < place:
                    path.unlink()
            os.replace(_pending(folder, place), folder / FILE)


def load(folder: Path, place: tuple[int, int], paid: bool) -> StoredRelease | None:
    """Return the release of a round and phase, None where it is not stored; `paid`: the ledger has its row.

    Raises RefusedError where a later release was paid, because only the last is stored, and where the file cannot be read.
    """
    if _pending(folder, place).is_file():
        return _read(_pending(folder, place), REMEDY_PENDING)
    if not (folder / FILE).exists():
        return None
    try:
        found = _read(folder / FILE, REMEDY_PAID)
    except RefusedError:
        if paid or _begun(folder) == NONE:  # a former version has no mark
            raise
        return None  # unpaid releases are served for the newest round only, so this file is of an earlier round
    if (last := (found.payload.round, found.payload.phase)) > place:
        what = "round {} phase {} is stale, the last that left is round {} phase {}".format(*place, *last)
        raise RefusedError(f"{folder / FILE}: {what}; nothing was sent", Reason.TASK)
    return found if last == place else None


def mark_started(folder: Path, place: tuple[int, int]) -> None:
    """Note that training begins at a place. Raises RefusedError where it cannot."""
    if _begun(folder) < place:
        with room_for(folder / BEGUN):
            write_atomic(folder / BEGUN, json.dumps(dict(zip(("round", "phase"), place, strict=True))).encode())


def reject_stale(folder: Path, place: tuple[int, int]) -> None:
    """Raise RefusedError where training has begun at a newer place: there unpaid answers of older ones are no longer given.

    Otherwise an answer for an older place would depend on how training went at the newer one.
    """
    if (newest := _begun(folder)) > place:
        what = "round {} phase {} is stale, the site has begun round {} phase {}".format(*place, *newest)
        raise RefusedError(f"{folder}: {what}; nothing was sent", Reason.TASK)


def _begun(folder: Path) -> tuple[int, int]:
    remedy = "restore it, or remove it where no run goes on"
    found = noted(folder / BEGUN, remedy) or dict(zip(("round", "phase"), NONE, strict=True))
    place = found.get("round"), found.get("phase")
    if not (isinstance(place[0], int) and isinstance(place[1], int)):
        raise unreadable(folder / BEGUN, remedy)
    return place[0], place[1]


def _read(path: Path, otherwise: str) -> StoredRelease:
    try:
        tensors, meta = load_state(path)
        payload, terms = Payload(meta["round"], meta["phase"], tensors, meta["scalars"], meta["metrics"]), meta.get("terms")
        places, numbers = (payload.round, payload.phase), [*payload.scalars.values(), *payload.metrics.values()]
        if {type(one) for one in places} != {int} or not {type(one) for one in numbers} <= {int, float}:
            raise TypeError
        return StoredRelease(payload, None if terms is None else Entry.of(terms))
    except (KeyError, TypeError, AttributeError, CheckpointError):
        raise unreadable(path, f"restore it, or use the version of consilium that wrote it; {otherwise}") from None


def _pending(folder: Path, place: tuple[int, int]) -> Path:
    return folder / "unpaid-{}-{}.safetensors".format(*place)
