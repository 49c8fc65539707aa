"""The guard's part in secure aggregation: answers the server's questions about masks, and masks the update."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from consilium.core.errors import Reason, RefusedError
from consilium.core.messages import Kind, Payload, Tensors
from consilium.privacy.guard import task_schedule
from consilium.privacy.guard.audit_entries import AuditTrail
from consilium.privacy.guard.release import upload_shapes
from consilium.privacy.guard.task_schedule import AuthorizedTask
from consilium.privacy.plan import DEVIATIONS, Plan
from consilium.privacy.secagg.arithmetic import UNIT, layout, quantize
from consilium.privacy.secagg.certificates import Identity
from consilium.privacy.secagg.client import FILE, SecAggClient, SiteRecord, check_weight
from consilium.privacy.secagg.server import MASKED
from consilium.privacy.secagg.sum_ledger import SumLedger, check_and_count_lines
from consilium.privacy.secagg.terms import Message, read_attempt
from consilium.strategies.strategy import Strategy

FOLDER = "masks"
"""The folder of the secure aggregation record, in a run's private folder."""
STATE = ("state.safetensors", "released.safetensors")
"""The files in a run's folder that show that the site has trained in the run."""


@dataclass
class Masking:
    """A site's part in the secure aggregation of the job of `trail`.

    `identity`: key and certificate of the site's kit, and the secure_aggregation section of its site.yaml.
    """

    trail: AuditTrail
    strategy: Strategy
    records: Path
    sums: SumLedger
    identity: Identity | None

    def check_admission(self) -> None:
        """Raise RefusedError if this site cannot take part in the job's secure aggregation, by its settings or records."""
        section = self.trail.config.secure_aggregation
        assert section is not None  # otherwise the guard has no Masking
        if self.trail.config.has_sums_without_noise:
            check_and_count_lines(self.records)
        if self.identity is None:
            raise RefusedError(f"{self.trail.site}: secure_aggregation needs a kit's key; nothing was sent", Reason.POLICY)
        if section.colluders < self.identity.asks.min_colluders:
            raise RefusedError(
                f"{self.trail.site}: secure_aggregation.colluders {section.colluders} is under min_colluders of site.yaml "
                f"({self.identity.asks.min_colluders}); nothing was sent",
                Reason.POLICY,
            )
        if section.bound is not None:
            self.check_noise_fits(section.bound, "secure_aggregation.bound is", "raise it or leave it out")
        if self.trail.policy.budgets and not (self.identity.simulated or self.identity.asks.partners):
            raise RefusedError(
                f"{self.trail.site}: site.yaml has a budget and names no secure_aggregation.partners; "
                "compare fingerprints and name them; nothing was sent",
                Reason.POLICY,
            )

    def answer(self, task: AuthorizedTask, weight: int) -> Message:
        """Return the answer to a question about masks: keys, sealed shares, signatures, or the shares that open a sum.

        `weight`: of this site. Too large a weight is refused before any site trains: without noise all must prepare a sum.
        Raises RefusedError, puts that on record, and then nothing may be sent.
        """
        question = task.payload.masking
        step = str(question.get("step"))[:40]
        try:
            if step == "prepare":
                check_weight(weight, self.trail.config)
            reply = self._open_party(task.run).answer(question)
        except RefusedError as refusal:
            self.trail.note("refusal", again=True, step=step, what=str(refusal))
            raise
        at = {key: question[key] for key in ("round", "phase", "attempt")} if step != "hello" else {}
        self.trail.note("masks", step=step, **at, **({"survivors": question["survivors"]} if step == "confirm" else {}))
        return reply

    def check_task_shares(self, task: AuthorizedTask) -> None:
        """Check the keys and shares that came with a training task, before training. Raises RefusedError and records it."""
        try:
            party = self._open_party(task.run)
            terms = party.check_train_question(task.payload, layout(upload_shapes(self.strategy, task.payload)))
            if self.trail.plan is not None:
                self.trail.plan.check_honest_noise_shares(terms.least_honest_sites)
                self.check_noise_fits(party.largest_number())
        except RefusedError as refusal:
            self.trail.note("refusal", again=True, step="train", what=str(refusal))
            raise

    def check_noise_fits(self, room: float, what: str = "sums have room for", remedy: str = "lower privacy.clip") -> None:
        """Raise RefusedError if noise could exceed `room`, the largest number in a sum. A later failure would reveal data.

        Without privacy larger numbers are cut off. `what` names the limit in the message.
        """
        if self.trail.plan and room < (largest := self.trail.plan.largest_noised_number):
            raise RefusedError(
                f"{self.trail.site}: {what} {room:.4g} a number, under the {largest:.4g} that clip and noise may come to; "
                f"nothing was sent; {remedy}",
                Reason.JOB,
            )

    def clamp_sums(self, run: str, sums: Tensors, plan: Plan) -> Tensors:
        """Return a step's sums (whole units of the grid), each number clamped to leave room for noise in the masks' integers.

        The sum of many units' gradients may be larger than one clip, and a refusal would reveal that. Limiting each number
        before the noise never increases the distance between the sums of two data sets.
        """
        most = int((self._open_party(run).largest_number() - DEVIATIONS * plan.site_noise) / UNIT)
        return {name: tensor.clamp(-most, most) for name, tensor in sums.items()}

    def mask(self, task: AuthorizedTask, released: Payload, weight: int) -> tuple[Payload, dict[str, Any]]:
        """Return the masked update, a Payload with one tensor, and the fields about masks for its line in the record.

        Tensors that are already integers on the grid, as discrete noise leaves them, are not rounded again. Under privacy the
        update carries no metrics. Raises RefusedError for tensors or shapes that differ from those of the phase.
        """
        found = {name: tuple(tensor.shape) for name, tensor in released.tensors.items()}
        if found != upload_shapes(self.strategy, task.payload) or released.scalars:
            raise RefusedError(f"{self.trail.site}: not the tensors of this phase, or numbers beside them; nothing was sent")
        party = self._open_party(task.run)
        words = party.mask(read_attempt(task.payload.masking), quantize(released.tensors), weight)
        metrics = {} if self.trail.plan else released.metrics
        masked = replace(released, tensors={MASKED: torch.from_numpy(words.view("int64").copy())}, metrics=metrics)
        return masked, party.about

    def delete_keys_if_final(self, task: AuthorizedTask) -> None:
        """Delete the run's keys at its final evaluation. Afterwards no sum of the run can be opened."""
        round, phase = task.place
        if task.kind is Kind.EVALUATE and phase == 0 and task_schedule.may_be_final_round(self.trail.config, round):
            SiteRecord(self.trail.folder / task.run / FOLDER).end()

    def _open_party(self, run: str) -> SecAggClient:
        """Return this site's protocol party. Raises RefusedError if the site has trained in this run and its record is lost."""
        assert self.identity is not None  # as check_admission makes sure
        home = self.trail.folder / run
        if not (home / FOLDER / FILE).is_file() and any((home / name).exists() for name in STATE):
            raise RefusedError(
                f"{home / FOLDER}: this site has trained in this run, and its record of masks is lost; "
                "it cannot take part in it again; nothing was sent",
                Reason.LEDGER,
            )
        sums = self.sums if self.trail.config.has_sums_without_noise else None
        return SecAggClient(self.identity, self.trail.config, run, SiteRecord(home / FOLDER), sums)
