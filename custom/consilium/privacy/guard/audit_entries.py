"""The guard's entries in the record of what left a site, its stored refusals, and the charges of a private job.

The record itself is privacy/audit_log.py.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from consilium.config.job import JobConfig
from consilium.config.privacy import HospitalPrivacyPolicy
from consilium.core.errors import Reason, RefusedError
from consilium.core.messages import Payload
from consilium.core.norms import norms
from consilium.core.storage import read_notes, refuse_if_unwritable, unreadable_error, write_json
from consilium.privacy import audit_log
from consilium.privacy.accounting import DISCRETE, Entry
from consilium.privacy.ledger import Ledger
from consilium.privacy.plan import Plan


@dataclass
class AuditTrail:
    """Writes the audit entries of one job at one site. `folder` has one folder per run; `run` is the current run's name.

    `policy`: of the site; `job_id`: FLARE's job id, "" for the in-process engine.
    """

    site: str
    config: JobConfig
    plan: Plan | None
    policy: HospitalPrivacyPolicy
    folder: Path
    ledger: Ledger
    job_id: str
    run: str = ""
    _records: dict[Path, audit_log.AuditLog] = field(default_factory=dict, init=False)

    @cached_property
    def digest(self) -> str:
        """The job's digest, which takes long to compute."""
        return self.config.digest

    def note(self, kind: str, payload: Payload | None = None, spends: bool = False, again: bool = False, **more: Any) -> None:
        """Write the line of a message before it leaves. Raises RefusedError if it cannot be written.

        `spends`: the message costs privacy; `again`: write a line even if the message has one; `more`: further fields.
        """
        line: dict[str, Any] = {
            "site": self.site,
            "job": self.config.name,
            "experiment": self.config.experiment,
            "run": self.run,
            "flare_job": self.job_id,
            "job_digest": self.digest,
            "ledger": self.ledger.seal(),
            "kind": kind,
            **more,
        }
        if payload is not None:
            sizes = norms(payload.tensors)
            line |= {
                "round": payload.round,
                "phase": payload.phase,
                "tensors": {
                    name: {
                        "shape": list(tensor.shape),
                        "dtype": str(tensor.dtype).removeprefix("torch."),
                        "bytes": tensor.numel() * tensor.element_size(),
                        "norm": sizes[name],
                    }
                    for name, tensor in payload.tensors.items()
                },
                "scalars": payload.scalars,
                "metrics": payload.metrics,
            }
        if spends and self.plan is not None:
            private = self.plan.config
            line["privacy"] = {
                "unit": private.unit,
                "adjacency": private.adjacency,
                "trust": private.trust,
                "delta": private.delta,
                **({"calibration": private.calibration} if private.calibration != "honest" else {}),
                "mechanism": DISCRETE,
                **({"seeded": True} if self.policy.noise_seed is not None else {}),
                "clip": private.clip,
                "noise_multiplier": self.plan.noise_multiplier,
                "spend": asdict(self.plan.event),
            }
        path = self.folder / self.run / audit_log.FILE
        self._records.setdefault(path, audit_log.AuditLog(path)).add(line, again)


# refusals --------------------------------------------------------------------------------------------------------------
# Stored refusals: failures that depend on the data and on the values that the server sent. In a private job such a refusal is
# the final answer of its round and phase.
#
# Otherwise a server could repeat a round with different values and learn one bit about the data each time.

ATTEMPT_SEPARATOR = ".after-word-"
"""Separates, in the ledger, a run's name from the number of earlier refusals in the same round and phase."""
REFUSAL_DIGEST = "word"
"""The digest in a refusal's row of the ledger. Site-level rows of a former version have no digest."""
DATA_DEPENDENT_REASONS = frozenset({Reason.TRAINING, Reason.RESULT, Reason.ERROR, Reason.LEDGER, Reason.CHECKPOINT})
"""Reasons that may depend on a site's data and on the values that the server sent.

`ledger` is among them because a disk may have space for a refusal and not for a release. `checkpoint` is among them because
successful training may have left tensors that do not fit the server's.
"""


class StoredRefusal(NamedTuple):
    """A stored refusal. `row`: the run's name in the ledger row that pays for it.

    `terms`: that row without its digest, as it was when training failed.
    """

    reason: Reason
    row: str
    terms: Entry


def save_refusal(run: Path, place: tuple[int, int], refusal: StoredRefusal) -> None:
    """Store the refusal of a round and phase in the run's folder. Raises RefusedError if it cannot be written.

    `place`: round and phase. A refusal is stored before it is paid, and names its ledger row. If the process ends in between,
    the next replay pays, once. A refusal that was paid but not stored would be paid again at every replay.
    """
    with refuse_if_unwritable(_refusal_path(run, place)):
        values = {"word": refusal.reason.value, "row": refusal.row, "terms": asdict(refusal.terms)}
        write_json(_refusal_path(run, place), values)


def load_refusal(run: Path, place: tuple[int, int]) -> StoredRefusal | None:
    """Return the stored refusal of a round and phase, None if there is none. Raises RefusedError for an unreadable file."""
    if not (file := _refusal_path(run, place)).is_file():
        return None
    remedy = (
        "restore it; after removing it, the round can be tried again until a newer round has begun, and a new release is "
        "charged again"
    )
    found = read_notes(file, remedy)
    try:
        if not isinstance(found["row"], str):
            raise TypeError
        return StoredRefusal(Reason(found["word"]), found["row"], Entry.of(found["terms"]))
    except (KeyError, ValueError, TypeError):
        raise unreadable_error(file, remedy) from None


def ledger_run_id(rows: Iterable[Entry], run: str, place: tuple[int, int]) -> str:
    """Return the run's name in the ledger for the next attempt at a round and phase; it changes after each paid refusal."""
    here = [row for row in rows if (row.round, row.phase) == place and run_of(row) == run]
    refused = sum(row.digest == REFUSAL_DIGEST or (row.unit == "site" and row.count > 0 and not row.digest) for row in here)
    return f"{run}{ATTEMPT_SEPARATOR}{refused}" if refused else run


def run_of(row: Entry) -> str:
    """Return the run's name in a row without the number of refusals."""
    return row.run.partition(ATTEMPT_SEPARATOR)[0]


def _refusal_path(run: Path, place: tuple[int, int]) -> Path:
    return run / "refused" / "{}-{}.json".format(*place)


# charges ---------------------------------------------------------------------------------------------------------------
# The cost of a private job's answers at a site: their rows in the privacy ledger, and the budgets that limit them.


@dataclass
class Charges:
    """Charges the answers of the job of `trail`, under its `plan`. `dataset`: the name of the data set in the ledger."""

    trail: AuditTrail
    plan: Plan
    dataset: str

    @property
    def is_dpsgd(self) -> bool:
        """Whether the training steps themselves are private (DP-SGD). Then they are charged before training."""
        return self.plan.config.unit != "site"

    def ledger_run(self, run: str, place: tuple[int, int]) -> str:
        """Return the run's name in the ledger for the next attempt at a round and phase."""
        return ledger_run_id(self.trail.ledger.entries(self.dataset), run, place)

    def row(self, run: str, place: tuple[int, int]) -> Entry:
        """Return the ledger row of a release, without its digest. `run`: its name in the ledger; `place`: round and phase."""
        privacy, spend = self.plan.config, self.plan.event
        return Entry(
            dataset=self.dataset, unit=privacy.unit, adjacency=privacy.adjacency, trust=privacy.trust,
            job=self.trail.config.title, run=run, round=place[0], phase=place[1],
            noise_multiplier=spend.noise_multiplier, sample_rate=spend.sample_rate, count=spend.count, clip=privacy.clip,
            private=self.trail.policy.noise_seed is None, mechanism=DISCRETE,
        )  # fmt: skip

    def check(self, rows: list[Entry]) -> None:
        """Raise RefusedError if these rows would exceed a budget. Writes nothing."""
        self.trail.ledger.check_budget(rows, self.trail.policy.budgets)

    def charge_answer(self, row: Entry, digest: str) -> None:
        """Charge an answer with this digest, once.

        With DP-SGD the row has count 0, because the steps were charged when training began.
        """
        count = 0 if self.is_dpsgd else row.count
        self.trail.ledger.charge_once(replace(row, digest=digest, count=count), self.trail.policy.budgets)

    def check_terms(self, terms: Entry, row: Entry) -> None:
        """Raise RefusedError if `row` does not cover `terms`, the terms on which a stored answer was made."""
        if not row.pays_for(terms):
            raise RefusedError(
                f"{row.name} was answered on other terms (noise multiplier {terms.noise_multiplier:.6g}, now "
                f"{row.noise_multiplier:.6g}); nothing was sent; give the new job a run of its own",
                Reason.LEDGER,
            )

    def has_released(self, run: str) -> bool:
        """Tell whether a release of this run was paid. Refusals and unpaid releases do not count."""
        rows = self.trail.ledger.entries(self.dataset)
        return any(run_of(row) == run and row.digest not in ("", REFUSAL_DIGEST) for row in rows)
