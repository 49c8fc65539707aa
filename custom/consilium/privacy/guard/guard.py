"""What may leave a site, and in what state. Pure of FLARE: the in-process engine and the FLARE filters use the same guard.

It authorizes one task at a time, and the object it authorizes is the one that runs. Of the answer it checks names, roles and
values, clips, adds noise, keeps what it releases, writes the ledger, and only then returns it. A replayed task gets the same
answer again and spends nothing, see replay.py. On any doubt nothing is sent.
"""

from collections.abc import Callable, Collection, Mapping, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from consilium.config.job import JobConfig
from consilium.config.privacy import HospitalPrivacyPolicy
from consilium.core.errors import ConsiliumError, Reason, RefusedError
from consilium.core.messages import LIBRARIES, PROTOCOL, Kind, Payload
from consilium.core.storage import locked, note, room_for
from consilium.data.counts import Tally
from consilium.privacy import noise_diagnostics, statistics
from consilium.privacy.guard import model_sharing, refusals, release_store, task_schedule
from consilium.privacy.guard.release_checks import check_complete, check_upload, geometries, privatized, sent_as_sums, source
from consilium.privacy.guard.replay import Answers
from consilium.privacy.guard.task import Task
from consilium.privacy.ledger import audit, ledger_recovery
from consilium.privacy.ledger.ledger import Ledger
from consilium.privacy.plan import Plan, check_policy, make_plan
from consilium.privacy.secagg.certificates import Identity
from consilium.privacy.secagg.sum_ledger import SumLedger
from consilium.privacy.secagg.terms import Terms
from consilium.strategies.strategy import Strategy

CAPACITY = frozenset({"download", "time", "memory"})
"""What a site may say of its machine, see strategies/heterogeneous_ranks/ranks.py."""


@dataclass
class Guard(Answers):
    """One site's gate for one job. `dataset` and `num_samples` are the site's; `records`: the folder of all its runs' records.

    Use: authorize(...) each task before the site sees it, then once greet, release or release_scores with that very task.
    `job_id` is FLARE's, "" in process; `listed`: what the ledger called the data before they had a name; `terms`: what the
    site says of statistics; `tensors`: the names of the adapter's; `test_only`: nothing is trained here; `share_personalized`:
    its own model may go to a cross-site job; `ready`: see Answers.
    """

    name: str
    config: JobConfig
    strategy: Strategy
    metrics: Set[str]
    policy: HospitalPrivacyPolicy
    share_metrics: bool
    dataset: str
    num_samples: int
    folder: Path
    records: Path
    ledger: Ledger
    sums: SumLedger
    observer: Callable[[Mapping[str, Any]], None]
    job_id: str = ""
    listed: str = ""
    terms: statistics.Terms = statistics.TERMS
    tensors: Collection[str] = ()
    test_only: bool = False
    share_personalized: bool = False
    ready: Callable[[], object] = lambda: None
    identity: Identity | None = None

    def __post_init__(self) -> None:
        self.plan: Plan | None = make_plan(self.config, self.strategy, self.num_samples, self.tensors)
        self._run, self._digest = "", self.config.digest
        self._admitted: str | None = None
        self._task: Task | None = None
        self._asked: Task | None = None
        self._attempt = ""  # the run's name in the ledger, for the task that is asked
        self._records: dict[Path, audit.Record] = {}
        self._terms: Terms | None = None
        self._summed: dict[str, Any] = {}

    @property
    def shown_samples(self) -> int:
        """How many samples or patients the server is told: 1 where the claim hides it or nothing trains, 0 for `test_only`."""
        hidden = (self.plan is not None and (self.masks or not self._in_steps)) or not self.config.trains
        return 0 if self.test_only else 1 if hidden else self.num_samples

    # what arrives ------------------------------------------------------------------------------------------------------

    def authorize(self, kind: Kind, run: str, payload: Payload | None = None, seal: str = "") -> Task:
        """Return the task to run, before the site sees anything of it. It can be answered once; a newer one ends it.

        Admits the job first. `seal`: the last of the site's ledger that the server has, which comes with a hello; "" for none.
        Raises RefusedError for a run, round or phase that the job does not have, by policy, for a ledger that lacks rows, and
        when the budget is used up. Record-level DP writes its ledger row here, because training itself is the cost.
        """
        self.end_task()
        own = task_schedule.own_run(self.name, run, self._digest, self.job_id)
        task = Task(kind, own, payload or Payload(-1, -1, {}))
        self._run = task.run
        task_schedule.check_place(self.name, self.config, self.strategy, task, self.test_only)
        if task.run != self._admitted:
            self._admit(task.run)
        ledger_recovery.check_seal(self.records, self.ledger, seal)
        if kind is Kind.STATISTICS:
            self.terms.check(self.name, self.policy.protects, self.config.privacy is not None)
            statistics.check_question(self.records, self.dataset, self.config, self.listed)
        if kind is Kind.MODEL:
            model_sharing.check_lends(self.name, self.config, self.share_personalized, self.policy.protects)
        if kind is Kind.EVALUATE and self.config.cross_site:
            model_sharing.check_once(self.folder, task.place, task.payload)  # a run is the server's word
        if kind is Kind.TRAIN:
            task = self._admit_training(task)
        self._end_masks(task)
        self._task = self._asked = task
        return task

    def end_task(self) -> None:
        """Forget the task at hand, because another message has come: whatever becomes of that is no answer to this."""
        self._task = self._asked = None

    def _admit(self, run: str) -> None:
        """Accept or refuse the whole job, with the numbers, before it touches any data."""
        counts = not self.config.trains and self.config.cross_site is None  # a job of statistics only is the site's to allow
        if not (counts and self.terms.share):
            check_policy(self.name, self.plan, self.policy)
        self._check_masks()
        ledger_recovery.check(self.records, self.ledger)
        if self.plan is not None and self.config.trains:
            ledger_recovery.check_name(self.name, self.dataset, self.listed, self.ledger)
            rounds = range(self.config.training.rounds)
            places = [(round, phase) for round in rounds for phase in range(self.strategy.traits.phases_of(round))]
            self.ledger.check(self._rows(run, places), self.policy.budgets)
        self._admitted = run

    # what leaves -------------------------------------------------------------------------------------------------------

    def greet(self, task: Task, hello: Mapping[str, Any]) -> dict[str, Any]:
        """Return what may leave of a site's hello: its declared fields, the number of samples the server may know, the seal."""
        self._take(task, Kind.HELLO)
        capacity = {key: float(value) for key, value in dict(hello["capacity"]).items() if key in CAPACITY}
        shown = {
            "name": self.name,
            "num_samples": self.shown_samples,
            "joined": bool(hello["joined"]) and (self.plan is None or self._has_released(task.run)),
            "version": str(hello["version"]),
            "checkpoint": str(hello["checkpoint"]),
            "capacity": capacity,
            "ledger": self.ledger.seal(),
            "plugins": self.config.packages,
            "test_only": self.test_only,
            "protocol": PROTOCOL,
            "seeded": self.plan is not None and self.policy.noise_seed is not None,
            "libraries": {name: str(told) for name, told in dict(hello["libraries"]).items() if name in LIBRARIES},
        }
        self._note("hello", values=shown)
        return shown

    def release(self, task: Task, result: Payload) -> Payload:
        """Return what may leave of a training result. Raises RefusedError, and then nothing may be sent."""
        self._take(task, Kind.TRAIN)
        if (result.round, result.phase) != task.place:
            what = f"a result for round {result.round} phase {result.phase} nobody asked for; nothing was sent"
            raise RefusedError(f"{self.name}: {what}")
        with locked(self.folder / task.run):  # a job process FLARE has given up may still be at it beside its successor
            released = self._leaving(task, self._private(self.plan, task, result) if self.plan else self._checked(result))
        self._asked = None
        return released

    def _leaving(self, task: Task, released: Payload) -> Payload:
        """Return a release as it leaves: paid for, under masks, on record.

        One of zeros (all public peers are zero) costs what any does: it tells that training went well.
        """
        if self.plan is not None:
            self._pay_release(task, released)
        if self.masks:
            released = self._masked(task, released, self.config.weight(self.shown_samples))
        released = replace(released, ledger=self.ledger.seal())
        self._note("update", released, self.plan is not None, **self._masks_said)
        return released

    def release_scores(self, task: Task, result: Payload) -> Payload:
        """Return what may leave of an evaluation: shared metrics, no tensors, nothing else of the answer.

        Raises RefusedError, and then nothing may be sent.
        """
        self._take(task, Kind.EVALUATE)
        if result.tensors:
            raise RefusedError(f"{self.name}: an evaluation with tensors; nothing was sent")
        scores = self._scores(task, result.metrics)
        self._asked = None
        return scores

    def _scores(self, task: Task, metrics: Mapping[str, float]) -> Payload:
        """Return an evaluation's answer as it leaves, on record."""
        checked = self._checked(Payload(*task.place, {}, metrics=dict(metrics)))
        checked = replace(checked, ledger=self.ledger.seal())
        self._note("evaluation", checked)
        return checked

    def release_statistics(self, task: Task, counted: Tally) -> dict[str, Any]:
        """Return what may leave of a site's counts, the same every time. Raises RefusedError, and then nothing may be sent."""
        self._take(task, Kind.STATISTICS)
        shown = statistics.answer(self.records, self.dataset, self.config, counted, self.terms, self.listed)
        self._note("statistics", values=shown)
        return shown

    def release_model(self, task: Task, result: Payload) -> Payload:
        """Return the site's own model, as it leaves for a cross-site job. Raises RefusedError, and then nothing may be sent."""
        self._take(task, Kind.MODEL)
        model_sharing.check_model(self.name, result, self.tensors)
        released = replace(result, round=-1, phase=-1, ledger=self.ledger.seal())
        self._note("model", released)
        return released

    def refuse(self, reason: Reason) -> Reason | tuple[Task, Payload]:
        """Put a refusal on record before it leaves, each one; return the word that leaves, or the answer in its place.

        A word that data decide is an answer like any other. In a private job it is final for its round and phase and costs what
        a release costs; of an evaluation whose scores stay here nothing is told, whatever the word. Raises RefusedError if it
        cannot be kept.
        """
        task, self._task, self._asked = self._asked, None, None
        if self.plan is not None and task is not None:
            if task.kind is Kind.TRAIN and reason in refusals.TELLING:
                return self._settle(task, reason)
            if task.kind is Kind.EVALUATE and not self.share_metrics:
                return task, self._silenced(task, reason)
        self._note("refusal", again=True, reason=reason.value)
        return reason

    def _silenced(self, task: Task, reason: Reason) -> Payload:
        """Return the answer of an evaluation whose scores stay: the one that it has had gone well, on record as that would be.

        The word stands behind it in the record where there is room: for want of that the answer must be no other one.
        """
        answer = self._scores(task, {})
        with suppress(RefusedError):
            self._note("refusal", again=True, reason=reason.value)
        return answer

    def _settle(self, task: Task, reason: Reason) -> Reason | tuple[Task, Payload]:
        """Return the answer of a place where training has failed: the one that it has had, or this word, kept and paid for."""
        with locked(self.folder / task.run):
            try:
                if (stored := self._given(task)) is None:
                    terms = self._entry(self._attempt, *task.place)
                    refusals.keep(self.folder / task.run, task.place, said := refusals.Said(reason, self._attempt, terms))
                    self._pay(task, said)
                    return reason
            except ConsiliumError as error:  # the same that would leave had training gone well
                self._note("refusal", again=True, reason=error.reason.value)
                return error.reason
            return task, self._leaving(task, stored)

    def _private(self, plan: Plan, task: Task, result: Payload) -> Payload:
        """Return the one release of this phase, made or kept."""
        if (stored := self._given(task)) is None:
            stored = self._prepare(plan, task, result)
            release_store.keep(self.folder / task.run, stored, self._entry(self._attempt, *task.place))
        return stored

    def _prepare(self, plan: Plan, task: Task, result: Payload) -> Payload:
        """Return a new release of `result`, checked whole."""
        checked = self._checked(result)
        if self._in_steps and not plan.by_step:
            return checked
        check_complete(self.name, self.strategy, checked, task.payload)
        if plan.by_step:
            checked = replace(checked, tensors=self._within_room(task, checked.tensors, plan))
        maps = geometries(self.strategy, self.config, checked.tensors, task.payload.tensors, *task.place)
        bits, as_sums = source(self.policy, self.name, result), sent_as_sums(self.config)
        released, outcome = privatized(plan, checked.tensors, maps, bits, as_sums)
        if self.config.diagnostics.noise:
            clean, _ = privatized(replace(plan, noise_multiplier=0.0), checked.tensors, maps)
            scaling = self.config.adapter.product_scaling
            terms = noise_diagnostics.measured(clean, released, task.payload.tensors, checked.tensors, scaling)
            with room_for(self.folder / task.run / noise_diagnostics.FILE):
                note(self.folder / task.run / noise_diagnostics.FILE, "{}-{}".format(*task.place), terms)
        self.observer({"event": "release", "site": self.name, "round": result.round, "phase": result.phase, **asdict(outcome)})
        return replace(checked, tensors=released)

    def _checked(self, result: Payload) -> Payload:
        check_upload(result, self.strategy, self.metrics)
        return result if self.share_metrics else replace(result, metrics={})
