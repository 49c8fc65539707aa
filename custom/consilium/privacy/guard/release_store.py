"""The bytes of a site's releases in a run: a replayed task gets them again, whatever comes now.

A release is kept before it is paid for, in a file of its own, and takes the place of the one before when it is paid. So what
was paid can be repeated until a newer one is, and whether a newer one waits does not show.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from consilium.core.errors import CheckpointError, Reason, RefusedError
from consilium.core.messages import Payload
from consilium.core.storage import load_state, noted, room_for, save_state, unreadable, write_atomic
from consilium.privacy.accounting.composition import Entry

FILE = "released.safetensors"
"""The last release that was paid."""
BEGUN = "begun.json"
"""The newest round and phase that training has begun in, whatever has become of it."""
NONE = (-1, -1)
"""Before any training."""
FORGO = "to remove it gives up the answer of its round alone"
ANEW = "to remove it lets its round be trained anew, until a newer one has begun"
"""What else can be done where the last release that was paid, or one that waits, cannot be read."""
UNPAID = re.compile(r"unpaid-(\d+)-(\d+)\.safetensors")
"""How a release is called that is not paid yet, by round and phase."""


class Kept(NamedTuple):
    """A release, and the row that it was made to be paid with, but for the digest; None in a file of a former version."""

    payload: Payload
    terms: Entry | None


def keep(folder: Path, released: Payload, terms: Entry) -> None:
    """Write a release that is not paid yet into the run's private folder. Raises RefusedError where it cannot."""
    meta = {"round": released.round, "phase": released.phase, "scalars": released.scalars, "metrics": released.metrics}
    path = _unpaid(folder, (released.round, released.phase))
    with room_for(path):
        save_state(path, released.tensors, meta | {"terms": asdict(terms)})


def paid(folder: Path, place: tuple[int, int]) -> None:
    """Let a release that has been paid take the place of the last one; what waits behind it is of no more use."""
    with room_for(folder / FILE):
        if _unpaid(folder, place).is_file():
            for path in [path for at, path in _waiting(folder) if at < place]:  # first: an older one must not come later
                path.unlink()
            os.replace(_unpaid(folder, place), folder / FILE)


def at(folder: Path, place: tuple[int, int], paid: bool) -> Kept | None:
    """Return the release of a round and phase, None where it is not kept; `paid`: the ledger has a row of it.

    Raises RefusedError behind a later one that was paid, because only the last is kept, and where its file cannot be read.
    """
    if _unpaid(folder, place).is_file():
        return _read(_unpaid(folder, place), ANEW)
    if not (folder / FILE).exists():
        return None
    try:
        found = _read(folder / FILE, FORGO)
    except RefusedError:
        if paid or _begun(folder) == NONE:  # a former version noted nothing
            raise
        return None  # behind the newest round nobody asks for what is not paid, so the file answers a round before this one
    if (last := (found.payload.round, found.payload.phase)) > place:
        what = "round {} phase {} is stale, the last that left is round {} phase {}".format(*place, *last)
        raise RefusedError(f"{folder / FILE}: {what}; nothing was sent", Reason.TASK)
    return found if last == place else None


def begin(folder: Path, place: tuple[int, int]) -> None:
    """Note that training begins at a place. Raises RefusedError where it cannot."""
    if _begun(folder) < place:
        with room_for(folder / BEGUN):
            write_atomic(folder / BEGUN, json.dumps(dict(zip(("round", "phase"), place, strict=True))).encode())


def check_newest(folder: Path, place: tuple[int, int]) -> None:
    """Raise RefusedError behind the newest place that training has begun in.

    Only what was paid is repeated there: how training went at a later place, and what that left here, must not show.
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


def _read(path: Path, otherwise: str) -> Kept:
    try:
        tensors, meta = load_state(path)
        payload, terms = Payload(meta["round"], meta["phase"], tensors, meta["scalars"], meta["metrics"]), meta.get("terms")
        places, numbers = (payload.round, payload.phase), [*payload.scalars.values(), *payload.metrics.values()]
        if {type(one) for one in places} != {int} or not {type(one) for one in numbers} <= {int, float}:
            raise TypeError
        return Kept(payload, None if terms is None else Entry.of(terms))
    except (KeyError, TypeError, AttributeError, CheckpointError):
        raise unreadable(path, f"restore it, or use the version of consilium that wrote it; {otherwise}") from None


def _unpaid(folder: Path, place: tuple[int, int]) -> Path:
    return folder / "unpaid-{}-{}.safetensors".format(*place)


def _waiting(folder: Path) -> Iterator[tuple[tuple[int, int], Path]]:
    for path in folder.glob("unpaid-*"):
        if found := UNPAID.fullmatch(path.name):
            yield (int(found[1]), int(found[2])), path
