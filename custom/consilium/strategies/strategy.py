"""The interface of an algorithm: its server half, its client half and its traits, in one class.

A strategy holds hyperparameters only (a frozen dataclass). State lives in `ServerState` (the server's checkpoint) and in the
site's own tensors. The defaults are federated averaging of the tensors with the role SHARED. An algorithm's file overrides the
methods in which its paper differs.
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
    FROZEN = "frozen"  # neither trained nor uploaded in this phase


@dataclass(frozen=True)
class ServerState:
    """Everything that the server needs to continue a run, as stored in its checkpoint.

    `shared`: the current values of the shared tensors. `initial`: the initial values of tensors that sites train for
    themselves. For strategies that treat sites separately: `sites`, the tensors stored per site; `matrices` by name, often with
    rows and columns in the sorted order of `sites`; `reported`, the round of each site's last result; `weights`, the weight of
    that result. `optimizer`: the state of a server optimizer (momentum, Adam), under names that it chooses.
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
    """One site's accepted result, its weight and the payload it was sent, for strategies that need single sites' results."""

    update: Payload
    weight: int
    sent: Payload
    site: SiteInfo

    def trained_tensors(self) -> Tensors:
        """Return the site's shared tensors after training: the sent tensors plus the update."""
        return {name: self.sent.tensors[name] + change for name, change in self.update.tensors.items()}


def shares(results: Mapping[str, SiteResult]) -> dict[str, float]:
    """Return p_i by site: each result's weight over the sum of weights."""
    return normalize_weights({name: float(result.weight) for name, result in results.items()})


def normalize_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """Return the weights divided by their sum."""
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


RoundResults: TypeAlias = Any
"""A phase's results: the mean update (Tensors, float64), or with `Traits.needs` "sites" all results (dict[str, SiteResult]).

A strategy's own methods annotate which of the two they take.
"""


def next_phase(state: ServerState, phases: int) -> tuple[int, int]:
    """Return the (round, phase) that follows the state's; `phases`: how many the state's round has."""
    return (state.round, state.phase + 1) if state.phase + 1 < phases else (state.round + 1, 0)


class Strategy:
    """Base of every algorithm. Methods never change their inputs. All randomness comes from seeds in fields or payloads."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: ClassVar[str]

    @property
    def traits(self) -> Traits:
        """The capabilities and needs of the algorithm with its settings. A class may define it as a plain attribute."""
        return Traits()

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return the role of the adapter tensor `name` in this phase. Raises ConfigError for a tensor without one."""
        raise ConfigError(f"strategy {self.name!r}: it has no role(); return SHARED, LOCAL or FROZEN for each tensor")

    def names(self, tensors: Mapping[str, Tensor], role: Role, round: int, phase: int) -> list[str]:
        """Return the names of the tensors that have `role` in this phase, in order."""
        return [name for name in tensors if self.role(name, round, phase) is role]

    # server half ------------------------------------------------------------------------------------------------------

    def start(self, initial: Tensors, weights: Tensors, scaling: float) -> Tensors:
        """Return the tensors that all sites start from. Called if `Traits.needs_base_weights`.

        `initial`: the usual start. `weights`: the adapted layers' base weights (out, in). `scaling`: alpha / rank.
        """
        return initial

    def initialize(self, initial: Tensors) -> ServerState:
        """Return the state before round 0. `initial`: every adapter tensor with the value that all sites start from.

        Local changes of the base are left out, because every site starts them at 0.
        """
        schedule = self.traits.phase_schedule()
        shared = {n: t for n, t in initial.items() if any(self.role(n, *place) is Role.SHARED for place in schedule)}
        return ServerState(0, 0, shared, {n: t for n, t in initial.items() if n not in shared and not is_base(n)})

    def payload(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return what `site` receives: the shared tensors and, before it has joined, the initial values of all others."""
        first = {} if site.joined else state.initial
        return Payload(state.round, state.phase, {**state.shared, **first})

    def final(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return what `site` receives after the last round, to evaluate and save."""
        return self.payload(state, site)

    def download_numbers(self, sent: Payload, site: SiteInfo) -> int:
        """Return how many numbers a site downloads per round, after the first update. `sent`: a payload to count."""
        return sum(tensor.numel() for tensor in sent.tensors.values())

    def diagnostics(self, state: ServerState, results: RoundResults) -> dict[str, float]:
        """Return numbers about a phase's results to log and plot; `state`: the state before they are aggregated."""
        return {}

    def aggregate(self, state: ServerState, results: RoundResults) -> ServerState:
        """Return the next state: the mean update (float64) added to the shared tensors."""
        shared = dict(state.shared)
        shared |= {n: (shared[n].double() + u).to(shared[n].dtype) for n, u in results.items()}
        round, phase = next_phase(state, self.traits.phases_of(state.round))
        return replace(state, round=round, phase=phase, shared=shared)

    # client half ------------------------------------------------------------------------------------------------------

    def receive(self, own: Tensors, payload: Payload) -> Tensors:
        """Return the model's tensors from the site's own tensors and a payload, for evaluation and as the start of training."""
        return {**own, **payload.tensors}

    def local_update(self, trainer: Trainer, payload: Payload) -> Payload:
        """Train the site's model for one phase and return what leaves the site."""
        trainer.fit()
        return trainer.update()

    def final_candidates(self, payload: Payload) -> dict[str, Payload]:
        """Return the candidates for the final model, by name. A site keeps the one that scores best on its validation split."""
        return {"": payload}


def scaling_multiplier(strategy: Strategy, payload: Payload) -> float:
    """Return the factor on the adapter's alpha / rank in the forward pass while this payload is in the model."""
    return payload.scalars.get("scaling", 1.0) if strategy.traits.scales_adapter else 1.0


def trained_names(strategy: Strategy, names: Iterable[str], round: int, phase: int) -> list[str]:
    """Return the names of the tensors that local training changes in this phase: not FROZEN and not in `Traits.measured`."""
    fixed = strategy.traits.measured
    return [name for name in names if name not in fixed and strategy.role(name, round, phase) is not Role.FROZEN]


def label_of(strategy: Strategy) -> str:
    """Return the strategy's label in comparisons: its name and, for some, its most important setting."""
    return strategy.traits.label or strategy.name
