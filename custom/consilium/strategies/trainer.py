"""What the client half of an algorithm works with: the site's trainer, as far as an algorithm may use it."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from consilium.core.lazy import Tensor
from consilium.core.messages import Payload, Tensors


@dataclass(frozen=True)
class LocalStep:
    """One optimizer step of `Trainer.fit`, as its penalty sees it.

    `params`: the live adapter tensors. `anchors`: their values when `fit` began, detached. `scalars`: those of the payload.
    `memory`: empty when `fit` begins; it belongs to the penalty.
    """

    params: Mapping[str, Tensor]
    anchors: Mapping[str, Tensor]
    scalars: Mapping[str, float]
    memory: dict[str, Tensor]


Penalty = Callable[[LocalStep], Tensor | None]
"""Returns a scalar that is added to the loss of a step, or None."""
FeaturePenalty = Callable[[Tensor], Tensor | None]
"""Returns a scalar that is added to a batch's loss, given the mean (C,) of its features with its graph; or None."""


class GradientProbe(Protocol):
    """Reads losses and gradients of a random part of the training data, batch after batch; `batches` of them are one pass."""

    batches: int

    def __call__(self, values: Tensors, names: Collection[str]) -> tuple[float, Tensors]:
        """Return the loss on the next batch of the model with `values`, and its gradients of `names`, on the CPU."""
        ...


class Trainer(Protocol):
    """A site's model and training data during one phase. It counts and limits what reads records, as `Traits` declares.

    `own`: the site's tensors after its last training, {} before its first. `start`: the tensors as `Strategy.receive` returned
    them, in the model's order; they are in the model. `memory`: tensors that the site keeps for the algorithm from round to
    round, {} at first; change it in place. `closing`: whether this is the fit after the last round.
    """

    own: Tensors
    start: Tensors
    memory: Tensors
    closing: bool

    def fit(
        self,
        names: Iterable[str] | None = None,
        *,
        share: float = 0.0,
        penalty: Penalty | None = None,
        feature_penalty: FeaturePenalty | None = None,
        correction: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Train the tensors `names` for the job's steps; by default all of `start` that have a role other than FROZEN.

        `share`: of a local adapter in the forward pass. `penalty`, `feature_penalty`: terms of the loss; the second needs the
        part FEATURE_SHIFT. `correction`: a change by name that is added to tensors over the steps, beside the optimizer's.
        """
        ...

    def probe(self) -> GradientProbe:
        """Return a reader of losses and gradients of `Traits.probe_fraction` of the training data."""
        ...

    def values(self) -> Tensors:
        """Return copies of the tensors of `start` as the model has them now, in the model's order."""
        ...

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Put `values` into the model; tensors that it does not name stay as they are."""
        ...

    def update(self, since: Mapping[str, Tensor] | None = None) -> Payload:
        """Return what leaves the site: by how much the SHARED tensors differ from `since`, by default from `start`."""
        ...
