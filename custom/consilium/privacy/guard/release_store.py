"""The stored releases of a site in a run, so that a replayed task gets the same bytes again.

A release is first stored unpaid in its own file ("pending"). When it is paid, it replaces the last paid release. Until then the
site can still replay the last paid release, so its answer does not reveal whether a newer release is pending.
"""

import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from consilium.core.errors import CheckpointError, ConsiliumError, Reason, RefusedError
from consilium.core.messages import Payload
from consilium.core.storage import (
    digest,
    load_state,
    lock_folder,
    read_notes,
    refuse_if_unwritable,
    save_state,
    unreadable_error,
    write_json,
)
from consilium.privacy.accounting import VOID, Entry
from consilium.privacy.guard import audit_entries, task_schedule
from consilium.privacy.guard.audit_entries import AuditTrail, Charges
from consilium.privacy.guard.task_schedule import AuthorizedTask

FILE = "released.safetensors"
"""The last paid release."""
BEGUN = "begun.json"
"""The file with the newest round and phase in which training has begun, whatever the outcome."""


class StoredRelease(NamedTuple):
    """A stored release. `terms`: the ledger row that pays for it, without its digest."""

    payload: Payload
    terms: Entry


def save_pending(folder: Path, released: Payload, terms: Entry) -> None:
    """Store an unpaid release in the run's private folder. Raises RefusedError if it cannot be written."""
    meta = {"round": released.round, "phase": released.phase, "scalars": released.scalars, "metrics": released.metrics}
    path = _pending_path(folder, (released.round, released.phase))
    with refuse_if_unwritable(path):
        save_state(path, released.tensors, meta | {"terms": asdict(terms)})


def mark_paid(folder: Path, place: tuple[int, int]) -> None:
    """Replace the last paid release by the pending one of this round and phase; delete older pending ones."""
    with refuse_if_unwritable(folder / FILE):
        if _pending_path(folder, place).is_file():
            for path in folder.glob("unpaid-*"):  # before the replacement, so that no older one remains
                numbers = re.fullmatch(r"unpaid-(\d+)-(\d+)\.safetensors", path.name)
                if numbers and (int(numbers[1]), int(numbers[2])) < place:
                    path.unlink()
            os.replace(_pending_path(folder, place), folder / FILE)


def load(folder: Path, place: tuple[int, int], paid: bool) -> StoredRelease | None:
    """Return the stored release of a round and phase, None if there is none. `paid`: the ledger has its row.

    Raises RefusedError if the ledger already charged a later release, because only the last is stored, and if the file cannot
    be read.
    """
    if _pending_path(folder, place).is_file():
        otherwise = "after removing it, its round can be trained again until a newer round has begun"
        return _read_release(_pending_path(folder, place), otherwise)
    if not (folder / FILE).exists():
        return None
    try:
        found = _read_release(folder / FILE, "removing it loses the reply of its round only")
    except RefusedError:
        if paid or _newest_started(folder) == task_schedule.NO_ROUND:  # begun.json is lost too
            raise
        return None  # unpaid releases are served for the newest round only, so this file is of an earlier round
    if (last := (found.payload.round, found.payload.phase)) > place:
        what = "round {} phase {} is stale, the last that left is round {} phase {}".format(*place, *last)
        raise RefusedError(f"{folder / FILE}: {what}; nothing was sent", Reason.TASK)
    return found if last == place else None


def mark_started(folder: Path, place: tuple[int, int]) -> None:
    """Record that training begins in a round and phase. Raises RefusedError if that cannot be written."""
    if _newest_started(folder) < place:
        with refuse_if_unwritable(folder / BEGUN):
            write_json(folder / BEGUN, dict(zip(("round", "phase"), place, strict=True)))


def reject_stale(folder: Path, place: tuple[int, int]) -> None:
    """Raise RefusedError if training has begun in a newer round or phase. Then unpaid answers of older ones no longer leave.

    Otherwise an older answer would depend on the outcome of the newer training.
    """
    if (newest := _newest_started(folder)) > place:
        what = "round {} phase {} is stale, the site has begun round {} phase {}".format(*place, *newest)
        raise RefusedError(f"{folder}: {what}; nothing was sent", Reason.TASK)


def _newest_started(folder: Path) -> tuple[int, int]:
    remedy = "restore it, or remove it where no run goes on"
    found = read_notes(folder / BEGUN, remedy)
    place = (found.get("round"), found.get("phase")) if found else task_schedule.NO_ROUND
    if not (isinstance(place[0], int) and isinstance(place[1], int)):
        raise unreadable_error(folder / BEGUN, remedy)
    return place[0], place[1]


def _read_release(path: Path, otherwise: str) -> StoredRelease:
    try:
        tensors, meta = load_state(path)
        payload = Payload(meta["round"], meta["phase"], tensors, meta["scalars"], meta["metrics"])
        places, numbers = (payload.round, payload.phase), [*payload.scalars.values(), *payload.metrics.values()]
        if {type(one) for one in places} != {int} or not {type(one) for one in numbers} <= {int, float}:
            raise TypeError
        return StoredRelease(payload, Entry.of(meta["terms"]))
    except (KeyError, TypeError, AttributeError, CheckpointError):
        raise unreadable_error(path, f"restore it, or use the version of consilium that wrote it; {otherwise}") from None


def _pending_path(folder: Path, place: tuple[int, int]) -> Path:
    return folder / "unpaid-{}-{}.safetensors".format(*place)


# replay ----------------------------------------------------------------------------------------------------------------
# Replay: each round and phase of a private job has one answer, the first one: a release or a refusal.
#
# A server may ask again with other values, and FLARE may leave two processes of one site running. If each request got a new
# answer, the server would learn each time whether training succeeded, which depends on the data. Only the first answer is paid,
# so only the first may leave.


@dataclass
class ReplayPolicy:
    """Decides the answers of the private job of `trail`. `records` is for all runs."""

    charges: Charges
    trail: AuditTrail
    records: Path

    def admit(self, task: AuthorizedTask, ready: Callable[[], object]) -> AuthorizedTask:
        """Return a training task that may begin. It is charged, and `answered` is set if its answer is already stored.

        `ready`: prepares the site for training. It is called before anything is charged, and any error that it raises ends the
        task. Raises RefusedError for a stored refusal, a stale round, or a budget that does not allow the task.
        """
        folder = self.trail.folder / task.run
        task_schedule.bind_run_folder(self.trail.site, self.records, self.trail.folder, task.run)
        task = replace(task, ledger_run=self.charges.ledger_run(task.run, task.place))
        with refuse_if_unwritable(folder), lock_folder(folder):
            answered = self.replay_answer(task) is not None
        if not answered:  # without the lock: reading data and weights may exceed another process's timeout for it
            ready()
        with refuse_if_unwritable(folder), lock_folder(folder):
            stored, row = self.replay_answer(task), self.charges.row(task.ledger_run, task.place)
            self.charges.check([row])
            mark_started(folder, task.place)  # before the charge: if this file cannot be written, nothing is charged
            if self.charges.is_dpsgd:
                self.trail.ledger.charge_once(row, self.trail.policy.budgets)
            if stored is not None:  # paid now, as a refusal is, so that a concurrent job sees the same budget in both cases
                self.pay(task, stored)
        return replace(task, answered=stored is not None)

    def rows(self, run: str, places: Iterable[tuple[int, int]]) -> list[Entry]:
        """Return the ledger row of each round's and phase's answer."""
        known = [row for row in self.trail.ledger.entries(self.charges.dataset) if row.run.startswith(run)]
        names = {}
        for place in places:
            names[place] = audit_entries.ledger_run_id(known, run, place)
            with suppress(RefusedError):  # an unreadable refusal counts as unpaid here; its own round raises the error
                if (refusal := audit_entries.load_refusal(self.trail.folder / run, place)) is not None:
                    names[place] = refusal.row
        return [self.charges.row(name, place) for place, name in names.items()]

    def replay_answer(self, task: AuthorizedTask) -> Payload | None:
        """Return the stored release of the task's round and phase, None if it has no answer yet.

        Raises RefusedError if the answer is a refusal (with its reason), if the answer's bytes are lost or were made on other
        terms, and if training has begun in a newer round or phase and the answer was not paid.
        """
        charges, folder, place = self.charges, self.trail.folder / task.run, "round {} phase {}".format(*task.place)
        refusal = audit_entries.load_refusal(folder, task.place)
        row = charges.row(refusal.row if refusal else task.ledger_run, task.place)
        paid = self.trail.ledger.is_released(row)
        if not paid:
            reject_stale(folder, task.place)
        if refusal is not None:
            self._pay_refusal(task, refusal)
            raise RefusedError(
                f"{self.trail.site}: {place} has failed here before, and that answer stays ({folder}); nothing was sent",
                refusal.reason,
            )
        if not paid and any(one.key == row.key and one.is_void for one in self.trail.ledger.entries(charges.dataset)):
            raise RefusedError(f"{self.trail.site}: {place} is {VOID}; nothing was sent; begin a new run", Reason.LEDGER)
        stored = load(folder, task.place, paid)
        lost = stored is None and (paid or task.answered)
        if lost or task.ledger_run != charges.ledger_run(task.run, task.place):
            what = "was answered, but its bytes are lost"
            raise RefusedError(f"{self.trail.site}: {place} {what}; nothing was sent", Reason.LEDGER)
        if stored is None:
            return None
        charges.check_terms(stored.terms, row)
        return stored.payload

    def load_or_make(self, task: AuthorizedTask, make: Callable[[], Payload]) -> Payload:
        """Return the one release of the task's round and phase: the stored one, or the result of `make`, stored unpaid."""
        if (released := self.replay_answer(task)) is None:
            released = make()
            save_pending(self.trail.folder / task.run, released, self.charges.row(task.ledger_run, task.place))
        return released

    def pay(self, task: AuthorizedTask, released: Payload) -> None:
        """Pay for a stored release, once. From then on it counts as released."""
        self.charges.charge_answer(self.charges.row(task.ledger_run, task.place), digest(released.tensors))
        mark_paid(self.trail.folder / task.run, task.place)

    def refuse(self, task: AuthorizedTask, reason: Reason) -> Reason | Payload:
        """Return the answer of a round and phase in which training failed: the stored release, or the refusal, stored and paid.

        An error while doing so becomes a refusal with that error's reason, as it would after successful training.
        """
        try:
            if (stored := self.replay_answer(task)) is None:
                row = self.charges.row(task.ledger_run, task.place)
                refusal = audit_entries.StoredRefusal(reason, task.ledger_run, row)
                audit_entries.save_refusal(self.trail.folder / task.run, task.place, refusal)
                self._pay_refusal(task, refusal)
                return reason
        except ConsiliumError as error:
            self.trail.note("refusal", again=True, reason=error.reason.value)
            return error.reason
        return stored

    def _pay_refusal(self, task: AuthorizedTask, refusal: audit_entries.StoredRefusal) -> None:
        """Pay for a stored refusal and record its cost, each once."""
        row = self.charges.row(refusal.row, task.place)
        self.charges.check_terms(refusal.terms, row)
        self.charges.charge_answer(row, audit_entries.REFUSAL_DIGEST)
        about: dict[str, Any] = {"round": row.round, "phase": row.phase, "row": refusal.row}
        self.trail.note("refusal", spends=True, reason=refusal.reason.value, **about)
