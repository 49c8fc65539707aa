"""A guard's entries in the record of what leaves a site (privacy/ledger/audit.py)."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from consilium.config.job import JobConfig
from consilium.config.privacy import HospitalPrivacyPolicy
from consilium.core.errors import Reason, RefusedError
from consilium.core.linalg.norms import norms
from consilium.core.messages import Payload, Tensors
from consilium.core.storage import noted, room_for, unreadable, write_atomic
from consilium.privacy.accounting.composition import DISCRETE, Entry
from consilium.privacy.ledger import audit
from consilium.privacy.ledger.ledger import Ledger
from consilium.privacy.plan import Plan


def described_tensors(tensors: Tensors) -> dict[str, dict[str, Any]]:
    """Return shape, type, bytes and Euclidean norm of each tensor."""
    sizes = norms(tensors)
    return {
        name: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "bytes": tensor.numel() * tensor.element_size(),
            "norm": sizes[name],
        }
        for name, tensor in tensors.items()
    }


def privacy_of(plan: Plan, seeded: bool = False) -> dict[str, Any]:
    """Return the privacy of one release under `plan`. `seeded`: its noise came from a known seed."""
    private = plan.config
    named = {"unit": private.unit, "adjacency": private.adjacency, "trust": private.trust, "delta": private.delta}
    named |= {"calibration": private.calibration} if private.calibration != "honest" else {}
    named |= {"mechanism": DISCRETE} | ({"seeded": True} if seeded else {})
    numbers = {"clip": private.clip, "noise_multiplier": plan.noise_multiplier}
    return named | numbers | {"spend": asdict(plan.event)}


@dataclass
class AuditTrail:
    """One job's entries at one site. `folder` has a folder for each run; `run` names the one whose messages are written now.

    `seeded`: noise comes from a known seed; `job_id`: FLARE's, "" in process.
    """

    site: str
    config: JobConfig
    plan: Plan | None
    seeded: bool
    folder: Path
    ledger: Ledger
    job_id: str
    run: str = ""
    _digest: str = field(init=False)
    _records: dict[Path, audit.AuditLog] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._digest = self.config.digest

    def note(self, kind: str, payload: Payload | None = None, spends: bool = False, again: bool = False, **more: Any) -> None:
        """Write a message before it leaves; `again`: also one that has its line already. Raises RefusedError where it cannot.

        `spends`: it costs privacy.
        """
        job = {"job": self.config.name, "experiment": self.config.experiment}
        line: dict[str, Any] = {"site": self.site, **job, "run": self.run}
        line |= {"flare_job": self.job_id, "job_digest": self._digest, "ledger": self.ledger.seal(), "kind": kind, **more}
        if payload is not None:
            line |= {"round": payload.round, "phase": payload.phase, "tensors": described_tensors(payload.tensors)}
            line |= {"scalars": payload.scalars, "metrics": payload.metrics}
        if spends and self.plan is not None:
            line["privacy"] = privacy_of(self.plan, self.seeded)
        path = self.folder / self.run / audit.FILE
        self._records.setdefault(path, audit.AuditLog(path)).add(line, again)


# refusals --------------------------------------------------------------------------------------------------------------
# Stored refusals: failures that depend on the data and on what the server sends. In a private job such an answer is final.
#
# Otherwise a server could ask the same round again and again, each time with other values, and learn a bit of the data each
# time.

ATTEMPT_SEPARATOR = ".after-word-"
"""Stands in the ledger between a run's name and how many refusals its round and phase had before."""
REFUSAL_DIGEST = "word"
"""Digest of a refusal's row in the ledger; of a former version it has none, at site level."""
DATA_DEPENDENT_REASONS = frozenset({Reason.TRAINING, Reason.RESULT, Reason.ERROR, Reason.LEDGER, Reason.CHECKPOINT})
"""Reasons that may depend on a site's data together with what the server sent.

`ledger` is one: a disk may have room for a refusal and none for a release. `checkpoint` is one: successful training may have
left tensors that those of the server do not fit.
"""


class StoredRefusal(NamedTuple):
    """A refusal, and the run's name in the ledger's row that pays for it; "" for one of a former version, which paid first.

    `terms`: that row, without its digest, as it was when training failed; None for one of a former version.
    """

    reason: Reason
    row: str
    terms: Entry | None = None


def save_refusal(run: Path, place: tuple[int, int], refusal: StoredRefusal) -> None:
    """Write the refusal of a round and phase into the run's folder. Raises RefusedError where it cannot.

    It is stored before it is paid, and names its row. So a process that ends between the two pays at the next ask, and once. A
    refusal that was paid and not stored would be paid again at every ask.
    """
    terms = asdict(refusal.terms) if refusal.terms else None
    with room_for(_file(run, place)):
        values = {"word": refusal.reason.value, "row": refusal.row, "terms": terms}
        write_atomic(_file(run, place), json.dumps(values).encode())


def load_refusal(run: Path, place: tuple[int, int]) -> StoredRefusal | None:
    """Return the refusal that answers this round and phase, None without one. Raises RefusedError for an unreadable file."""
    if not (file := _file(run, place)).is_file():
        return None
    remedy = "restore it; to remove it allows another try until a newer round has begun, and what is then released costs again"
    found = noted(file, remedy)
    try:
        terms, row = found.get("terms"), found.get("row", "")
        if not isinstance(row, str):
            raise TypeError
        return StoredRefusal(Reason(found["word"]), row, None if terms is None else Entry.of(terms))
    except (KeyError, ValueError, TypeError):
        raise unreadable(file, remedy) from None


def ledger_run_id(rows: Iterable[Entry], run: str, place: tuple[int, int]) -> str:
    """Return the run's name in the ledger for the next attempt at a place: another after each refusal that left."""
    here = [row for row in rows if (row.round, row.phase) == place and run_of(row) == run]
    refused = sum(row.digest == REFUSAL_DIGEST or (row.unit == "site" and row.count > 0 and not row.digest) for row in here)
    return f"{run}{ATTEMPT_SEPARATOR}{refused}" if refused else run


def run_of(row: Entry) -> str:
    """Return the run's name without the number of its refusals."""
    return row.run.partition(ATTEMPT_SEPARATOR)[0]


def _file(run: Path, place: tuple[int, int]) -> Path:
    return run / "refused" / "{}-{}.json".format(*place)


# charges ---------------------------------------------------------------------------------------------------------------
# What the answers of a private job cost at a site: their rows in the privacy ledger, and the budgets that limit them.


@dataclass
class Charges:
    """The charges of one job at one site, under its `plan`. `dataset`: the data's name in the ledger."""

    site: str
    config: JobConfig
    plan: Plan
    policy: HospitalPrivacyPolicy
    ledger: Ledger
    dataset: str

    @property
    def in_steps(self) -> bool:
        """Whether training itself is private (DP-SGD), and so charged before it is done."""
        return self.plan.config.unit != "site"

    def ledger_run(self, run: str, place: tuple[int, int]) -> str:
        """Return the run's name in the ledger for the next attempt at a place."""
        return ledger_run_id(self.ledger.entries(self.dataset), run, place)

    def row(self, run: str, place: tuple[int, int]) -> Entry:
        """Return the ledger's row of a release, without its digest. `run`: the run's name in the ledger."""
        privacy, spend = self.plan.config, self.plan.event
        return Entry(
            dataset=self.dataset, unit=privacy.unit, adjacency=privacy.adjacency, trust=privacy.trust,
            job=self.config.title, run=run, round=place[0], phase=place[1],
            noise_multiplier=spend.noise_multiplier, sample_rate=spend.sample_rate, count=spend.count, clip=privacy.clip,
            private=self.policy.noise_seed is None, mechanism=DISCRETE,
        )  # fmt: skip

    def check(self, rows: list[Entry]) -> None:
        """Raise RefusedError where these rows exceed a budget. Writes nothing."""
        self.ledger.check(rows, self.policy.budgets)

    def begin(self, row: Entry) -> None:
        """Charge training that is private itself, as it begins."""
        if self.in_steps:
            self.ledger.spend(row, self.policy.budgets)

    def pay(self, row: Entry, digest: str) -> None:
        """Charge an answer with this digest, once. Steps were charged when training began."""
        self.ledger.spend(replace(row, digest=digest, count=0 if self.in_steps else row.count), self.policy.budgets)

    def is_void(self, row: Entry) -> bool:
        """Tell whether the ledger's row with the same key promises nothing."""
        return any(one.key == row.key and one.is_void for one in self.ledger.entries(self.dataset))

    def check_terms(self, terms: Entry | None, row: Entry) -> None:
        """Raise RefusedError where a stored answer was made to be paid with another row than `row`: its price would be wrong.

        A former version stored no terms: then the ledger must have the row.
        """
        if self.ledger.released(row) if terms is None else row.pays_for(terms):
            return
        was = f"noise multiplier {terms.noise_multiplier:.6g}" if terms else "none noted"
        raise RefusedError(
            f"{row.name} was answered on other terms ({was}, now {row.noise_multiplier:.6g}); nothing was sent; give the new "
            "job a run of its own",
            Reason.LEDGER,
        )

    def has_released(self, run: str) -> bool:
        """Tell whether a release of this run was paid. Refusals do not count, and neither do unpaid releases."""
        rows = self.ledger.entries(self.dataset)
        return any(run_of(row) == run and row.digest not in ("", REFUSAL_DIGEST) for row in rows)
