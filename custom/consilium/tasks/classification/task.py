"""Classification: batches of images and class numbers, cross-entropy, accuracy, macro F1, recalls and the confusion table."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilium.data.augment import augment
from consilium.data.cache import SampleCache, to_float
from consilium.data.datalist import SPLITS, DataList, Item
from consilium.data.images import Sample, read_picture_bytes
from consilium.data.inspect import look_at_picture
from consilium.data.settings import DEFAULTS, PictureSettings, read_as
from consilium.data.store import Raw
from consilium.errors import DataError
from consilium.tasks.base import Batch, Classified, evaluating

EXAMPLES = 6
"""How many pictures of a split are shown."""


class ClassificationTask:
    """One site's images, each of one class. All are looked at once at the start, so that bad data stops before any training.

    Metrics: see `score`. A class without samples in the evaluated split has no recall and is left out of macro F1.
    """

    def __init__(
        self,
        data: DataList,
        classes: Sequence[str],
        image_size: int,
        augment: bool = True,
        settings: PictureSettings = DEFAULTS,
    ) -> None:
        self.data, self.classes, self.augment = data, list(classes), augment
        self.num_samples = len(data.splits["training"])
        self._labels = {split: [class_index(item, self.classes) for item in data.splits[split]] for split in SPLITS}
        self.workers = data.loading.workers
        self._samples = SampleCache(
            data,
            lambda item: {"image": read_picture_bytes(item, image_size, settings)},
            lambda item: look_at(item, self.classes, settings),
            read_as("classification", settings, image_size, self.classes),
        )

    @property
    def skipped(self) -> int:
        """How many samples were left out so far because they cannot be read."""
        return self._samples.skipped

    def has(self, split: str) -> bool:
        """Tell whether the split holds any sample."""
        return bool(self.data.splits[split])

    def batch(self, indices: Sequence[int], seed: int) -> Batch:
        """Return "image" (N, 3, S, S) and "label" (N,) of these training samples, augmented as `seed` says.

        {} if none of them can be read.
        """

        def made(index: int, raw: Raw) -> Sample:
            return augment(raw, seed, index) if self.augment else to_float(index, raw)

        return self._collate("training", self._samples.many("training", indices, made))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of a batch, in float32."""
        device = next(model.parameters()).device
        return F.cross_entropy(model(batch["image"].to(device, non_blocking=True)).float(), batch["label"].to(device))

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: str, batch_size: int, distances: bool = False) -> dict[str, float]:
        """Return metrics of a split, {} if it is empty; `distances`, the closing evaluation, adds the confusion table.

        The model's mode is restored.
        """
        device, was_training = next(model.parameters()).device, model.training
        logits, labels = [], []
        model.eval()
        for part in self._samples.parts(split, batch_size):
            if batch := self._collate(split, part):
                logits.append(model(batch["image"].to(device, non_blocking=True)).float().cpu())
                labels.append(batch["label"])
        model.train(was_training)
        return score(torch.cat(logits), torch.cat(labels), self.classes, distances) if logits else {}

    @torch.no_grad()
    def examples(self, model: nn.Module, split: str) -> Classified | None:
        """Return pictures of as many classes as can be; None if the split is empty.

        The model sees one at a time, to save memory.
        """
        picked = spread(self._labels[split], EXAMPLES)
        batch = self._collate(split, self._samples.many(split, picked, to_float))
        if not batch:
            return None
        device = next(model.parameters()).device
        with evaluating(model):
            logits = torch.cat([model(image[None].to(device)).float().cpu() for image in batch["image"]])
        return Classified(batch["image"].byte(), batch["label"], logits.softmax(1), tuple(self.classes))

    def _collate(self, split: str, samples: Sequence[tuple[int, Sample]]) -> Batch:
        if not samples:
            return {}
        labels = torch.tensor([self._labels[split][index] for index, _ in samples])
        return {"image": torch.stack([sample["image"] for _, sample in samples]), "label": labels}


def spread(labels: Sequence[int], count: int) -> list[int]:
    """Return at most `count` indices in order: the first of every class, then the second of every class, and so on."""
    seen: Counter[int] = Counter()
    turns = []
    for index, label in enumerate(labels):
        turns.append((seen[label], index))
        seen[label] += 1
    return sorted(index for _, index in sorted(turns)[:count])


def look_at(item: Item, classes: Sequence[str], settings: PictureSettings) -> None:
    """Raise DataError for a sample without a class of the task, or whose header tells that it cannot be read."""
    class_index(item, classes)
    look_at_picture(item, settings)


def class_index(item: Item, classes: Sequence[str]) -> int:
    """Return a sample's class by name or number from 0. Raises DataError if it has none of `classes`."""
    known = f"task.classes has {', '.join(classes)}"
    if item.label is None or isinstance(item.label, Path):
        raise DataError(f"{item.image}: has no class; every sample of a classification task needs a label ({known})")
    if isinstance(item.label, str):
        if item.label not in classes:
            raise DataError(f"{item.image}: label {item.label!r} is no class of the task; {known}")
        return list(classes).index(item.label)
    if not 0 <= item.label < len(classes):
        raise DataError(f"{item.image}: label {item.label} is outside 0..{len(classes) - 1}; {known}")
    return item.label


def score(logits: Tensor, labels: Tensor, classes: Sequence[str], confusion: bool = False) -> dict[str, float]:
    """Return metrics of logits (N, C) for labels (N,): mean cross-entropy "loss", "accuracy", macro "f1", "recall/<class>".

    `confusion` adds the counts "confusion/<true>/<predicted>". F1 of a class is 2 TP / (2 TP + FP + FN); macro F1 is its mean
    over the classes that have samples. Classes without samples have neither recall nor a row of counts.
    """
    size = len(classes)
    counts = torch.bincount(labels * size + logits.argmax(1), minlength=size**2).view(size, size).double()
    hits, of_true, of_guess = counts.diagonal(), counts.sum(1), counts.sum(0)
    seen = [i for i in range(size) if of_true[i] > 0]
    found = {"loss": float(F.cross_entropy(logits, labels)), "accuracy": float(hits.sum() / counts.sum())}
    found["f1"] = float((2 * hits / (of_true + of_guess))[seen].mean())
    found |= {f"recall/{classes[i]}": float(hits[i] / of_true[i]) for i in seen}
    if confusion:
        found |= {f"confusion/{classes[i]}/{classes[j]}": float(counts[i, j]) for i in seen for j in range(size)}
    return found
