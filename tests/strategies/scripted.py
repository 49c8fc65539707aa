"""A trainer whose fits end where a test says, so that client halves can be tested without a model."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from consilium.core.messages import Payload, Tensors
from consilium.strategies.strategy import GradientProbe, Role, Strategy


class Unread:
    """A probe of no data."""

    batches = 0

    def __call__(self, values: Tensors, names: Any) -> tuple[float, Tensors]:
        raise AssertionError("there is no batch")


class Scripted:
    """`fits`: what each fit was asked for. The first fit ends in `end`."""

    closing = False

    def __init__(
        self, strategy: Strategy, start: Tensors, end: Tensors, payload: Payload, own: Tensors | None = None,
        probe: GradientProbe | None = None,
    ) -> None:  # fmt: skip
        self.start, self.own, self.memory, self.fits = dict(start), own or {}, Tensors(), list[dict[str, Any]]()
        self._strategy, self._end, self._payload, self._now, self._probe = strategy, end, payload, dict(start), probe

    def fit(self, names: Any = None, **options: Any) -> None:
        self.fits.append({"names": names if names is None else list(names), **options})
        self._now |= self._end

    def gradient_probe(self) -> GradientProbe:
        return self._probe or Unread()

    def values(self) -> Tensors:
        return dict(self._now)

    def load(self, values: Mapping[str, Tensor]) -> None:
        self._now |= values

    def update(self, since: Mapping[str, Tensor] | None = None) -> Payload:
        since, place = self.start if since is None else since, (self._payload.round, self._payload.phase)
        end = self.values()
        return Payload(*place, {name: end[name] - since[name] for name in self._strategy.names(end, Role.SHARED, *place)})


def update_of(strategy: Strategy, start: Tensors, end: Tensors, payload: Payload) -> Payload:
    """Return what leaves a site whose training took it from `start` to `end`."""
    return strategy.local_update(Scripted(strategy, start, end, payload), payload)
