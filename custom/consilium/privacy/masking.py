"""The guard's part in secure aggregation: who may ask for masks, and that no update leaves a job that has them without one."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from consilium.config.job import JobConfig
from consilium.config.privacy import HospitalPrivacyPolicy
from consilium.core.errors import Reason, RefusedError
from consilium.core.messages import Kind, Payload, Tensors
from consilium.privacy.guard import task_schedule
from consilium.privacy.guard.record_entries import described_tensors, privacy_of
from consilium.privacy.guard.release_checks import upload_shapes
from consilium.privacy.guard.task import Task
from consilium.privacy.ledger import audit
from consilium.privacy.ledger.ledger import Ledger
from consilium.privacy.plan import Plan
from consilium.privacy.secagg.arithmetic import UNIT, layout, quantize
from consilium.privacy.secagg.certificates import Identity
from consilium.privacy.secagg.client import Party
from consilium.privacy.secagg.record import FILE, SiteRecord
from consilium.privacy.secagg.server import MASKED
from consilium.privacy.secagg.sum_ledger import SEAL, SumLedger, check_whole
from consilium.privacy.secagg.terms import Message, Terms, read_place
from consilium.strategies.strategy import Strategy

FOLDER = "masks"
"""Where a run's private folder keeps what secure aggregation must not forget."""
DEVIATIONS = 40
"""Standard deviations of noise that a bound has room for: none is ever over it."""
STATE = ("state.safetensors", "released.safetensors")
"""What a site has kept of a run that it has trained in."""


class Masking:
    """What a guard does for secure aggregation, and its records of what leaves.

    `identity`: of the site's kit, with what its site.yaml asks.
    """

    name: str
    config: JobConfig
    strategy: Strategy
    policy: HospitalPrivacyPolicy
    folder: Path
    records: Path
    ledger: Ledger
    job_id: str
    plan: Plan | None
    identity: Identity | None
    _task: Task | None
    _run: str
    _records: dict[Path, audit.Record]
    _terms: Terms | None
    _digest: str
    sums: SumLedger
    _summed: dict[str, Any]

    @property
    def _bare(self) -> bool:
        """Whether the sums of this job reach the server without noise."""
        return self.config.sums_without_noise

    @property
    def masks(self) -> bool:
        """Whether updates of this job leave under masks only."""
        return self.config.secure_aggregation is not None

    def answer_masks(self, task: Task) -> Message:
        """Return what may leave of secure aggregation beside updates: keys, sealed shares, signatures, shares of an open sum.

        Raises RefusedError, on record, and then nothing may be sent.
        """
        self._take(task, Kind.MASKS)
        question = task.payload.masking
        step = str(question.get("step"))[:40]
        try:
            said = self._party(task.run).answer(question)
        except RefusedError as refusal:
            self._note("refusal", again=True, step=step, what=str(refusal))
            raise
        at = {key: question[key] for key in ("round", "phase", "attempt")} if step != "hello" else {}
        self._note("masks", step=step, **at, **({"survivors": question["survivors"]} if step == "confirm" else {}))
        return said

    def _open_masks(self, task: Task) -> None:
        """Check what came for masks with a training task, before any training. Raises RefusedError, on record."""
        if self.masks:
            try:
                self._terms = self._party(task.run).open(task.payload, layout(upload_shapes(self.strategy, task.payload)))
                if self.plan is not None:
                    self.plan.check_shares(self._terms.honest)
                    self._check_room(self._party(task.run).room())
            except RefusedError as refusal:
                self._note("refusal", again=True, step="train", what=str(refusal))
                raise

    @property
    def _need(self) -> float:
        """What clip and noise may come to; without privacy 0, because numbers over the bound are cut off."""
        return self.plan.clip + DEVIATIONS * self.plan.site_noise if self.plan else 0.0

    def _check_room(self, room: float) -> None:
        """Raise RefusedError where noise could come to more than sums have room for: whether it does would tell of the data."""
        if room < self._need:
            what = f"sums have room for {room:.4g} a number, under the {self._need:.4g} that clip and noise may come to"
            raise RefusedError(f"{self.name}: {what}; nothing was sent; lower privacy.clip", Reason.JOB)

    def _within_room(self, task: Task, sums: Tensors, plan: Plan) -> Tensors:
        """Return a step's sums, in units, with no number over what sums have room for beside the noise.

        The sum of many units' gradients may be larger than one clip, and a refusal would tell so. Cut off number by number
        before the noise, sums of data that differ in a unit lie no further apart than they did.
        """
        most = int((self._party(task.run).room() - DEVIATIONS * plan.site_noise) / UNIT)
        return {name: tensor.clamp(-most, most) for name, tensor in sums.items()}

    def _check_masks(self) -> None:
        """Raise RefusedError where this site does not take part in the job's secure aggregation at all."""
        section = self.config.secure_aggregation
        if section is None:
            return
        if self._bare:
            check_whole(self.records)
        if self.identity is None:
            raise RefusedError(f"{self.name}: secure_aggregation needs a kit's key; nothing was sent", Reason.POLICY)
        if section.colluders < self.identity.asks.min_colluders:
            what = f"secure_aggregation.colluders {section.colluders} is under min_colluders of site.yaml"
            raise RefusedError(f"{self.name}: {what} ({self.identity.asks.min_colluders}); nothing was sent", Reason.POLICY)
        if section.bound is not None and section.bound < self._need:
            what = f"secure_aggregation.bound {section.bound:g} is under the {self._need:.4g} that clip and noise may come to"
            raise RefusedError(f"{self.name}: {what}; nothing was sent; raise it or leave it out", Reason.JOB)
        if self.policy.budgets and not (self.identity.simulated or self.identity.asks.partners):
            what = "site.yaml has a budget and names no secure_aggregation.partners; compare fingerprints and name them"
            raise RefusedError(f"{self.name}: {what}; nothing was sent", Reason.POLICY)

    def _party(self, run: str) -> Party:
        """Return this site in the protocol. Raises RefusedError where it has trained in this run and its record is lost."""
        assert self.identity is not None  # _check_masks has looked
        home = self.folder / run
        if not (home / FOLDER / FILE).is_file() and any((home / name).exists() for name in STATE):
            what = "this site has trained in this run, and its record of masks is lost"
            raise RefusedError(f"{home / FOLDER}: {what}; it cannot take part in it again; nothing was sent", Reason.LEDGER)
        return Party(self.identity, self.config, run, SiteRecord(home / FOLDER), self.sums if self._bare else None)

    def _masked(self, task: Task, released: Payload, weight: int) -> Payload:
        """Return an update under masks, its one tensor; integers on the grid, as discrete noise makes them, stay as they are.

        With privacy nothing beside it tells of this site. Raises RefusedError for another shape than the phase has.
        """
        expected = upload_shapes(self.strategy, task.payload)
        found = {name: tuple(tensor.shape) for name, tensor in released.tensors.items()}
        if found != expected or released.scalars:
            raise RefusedError(f"{self.name}: not the tensors of this phase, or numbers beside them; nothing was sent")
        integers = quantize(released.tensors)
        party = self._party(task.run)
        words = party.mask(read_place(task.payload.masking), integers, weight)
        self._summed = party.summed
        metrics = {} if self.plan else released.metrics
        return replace(released, tensors={MASKED: torch.from_numpy(words.view("int64").copy())}, metrics=metrics)

    @property
    def _masks_said(self) -> dict[str, Any]:
        """What the record says of the masks of an update; without noise also whom it is summed with."""
        if self._terms is None:
            return {}
        named = {"sites": self._summed["sites"]} if self._summed else {}
        return {"masked": asdict(self._terms) | named} | ({SEAL: self._summed[SEAL]} if self._summed else {})

    def _end_masks(self, task: Task) -> None:
        """Forget the run's keys at its last evaluation: from then on no sum of it can be asked for."""
        round, phase = task.place
        if self.masks and task.kind is Kind.EVALUATE and phase == 0 and task_schedule.ends(self.config, round):
            SiteRecord(self.folder / task.run / FOLDER).end()

    # what every guard does ---------------------------------------------------------------------------------------------

    def _take(self, task: Task, kind: Kind) -> None:
        """Use up the authorization. Raises RefusedError unless `task` is the one that stands."""
        standing, self._task = self._task, None
        if standing is None or task is not standing or task.kind is not kind:
            raise RefusedError(f"{self.name}: an answer to a task that was not authorized; nothing was sent", Reason.TASK)

    def _note(self, kind: str, payload: Payload | None = None, spends: bool = False, again: bool = False, **said: Any) -> None:
        """Put a message into the site's record before it leaves, see audit.py."""
        job = {"job": self.config.name, "experiment": self.config.experiment}
        line: dict[str, Any] = {"site": self.name, **job, "run": self._run}
        line |= {"flare_job": self.job_id, "job_digest": self._digest, "ledger": self.ledger.seal(), "kind": kind, **said}
        if payload is not None:
            line |= {"round": payload.round, "phase": payload.phase, "tensors": described_tensors(payload.tensors)}
            line |= {"scalars": payload.scalars, "metrics": payload.metrics}
        if spends and self.plan is not None:
            line["privacy"] = privacy_of(self.plan, self.policy.noise_seed is not None)
        path = self.folder / self._run / audit.FILE
        self._records.setdefault(path, audit.Record(path)).add(line, again)
