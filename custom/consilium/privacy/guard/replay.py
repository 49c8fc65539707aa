"""One answer for a round and phase of a private job: the release or the word that was first, whatever is found later.

A server that asks again with other values, and processes that FLARE has left beside each other, would otherwise be told each
time whether training went well, which the data decide. Only the first answer is paid for, so only it may leave.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from consilium.core.errors import Reason, RefusedError
from consilium.core.messages import Payload
from consilium.core.storage import digest, locked, room_for
from consilium.privacy.accounting.composition import DISCRETE, VOID, Entry
from consilium.privacy.guard import refusals, release_store, task_schedule
from consilium.privacy.guard.task import Task
from consilium.privacy.masking import Masking


class Answers(Masking):
    """What a guard knows of the answers that have left, and how it admits a round that may have one.

    `dataset`: the data's name in the ledger. `ready` makes the site ready to train, and raises what that raises, such as
    DataError where files that a round reads are gone: it knows of nothing that a server sends.
    """

    dataset: str
    records: Path
    ready: Callable[[], object]
    _attempt: str

    def _admit_training(self, task: Task) -> Task:
        """Return a training task that may begin, marked where its answer is kept.

        A site that cannot train says so before anything is charged. Raises RefusedError, and what `ready` raises.
        """
        self._open_masks(task)  # before the answer is looked for: what is wrong with them must not depend on it
        if self.plan is None:
            return task
        folder = self.folder / task.run
        task_schedule.claim(self.name, self.records, self.folder, task.run)
        self._attempt = self._next_attempt(task)
        with room_for(folder), locked(folder):
            answered = self._given(task) is not None
        if not answered:  # not under the lock: to read data and weights may take longer than anybody waits for that
            self.ready()
        with room_for(folder), locked(folder):
            self._charge(task, stored := self._given(task))
        return replace(task, answered=stored is not None)

    def _charge(self, task: Task, stored: Payload | None) -> None:
        """Charge a round; what is kept of it is paid at the ask, as a word is: who comes between finds the same budget.

        That it has begun is noted before: where there is no room for the note, nothing is charged for what cannot be trained.
        """
        entry = self._entry(self._attempt, *task.place)
        self.ledger.check([entry], self.policy.budgets)
        release_store.begin(self.folder / task.run, task.place)
        if self._in_steps:
            self.ledger.spend(entry, self.policy.budgets)
        if stored is not None:
            self._pay_release(task, stored)

    def _rows(self, run: str, places: Iterable[tuple[int, int]]) -> list[Entry]:
        """Return what the answers of these places cost, each one's row, but for those that a former version has paid."""
        rows = [row for row in self.ledger.entries(self.dataset) if row.run.startswith(run)]
        names = {at: self._row_name(rows, run, at) for at in places}
        return [self._entry(name, *at) for at, name in names.items() if name]

    def _row_name(self, rows: list[Entry], run: str, place: tuple[int, int]) -> str:
        """Return the run's name in the row that pays for a place; a word that nobody can read counts as one more to be paid."""
        with suppress(RefusedError):  # it stops its own round, which asks for it
            if (word := refusals.said(self.folder / run, place)) is not None:
                return word.row
        return refusals.attempt(rows, run, place)

    def _pay(self, task: Task, said: refusals.Said) -> None:
        """Pay for a kept word, once, and put what it cost on record, once; its row tells one try from another."""
        (round, phase), row = task.place, self._entry(said.row, *task.place)
        if said.row:
            self._check_terms(said.terms, row)
        row = replace(row, digest=refusals.ROW, count=0 if self._in_steps else row.count)  # in steps paid when the task came
        if said.row:
            self.ledger.spend(row, self.policy.budgets)
            self._note("refusal", spends=True, reason=said.word.value, round=round, phase=phase, row=said.row)

    def _pay_release(self, task: Task, released: Payload) -> None:
        """Pay for a kept release, once; from here on it counts as released."""
        entry = replace(self._entry(self._attempt, *task.place), digest=digest(released.tensors))
        entry = replace(entry, count=0) if self._in_steps else entry  # paid when the task came
        self.ledger.spend(entry, self.policy.budgets)
        release_store.paid(self.folder / task.run, task.place)

    def _given(self, task: Task) -> Payload | None:
        """Return the release that a place has had, None where it has had no answer.

        A place has one answer. What another process finds there, or another training on what the server sends the next time,
        must not show, or each would be told for nothing. Raises RefusedError with the word where that was the answer, where
        the answer's bytes are gone or were made on other terms, and behind a newer place unless it was paid.
        """
        folder, place = self.folder / task.run, "round {} phase {}".format(*task.place)
        said = refusals.said(folder, task.place)
        row = self._entry(said.row if said else self._attempt, *task.place)
        paid = self.ledger.released(row) or (said is not None and not said.row)
        if not paid:
            release_store.check_newest(folder, task.place)
        if said is not None:
            self._pay(task, said)
            what = f"{place} has failed here before, and that answer stays ({folder})"
            raise RefusedError(f"{self.name}: {what}; nothing was sent", said.word)
        if not paid and any(one.key == row.key and one.is_void for one in self.ledger.entries(self.dataset)):
            raise RefusedError(f"{self.name}: {place} is {VOID}; nothing was sent; begin a new run", Reason.LEDGER)
        stored = release_store.at(folder, task.place, paid)
        if (stored is None and (paid or task.answered)) or self._attempt != self._next_attempt(task):
            raise RefusedError(f"{self.name}: {place} was answered, but its bytes are lost; nothing was sent", Reason.LEDGER)
        if stored is None:
            return None
        self._check_terms(stored.terms, row)
        return stored.payload

    def _check_terms(self, terms: Entry | None, row: Entry) -> None:
        """Raise RefusedError where what is kept was made to be paid with another row: it would leave at a price not its own.

        Of a former version, which noted no terms, the ledger alone knows them: what it has no row of is refused.
        """
        if self.ledger.released(row) if terms is None else row.pays_for(terms):
            return
        was = f"noise multiplier {terms.noise_multiplier:.6g}" if terms else "none noted"
        raise RefusedError(
            f"{row.name} was answered on other terms ({was}, now {row.noise_multiplier:.6g}); nothing was sent; give the new "
            "job a run of its own",
            Reason.LEDGER,
        )

    def _has_released(self, run: str) -> bool:
        """Tell whether a release of this run was paid for; what the site keeps of it besides, nobody paid for."""
        rows = self.ledger.entries(self.dataset)
        return any(refusals.run_of(row) == run and row.digest not in ("", refusals.ROW) for row in rows)

    def _next_attempt(self, task: Task) -> str:
        return refusals.attempt(self.ledger.entries(self.dataset), task.run, task.place)

    @property
    def _in_steps(self) -> bool:
        """Whether training itself is private (DP-SGD), and so charged before it is done."""
        return self.plan is not None and self.plan.config.unit != "site"

    def _entry(self, run: str, round: int, phase: int) -> Entry:
        """Return the ledger's row of a release."""
        if self.plan is None:
            raise RefusedError(f"{self.name}: a row for a job without privacy; nothing was sent")
        privacy, spend = self.plan.config, self.plan.event
        return Entry(
            dataset=self.dataset, unit=privacy.unit, adjacency=privacy.adjacency, trust=privacy.trust,
            job=self.config.title, run=run, round=round, phase=phase,
            noise_multiplier=spend.noise_multiplier, sample_rate=spend.sample_rate, count=spend.count, clip=privacy.clip,
            private=self.policy.noise_seed is None, mechanism=DISCRETE,
        )  # fmt: skip
