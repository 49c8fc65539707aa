"""The strategy interface: one federated algorithm, both halves, as pure functions on tensors.

A strategy holds hyperparameters only (a frozen dataclass). State lives in `ServerState` (the server's checkpoint) and in the
site's own tensors. The defaults here are plain federated averaging of whatever `role` calls SHARED; a strategy file says
which tensors those are and overrides a hook only where its paper differs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar, Literal

import torch
from pydantic import ConfigDict
from torch import Tensor

from consilium.config_section import STRICT
from consilium.errors import ConfigError, RefusedError

Tensors = dict[str, Tensor]

MEAN_UNIT = 2.0**-36
"""Grid of the exact mean: updates are rounded to multiples of this (7e-12) before they are summed."""


HELD_OUT = -1
"""The phase of an evaluation before a round's first phase, by a site that is not asked to train in it."""


class Role(StrEnum):
    """What happens to a tensor at a site in one phase of one round."""

    SHARED = "shared"  # trained and uploaded
    LOCAL = "local"  # trained, never leaves the site
    FROZEN = "frozen"  # neither in this phase


@dataclass(frozen=True)
class SiteInfo:
    """What the server knows of a site. `joined`: the site already keeps its own adapter tensors; `capacity`: see ranks.py."""

    name: str
    num_samples: int
    joined: bool = False
    capacity: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Payload:
    """All that crosses the wire, both ways. Down: `tensors` are values. Up: updates (end - start of the local training).

    `ledger`, up: the last seal of the site's privacy ledger, so that somebody else can tell should rows of it go missing.
    """

    round: int
    phase: int
    tensors: Tensors
    scalars: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    ledger: str = ""


@dataclass(frozen=True)
class ServerState:
    """Everything the server needs to go on: `shared` as the federation has it now, `initial` as every site starts.

    For strategies that treat sites apart: `sites`, what the server keeps of each; `matrices` by name, rows and columns in the
    sorted order of `sites`; `reported`, the round of each site's last result, and `weights`, that result's weight.
    """

    round: int
    phase: int
    shared: Tensors
    initial: Tensors
    sites: dict[str, Tensors] = field(default_factory=dict)
    matrices: Tensors = field(default_factory=dict)
    reported: dict[str, int] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """One local optimizer step as a regularizer sees it.

    `params` are the live adapter tensors, `anchors` their detached values at the round's start (after the payload was
    received), `scalars` those of the payload; `memory` is empty at the round's start and belongs to the strategy.
    """

    params: Mapping[str, Tensor]
    anchors: Mapping[str, Tensor]
    scalars: Mapping[str, float]
    memory: dict[str, Tensor]


@dataclass(frozen=True)
class Upload:
    """One site's accepted result with its weight, for strategies that need sites' results one by one."""

    update: Payload
    weight: int
    sent: Payload
    site: SiteInfo


Gathered = Tensors | dict[str, Upload]
"""A phase's results: their mean update (float64), or all of them by site, as `Strategy.needs` says."""


PARTIES = 1024
"""How many updates a mean has room for, unless it is told."""


class ExactMean:
    """Weighted mean that keeps one running sum and does not depend on the order of arrival.

    Updates are summed as 64-bit integers in units of `MEAN_UNIT`: integer addition never rounds, so it is associative.
    Memory: one int64 tensor per name, however many sites report.
    """

    def __init__(self, parties: int = PARTIES) -> None:
        self._sums: Tensors = {}
        self._weight, self._parties = 0, parties

    def add(self, update: Tensors, weight: int) -> None:
        """Add one site's update with a positive integer weight. Raises RefusedError, adding nothing, if it cannot be exact.

        Each of the `parties` has its share of the 62 bits, so that no update can crowd out another, whoever comes first.
        """
        largest = max((float(t.abs().max()) for t in update.values() if t.numel()), default=0.0)
        if largest / MEAN_UNIT * weight >= 2.0**62 / self._parties:
            raise RefusedError(f"update has a value of {largest:.3g}, too large to average; lower the learning rate or clip")
        for name, tensor in update.items():
            term = tensor.detach().double().div(MEAN_UNIT).round_().to(torch.int64).mul_(weight)
            self._sums[name] = self._sums[name].add_(term) if name in self._sums else term
        self._weight += weight

    def value(self) -> Tensors:
        """Return the mean in float64, {} of empty updates. Raises RefusedError if nothing was added."""
        if not self._weight:
            raise RefusedError("no site's update was accepted, so there is no mean; check the sites' logs")
        return {name: total.double().mul_(MEAN_UNIT / self._weight) for name, total in self._sums.items()}


def factor(name: str) -> str | None:
    """Return "A" or "B" for a LoRA factor's tensor name, None for any other adapter tensor (a head, a bottleneck)."""
    return {"lora_A": "A", "lora_B": "B"}.get(name.rpartition(".")[2])


def lora_factor(name: str, strategy: str) -> str | None:
    """Return `factor(name)` for a strategy that is about LoRA. Raises ConfigError for another kind of adapter."""
    if ".adapter_" in name or (name.startswith("mask_decoder.") and factor(name) is None):
        raise ConfigError(f"strategy {strategy} cannot place adapter tensor {name!r}; use adapter kind lora")
    return factor(name)


def next_phase(state: ServerState, phases: int) -> tuple[int, int]:
    """Return (round, phase) after the state's."""
    return (state.round, state.phase + 1) if state.phase + 1 < phases else (state.round + 1, 0)


class Strategy:
    """Base of every algorithm. Hooks never mutate their inputs; all randomness must come from seeds in the payload."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: ClassVar[str]
    upload_scalars: ClassVar[frozenset[str]] = frozenset()
    pools_data: ClassVar[bool] = False
    ranks_differ: ClassVar[bool] = False
    """Whether ranks differ by site and layer, which takes the dual-rank adapter."""
    needs: ClassVar[Literal["sums", "sites"]] = "sums"
    """What the server must see: weighted sums only (then noise, secure aggregation or encryption may hide the sites), or
    every site's result."""

    @property
    def period(self) -> int:
        """After how many rounds `phases` and `role` repeat."""
        return 1

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return what happens to the adapter tensor `name` in this phase. Raises ConfigError for a tensor it cannot place."""
        raise NotImplementedError

    def phases(self, round: int) -> int:
        """Return how many exchanges this round has."""
        return 1

    def names(self, tensors: Mapping[str, Tensor], role: Role, round: int, phase: int) -> list[str]:
        """Return the names that have `role` in this phase, in order."""
        return [name for name in tensors if self.role(name, round, phase) is role]

    def peer(self, name: str, round: int, phase: int) -> str | None:
        """Return the tensor, public in this phase, whose product with `name` is the effective update, or None.

        With a peer, clipping and noise act in the space of that product; see privacy/mechanism.py.
        """
        return None

    # server half ------------------------------------------------------------------------------------------------------

    def init_state(self, initial: Tensors) -> ServerState:
        """Return the state before round 0; `initial` holds every adapter tensor as all sites start from it."""
        phases = [(r, p) for r in range(self.period) for p in range(self.phases(r))]
        shared = {n: t for n, t in initial.items() if any(self.role(n, *p) is Role.SHARED for p in phases)}
        return ServerState(0, 0, shared, {n: t for n, t in initial.items() if n not in shared})

    def broadcast(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return what `site` receives: the shared tensors, and once also the start of those it will keep for itself."""
        first = {} if site.joined else state.initial
        return Payload(state.round, state.phase, {**state.shared, **first})

    def final(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return what `site` receives after the last round, to evaluate and keep."""
        return self.broadcast(state, site)

    def figures(self, state: ServerState) -> dict[str, Tensor]:
        """Return matrices (sites x sites, sorted names) worth a picture every round, by title."""
        return {}

    def diagnostics(self, state: ServerState, gathered: Gathered) -> dict[str, float]:
        """Return numbers about a phase's results worth a curve, given the state before they are merged."""
        return {}

    def conclude(self, state: ServerState, mean: Gathered) -> ServerState:
        """Return the next state: the mean update (float64) added to the shared tensors."""
        shared = dict(state.shared)
        shared |= {n: (shared[n].double() + u).to(shared[n].dtype) for n, u in mean.items()}
        round, phase = next_phase(state, self.phases(state.round))
        return replace(state, round=round, phase=phase, shared=shared)

    # site half --------------------------------------------------------------------------------------------------------

    def receive(self, params: Tensors, payload: Payload) -> Tensors:
        """Return the tensors local training starts from: the site's own, overwritten by what the server sent."""
        return {**params, **payload.tensors}

    def scaling(self, payload: Payload) -> float:
        """Return what multiplies the adapter's alpha / rank in the forward pass while this payload is in the model."""
        return 1.0

    def regularizer(self, step: Step) -> Tensor | None:
        """Return a scalar to add to the task's loss at this step, or None."""
        return None

    def upload(self, start: Tensors, end: Tensors, payload: Payload) -> Payload:
        """Return the update that leaves the site: end - start of the SHARED tensors."""
        shared = self.names(end, Role.SHARED, payload.round, payload.phase)
        return Payload(payload.round, payload.phase, {name: end[name] - start[name] for name in shared})


class RoundAggregate:
    """One phase's results as they come in: a running mean, or all of them where the strategy needs that."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.reset()

    def reset(self, parties: int = PARTIES) -> None:
        """Forget everything added; there is room for the results of so many `parties`."""
        self._mean = ExactMean(parties)
        self._uploads: dict[str, Upload] = {}

    def add(self, site: SiteInfo, update: Payload, weight: int, sent: Payload) -> None:
        """Add one accepted result. Raises RefusedError and adds nothing if it cannot be averaged exactly."""
        if self.strategy.needs == "sites":
            self._uploads[site.name] = Upload(update, weight, sent, site)
        else:
            self._mean.add(update.tensors, weight)

    def take(self) -> Gathered:
        """Return the mean, or the results in the order of sites' names, and forget them."""
        if self.strategy.needs == "sums":
            return self.mean()
        uploads = {name: self._uploads[name] for name in sorted(self._uploads)}
        self.reset()
        return uploads

    def mean(self) -> Tensors:
        """Return the mean update so far, float64, and forget what was added."""
        mean = self._mean.value()
        self.reset()
        return mean
