"""What may leave a site, and in what state. Pure of FLARE: the in-process engine and the FLARE filters use the same guard.

The guard authorizes one task at a time, and exactly the authorized object runs. It checks names, roles and values of the
answer, clips it, adds noise, stores the release, writes the ledger, and only then returns it. A replayed task gets the same
answer again and spends nothing, see release_store.py. On any doubt nothing is sent.
"""

from collections.abc import Callable, Collection, Mapping, Set
from contextlib import suppress
from dataclasses import InitVar, asdict, dataclass, replace
from pathlib import Path
from typing import Any

from consilium.config.job import JobConfig
from consilium.config.privacy import HospitalPrivacyPolicy
from consilium.core.errors import Reason, RefusedError
from consilium.core.messages import CAPACITY, LIBRARIES, PROTOCOL, Kind, Payload
from consilium.core.storage import locked, note, room_for
from consilium.data.counts import Tally
from consilium.privacy import mechanism, statistics
from consilium.privacy.guard import release_checks, task_schedule
from consilium.privacy.guard.audit_trail import DATA_DEPENDENT_REASONS, AuditTrail, Charges
from consilium.privacy.guard.masking import Masking
from consilium.privacy.guard.release_checks import check_complete, check_upload, geometries, privatized, sent_as_sums, source
from consilium.privacy.guard.release_store import ReplayPolicy
from consilium.privacy.guard.task_schedule import AuthorizedTask
from consilium.privacy.ledger import ledger
from consilium.privacy.ledger.ledger import Ledger
from consilium.privacy.plan import Plan, check_policy, make_plan
from consilium.privacy.secagg.certificates import Identity
from consilium.privacy.secagg.sum_ledger import SumLedger
from consilium.strategies.strategy import Strategy


@dataclass
class Guard:
    """One site's gate for one job. `dataset` and `num_samples` are the site's; `records`: the folder of all its runs' records.

    Call authorize(...) for each task before the site sees it, then answer(...) once with that very task. `job_id`: FLARE's, ""
    in process; `listed`: the path of the data's list, their former name in the ledger; `terms`: the site's rules for
    statistics; `tensors`: the adapter's names; `test_only`: nothing is trained here; `share_personalized`: the site's own model
    may go to a cross-site job; `ready`: makes the site ready to train, and raises for example DataError where files are
    missing; `identity`: of the kit, for secure aggregation.

    `replay` is None without privacy, `masking` without secure aggregation.
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
    identity: InitVar[Identity | None] = None

    def __post_init__(self, identity: Identity | None) -> None:
        self.plan: Plan | None = make_plan(self.config, self.strategy, self.num_samples, self.tensors)
        self.trail = AuditTrail(
            self.name, self.config, self.plan, self.policy.noise_seed is not None, self.folder, self.ledger, self.job_id
        )
        self.replay: ReplayPolicy | None = None
        if self.plan is not None:
            charges = Charges(self.name, self.config, self.plan, self.policy, self.ledger, self.dataset)
            self.replay = ReplayPolicy(charges, self.trail, self.folder, self.records)
        self.masking: Masking | None = None
        if self.config.secure_aggregation is not None:
            self.masking = Masking(
                self.name, self.config, self.strategy, self.plan, self.policy, self.folder, self.records, self.sums, self.trail,
                identity,
            )  # fmt: skip
        self._digest = self.config.digest
        self._admitted: str | None = None
        self._task: AuthorizedTask | None = None
        self._asked: AuthorizedTask | None = None

    @property
    def shown_samples(self) -> int:
        """The number of samples or patients that leaves: 1 where the claim hides it or nothing trains, 0 for `test_only`."""
        hidden = (self.replay is not None and (self.masking or not self.replay.charges.in_steps)) or not self.config.trains
        return 0 if self.test_only else 1 if hidden else self.num_samples

    # what arrives ------------------------------------------------------------------------------------------------------

    def authorize(self, kind: Kind, run: str, payload: Payload | None = None, seal: str = "") -> AuthorizedTask:
        """Return the task to run, before the site sees anything of it. It can be answered once; a newer one ends it.

        Admits the job first. `seal`: the last seal of the site's ledger that the server has, sent with a hello; "" for none.
        Raises RefusedError for a run, round or phase that the job does not have, by policy, for a ledger that lacks rows, and
        when the budget is used up. Record-level DP writes its ledger row here, because training itself is the cost.
        """
        self.end_task()
        own = task_schedule.site_run_id(self.name, run, self._digest, self.job_id)
        task = AuthorizedTask(kind, own, payload or Payload(-1, -1, {}))
        self.trail.run = task.run
        task_schedule.check_place(self.name, self.config, self.strategy, task, self.test_only)
        if task.run != self._admitted:
            self._admit(task.run)
        ledger.check_seal(self.records, self.ledger, seal)
        if kind is Kind.STATISTICS:
            self.terms.check(self.name, self.policy.protects, self.config.privacy is not None)
            statistics.check_question(self.records, self.dataset, self.config, self.listed)
        if kind is Kind.MODEL:
            release_checks.check_shares_model(self.name, self.config, self.share_personalized, self.policy.protects)
        if kind is Kind.EVALUATE and self.config.cross_site:
            release_checks.check_once(self.folder, task.place, task.payload)  # the server alone names the run
        if kind is Kind.TRAIN and self.masking:
            self.masking.open(task)  # before the stored answer is read: an error here must not depend on it
        if kind is Kind.TRAIN and self.replay:
            task = self.replay.admit(task, self.ready)
        if self.masking:
            self.masking.end(task)
        self._task = self._asked = task
        return task

    def end_task(self) -> None:
        """Forget the current task, because another message has come: nothing that follows answers the old one."""
        self._task = self._asked = None

    def _admit(self, run: str) -> None:
        """Accept or refuse the whole job, with the numbers, before it touches any data."""
        counts = not self.config.trains and self.config.cross_site is None  # a job of statistics only is the site's to allow
        if not (counts and self.terms.share):
            check_policy(self.name, self.plan, self.policy)
        if self.masking:
            self.masking.check_admission()
        ledger.check(self.records, self.ledger)
        if self.replay and self.config.trains:
            ledger.check_name(self.name, self.dataset, self.listed, self.ledger)
            rounds = range(self.config.training.rounds)
            places = [(round, phase) for round in rounds for phase in range(self.strategy.traits.phases_of(round))]
            self.replay.charges.check(self.replay.rows(run, places))
        self._admitted = run

    def _take(self, task: AuthorizedTask, kind: Kind) -> None:
        """Note that the authorized task is answered. Raises RefusedError for any other task, and for a second answer."""
        current, self._task = self._task, None
        if current is None or task is not current or task.kind is not kind:
            raise RefusedError(f"{self.name}: an answer to a task that was not authorized; nothing was sent", Reason.TASK)

    # what leaves -------------------------------------------------------------------------------------------------------

    def answer(self, task: AuthorizedTask, result: Any) -> Any:
        """Return what may leave of a task's result, of any kind: plain values, or a Payload. Raises RefusedError."""
        if task.kind is Kind.MASKS:
            self._take(task, Kind.MASKS)
            if self.masking is None:
                raise RefusedError(f"{self.name}: an answer about masks in a job without them; nothing was sent", Reason.TASK)
            return self.masking.answer(task)
        leave: dict[Kind, Callable[[AuthorizedTask, Any], Any]] = {
            Kind.HELLO: self.greet,
            Kind.STATISTICS: self.release_statistics,
            Kind.MODEL: self.release_model,
            Kind.EVALUATE: self.release_scores,
            Kind.TRAIN: self.release,
        }
        return leave[task.kind](task, result)

    def greet(self, task: AuthorizedTask, hello: Mapping[str, Any]) -> dict[str, Any]:
        """Return what may leave of a site's hello: its declared fields, the number of samples the server may know, the seal."""
        self._take(task, Kind.HELLO)
        shown = {
            "name": self.name,
            "num_samples": self.shown_samples,
            "joined": bool(hello["joined"]) and (self.replay is None or self.replay.charges.has_released(task.run)),
            "version": str(hello["version"]),
            "checkpoint": str(hello["checkpoint"]),
            "capacity": {key: float(value) for key, value in dict(hello["capacity"]).items() if key in CAPACITY},
            "ledger": self.ledger.seal(),
            "plugins": self.config.packages,
            "test_only": self.test_only,
            "protocol": PROTOCOL,
            "seeded": self.plan is not None and self.policy.noise_seed is not None,
            "libraries": {name: str(version) for name, version in dict(hello["libraries"]).items() if name in LIBRARIES},
        }
        self.trail.note("hello", values=shown)
        return shown

    def release(self, task: AuthorizedTask, result: Payload) -> Payload:
        """Return what may leave of a training result. Raises RefusedError, and then nothing may be sent."""
        self._take(task, Kind.TRAIN)
        if (result.round, result.phase) != task.place:
            what = f"a result for round {result.round} phase {result.phase} nobody asked for; nothing was sent"
            raise RefusedError(f"{self.name}: {what}")
        with locked(self.folder / task.run):  # FLARE may have given up a process that still works beside its successor
            checked = self.replay.once(task, lambda: self._prepare(task, result)) if self.replay else self._checked(result)
            released = self._finalize_release(task, checked)
        self._asked = None
        return released

    def _finalize_release(self, task: AuthorizedTask, released: Payload) -> Payload:
        """Return a release as it leaves: paid, masked, on record.

        One of zeros (all public peers are zero) costs the same: it shows that training went well.
        """
        about: dict[str, Any] = {}
        if self.replay:
            self.replay.pay(task, released)
        if self.masking:
            released, about = self.masking.mask(task, released, self.config.weight(self.shown_samples))
        released = replace(released, ledger=self.ledger.seal())
        self.trail.note("update", released, self.plan is not None, **about)
        return released

    def release_scores(self, task: AuthorizedTask, result: Payload) -> Payload:
        """Return what may leave of an evaluation: shared metrics, no tensors, nothing else of the answer.

        Raises RefusedError, and then nothing may be sent.
        """
        self._take(task, Kind.EVALUATE)
        if result.tensors:
            raise RefusedError(f"{self.name}: an evaluation with tensors; nothing was sent")
        scores = self._scores(task, result.metrics)
        self._asked = None
        return scores

    def _scores(self, task: AuthorizedTask, metrics: Mapping[str, float]) -> Payload:
        """Return an evaluation's answer as it leaves, on record."""
        checked = self._checked(Payload(*task.place, {}, metrics=dict(metrics)))
        checked = replace(checked, ledger=self.ledger.seal())
        self.trail.note("evaluation", checked)
        return checked

    def release_statistics(self, task: AuthorizedTask, counted: Tally) -> dict[str, Any]:
        """Return what may leave of a site's counts, the same every time. Raises RefusedError, and then nothing may be sent."""
        self._take(task, Kind.STATISTICS)
        shown = statistics.answer(self.records, self.dataset, self.config, counted, self.terms, self.listed)
        self.trail.note("statistics", values=shown)
        return shown

    def release_model(self, task: AuthorizedTask, result: Payload) -> Payload:
        """Return the site's own model, as it leaves for a cross-site job. Raises RefusedError, and then nothing may be sent."""
        self._take(task, Kind.MODEL)
        release_checks.check_model(self.name, result, self.tensors)
        released = replace(result, round=-1, phase=-1, ledger=self.ledger.seal())
        self.trail.note("model", released)
        return released

    def refuse(self, reason: Reason) -> Reason | tuple[AuthorizedTask, Payload]:
        """Put a refusal on record before it leaves, each one; return the reason that leaves, or the answer in its place.

        In a private job a refusal that depends on the data is an answer: final for its round and phase, and charged like a
        release. Of an evaluation whose scores stay here, the server never learns that it failed. Raises RefusedError if the
        refusal cannot be stored.
        """
        task, self._task, self._asked = self._asked, None, None
        if self.replay and task is not None and task.kind is Kind.TRAIN and reason in DATA_DEPENDENT_REASONS:
            with locked(self.folder / task.run):
                answer = self.replay.refuse(task, reason)
                return answer if isinstance(answer, Reason) else (task, self._finalize_release(task, answer))
        if self.replay and task is not None and task.kind is Kind.EVALUATE and not self.share_metrics:
            empty = self._scores(task, {})
            with suppress(RefusedError):  # a full disk must not change the answer
                self.trail.note("refusal", again=True, reason=reason.value)
            return task, empty
        self.trail.note("refusal", again=True, reason=reason.value)
        return reason

    def _prepare(self, task: AuthorizedTask, result: Payload) -> Payload:
        """Return a new release of `result`: checked, clipped, and with noise by the plan."""
        plan, checked = self.plan, self._checked(result)
        assert plan is not None
        assert self.replay is not None
        if self.replay.charges.in_steps and not plan.by_step:
            return checked
        check_complete(self.name, self.strategy, checked, task.payload)
        if plan.by_step:
            assert self.masking is not None  # the job says so
            checked = replace(checked, tensors=self.masking.within_room(task.run, checked.tensors, plan))
        maps = geometries(self.strategy, self.config, checked.tensors, task.payload.tensors, *task.place)
        bits, as_sums = source(self.policy, self.name, result), sent_as_sums(self.config)
        released, outcome = privatized(plan, checked.tensors, maps, bits, as_sums)
        if self.config.diagnostics.noise:
            clean, _ = privatized(replace(plan, noise_multiplier=0.0), checked.tensors, maps)
            scaling = self.config.adapter.product_scaling
            terms = mechanism.measured(clean, released, task.payload.tensors, checked.tensors, scaling)
            with room_for(self.folder / task.run / mechanism.FILE):
                note(self.folder / task.run / mechanism.FILE, "{}-{}".format(*task.place), terms)
        self.observer({"event": "release", "site": self.name, "round": result.round, "phase": result.phase, **asdict(outcome)})
        return replace(checked, tensors=released)

    def _checked(self, result: Payload) -> Payload:
        check_upload(result, self.strategy, self.metrics)
        return result if self.share_metrics else replace(result, metrics={})
