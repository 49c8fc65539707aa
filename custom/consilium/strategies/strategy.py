"""The strategy interface: one federated algorithm, both halves, as pure functions on tensors.

A strategy holds hyperparameters only (a frozen dataclass). State lives in `ServerState` (the server's checkpoint) and in the
site's own tensors. The defaults here are plain federated averaging of whatever `role` calls SHARED; a strategy file says
which tensors those are and overrides a hook only where its paper differs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar, Literal, TypeAlias

from pydantic import ConfigDict
from torch import Tensor

from consilium.adapters.names import is_base
from consilium.core.errors import ConfigError
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.core.schema import STRICT
from consilium.strategies.local_plan import Blend, Look, Pass


class Role(StrEnum):
    """What happens to a tensor at a site in one phase of one round."""

    SHARED = "shared"  # trained and uploaded
    LOCAL = "local"  # trained, never leaves the site
    FROZEN = "frozen"  # neither in this phase


@dataclass(frozen=True)
class ServerState:
    """Everything the server needs to go on: `shared` as the federation has it now, `initial` as every site starts.

    For strategies that treat sites apart: `sites`, what the server keeps of each; `matrices` by name, rows and columns in the
    sorted order of `sites`; `reported`, the round of each site's last result, and `weights`, that result's weight.
    `optimizer`: what a server optimizer (momentum, Adam) remembers, by names of its own.
    """

    round: int
    phase: int
    shared: Tensors
    initial: Tensors
    sites: dict[str, Tensors] = field(default_factory=dict)
    matrices: Tensors = field(default_factory=dict)
    reported: dict[str, int] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    optimizer: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class LocalStep:
    """One local optimizer step as a regularizer sees it.

    `params` are the live adapter tensors, `anchors` their detached values at the round's start (after the payload was
    received), `scalars` those of the payload; `memory` is empty at the round's start and belongs to the strategy.
    """

    params: Mapping[str, Tensor]
    anchors: Mapping[str, Tensor]
    scalars: Mapping[str, float]
    memory: dict[str, Tensor]


@dataclass(frozen=True)
class SiteResult:
    """One site's accepted result with its weight, for strategies that need sites' results one by one."""

    update: Payload
    weight: int
    sent: Payload
    site: SiteInfo

    def trained(self) -> Tensors:
        """Return the site's shared tensors after its training: what it was sent plus its update."""
        return {name: self.sent.tensors[name] + change for name, change in self.update.tensors.items()}


def shares(results: Mapping[str, SiteResult]) -> dict[str, float]:
    """Return p_i, the results' weights over their sum."""
    return normalized({name: float(result.weight) for name, result in results.items()})


def normalized(weights: Mapping[str, float]) -> dict[str, float]:
    """Return weights over their sum."""
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


Gathered: TypeAlias = Any
"""A phase's results: their mean update (Tensors, float64), or all of them by site (dict[str, SiteResult]), as `Strategy.needs`
says; a strategy's own methods name which."""


def next_phase(state: ServerState, phases: int) -> tuple[int, int]:
    """Return (round, phase) after the state's."""
    return (state.round, state.phase + 1) if state.phase + 1 < phases else (state.round + 1, 0)


class Strategy:
    """Base of every algorithm. Hooks never mutate their inputs; all randomness must come from seeds in the payload."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: ClassVar[str]
    upload_scalars: ClassVar[frozenset[str]] = frozenset()
    """Names of the scalars that a site uploads beside its tensors."""
    pools_data: ClassVar[bool] = False
    """Whether all data lie in one place (the centralized reference)."""
    parts: ClassVar[frozenset[str]] = frozenset()
    """What it asks of the model beside the job's adapter; see adapters/parts.py."""
    ranks_differ: ClassVar[bool] = False
    """Whether ranks differ by site and layer, which takes the dual-rank adapter."""
    one_rank: ClassVar[bool] = False
    """Whether a strategy whose ranks differ may also run at one rank everywhere, on plain LoRA."""
    tails: ClassVar[bool] = False
    """Whether sites are sent frozen ranks beside those they train."""
    one_by_one: ClassVar[bool] = False
    """Whether it averages whatever tensors there are, each for itself, and so also DoRA's lengths of rows."""
    from_base: ClassVar[bool] = False
    """Whether the server reads the base's weights to make the start, see `start`."""
    needs: ClassVar[Literal["sums", "sites"]] = "sums"
    """What the server must see: weighted sums (noise, masks or encryption may then hide the sites), or every site's result."""

    @property
    def label(self) -> str:
        """How it is called in a comparison: its name, and the setting in which it differs most."""
        return self.name

    @property
    def warnings(self) -> list[str]:
        """What whoever starts the run should read first about its settings, a line each."""
        return []

    @property
    def fixed_basis(self) -> bool:
        """Whether a tensor's numbers mean the same from round to round, so that an optimizer may remember them."""
        return not self.ranks_differ

    @classmethod
    def variants(cls) -> "list[Strategy]":
        """Return one instance for each setting that a comparison shows."""
        return [cls()]

    @property
    def period(self) -> int:
        """After how many rounds `phases` and `role` repeat."""
        return 1

    @property
    def warm_up(self) -> int:
        """How many rounds come before those that repeat."""
        return 0

    @property
    def looked_at(self) -> float:
        """The share of its training data that a site looks at before its local training."""
        return 0.0

    def refuses_records(self) -> str | None:
        """Return what of the site half record-level privacy does not cover (field, value, remedy), None where it covers all."""
        return None

    def places(self) -> list[tuple[int, int]]:
        """Return the rounds and phases in which roles can differ: those of the warm-up and of one period."""
        return [(round, phase) for round in range(self.warm_up + self.period) for phase in range(self.phases(round))]

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return what happens to the adapter tensor `name` in this phase. Raises ConfigError for a tensor it cannot place."""
        raise ConfigError(f"strategy {self.name!r}: it has no role(); return SHARED, LOCAL or FROZEN for each tensor")

    def phases(self, round: int) -> int:
        """Return how many exchanges this round has."""
        return 1

    def names(self, tensors: Mapping[str, Tensor], role: Role, round: int, phase: int) -> list[str]:
        """Return the names that have `role` in this phase, in order."""
        return [name for name in tensors if self.role(name, round, phase) is role]

    def peer(self, name: str, round: int, phase: int) -> str | None:
        """Return the other factor of the product that `name` is part of, or None. It is public: all were sent it.

        Where there is one, clipping and noise act on the product, with the values that were sent, even if a site trains the
        other factor too; see privacy/mechanism.py.
        """
        return None

    def at_rank(self, rank: int) -> "Strategy":
        """Return this strategy for an adapter that has one rank at all sites. Raises ConfigError where that is impossible."""
        return self

    # server half ------------------------------------------------------------------------------------------------------

    def start(self, initial: Tensors, weights: Tensors, scaling: float) -> Tensors:
        """Return the tensors that all sites start from. `initial`: the usual start; `scaling`: alpha / rank.

        `weights`: the adapted layers' base weights (out, in).
        """
        return initial

    def init_state(self, initial: Tensors) -> ServerState:
        """Return the state before round 0; `initial` holds every adapter tensor as all sites start from it.

        A change of the base that stays at its site is not sent: every site knows that it starts at 0.
        """
        places = self.places()
        shared = {n: t for n, t in initial.items() if any(self.role(n, *p) is Role.SHARED for p in places)}
        return ServerState(0, 0, shared, {n: t for n, t in initial.items() if n not in shared and not is_base(n)})

    def broadcast(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return what `site` receives: the shared tensors, and once also the start of those it will keep for itself."""
        first = {} if site.joined else state.initial
        return Payload(state.round, state.phase, {**state.shared, **first})

    def download_numbers(self, sent: Payload, site: SiteInfo) -> int:
        """Return how many numbers a site downloads in a round, once there is an update."""
        return sum(tensor.numel() for tensor in sent.tensors.values())

    def final(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return what `site` receives after the last round, to evaluate and keep."""
        return self.broadcast(state, site)

    def choices(self, payload: Payload) -> dict[str, Payload]:
        """Return the candidates for the final model, by name. A site keeps the one that scores best on its validation split."""
        return {"": payload}

    def figures(self, state: ServerState) -> dict[str, Tensor]:
        """Return matrices (sites x sites, sorted names) worth a picture every round, by title."""
        return {}

    def diagnostics(self, state: ServerState, gathered: Gathered) -> dict[str, float]:
        """Return numbers about a phase's results worth a curve, given the state before they are merged."""
        return {}

    def merge(self, state: ServerState, results: Gathered) -> ServerState:
        """Return the next state: the mean update (float64) added to the shared tensors."""
        shared = dict(state.shared)
        shared |= {n: (shared[n].double() + u).to(shared[n].dtype) for n, u in results.items()}
        round, phase = next_phase(state, self.phases(state.round))
        return replace(state, round=round, phase=phase, shared=shared)

    # site half --------------------------------------------------------------------------------------------------------

    def receive(self, params: Tensors, payload: Payload) -> Tensors:
        """Return the tensors local training starts from: the site's own, overwritten by what the server sent."""
        return {**params, **payload.tensors}

    def before_training(self, own: Tensors, start: Tensors, kept: Tensors, look: Look) -> tuple[Tensors, Tensors]:
        """Return the tensors training really starts from, and what the site keeps for the next time.

        `own`: the site's tensors after its last training; `start`: as `receive` returned them, in the model's order; `kept`:
        what this hook returned last, {} at first. Called where `looked_at` is over 0.
        """
        return start, kept

    def passes(self, names: Iterable[str], round: int, phase: int) -> list[Pass]:
        """Return the passes of this phase's local training over `names`; how many does not depend on them."""
        return [Pass(frozenset(name for name in names if self.role(name, round, phase) is not Role.FROZEN))]

    def closing_passes(self, names: Iterable[str]) -> list[Pass] | None:
        """Return what trains once more after the last round, from what was then received; it never leaves the site.

        None: the personalized model is the one that the site trained last.
        """
        return None

    def blend(self, closing: bool) -> Blend | None:
        """Return how the personalized model weighs a local adapter, in a round or at the end of the run; None without one."""
        return None

    def feature_penalty(self, mean: Tensor, params: Mapping[str, Tensor], memory: Tensors, round: int) -> Tensor | None:
        """Return a scalar to add to a batch's loss, given its features' mean (C,) with its graph; for the part FEATURE_SHIFT.

        `memory` is empty at the phase's start and belongs to the strategy.
        """
        return None

    def after_training(self, end: Tensors, memory: Tensors, round: int) -> Tensors:
        """Return the site's tensors after its training, given what `feature_penalty` has put into `memory`."""
        return end

    def block(self, name: str) -> str | None:
        """Return the module that a site runs without where it has no tensor `name`; None where it cannot do without."""
        return None

    def scaling(self, payload: Payload) -> float:
        """Return what multiplies the adapter's alpha / rank in the forward pass while this payload is in the model."""
        return 1.0

    def regularizer(self, step: LocalStep) -> Tensor | None:
        """Return a scalar to add to the task's loss at this step, or None."""
        return None

    def drift(self, payload: Payload) -> Tensors:
        """Return by how much local training is to move tensors over the round beside what the optimizer does, by name."""
        return {}

    def upload(self, start: Tensors, end: Tensors, payload: Payload) -> Payload:
        """Return the update that leaves the site: end - start of the SHARED tensors."""
        shared = self.names(end, Role.SHARED, payload.round, payload.phase)
        return Payload(payload.round, payload.phase, {name: end[name] - start[name] for name in shared})
