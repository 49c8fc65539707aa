"""The interface of an algorithm: its server half, its client half and its traits, in one class.

A strategy holds hyperparameters only (a frozen dataclass). State lives in `ServerState` (the server's checkpoint) and in the
site's own tensors. The defaults are federated averaging of the tensors with the role SHARED. An algorithm's file overrides the
methods in which its paper differs. `Traits` are its declared capabilities and needs, which checks, privacy plans and estimates
read. `Trainer` is the site's trainer, which the client half uses.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

from pydantic import ConfigDict

from consilium.adapters.names import is_base
from consilium.core.errors import ConfigError
from consilium.core.lazy import Tensor
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.core.schema import STRICT

# traits ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interpolation:
    """The weight of a local adapter in a site's personalized model: `most` times a sample's similarity to the site's data.

    `examples`: the number of training records with which a sample is compared; with 0 the weight is `most` for every sample.
    `as_in_code`: the weight is 1 minus that product, similarities may be negative, and a fit sends no gradient through the
    frozen adapter; see strategies/feddpa.py.
    """

    most: float
    examples: int
    as_in_code: bool = False


@dataclass(frozen=True)
class Traits:
    """The capabilities and needs of one algorithm with its settings. The defaults are those of federated averaging.

    Server:
    - `needs`: what the server must see. "sums": weighted sums, so noise, masks or encryption may hide single results. "sites":
      each site's result.
    - `phases`: how many exchanges each round has; the tuple repeats. `warm_up`: rounds whose roles differ from later ones.
    - `pools_data`: the data of all sites are pooled (the centralized reference).
    - `needs_base_weights`: `Strategy.start` reads the base's weights.
    - `elementwise`: each tensor is averaged separately, so the algorithm can also average DoRA's row lengths.
    - `fixed_basis`: the basis of a tensor is the same in every round, so an optimizer may keep its moments.
    - `paired_factors`: clipping and noise act on a product B A, with the other factor as it was sent; see privacy/mechanism.py.
    - `measured`: tensors that are shared but measured instead of trained.
    - `site_matrices`: `ServerState.matrices` are sites x sites and are drawn in every round.

    Adapter:
    - `parts`: modules added to the model beside the job's adapter; see adapters/strategy_modules.py.
    - `ranks_differ`: ranks differ by site and layer, which needs the adapter kind dual_rank. `one_rank`: the algorithm can also
      run at one rank everywhere, on plain LoRA. `sends_frozen_ranks`: sites receive frozen ranks beside those they train.
    - `scales_adapter`: a payload's scalar "scaling" multiplies the adapter's alpha / rank.
    - `skips_blocks`: a site runs without the blocks of the base whose tensors it was not sent.

    Client:
    - `fits`: how often `local_update` calls `fit` in a phase. DP-SGD charges this many; the trainer refuses more.
    - `fits_only`: an overridden `local_update` reads records only through plain `fit`, which DP-SGD covers. Without this trait
      record- and patient-level privacy refuse such an algorithm. With it the trainer refuses all other reading of records.
    - `refuses_records`: why record- and patient-level privacy do not cover the algorithm (field, value, remedy); "" if they do.
    - `probe_fraction`: the share of the training data on which `Trainer.gradient_probe` reads gradients.
    - `interpolation`: how the personalized model weighs a local adapter. `fits_after_last_round`: `local_update` runs once more
      after the last round, for the personalized model; its result stays at the site.

    Presentation: `label`: the name in comparisons, by default the strategy's; `warnings`: lines printed before a run;
    `variants`: the settings for which `consilium cost` shows a row each.
    """

    needs: Literal["sums", "sites"] = "sums"
    phases: tuple[int, ...] = (1,)
    warm_up: int = 0
    pools_data: bool = False
    needs_base_weights: bool = False
    elementwise: bool = False
    fixed_basis: bool = True
    paired_factors: bool = False
    measured: frozenset[str] = frozenset()
    site_matrices: bool = False
    parts: frozenset[str] = frozenset()
    ranks_differ: bool = False
    one_rank: bool = False
    sends_frozen_ranks: bool = False
    scales_adapter: bool = False
    skips_blocks: bool = False
    fits: int = 1
    fits_only: bool = False
    refuses_records: str = ""
    probe_fraction: float = 0.0
    interpolation: Interpolation | None = None
    fits_after_last_round: bool = False
    label: str = ""
    warnings: tuple[str, ...] = ()
    variants: tuple[Mapping[str, Any], ...] = ({},)

    def phases_of(self, round: int) -> int:
        """Return the number of phases (exchanges) in a round."""
        return self.phases[round % len(self.phases)]

    def phase_schedule(self, first: int = 0, rounds: int | None = None) -> list[tuple[int, int]]:
        """Return all (round, phase) of `rounds` rounds from `first` on; by default those of the warm-up and one period."""
        last = first + rounds if rounds is not None else self.warm_up + len(self.phases)
        return [(round, phase) for round in range(first, last) for phase in range(self.phases_of(round))]


# trainer ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalStep:
    """The argument of a penalty at one optimizer step of `Trainer.fit`.

    `params`: the live adapter tensors. `anchors`: their detached values from the start of `fit`. `memory`: a dict that the
    penalty may use from step to step; empty when `fit` begins.
    """

    params: Mapping[str, Tensor]
    anchors: Mapping[str, Tensor]
    memory: dict[str, Tensor]


Penalty = Callable[[LocalStep], Tensor | None]
"""A function that returns a scalar to add to the loss of a step, or None."""
FeaturePenalty = Callable[[Tensor], Tensor | None]
"""A function of a batch's mean of features (C,), with gradient, that returns a scalar to add to the batch's loss, or None."""


class GradientProbe(Protocol):
    """Reads losses and gradients on a random part of the training data, batch by batch. One pass has `batches` batches."""

    batches: int

    def __call__(self, values: Tensors, names: Collection[str]) -> tuple[float, Tensors]:
        """Return the loss of the model with `values` on the next batch, and the gradients for `names`, on the CPU."""
        ...


class Trainer(Protocol):
    """A site's model and training data during one phase.

    `fit` and `gradient_probe` read records. `fit` may be called `Traits.fits` times per phase. `gradient_probe` needs
    `Traits.probe_fraction` and is refused under DP-SGD.

    `own`: the site's tensors after its last training, {} before its first. `start`: the tensors as `Strategy.receive` returned
    them, in the model's order; the model holds them when the phase begins. `memory`: tensors that the site stores for the
    algorithm from round to round, {} at first; change it in place. `closing`: whether this is the fit after the last round.
    """

    own: Tensors
    start: Tensors
    memory: Tensors
    closing: bool

    def fit(
        self,
        names: Iterable[str] | None = None,
        *,
        local_adapter_weight: float = 0.0,
        penalty: Penalty | None = None,
        feature_penalty: FeaturePenalty | None = None,
        correction: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Train the tensors `names` for the job's steps; by default all of `start` that have a role other than FROZEN.

        `local_adapter_weight`: the weight of a local adapter in the forward pass. `penalty`, `feature_penalty`: terms of the
        loss; the second needs the part FEATURE_SHIFT. `correction`: changes by tensor name; each step adds an equal part beside
        the optimizer's step.
        """
        ...

    def gradient_probe(self) -> GradientProbe:
        """Return a reader of losses and gradients on `Traits.probe_fraction` of the training data."""
        ...

    def values(self) -> Tensors:
        """Return copies of the tensors of `start` as the model has them now, in the model's order."""
        ...

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Put `values` into the model; tensors that it does not name stay as they are."""
        ...

    def update(self, since: Mapping[str, Tensor] | None = None) -> Payload:
        """Return the payload that leaves the site: the SHARED tensors minus those in `since`, by default minus `start`."""
        ...


# strategy --------------------------------------------------------------------------------------------------------------


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

    def download_numbers(self, state: ServerState, site: SiteInfo) -> int:
        """Return how many numbers a site downloads in a phase after the first update. `state`: one without updates."""
        return sum(tensor.numel() for tensor in self.payload(state, site).tensors.values())

    def diagnostics(self, state: ServerState, results: RoundResults) -> dict[str, float]:
        """Return numbers about a phase's results to log and plot; `state`: the state before they are aggregated."""
        return {}

    def aggregate(self, state: ServerState, results: RoundResults) -> ServerState:
        """Return the next state: the mean update (float64) added to the shared tensors."""
        shared = dict(state.shared)
        shared |= {n: (shared[n].double() + u).to(shared[n].dtype) for n, u in results.items()}
        return next_state(self, state, shared=shared)

    # client half ------------------------------------------------------------------------------------------------------

    def receive(self, own: Tensors, payload: Payload) -> Tensors:
        """Return the model's tensors from the site's own tensors and a payload, for evaluation and as the start of training.

        Tensors that only the site trains stay as they are. A server without the site's last result sends their initial values.
        """
        places = self.traits.phase_schedule()
        roles = {name: {self.role(name, *place) for place in places} for name in own.keys() & payload.tensors.keys()}
        kept = {name: own[name] for name, of in roles.items() if Role.LOCAL in of and Role.SHARED not in of}
        return {**own, **payload.tensors, **kept}

    def local_update(self, trainer: Trainer, payload: Payload) -> Payload:
        """Train the site's model for one phase and return what leaves the site."""
        trainer.fit()
        return trainer.update()

    def final_candidates(self, payload: Payload) -> dict[str, Payload]:
        """Return the candidates for the final model, by name. A site keeps the one that scores best on its validation split."""
        return {"": payload}


def next_state(strategy: Strategy, state: ServerState, **changes: Any) -> ServerState:
    """Return the state of the next phase: of the same round, or the first of the next one. `changes`: its new fields."""
    has_more = state.phase + 1 < strategy.traits.phases_of(state.round)
    round, phase = (state.round, state.phase + 1) if has_more else (state.round + 1, 0)
    return replace(state, round=round, phase=phase, **changes)


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
