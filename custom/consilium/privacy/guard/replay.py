"""Replay: each round and phase of a private job has one answer, the first, whether a release or a refusal.

A server may ask again with other values, and FLARE may leave two processes of one site. If the site answered each of them anew,
the server would learn each time whether training went well, which the data decide. Only the first answer is paid, so only the
first may leave.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from consilium.core.errors import ConsiliumError, Reason, RefusedError
from consilium.core.messages import Payload
from consilium.core.storage import digest, locked, room_for
from consilium.privacy.accounting.composition import VOID, Entry
from consilium.privacy.guard import refusals, release_store, task_schedule
from consilium.privacy.guard.audit_trail import AuditTrail
from consilium.privacy.guard.charges import Charges
from consilium.privacy.guard.task import AuthorizedTask


@dataclass
class ReplayPolicy:
    """The answers of one private job at one site. `folder` has a folder for each run; `records`: of all the site's runs."""

    charges: Charges
    trail: AuditTrail
    folder: Path
    records: Path

    def admit(self, task: AuthorizedTask, ready: Callable[[], object]) -> AuthorizedTask:
        """Return a training task that may begin, charged, and marked where its answer is stored.

        `ready`: makes the site ready to train. It is called before anything is charged, and what it raises ends the task.
        Raises RefusedError.
        """
        folder = self.folder / task.run
        task_schedule.bind_run_folder(self.charges.site, self.records, self.folder, task.run)
        task = replace(task, ledger_run=self.charges.ledger_run(task.run, task.place))
        with room_for(folder), locked(folder):
            answered = self.stored_answer(task) is not None
        if not answered:  # outside the lock: reading data and weights may take longer than others wait for the lock
            ready()
        with room_for(folder), locked(folder):
            stored, row = self.stored_answer(task), self.charges.row(task.ledger_run, task.place)
            self.charges.check([row])
            release_store.mark_started(folder, task.place)  # first: without room for the mark nothing is charged
            self.charges.begin(row)
            if stored is not None:  # paid now, as a refusal is: a job that comes between finds the same budget
                self.pay(task, stored)
        return replace(task, answered=stored is not None)

    def rows(self, run: str, places: Iterable[tuple[int, int]]) -> list[Entry]:
        """Return the row of each place's answer, without those that a former version has paid."""
        known = [row for row in self.charges.ledger.entries(self.charges.dataset) if row.run.startswith(run)]
        names = {}
        for place in places:
            names[place] = refusals.ledger_run_id(known, run, place)
            with suppress(RefusedError):  # an unreadable refusal counts as unpaid here; its own round raises it
                if (refusal := refusals.load_refusal(self.folder / run, place)) is not None:
                    names[place] = refusal.row
        return [self.charges.row(name, place) for place, name in names.items() if name]

    def stored_answer(self, task: AuthorizedTask) -> Payload | None:
        """Return the release that answers this place, None where it has no answer.

        Raises RefusedError with the reason where the answer is a refusal; where the answer's bytes are lost or were made on
        other terms; and behind a newer place, unless the answer was paid.
        """
        charges, folder, place = self.charges, self.folder / task.run, "round {} phase {}".format(*task.place)
        refusal = refusals.load_refusal(folder, task.place)
        row = charges.row(refusal.row if refusal else task.ledger_run, task.place)
        paid = charges.ledger.released(row) or (refusal is not None and not refusal.row)
        if not paid:
            release_store.reject_stale(folder, task.place)
        if refusal is not None:
            self._pay_refusal(task, refusal)
            what = f"{place} has failed here before, and that answer stays ({folder})"
            raise RefusedError(f"{charges.site}: {what}; nothing was sent", refusal.reason)
        if not paid and charges.is_void(row):
            raise RefusedError(f"{charges.site}: {place} is {VOID}; nothing was sent; begin a new run", Reason.LEDGER)
        stored = release_store.load(folder, task.place, paid)
        lost = stored is None and (paid or task.answered)
        if lost or task.ledger_run != charges.ledger_run(task.run, task.place):
            raise RefusedError(f"{charges.site}: {place} was answered, but its bytes are lost; nothing was sent", Reason.LEDGER)
        if stored is None:
            return None
        charges.check_terms(stored.terms, row)
        return stored.payload

    def once(self, task: AuthorizedTask, make: Callable[[], Payload]) -> Payload:
        """Return the one release of this place: the stored one, or what `make` returns, stored and not yet paid."""
        if (released := self.stored_answer(task)) is None:
            released = make()
            release_store.save_pending(self.folder / task.run, released, self.charges.row(task.ledger_run, task.place))
        return released

    def pay(self, task: AuthorizedTask, released: Payload) -> None:
        """Pay for a stored release, once; from then on it counts as released."""
        self.charges.pay(self.charges.row(task.ledger_run, task.place), digest(released.tensors))
        release_store.mark_paid(self.folder / task.run, task.place)

    def refuse(self, task: AuthorizedTask, reason: Reason) -> Reason | Payload:
        """Return the answer of a place where training has failed: the stored release, or the refusal, stored and paid.

        Any other error becomes a refusal with its own reason, as it would after successful training.
        """
        try:
            if (stored := self.stored_answer(task)) is None:
                row = self.charges.row(task.ledger_run, task.place)
                refusal = refusals.StoredRefusal(reason, task.ledger_run, row)
                refusals.save_refusal(self.folder / task.run, task.place, refusal)
                self._pay_refusal(task, refusal)
                return reason
        except ConsiliumError as error:
            self.trail.note("refusal", again=True, reason=error.reason.value)
            return error.reason
        return stored

    def _pay_refusal(self, task: AuthorizedTask, refusal: refusals.StoredRefusal) -> None:
        """Pay for a stored refusal and note its cost, each once. A former version paid first: its refusal has no row."""
        if refusal.row:
            row = self.charges.row(refusal.row, task.place)
            self.charges.check_terms(refusal.terms, row)
            self.charges.pay(row, refusals.REFUSAL_DIGEST)
            about: dict[str, Any] = {"round": row.round, "phase": row.phase, "row": refusal.row}
            self.trail.note("refusal", spends=True, reason=refusal.reason.value, **about)
