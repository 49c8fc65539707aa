"""What a strategy may ask of a site beyond one pass over one adapter: more passes, a local adapter, looks at its data."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from consilium.core.messages import Tensors


@dataclass(frozen=True)
class Pass:
    """One pass of local training: the tensors it trains, and the share of a local adapter in its forward pass."""

    trained: frozenset[str]
    share: float = 0.0


@dataclass(frozen=True)
class Blend:
    """The share of a local adapter in a site's personalized model: `most`, times each sample's similarity to the site's data.

    `examples`: of how many training records; with 0 the share is `most` for every sample.
    """

    most: float
    examples: int


class Look(Protocol):
    """Looks at a site's training data before local training, batch after batch; `batches` of them are one pass."""

    batches: int

    def __call__(self, values: Tensors, names: Collection[str]) -> tuple[float, Tensors]:
        """Return the loss on the next batch of the model with `values`, and its gradients of `names`."""
        ...
