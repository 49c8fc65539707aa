"""The guard of a site: checks every task that arrives and every answer that leaves.

It does not depend on FLARE: the in-process engine and the FLARE filters use the same guard. The guard authorizes one task at a
time, and the client runs exactly the authorized object. The guard checks names, roles and values of the answer, clips it, adds
noise, stores the release, writes the ledger, and only then returns the release. A replayed task gets the same answer again and
spends nothing, see release_store.py. In case of doubt nothing is sent.
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
from consilium.core.seeding import seed_for
from consilium.core.storage import lock_folder, note, refuse_if_unwritable
from consilium.data.stats import Tally
from consilium.privacy import disclosure_control, ledger, mechanism
from consilium.privacy.accounting import Entry
from consilium.privacy.guard import task_schedule
from consilium.privacy.guard.audit_entries import DATA_DEPENDENT_REASONS, AuditTrail, Charges
from consilium.privacy.guard.masking import Masking
from consilium.privacy.guard.release import (
    check_complete,
    check_model,
    check_shares_model,
    check_upload,
    geometries,
    privatize_update,
    record_scored_model,
    server_sees_only_sums,
)
from consilium.privacy.guard.release_store import ReplayPolicy
from consilium.privacy.guard.task_schedule import AuthorizedTask
from consilium.privacy.ledger import Ledger
from consilium.privacy.plan import Plan, check_policy, make_plan
from consilium.privacy.randomness import Randomness
from consilium.privacy.secagg.certificates import Identity
from consilium.privacy.secagg.sum_ledger import SumLedger
from consilium.strategies.strategy import Strategy, scaling_multiplier


@dataclass
class Guard:
    """The guard of one site for one job.

    Call authorize(...) for each task before the client sees it, then answer(...) once with the same task object.

    `metrics`: names of the metrics that may leave; `dataset`: the data set's name in the ledger; `num_samples`: the site's
    training records or patients; `folder`: has one folder per run of this submission; `records`: holds the records of all runs
    of the site; `job_id`: FLARE's job id, "" for the in-process engine; `listed`: the path of the data list, the data set's
    former name in the ledger; `terms`: the site's rules for statistics; `tensors`: names of all adapter tensors; `test_only`:
    the site never trains; `share_personalized`: the site's own model may leave for a cross-site job; `ready`: prepares the site
    for training and raises, for example, DataError if files are missing; `identity`: key and certificate of the kit, for secure
    aggregation.

    `replay` is None without privacy, `masking` is None without secure aggregation.
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
    terms: disclosure_control.Terms = disclosure_control.TERMS
    tensors: Collection[str] = ()
    test_only: bool = False
    share_personalized: bool = False
    ready: Callable[[], object] = lambda: None
    identity: InitVar[Identity | None] = None

    def __post_init__(self, identity: Identity | None) -> None:
        self.plan: Plan | None = make_plan(self.config, self.strategy, self.num_samples, self.tensors)
        self.trail = AuditTrail(self.name, self.config, self.plan, self.policy, self.folder, self.ledger, self.job_id)
        charges = None if self.plan is None else Charges(self.trail, self.plan, self.dataset)
        self.replay = None if charges is None else ReplayPolicy(charges, self.trail, self.records)
        masked = self.config.secure_aggregation is not None
        self.masking = Masking(self.trail, self.strategy, self.records, self.sums, identity) if masked else None
        self._admitted: str | None = None
        self._task: AuthorizedTask | None = None
        self._asked: AuthorizedTask | None = None

    @property
    def shown_samples(self) -> int:
        """The number of samples or patients shown to the server.

        It is 0 for a test-only site, and 1 if the privacy claim hides the number or the job does not train.
        """
        hidden = (self.replay is not None and (self.masking or not self.replay.charges.is_dpsgd)) or not self.config.trains
        return 0 if self.test_only else 1 if hidden else self.num_samples

    # incoming tasks ----------------------------------------------------------------------------------------------------

    def authorize(self, kind: Kind, run: str, payload: Payload | None = None, seal: str = "") -> AuthorizedTask:
        """Return the task that the client may run. It can be answered once, and a newer task replaces it.

        The run's first task also checks the job against policy and budgets. `seal`: the last seal of the site's ledger that the
        server has, sent with a hello; "" for none. Raises RefusedError for a run, round or phase that the job does not have,
        for a job that the policy forbids, for a ledger that lacks rows, and for a budget that is used up. DP-SGD writes its
        ledger row here, because the training itself is the cost.
        """
        self.end_task()
        own = task_schedule.site_run_id(self.name, run, self.trail.digest, self.job_id)
        task = AuthorizedTask(kind, own, payload or Payload(-1, -1, {}))
        self.trail.run = task.run
        task_schedule.check_round_phase(self.name, self.config, self.strategy, task, self.test_only)
        if task.run != self._admitted:
            self._admit(task.run)
        ledger.check_has_seal(self.records, self.ledger, seal)
        if kind is Kind.STATISTICS:
            self.terms.check(self.name, self.policy.requires_privacy, self.config.privacy is not None)
            disclosure_control.check_question(self.records, self.dataset, self.config, self.listed)
        if kind is Kind.MODEL:
            check_shares_model(self.name, self.config, self.share_personalized, self.policy.requires_privacy)
        if kind is Kind.EVALUATE and self.config.cross_site:
            record_scored_model(self.folder, task.place, task.payload)  # the server alone names the run
        if kind is Kind.TRAIN and self.masking:
            self.masking.check_task_shares(task)  # before reading the stored answer, on which an error here must not depend
        if kind is Kind.TRAIN and self.replay:
            task = self.replay.admit(task, self.ready)
        if self.masking:
            self.masking.delete_keys_if_final(task)
        self._task = self._asked = task
        return task

    def end_task(self) -> None:
        """Forget the current task because another message has arrived. The old task can no longer be answered."""
        self._task = self._asked = None

    def _admit(self, run: str) -> None:
        """Admit the job, or raise RefusedError, by policy and budget, before it reads any data."""
        counts = not self.config.trains and self.config.cross_site is None  # a job that only collects statistics
        if not (counts and self.terms.share):
            check_policy(self.name, self.plan, self.policy)
        if self.masking:
            self.masking.check_admission()
        ledger.check_no_lost_rows(self.records, self.ledger)
        if self.replay and self.config.trains:
            ledger.check_dataset_name(self.name, self.dataset, self.listed, self.ledger)
            self.replay.charges.check(self.planned_rows(run))
        self._admitted = run

    def planned_rows(self, run: str) -> list[Entry]:
        """Return the ledger rows of all answers of a run, by the site's own name for it; none if nothing is charged."""
        if self.replay is None or not self.config.trains:
            return []
        rounds = range(self.config.training.rounds)
        return self.replay.rows(
            run, [(round, phase) for round in rounds for phase in range(self.strategy.traits.phases_of(round))]
        )

    def _mark_answered(self, task: AuthorizedTask, kind: Kind) -> None:
        """Mark the authorized task as answered. Raises RefusedError for any other task, and for a second answer."""
        current, self._task = self._task, None
        if current is None or task is not current or task.kind is not kind:
            raise RefusedError(f"{self.name}: an answer to a task that was not authorized; nothing was sent", Reason.TASK)

    # outgoing answers --------------------------------------------------------------------------------------------------

    def answer(self, task: AuthorizedTask, result: Any) -> Any:
        """Return the answer that may leave for a task with this `result`: plain values or a Payload, by the kind of task.

        Raises RefusedError, and then nothing may be sent.
        """
        if task.kind is Kind.MASKS:
            self._mark_answered(task, Kind.MASKS)
            assert self.masking is not None  # otherwise the job has no such task
            return self.masking.answer(task, self.config.weight(self.shown_samples))
        leave: dict[Kind, Callable[[AuthorizedTask, Any], Any]] = {
            Kind.HELLO: self.release_hello,
            Kind.STATISTICS: self.release_statistics,
            Kind.MODEL: self.release_model,
            Kind.EVALUATE: self.release_scores,
            Kind.TRAIN: self.release,
        }
        return leave[task.kind](task, result)

    def release_hello(self, task: AuthorizedTask, hello: Mapping[str, Any]) -> dict[str, Any]:
        """Return a site's hello as it leaves: declared fields, the number of samples that may be shown, the ledger's seal."""
        self._mark_answered(task, Kind.HELLO)
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
        """Return the update that may leave for a training result. Raises RefusedError, and then nothing may be sent."""
        self._mark_answered(task, Kind.TRAIN)
        if (result.round, result.phase) != task.place:
            raise RefusedError(
                f"{self.name}: a result for round {result.round} phase {result.phase} nobody asked for; nothing was sent"
            )
        with lock_folder(self.folder / task.run):  # a process that FLARE gave up may still run beside its successor
            checked = (
                self.replay.load_or_make(task, lambda: self._make_release(task, result))
                if self.replay
                else self._checked_result(result)
            )
            released = self._finalize_release(task, checked)
        self._asked = None
        return released

    def _finalize_release(self, task: AuthorizedTask, released: Payload) -> Payload:
        """Pay for a release, mask it, put it on record, and return it as it leaves.

        A release of zeros (all public peers are zero) costs the same, because it shows that training succeeded.
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
        """Return an evaluation's answer as it leaves: only the metrics, and those only if the site shares them.

        Raises RefusedError, and then nothing may be sent.
        """
        self._mark_answered(task, Kind.EVALUATE)
        if result.tensors:
            raise RefusedError(f"{self.name}: an evaluation with tensors; nothing was sent")
        scores = self._record_scores(task, result.metrics)
        self._asked = None
        return scores

    def _record_scores(self, task: AuthorizedTask, metrics: Mapping[str, float]) -> Payload:
        """Check an evaluation's scores, add the ledger's seal, put them on record, and return them as they leave."""
        checked = self._checked_result(Payload(*task.place, {}, metrics=dict(metrics)))
        checked = replace(checked, ledger=self.ledger.seal())
        self.trail.note("evaluation", checked)
        return checked

    def release_statistics(self, task: AuthorizedTask, counted: Tally) -> dict[str, Any]:
        """Return the statistics that may leave, the same every time. Raises RefusedError, and then nothing may be sent."""
        self._mark_answered(task, Kind.STATISTICS)
        shown = disclosure_control.answer_once(self.records, self.dataset, self.config, counted, self.terms, self.listed)
        self.trail.note("statistics", values=shown)
        return shown

    def release_model(self, task: AuthorizedTask, result: Payload) -> Payload:
        """Return the site's own model, as it leaves for a cross-site job. Raises RefusedError, and then nothing may be sent."""
        self._mark_answered(task, Kind.MODEL)
        check_model(self.name, result, self.tensors)
        released = replace(result, round=-1, phase=-1, ledger=self.ledger.seal())
        self.trail.note("model", released)
        return released

    def refuse(self, reason: Reason) -> Reason | tuple[AuthorizedTask, Payload]:
        """Put a refusal on record before it leaves; return the reason to send, or the task and the answer to send instead.

        In a private job a refusal that depends on the data is an answer: final for its round and phase, and charged like a
        release. If the scores of an evaluation stay at the site, the server gets the usual empty answer and never learns that
        the evaluation failed. Raises RefusedError if the refusal cannot be stored.
        """
        task, self._task, self._asked = self._asked, None, None
        if self.replay and task is not None and task.kind is Kind.TRAIN and reason in DATA_DEPENDENT_REASONS:
            with lock_folder(self.folder / task.run):
                answer = self.replay.refuse(task, reason)
                return answer if isinstance(answer, Reason) else (task, self._finalize_release(task, answer))
        if task is not None and task.kind is Kind.EVALUATE and not self.share_metrics:
            empty = self._record_scores(task, {})
            with suppress(RefusedError):  # a full disk must not change the answer
                self.trail.note("refusal", again=True, reason=reason.value, stays=True)
            return task, empty
        self.trail.note("refusal", again=True, reason=reason.value)
        return reason

    def _make_release(self, task: AuthorizedTask, result: Payload) -> Payload:
        """Return a new release made from `result`: checked, clipped, and with the plan's noise."""
        plan, checked = self.plan, self._checked_result(result)
        assert plan is not None
        assert self.replay is not None
        if self.replay.charges.is_dpsgd and not plan.is_distributed_dpsgd:
            return checked
        check_complete(self.name, self.strategy, checked, task.payload)
        if plan.is_distributed_dpsgd:
            assert self.masking is not None  # trust distributed requires secure aggregation
            checked = replace(checked, tensors=self.masking.clamp_sums(task.run, checked.tensors, plan))
        maps = geometries(self.strategy, self.config, checked.tensors, task.payload.tensors, *task.place)
        seed = self.policy.noise_seed
        bits = Randomness.of(None if seed is None else seed_for(seed, self.name, result.round, result.phase))
        released, outcome = privatize_update(plan, checked.tensors, maps, bits, server_sees_only_sums(self.config))
        if self.config.diagnostics.noise:
            clean, _ = privatize_update(replace(plan, noise_multiplier=0.0), checked.tensors, maps)
            scaling = self.config.adapter.product_scaling * scaling_multiplier(self.strategy, task.payload)
            terms = mechanism.measure_noise_terms(clean, released, task.payload.tensors, checked.tensors, scaling)
            with refuse_if_unwritable(self.folder / task.run / mechanism.FILE):
                note(self.folder / task.run / mechanism.FILE, "{}-{}".format(*task.place), terms)
        self.observer({"event": "release", "site": self.name, "round": result.round, "phase": result.phase, **asdict(outcome)})
        return replace(checked, tensors=released)

    def _checked_result(self, result: Payload) -> Payload:
        check_upload(result, self.strategy, self.metrics)
        return result if self.share_metrics else replace(result, metrics={})
