"""The interface of a task for training and evaluation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch: TypeAlias = "dict[str, Tensor]"


@dataclass(frozen=True)
class Segmented:
    """Pictures beside their masks: `images` (N, 3, S, S) uint8, `references` and `predictions` (N, C, S, S) bool of `classes`.

    `dice` (N,) is the mean over the classes that a picture's reference has, NaN if it has none; `grid`: whose pixels it is of.
    """

    images: "Tensor"
    references: "Tensor"
    predictions: "Tensor"
    dice: "Tensor"
    classes: tuple[str, ...]
    grid: str = ""


@dataclass(frozen=True)
class Classified:
    """Pictures beside their classes: `images` (N, 3, S, S) uint8, `references` (N,) numbers of `classes`, `predictions` (N, C)
    probabilities.
    """

    images: "Tensor"
    references: "Tensor"
    predictions: "Tensor"
    classes: tuple[str, ...]


Examples = Segmented | Classified


@dataclass(frozen=True)
class Answered:
    """Prompts, reference answers and the model's answers, one of each per record."""

    prompts: tuple[str, ...]
    references: tuple[str, ...]
    answers: tuple[str, ...]


Shown = Examples | Answered


@dataclass(frozen=True)
class Scored:
    """The scores of a closing evaluation by unit (an image, a volume, a patient, a record).

    `score`: how the values are called; `lower`: whether less is better; `names` of the units, such as their files'; `values`:
    NaN where there is none; `samples`: which one of the split shows a unit.
    """

    score: str
    lower: bool
    names: tuple[str, ...]
    values: tuple[float, ...]
    samples: tuple[int, ...]


@runtime_checkable
class ShowsUnits(Protocol):
    """Optional methods of a task that show its best, median and worst units; see report/best_worst_cases.py."""

    scored: Scored | None
    """Of the last closing evaluation."""

    def show(self, model: "nn.Module", split: str, indices: Sequence[int]) -> Shown | None:
        """Return these samples of a split, in order, with the model's predictions; None if none can be read."""
        ...


class GroupsRecords(Protocol):
    """A task that may want other records in one batch than chance."""

    def grouped(self, order: list[int], size: int) -> list[int]:
        """Return an epoch's shuffled order, for batches of `size`, in the order that is wanted."""
        ...


class Task(Protocol):
    """A task, as the training loop uses it; see tasks/segmentation/task.py."""

    num_samples: int

    def has(self, split: str) -> bool:
        """Tell whether the split has any sample."""
        ...

    def batch(self, indices: Sequence[int], seed: int) -> Batch:
        """Return these samples of the training split. The first dimension is the sample.

        A sample's augmentation depends on `seed` and its own index only, never on the samples beside it. Without those that
        cannot be read, where the site leaves them out; {} if none is left. A task with `workers`, a number of threads, has
        its next batches made by another thread, one at a time. One that is `quiet` leaves out what does not fit the job, and
        none need be left; see data/loading.py.
        """
        ...

    def loss(self, model: "nn.Module", batch: Batch) -> "Tensor":
        """Return the scalar mean loss of a batch."""
        ...

    def evaluate(self, model: "nn.Module", split: str, batch_size: int, distances: bool = False) -> dict[str, float]:
        """Return metrics of a split, {} if it is empty."""
        ...

    def examples(self, model: "nn.Module", split: str) -> Examples | None:
        """Return a few samples of a split, the same at every call, with the model's predictions.

        None if the split is empty, or if the task has no pictures.
        """
        ...


@contextmanager
def evaluating(model: "nn.Module") -> Iterator[None]:
    """Have the model in evaluation mode for the block, and in its own mode after it.

    To switch the mode costs as much as a small model's forward pass, so it is switched only where it is another.
    """
    if not model.training:
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()
