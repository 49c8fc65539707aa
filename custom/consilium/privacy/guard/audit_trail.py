"""A guard's entries in the record of what leaves a site (privacy/ledger/audit.py)."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from consilium.config.job import JobConfig
from consilium.core.linalg.together import norms
from consilium.core.messages import Payload, Tensors
from consilium.privacy.accounting.composition import DISCRETE
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
    _records: dict[Path, audit.Record] = field(default_factory=dict, init=False)

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
        self._records.setdefault(path, audit.Record(path)).add(line, again)
