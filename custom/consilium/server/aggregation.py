"""A phase's results at the server: an exact running mean, or all of them where the strategy needs that."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from consilium.config.server import ServerConfig
from consilium.core.errors import RefusedError
from consilium.core.linalg.together import together
from consilium.core.messages import TRAIN_LOSS, TRAIN_PENALTY, Payload, SiteInfo, Tensors
from consilium.privacy.secagg.arithmetic import UNIT, quantize
from consilium.server.server_optimizer import robust_mean
from consilium.strategies.strategy import RoundResults, SiteResult, Strategy

MEAN_UNIT = UNIT
"""Grid of the exact mean: updates are rounded to multiples of this before they are summed."""

PARTIES = 1024
"""How many updates a mean has room for by default."""


Piece = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of the tensors whose numbers are summed in one."""


class ExactMean:
    """Weighted mean that keeps one running sum and does not depend on the order of arrival.

    Updates are summed as 64-bit integers in units of `MEAN_UNIT`: integer addition never rounds, so it is associative.
    Memory: one int64 number for each of an update's, however many sites report.
    """

    def __init__(self, parties: int = PARTIES) -> None:
        self._sums, self._names = dict[Piece, Tensor](), dict[str, None]()
        self._weight, self._parties = 0.0, parties

    def add(self, update: Tensors, weight: int) -> None:
        """Add one site's update with a positive integer weight. Raises RefusedError, adding nothing, if it cannot be exact.

        Tensors of int64 are in units already.

        Each of the `parties` has its share of the 62 bits, so that no update can crowd out another, in any order of arrival.
        """
        pieces = {tuple((n, tuple(update[n].shape)) for n in names): numbers for names, numbers in together(update)}
        units = {piece: MEAN_UNIT if t.dtype is torch.int64 else 1.0 for piece, t in pieces.items()}
        tops = [float(t.abs().max()) * units[piece] for piece, t in pieces.items() if t.numel()]
        if not all(top / MEAN_UNIT * weight < 2.0**62 / self._parties for top in tops):  # so is NaN refused
            largest = next((top for top in tops if math.isnan(top)), max(tops))
            raise RefusedError(f"update has a value of {largest:.3g}, too large to average; lower the learning rate or clip")
        for piece, numbers in pieces.items():
            term = quantize({"": numbers})[""] * weight
            self._sums[piece] = self._sums[piece].add_(term) if piece in self._sums else term
        self._names |= dict.fromkeys(update)
        self._weight += weight

    def put(self, sums: Tensors, weight: float) -> None:
        """Take sums that were made elsewhere: int64 in units of `MEAN_UNIT`, and their weights' (or another divisor)."""
        self._sums = {((name, tuple(total.shape)),): total.reshape(-1) for name, total in sums.items()}
        self._names, self._weight = dict.fromkeys(sums), weight

    def value(self) -> Tensors:
        """Return the mean in float64, {} of empty updates. Raises RefusedError if nothing was added."""
        return {name: total.double().mul_(MEAN_UNIT / self._weight) for name, total in self.sums().items()}

    def sums(self) -> Tensors:
        """Return the sums, int64 in units of `MEAN_UNIT`. Raises RefusedError if nothing was added."""
        if not self._weight:
            raise RefusedError("no site's update was accepted, so there is no mean; check the sites' logs")
        sums: Tensors = {}
        for piece, total in self._sums.items():
            for (name, shape), part in zip(piece, total.split([math.prod(shape) for _, shape in piece]), strict=True):
                sums[name] = sums[name] + part.view(shape) if name in sums else part.view(shape)
        return {name: sums[name] for name in self._names}


class RoundAggregate:
    """One phase's results as they come in: a running mean, or all of them where the strategy or a robust mean needs that."""

    def __init__(self, strategy: Strategy, server: ServerConfig | None = None) -> None:
        self.strategy, self.server = strategy, server or ServerConfig()
        self.reset()

    def reset(self, parties: int = PARTIES) -> None:
        """Forget everything added; there is room for the results of so many `parties`."""
        self._mean = ExactMean(parties)
        self._uploads: dict[str, SiteResult] = {}

    def add(self, site: SiteInfo, update: Payload, weight: int, sent: Payload) -> None:
        """Add one accepted result. Raises RefusedError and adds nothing if it cannot be averaged exactly."""
        if self.strategy.traits.needs == "sites" or self.server.robust:
            self._uploads[site.name] = SiteResult(update, weight, sent, site)
        else:
            self._mean.add(update.tensors, weight)

    def take(self) -> RoundResults:
        """Return the mean, or the results in the order of sites' names, and forget them."""
        if self.strategy.traits.needs == "sums":
            return self.mean()
        uploads = {name: self._uploads[name] for name in sorted(self._uploads)}
        self.reset()
        return uploads

    def sums(self) -> Tensors:
        """Return the sums of the updates, int64 in units of `MEAN_UNIT`, and forget them."""
        sums = self._mean.sums()
        self.reset()
        return sums

    def mean(self) -> Tensors:
        """Return the mean update so far, float64, as the job's `server.mean` says, and forget what was added."""
        updates = [result.update.tensors for result in self._uploads.values()]
        mean = robust_mean(self.server, updates) if self.server.robust else self._mean.value()
        self.reset()
        return mean


def penalized(trained: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the loss with and without the strategy's penalty, means over the sites that send both; {} where none does."""
    told = [one for one in trained if TRAIN_PENALTY in one and TRAIN_LOSS in one]
    if not told:
        return {}
    loss, penalty = (math.fsum(one[name] for one in told) / len(told) for name in (TRAIN_LOSS, TRAIN_PENALTY))
    return {"loss/task": loss, "loss/with penalty": loss + penalty, "penalty/mean": penalty}
