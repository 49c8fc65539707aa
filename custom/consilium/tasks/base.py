"""What training and evaluation need of a task."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch: TypeAlias = "dict[str, Tensor]"


class Task(Protocol):
    """What the loop needs of a task; see tasks/segmentation.py."""

    num_samples: int

    def has(self, split: str) -> bool:
        """Tell whether the split holds any sample."""
        ...

    def batch(self, indices: Sequence[int], seed: int) -> Batch:
        """Return these samples of the training split. The first dimension is the sample.

        A sample's augmentation depends on `seed` and its own index only, never on the samples beside it.
        """
        ...

    def loss(self, model: "nn.Module", batch: Batch) -> "Tensor":
        """Return the scalar mean loss of a batch."""
        ...

    def evaluate(self, model: "nn.Module", split: str, batch_size: int, distances: bool = False) -> dict[str, float]:
        """Return metrics of a split, {} if it is empty."""
        ...
