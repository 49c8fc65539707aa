"""Aggregation of a phase's results at the server, and the server optimizer's step.

Results are aggregated in an exact running mean, or all of them are stored if the strategy or a robust mean needs that.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from consilium.config.job import TrainingConfig
from consilium.config.run_sections import ROUNDING, ServerConfig
from consilium.core.errors import ConsiliumError, RefusedError
from consilium.core.messages import TRAIN_LOSS, TRAIN_PENALTY, Payload, SiteInfo, Tensors
from consilium.core.norms import concat_small
from consilium.federation.job_assembly import Job
from consilium.privacy.guard.release import geometries, server_sees_only_sums
from consilium.privacy.mechanism import Geometry, restore_update
from consilium.privacy.secagg.arithmetic import UNIT, quantize
from consilium.server.checks import check_next_state
from consilium.strategies.strategy import RoundResults, ServerState, SiteResult, Strategy, trained_names
from consilium.training.loop import make_optimizer, restore_optimizer, state_of

# server optimizer ------------------------------------------------------------------------------------------------------
# Between the sites' updates and the strategy's aggregate(): an optional robust mean, and the step of a server optimizer.
#
# DP-SGD steps over all sites use PyTorch's optimizer of the job's `training:` section instead.
#
# Optimizers, elementwise, with D the mean update of the round and x the shared tensors:
#
#     momentum    m = beta1 m + D                 x = x + lr m
#     adam        m = beta1 m + (1 - beta1) D     v = beta2 v + (1 - beta2) D^2
#     yogi        m as adam's                     v = v - (1 - beta2) D^2 sign(v - D^2)
#     adam, yogi                                  x = x + lr m / (sqrt(v) + tau)
#
# At the start m = 0 and v = tau^2. There is no bias correction. (Flower's FedAdam starts v at 0 and corrects the bias.) Each
# tensor has its own state, which does not change in a phase that does not train the tensor. All state is float64.
#
# Robust means, elementwise:
#
#     median      the median of the sites' values; for an even number of sites, the mean of the middle two
#     trimmed     the mean without the fraction `trim` of the largest and of the smallest values
#
# Source of FedAdam and FedYogi: S. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konecny, S. Kumar, H. B. McMahan,
# "Adaptive Federated Optimization", ICLR 2021, Algorithm 2 (source's formula; v = tau^2 is the least start it allows). Source
# of FedAvgM: T.-M. H. Hsu, H. Qi, M. Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
# Classification", arXiv 1909.06335, 2019 (source's formula; lr is ours, 1 in the paper). Source of median and trimmed mean: D.
# Yin, Y. Chen, K. Ramchandran, P. Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML
# 2018, Definitions 1 and 2. Our choice: for n sites, trim * n is rounded up, but at least one value remains.

FIRST, SECOND = "first", "second"
"""Prefixes of names in ServerState.optimizer: "first/<tensor>" is m, "second/<tensor>" is v."""


def aggregate_results(job: Job, state: ServerState, mean: RoundResults) -> ServerState:
    """Return the next state after the server optimizer's step, if the job has one, and the strategy's aggregation of `mean`.

    Tensors that are shared but not trained, such as FedDBE's mean of features, are added unchanged. Raises ConsiliumError if
    the result has NaN or Inf, or an error occurs. `state` is not changed.
    """
    config, before = job.config, state
    try:
        if config.dpsgd is not None and config.dpsgd.trust == "distributed":
            before, mean = training_optimizer_step(config.training, state, mean)
        elif config.server is not None:
            trained = trained_names(job.strategy, job.initial, state.round, state.phase)
            descent = {name: update for name, update in mean.items() if name in trained}
            before, steps = server_optimizer_step(config.server, state, descent)
            mean = {**mean, **steps}
        after = job.strategy.aggregate(before, mean)
    except RuntimeError as error:  # a decomposition that does not converge
        why = " ".join(str(error).split())[:200]
        raise ConsiliumError(f"round {state.round + 1}: the results cannot be merged ({type(error).__name__}: {why})") from None
    check_next_state(job.strategy, job.initial, state, after)
    kept = [after.shared, after.matrices, after.optimizer, *after.sites.values()]
    if not all(torch.isfinite(tensor).all() for tensors in kept for tensor in tensors.values()):
        raise ConsiliumError(
            f"round {state.round + 1}: NaN or Inf in what {job.strategy.name} merged; lower federation.max_norm_ratio"
        )
    return after


def server_optimizer_step(config: ServerConfig, state: ServerState, mean: Tensors) -> tuple[ServerState, Tensors]:
    """Return the state with the optimizer's new moments, and the step that the strategy adds instead of the mean, float64.

    An update with a smaller shape than its tensor (as with dp_dylora) applies to the tensor's leading rows and columns.
    """
    if config.optimizer is None:
        return state, mean
    kept, steps = dict(state.optimizer), dict[str, Tensor]()
    for name, value in mean.items():
        whole, update, part = state.shared[name], value.double(), tuple(slice(size) for size in value.shape)
        first = _store_moment_copy(kept, f"{FIRST}/{name}", whole, 0.0)[part]
        first.mul_(config.beta1).add_(update, alpha=1.0 if config.optimizer == "momentum" else 1 - config.beta1)
        if config.optimizer == "momentum":
            steps[name] = config.learning_rate * first
            continue
        second, square = _store_moment_copy(kept, f"{SECOND}/{name}", whole, config.tau**2)[part], update.square()
        if config.optimizer == "adam":
            second.mul_(config.beta2).add_(square, alpha=1 - config.beta2)
        else:
            second.sub_((1 - config.beta2) * square * torch.sign(second - square))
        steps[name] = config.learning_rate * first / (second.sqrt() + config.tau)
    return replace(state, optimizer=kept), steps


def training_optimizer_step(config: TrainingConfig, state: ServerState, descent: Tensors) -> tuple[ServerState, Tensors]:
    """Apply `training.optimizer` to one DP-SGD step over all sites. Return the state with its new state, and the step to add.

    `descent`: minus the noisy gradient, float64. The optimizer is PyTorch's, with the state of all earlier steps. So one step
    here equals one step of training on pooled data.
    """
    parameters = {name: nn.Parameter(state.shared[name].clone()) for name in descent}
    for name, parameter in parameters.items():
        parameter.grad = -descent[name].to(parameter.dtype)
    optimizer = make_optimizer(list(parameters.values()), config)
    restore_optimizer(optimizer, list(parameters), state.optimizer)
    optimizer.step()
    steps = {name: parameter.detach().double() - state.shared[name].double() for name, parameter in parameters.items()}
    return replace(state, optimizer=state.optimizer | state_of(optimizer, list(parameters))), steps


def _store_moment_copy(kept: Tensors, name: str, whole: Tensor, start: float) -> Tensor:
    """Store a copy of a moment, or its initial value, in `kept`. Return it, to be changed in place."""
    before = kept.get(name)
    kept[name] = torch.full(whole.shape, start, dtype=torch.float64) if before is None else before.clone()
    return kept[name]


def robust_mean(config: ServerConfig, updates: Sequence[Tensors]) -> Tensors:
    """Return the median or trimmed mean of updates, float64, independent of their order. Raises RefusedError for no update."""
    if not updates:
        raise RefusedError("no site's update was accepted, so there is no mean; check the sites' logs")
    count = len(updates)
    most = (count - 1) // 2
    cut = most if config.mean == "median" else min(math.ceil(config.trim * count - ROUNDING), most)
    ordered = {name: torch.stack([one[name].double() for one in updates]).sort(0).values for name in updates[0]}
    return {name: values[cut : count - cut].mean(0) for name, values in ordered.items()}


# aggregation -----------------------------------------------------------------------------------------------------------

PARTIES = 1024
"""The default number of updates for which a mean leaves room."""


Piece = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of the tensors that are concatenated and summed as one vector."""


class ExactMean:
    """A weighted mean with one running sum. The result does not depend on the order of arrival.

    Updates are rounded to multiples of `UNIT` and summed as 64-bit integers. Integer addition never rounds, so it is
    associative. The memory is one int64 per number of an update, for any number of sites.
    """

    def __init__(self, parties: int = PARTIES) -> None:
        self._sums, self._names = dict[Piece, Tensor](), dict[str, None]()
        self._weight, self._parties = 0.0, parties

    def add(self, update: Tensors, weight: int) -> None:
        """Add one site's update with a positive integer weight. int64 tensors are in units already.

        Raises RefusedError and adds nothing if a value is NaN or too large. Each of the `parties` may use an equal part of the
        range of 62 bits, so that one update never makes another overflow, in any order of arrival.
        """
        pieces = {tuple((n, tuple(update[n].shape)) for n in names): numbers for names, numbers in concat_small(update)}
        units = {piece: UNIT if t.dtype is torch.int64 else 1.0 for piece, t in pieces.items()}
        tops = [float(t.abs().max()) * units[piece] for piece, t in pieces.items() if t.numel()]
        if not all(top / UNIT * weight < 2.0**62 / self._parties for top in tops):  # refuses NaN too
            largest = next((top for top in tops if math.isnan(top)), max(tops))
            raise RefusedError(f"update has a value of {largest:.3g}, too large to average; lower the learning rate or clip")
        for piece, numbers in pieces.items():
            term = quantize({"": numbers})[""] * weight
            self._sums[piece] = self._sums[piece].add_(term) if piece in self._sums else term
        self._names |= dict.fromkeys(update)
        self._weight += weight

    def set_sums(self, sums: Tensors, weight: float) -> None:
        """Set the sums to `sums` (int64 in units of `UNIT`), and their divisor to `weight`."""
        self._sums = {((name, tuple(total.shape)),): total.reshape(-1) for name, total in sums.items()}
        self._names, self._weight = dict.fromkeys(sums), weight

    def value(self) -> Tensors:
        """Return the mean in float64, {} for empty updates. Raises RefusedError if nothing was added."""
        return {name: total.double().mul_(UNIT / self._weight) for name, total in self.sums().items()}

    def sums(self) -> Tensors:
        """Return the sums, int64 in units of `UNIT`. Raises RefusedError if nothing was added."""
        if not self._weight:
            raise RefusedError("no site's update was accepted, so there is no mean; check the sites' logs")
        sums: Tensors = {}
        for piece, total in self._sums.items():
            for (name, shape), part in zip(piece, total.split([math.prod(shape) for _, shape in piece]), strict=True):
                sums[name] = sums[name] + part.view(shape) if name in sums else part.view(shape)
        return {name: sums[name] for name in self._names}


class RoundAggregate:
    """Collects one phase's results: as a running mean, or all of them if the strategy or a robust mean needs that."""

    def __init__(self, strategy: Strategy, server: ServerConfig | None = None) -> None:
        self.strategy, self.server = strategy, server or ServerConfig()
        self.reset()

    def reset(self, parties: int = PARTIES) -> None:
        """Forget everything added, and leave room for the results of `parties` sites."""
        self._mean = ExactMean(parties)
        self._uploads: dict[str, SiteResult] = {}

    def add(self, site: SiteInfo, update: Payload, weight: int, sent: Payload) -> None:
        """Add one accepted result. Raises RefusedError and adds nothing if it cannot be averaged exactly."""
        if self.strategy.traits.needs == "sites" or self.server.is_robust:
            self._uploads[site.name] = SiteResult(update, weight, sent, site)
        else:
            self._mean.add(update.tensors, weight)

    def take(self) -> RoundResults:
        """Return the mean, or all results in the order of sites' names if the strategy needs them; forget them."""
        if self.strategy.traits.needs == "sums":
            return self.take_mean()
        uploads = {name: self._uploads[name] for name in sorted(self._uploads)}
        self.reset()
        return uploads

    def take_sums(self) -> Tensors:
        """Return the sums of the updates, int64 in units of `UNIT`, and forget them."""
        sums = self._mean.sums()
        self.reset()
        return sums

    def take_mean(self) -> Tensors:
        """Return the mean update in float64, by the job's `server.mean`, and forget the results."""
        updates = [result.update.tensors for result in self._uploads.values()]
        mean = robust_mean(self.server, updates) if self.server.is_robust else self._mean.value()
        self.reset()
        return mean


class MaskedAggregate(RoundAggregate):
    """An aggregate that is filled with the opened sum instead of single updates."""

    def add(self, site: SiteInfo, update: Payload, weight: int, sent: Payload) -> None:
        """Do nothing, because the update is already in the sum."""

    def fill(self, sums: Tensors, divisor: float, maps: Mapping[str, Geometry]) -> None:
        """Set the opened sums (int64, units), their divisor, and the maps from whitened coordinates back to updates."""
        self._mean.set_sums(sums, divisor)
        self._maps = dict(maps)

    def take_mean(self) -> Tensors:
        """Return the mean update, float64, and forget the sum."""
        return restore_update(self._maps, super().take_mean())


def with_divisor_and_maps(
    job: Job, state: ServerState, sums: Tensors, weight: int
) -> tuple[Tensors, float, dict[str, Geometry]]:
    """Return the unmasked `sums` of a phase (int64, units) with their divisor and the whitening maps.

    `weight`: the sum of the sites' weights. A DP-SGD step is divided by the job's constant, which does not depend on what was
    drawn. The maps turn whitened coordinates into updates, by tensor name; {} if no tensor is whitened.
    """
    public = state.shared | state.initial
    if not server_sees_only_sums(job.config):
        return sums, weight, {}
    divisor = job.config.dpsgd.divisor if job.config.dpsgd else None
    return sums, divisor or weight, geometries(job.strategy, job.config, sums, public, state.round, state.phase)


def aggregate_for(job: Job) -> RoundAggregate:
    """Return the aggregate that collects a job's results: masked or not."""
    return (MaskedAggregate if job.config.secure_aggregation else RoundAggregate)(job.strategy, job.config.server)


def mean_penalty_losses(trained: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the loss with and without the strategy's penalty, as means over the sites that report both; {} if none does."""
    told = [one for one in trained if TRAIN_PENALTY in one and TRAIN_LOSS in one]
    if not told:
        return {}
    loss, penalty = (math.fsum(one[name] for one in told) / len(told) for name in (TRAIN_LOSS, TRAIN_PENALTY))
    return {"loss/task": loss, "loss/with penalty": loss + penalty, "penalty/mean": penalty}
