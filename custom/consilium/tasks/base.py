"""The interface of a task for training and evaluation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from consilium.data.datalist import DataList

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch: TypeAlias = "dict[str, Tensor]"


@dataclass(frozen=True)
class Segmented:
    """Pictures with their masks: `images` (N, 3, S, S) uint8, `references` and `predictions` (N, C, S, S) bool by `classes`.

    S is the model's size or, where scores are taken at the files' size, the size at which they are drawn.

    `dice` (N,): the mean over the classes in a picture's reference, NaN if it has none. `grid`: whose pixels `dice` counts.
    """

    images: "Tensor"
    references: "Tensor"
    predictions: "Tensor"
    dice: "Tensor"
    classes: tuple[str, ...]
    grid: str = ""


@dataclass(frozen=True)
class Classified:
    """Pictures with their classes: `images` (N, 3, S, S) uint8, `references` (N,), indices into `classes`, and `predictions`
    (N, C), probabilities.
    """

    images: "Tensor"
    references: "Tensor"
    predictions: "Tensor"
    classes: tuple[str, ...]


Examples = Segmented | Classified


@dataclass(frozen=True)
class Answered:
    """Prompts, reference answers and the model's answers; each has one entry per record."""

    prompts: tuple[str, ...]
    references: tuple[str, ...]
    answers: tuple[str, ...]


Shown = Examples | Answered


@dataclass(frozen=True)
class UnitScores:
    """The scores of the final evaluation by unit (an image, a volume, a patient, a record).

    `score`: the name of the score. `lower`: whether lower values are better. `names`: one per unit, such as its file. `values`:
    one per unit, NaN if undefined. `samples`: for each unit the index of the sample in the split that shows it.
    """

    score: str
    lower: bool
    names: tuple[str, ...]
    values: tuple[float, ...]
    samples: tuple[int, ...]


@runtime_checkable
class ShowsUnits(Protocol):
    """Optional methods of a task that show its best, median and worst units; see report/predictions.py."""

    scored: UnitScores | None
    """The scores of the last final evaluation."""

    def show(self, model: "nn.Module", split: str, indices: Sequence[int]) -> Shown | None:
        """Return these samples of a split, in order, with the model's predictions; None if none can be read."""
        ...


class Task(Protocol):
    """A task, as the training loop uses it; see tasks/segmentation/task.py.

    Optional: `batch_order(order, size)` returns an epoch's shuffled `order`, rearranged for batches of `size`.
    """

    num_samples: int

    def has(self, split: str) -> bool:
        """Return whether the split has any sample."""
        ...

    def batch(self, indices: Sequence[int], seed: int) -> Batch:
        """Return these samples of the training split as a batch. The first dimension is the sample.

        A sample's augmentation depends only on `seed` and its own index, never on other samples of the batch. Samples that
        cannot be read are left out if the site allows it; {} if none remains. If a task's attribute `workers` (its number of
        reading threads) is over 0, one background thread calls `batch` ahead of training. Calls of `batch` never overlap. A
        task whose attribute `ignores_unfit` is true leaves out samples that do not fit the job, possibly all; see
        data/datalist.py.
        """
        ...

    def loss(self, model: "nn.Module", batch: Batch) -> "Tensor":
        """Return the scalar mean loss of a batch."""
        ...

    def evaluate(self, model: "nn.Module", split: str, batch_size: int, full: bool = False) -> dict[str, float]:
        """Return the metrics of a split, {} if it is empty. `full`: also those of the final evaluation only."""
        ...

    def examples(self, model: "nn.Module", split: str) -> Examples | None:
        """Return a few samples of a split, the same at every call, with the model's predictions.

        None if the split is empty, or if the task has no pictures.
        """
        ...


class SampledTask:
    """The methods that tasks on a data list share whose samples are decoded and cached."""

    data: DataList
    _samples: Any
    """A SampleCache, or an object with its methods."""

    @property
    def skipped(self) -> int:
        """The number of unreadable samples that were skipped so far."""
        return self._samples.skipped

    @property
    def ignores_unfit(self) -> bool:
        """See Task."""
        return self.data.loading.ignore_unfit and not self._samples.all_lost

    def read_again(self, split: str, index: int) -> None:
        """Read a sample from its files, even if it is cached. Raises DataError."""
        self._samples.read_again(split, index)

    def has(self, split: str) -> bool:
        """Return whether the split has any sample."""
        return bool(self.data.splits[split])


@contextmanager
def evaluating(model: "nn.Module") -> Iterator[None]:
    """Put the model into evaluation mode within the context, and restore its mode afterwards.

    Switching the mode costs as much as a small model's forward pass, so it is skipped if the mode is already right.
    """
    if not model.training:
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()
