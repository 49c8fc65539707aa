"""The interface of the site's trainer that the client half of an algorithm uses."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from consilium.core.lazy import Tensor
from consilium.core.messages import Payload, Tensors


@dataclass(frozen=True)
class LocalStep:
    """The argument of a penalty at one optimizer step of `Trainer.fit`.

    `params`: the live adapter tensors. `anchors`: their detached values from the start of `fit`. `scalars`: the scalars of the
    payload. `memory`: a dict that the penalty may use from step to step; empty when `fit` begins.
    """

    params: Mapping[str, Tensor]
    anchors: Mapping[str, Tensor]
    scalars: Mapping[str, float]
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
