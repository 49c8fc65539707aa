"""What may leave a site, and in what state. Pure of FLARE: the in-process engine and the FLARE filters use the same guard.

It sees the broadcast and the result. It checks names, roles and values, clips, adds noise, keeps what it releases, writes the
ledger, and only then lets go. A replayed task gets the same bytes again and spends nothing. On any doubt nothing is sent.
"""

import re
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from consilium.config import JobConfig
from consilium.config_privacy import BudgetConfig, PolicyConfig
from consilium.errors import RefusedError
from consilium.privacy import audit, mechanism
from consilium.privacy.ledger import WHOLE_RUN, Budget, Entry, Ledger
from consilium.privacy.plan import Plan, make_plan
from consilium.seeding import seed_for
from consilium.storage import load_state, locked, save_state
from consilium.strategy import Payload, Role, Strategy, Tensors, factor

STAGES = ("received", "personal", "base")
TRAIN_METRICS = frozenset({"train/loss", "train/steps", "train/seconds"})


def allowed_metrics(task_metrics: Set[str]) -> frozenset[str]:
    """Return the metric names a site may report: "<split>/<stage>/<metric>" and the training loop's own."""
    splits = ("validation", "test")
    return TRAIN_METRICS | {f"{split}/{stage}/{m}" for split in splits for stage in STAGES for m in task_metrics}


def check_release(payload: Payload, strategy: Strategy, metrics: Set[str]) -> None:
    """Raise RefusedError unless every tensor is SHARED in this phase, finite, and every scalar and metric is declared."""
    for name, tensor in payload.tensors.items():
        role = strategy.role(name, payload.round, payload.phase)
        if role is not Role.SHARED:
            raise RefusedError(f"release: tensor {name!r} is {role}, only shared tensors may leave; nothing was sent")
        if not torch.isfinite(tensor).all():
            raise RefusedError(f"release: tensor {name!r} has NaN or Inf; nothing was sent; lower training.lr")
    for kind, given, known in (
        ("scalar", payload.scalars, strategy.upload_scalars),
        ("metric", payload.metrics, metrics),
    ):
        if extra := sorted(given.keys() - known):
            raise RefusedError(f"release: {kind} {extra[0]!r} is not declared, so it may not leave; nothing was sent")


@dataclass
class Guard:
    """One site's gate for one job. `dataset` and `num_samples` are the site's.

    Use: admit(run) before anything else; per task receive(run, broadcast), then release(run, result) or report(result).
    """

    name: str
    config: JobConfig
    strategy: Strategy
    metrics: Set[str]
    policy: PolicyConfig
    share_metrics: bool
    dataset: str
    num_samples: int
    folder: Path
    ledger: Ledger
    observer: Callable[[Mapping[str, Any]], None]
    broadcast: Payload | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.plan: Plan | None = make_plan(self.config, self.strategy, self.num_samples)
        self._admitted: str | None = None

    @property
    def shown_samples(self) -> int:
        """The sample count the server may know: 1 under site-level DP, whose guarantee the true one would break."""
        return 1 if self._site_level else self.num_samples

    def admit(self, run: str) -> None:
        """Accept or refuse the whole job, before any training.

        Raises RefusedError, with the numbers, if the plan exceeds the site's budget or the site's policy forbids the job.
        """
        if not re.fullmatch(r"[A-Za-z0-9-]*", run):  # it becomes a folder's name
            raise RefusedError(f"{self.name}: {run!r} is no name of a run; nothing was sent")
        if self.plan is None:
            if self.policy.budgets:
                raise RefusedError(f"{self.name}: site.yaml has a privacy budget and the job no `privacy:`; nothing was sent")
            self._admitted = run
            return
        unit, trust = self.plan.config.unit, self.plan.config.trust
        if self.policy.budgets and unit not in self.policy.budgets:
            raise RefusedError(f"{self.name}: site.yaml has no privacy.budgets.{unit}, the job's unit; nothing was sent")
        if self.policy.budgets and trust not in self.policy.trust:
            raise RefusedError(f"{self.name}: privacy.trust {trust!r} is not in site.yaml's privacy.trust; nothing was sent")
        self.ledger.check(self._planned(run), self._budget())
        if self.plan.in_advance:
            self.ledger.spend(self._planned(run)[0], self._budget())
        self._admitted = run

    def receive(self, run: str, broadcast: Payload) -> None:
        """Note a training task before the site sees it. Raises RefusedError for a round the job does not have, or when the
        budget is used up; record-level DP writes its ledger row here, because training itself is the release's cost."""
        self.broadcast = None
        if run != self._admitted:
            self.admit(run)
        round, phase = broadcast.round, broadcast.phase
        if not (0 <= round < self.config.training.rounds and 0 <= phase < self.strategy.phases(round)):
            raise RefusedError(f"{self.name}: the job has no round {round} phase {phase}; nothing was sent")
        if self.plan is not None and not self.plan.in_advance:
            entry = self._entry(run, round, phase)
            if self.plan.config.unit == "record":
                self.ledger.spend(entry, self._budget())
            else:
                self.ledger.check([entry], self._budget())
        self.broadcast = broadcast

    def release(self, run: str, result: Payload) -> Payload:
        """Return what may leave of a training result. Raises RefusedError, and then nothing may be sent."""
        place = _place(result)
        if self.broadcast is None or place != _place(self.broadcast):
            raise RefusedError(
                f"{self.name}: a result for round {place[0]} phase {place[1]} nobody asked for; nothing was sent"
            )
        with locked(self.folder / run):  # a job process FLARE has given up may still be at it beside its successor
            released, spends = self._site_release(run, result) if self._site_level else (self._checked(result), True)
            self.note("update", released, spends)
        return released

    def _site_release(self, run: str, result: Payload) -> tuple[Payload, bool]:
        """Return the one release of this phase, made or kept, and whether it costs anything."""
        place, (stored, spends) = _place(result), self._stored(run)
        if stored is None or _place(stored) != place:
            stored, spends = self._prepare(run, result, stored)
            self._store(run, stored, spends)
        if spends and not self.plan.in_advance:
            self.ledger.spend(self._entry(run, *place), self._budget())  # from here on it counts as released
        return stored, spends

    def report(self, result: Payload) -> Payload:
        """Return what may leave of a closing evaluation: shared metrics, no tensors."""
        if result.tensors:
            raise RefusedError(f"{self.name}: an evaluation with tensors; nothing was sent")
        checked = self._checked(result)
        self.note("evaluation", checked)
        return checked

    def note(self, kind: str, payload: Payload | None = None, spends: bool = False, **said: Any) -> None:
        """Put a message into the site's record before it leaves, see audit.py. Raises RefusedError if that cannot be."""
        line = {"site": self.name, "job": self.config.name, "experiment": self.config.experiment, "run": self._admitted}
        line |= {"kind": kind, **said}
        if payload is not None:
            line |= {"round": payload.round, "phase": payload.phase, "tensors": audit.describe(payload.tensors)}
            line |= {"scalars": payload.scalars, "metrics": payload.metrics}
        if spends and self.plan is not None:
            line["privacy"] = audit.cost(self.plan)
        audit.record(self.folder / (self._admitted or "") / audit.FILE, line)

    @property
    def _site_level(self) -> bool:
        return self.plan is not None and self.plan.config.unit == "site"

    def _checked(self, result: Payload) -> Payload:
        check_release(result, self.strategy, self.metrics)
        return result if self.share_metrics else replace(result, metrics={})

    def _prepare(self, run: str, result: Payload, last: Payload | None) -> tuple[Payload, bool]:
        """Return a new release of `result`, checked whole, clipped and noised, and whether it tells anything.

        One of zero dimensions (all public peers are zero) does not, and costs nothing.
        """
        if last is not None and _place(last) > _place(result):
            raise RefusedError(f"{self.name}: round {result.round} phase {result.phase} is stale; nothing was sent")
        if self.ledger.has(self._entry(run, result.round, result.phase)):
            raise RefusedError(f"{self.name}: round {result.round} was released but its bytes are lost; nothing was sent")
        checked = self._checked(result)
        self._check_complete(checked)
        noise = self.plan.site_noise(self.config.federation.min_sites)
        maps = geometries(self.strategy, self.config, checked.tensors, self.broadcast.tensors, *_place(result))
        released, outcome = mechanism.release(checked.tensors, maps, self.plan.config.clip, noise, self._normal(result))
        self.observer({"event": "release", "site": self.name, "round": result.round, "phase": result.phase, **asdict(outcome)})
        return replace(checked, tensors=released), outcome.dimensions > 0

    def _check_complete(self, result: Payload) -> None:
        """Raise RefusedError unless tensors are exactly those of the phase, in shape: clipping is joint over all of them."""
        if result.scalars:
            raise RefusedError(f"{self.name}: scalar {min(result.scalars)!r} would leave without noise; nothing was sent")
        expected = upload_shapes(self.strategy, self.broadcast)
        found = {name: tuple(tensor.shape) for name, tensor in result.tensors.items()}
        if wrong := sorted(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n)):
            shapes = f"{found.get(wrong[0])}, expected {expected.get(wrong[0])}"
            raise RefusedError(f"{self.name}: tensor {wrong[0]!r} has shape {shapes}; nothing was sent")

    def _normal(self, result: Payload) -> mechanism.Normal:
        if self.policy.noise_seed is None:
            return mechanism.system_normal
        return mechanism.seeded_normal(seed_for(self.policy.noise_seed, self.name, result.round, result.phase))

    def _budget(self) -> Budget | None:
        found: BudgetConfig | None = self.policy.budgets.get(self.plan.config.unit)
        return None if found is None else Budget(found.epsilon, found.delta)

    def _entry(self, run: str, round: int, phase: int) -> Entry:
        privacy, spend = self.plan.config, self.plan.release
        return Entry(
            dataset=self.dataset, unit=privacy.unit, adjacency=privacy.adjacency, trust=privacy.trust,
            job=self.config.name, run=run, round=round, phase=phase, noise_multiplier=spend.noise_multiplier,
            sample_rate=spend.sample_rate, count=spend.count, clip=privacy.clip, private=self.policy.noise_seed is None,
        )  # fmt: skip

    def _planned(self, run: str) -> list[Entry]:
        if self.plan.in_advance:
            return [self._entry(run, WHOLE_RUN, WHOLE_RUN)]
        rounds = range(self.config.training.rounds)
        return [self._entry(run, round, phase) for round in rounds for phase in range(self.strategy.phases(round))]

    def _file(self, run: str) -> Path:
        return self.folder / run / "released.safetensors"

    def _stored(self, run: str) -> tuple[Payload | None, bool]:
        """Return the last release and whether it costs anything: what was decided then, whatever the server sends now."""
        if not self._file(run).exists():
            return None, True
        tensors, meta = load_state(self._file(run))
        return Payload(meta["round"], meta["phase"], tensors, meta["scalars"], meta["metrics"]), meta["spends"]

    def _store(self, run: str, released: Payload, spends: bool) -> None:
        meta = {"round": released.round, "phase": released.phase, "scalars": released.scalars, "metrics": released.metrics}
        save_state(self._file(run), released.tensors, meta | {"spends": spends})


def _place(payload: Payload) -> tuple[int, int]:
    return payload.round, payload.phase


def upload_shapes(strategy: Strategy, sent: Payload) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that a site uploads in answer to `sent`: the shared ones, as they came."""
    names = strategy.names(sent.tensors, Role.SHARED, sent.round, sent.phase)
    return {name: tuple(sent.tensors[name].shape) for name in names}


def geometries(
    strategy: Strategy, config: JobConfig, update: Tensors, public: Tensors, round: int, phase: int
) -> dict[str, mechanism.Geometry]:
    """Return the whitening of every tensor that has a peer, from the `public` values. Raises RefusedError without them."""
    maps: dict[str, mechanism.Geometry] = {}
    for name in update:
        if (peer := strategy.peer(name, round, phase)) is None:
            continue
        if peer not in public or not torch.isfinite(public[peer]).all() or strategy.role(peer, round, phase) is not Role.FROZEN:
            raise RefusedError(f"release: {peer!r}, the public peer of {name!r}, is missing or unusable; nothing was sent")
        side = "right" if factor(name) == "B" else "left"
        maps[name] = mechanism.geometry(public[peer], side, config.adapter.scaling)
    return maps
