"""The interface of an algorithm: its server half, its client half and its traits, in one class.

A strategy holds hyperparameters only (a frozen dataclass). State lives in `ServerState` (the server's checkpoint) and in the
site's own tensors. The defaults are federated averaging of the tensors that `role` calls SHARED. An algorithm's file overrides
what its paper does otherwise.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar, TypeAlias

from pydantic import ConfigDict

from consilium.adapters.names import is_base
from consilium.core.errors import ConfigError
from consilium.core.lazy import Tensor
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.core.schema import STRICT
from consilium.strategies.trainer import Trainer
from consilium.strategies.traits import Traits


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


RoundResults: TypeAlias = Any
"""A phase's results: their mean update (Tensors, float64), or with `Traits.needs` "sites" each site's (dict[str, SiteResult]).

A strategy's own methods name which.
"""


def next_phase(state: ServerState, phases: int) -> tuple[int, int]:
    """Return (round, phase) after the state's."""
    return (state.round, state.phase + 1) if state.phase + 1 < phases else (state.round + 1, 0)


class Strategy:
    """Base of every algorithm. Methods never change their inputs; all randomness comes from seeds in settings or payload."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: ClassVar[str]

    @property
    def traits(self) -> Traits:
        """What the algorithm can do and needs, with its settings. A class may set it as a plain attribute."""
        return Traits()

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return what happens to the adapter tensor `name` in this phase. Raises ConfigError for a tensor it cannot place."""
        raise ConfigError(f"strategy {self.name!r}: it has no role(); return SHARED, LOCAL or FROZEN for each tensor")

    def names(self, tensors: Mapping[str, Tensor], role: Role, round: int, phase: int) -> list[str]:
        """Return the names that have `role` in this phase, in order."""
        return [name for name in tensors if self.role(name, round, phase) is role]

    # server half ------------------------------------------------------------------------------------------------------

    def start(self, initial: Tensors, weights: Tensors, scaling: float) -> Tensors:
        """Return the tensors that all sites start from; called where `Traits.needs_base_weights`.

        `initial`: the usual start. `weights`: the adapted layers' base weights (out, in). `scaling`: alpha / rank.
        """
        return initial

    def initialize(self, initial: Tensors) -> ServerState:
        """Return the state before round 0; `initial` holds every adapter tensor as all sites start from it.

        A change of the base that stays at its site is not sent: every site knows that it starts at 0.
        """
        schedule = self.traits.role_schedule()
        shared = {n: t for n, t in initial.items() if any(self.role(n, *place) is Role.SHARED for place in schedule)}
        return ServerState(0, 0, shared, {n: t for n, t in initial.items() if n not in shared and not is_base(n)})

    def payload(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return what `site` receives: the shared tensors, and once also the start of those it will keep for itself."""
        first = {} if site.joined else state.initial
        return Payload(state.round, state.phase, {**state.shared, **first})

    def final(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return what `site` receives after the last round, to evaluate and keep."""
        return self.payload(state, site)

    def download_numbers(self, sent: Payload, site: SiteInfo) -> int:
        """Return how many numbers a site downloads in a round, once there is an update."""
        return sum(tensor.numel() for tensor in sent.tensors.values())

    def diagnostics(self, state: ServerState, results: RoundResults) -> dict[str, float]:
        """Return numbers about a phase's results worth a curve, given the state before they are aggregated."""
        return {}

    def aggregate(self, state: ServerState, results: RoundResults) -> ServerState:
        """Return the next state: the mean update (float64) added to the shared tensors."""
        shared = dict(state.shared)
        shared |= {n: (shared[n].double() + u).to(shared[n].dtype) for n, u in results.items()}
        round, phase = next_phase(state, self.traits.phases_of(state.round))
        return replace(state, round=round, phase=phase, shared=shared)

    # client half ------------------------------------------------------------------------------------------------------

    def receive(self, own: Tensors, payload: Payload) -> Tensors:
        """Return the model that a payload makes of the site's own tensors; it is evaluated, and training starts from it."""
        return {**own, **payload.tensors}

    def local_update(self, trainer: Trainer, payload: Payload) -> Payload:
        """Train the site's model for one phase and return what leaves the site."""
        trainer.fit()
        return trainer.update()

    def final_candidates(self, payload: Payload) -> dict[str, Payload]:
        """Return the candidates for the final model, by name. A site keeps the one that scores best on its validation split."""
        return {"": payload}


def scaling_of(strategy: Strategy, payload: Payload) -> float:
    """Return what multiplies the adapter's alpha / rank in the forward pass while this payload is in the model."""
    return payload.scalars.get("scaling", 1.0) if strategy.traits.scales_adapter else 1.0


def trained_names(strategy: Strategy, names: Iterable[str], round: int, phase: int) -> list[str]:
    """Return the names that local training changes in this phase: those with another role than FROZEN that are not measured."""
    fixed = strategy.traits.measured
    return [name for name in names if name not in fixed and strategy.role(name, round, phase) is not Role.FROZEN]


def label_of(strategy: Strategy) -> str:
    """Return what a comparison calls the strategy: its name, and the setting in which it differs most."""
    return strategy.traits.label or strategy.name
