"""The classification task on one site's data: batches of images or texts, cross-entropy, accuracy, F1, recalls, confusions."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilium.core.errors import DataError, UnfitError
from consilium.data.cache import SampleCache, to_float
from consilium.data.check_samples import image_shape
from consilium.data.class_checks import text_label
from consilium.data.datalist import SPLITS, DataList, Item
from consilium.data.disk_cache import CachedSample
from consilium.data.images import BLACK, Colour, Sample, augment, read_picture
from consilium.data.settings import DEFAULTS, PictureSettings, reading_key
from consilium.data.text import Text
from consilium.models.registry import ModelConfig
from consilium.models.text_encoder import PAD
from consilium.tasks.base import Answered, Batch, Classified, SampledTask, UnitScores, evaluating
from consilium.tasks.bootstrap import bootstrap_unit, intervals, number_groups, sum_by_group
from consilium.tasks.classification import ClassificationConfig, F1Classes
from consilium.tasks.classification.text_samples import TextSamples, require_kind, text_or_blank
from consilium.tasks.registry import COUNT

EXAMPLES = 6
"""The number of pictures of a split that are shown."""
NONE = -1
"""The class index of a sample that has none of the task's classes."""


class ClassificationTask(SampledTask):
    """One site's images, each with one class. All are checked at the start, so bad data stops the job before training.

    With `texts` the samples are texts: a batch has "text" (N, T) instead of "image". Metrics: see `score`, for each image, or
    with `by_patient` for the mean probability over a patient's images. A class without samples in the evaluated split has no
    recall; `f1` says whether macro F1 counts it. In a list that ignores unfit samples a sample without a class is in no batch
    and no score, and a patient with two classes has the class of the first image.
    """

    def __init__(
        self,
        data: DataList,
        classes: Sequence[str],
        image_size: int,
        augment: bool = True,
        settings: PictureSettings = DEFAULTS,
        by_patient: bool = False,
        padding: Colour = BLACK,
        balance: str = "none",
        f1: F1Classes = "all",
        texts: TextSamples | None = None,
    ) -> None:
        self._key, self.augment = ("image", augment) if texts is None else ("text", False)
        self.data, self.classes = data, list(classes)
        self.workers = data.loading.workers
        self.num_samples = len(data.splits["training"])
        self.scored: UnitScores | None = None
        self._labels: dict[str, list[int]] = {split: [] for split in SPLITS}
        entries = [(split, item) for split in SPLITS for item in data.splits[split]]
        for split, item in entries:
            try:
                self._labels[split].append(class_index(item, self.classes))
            except UnfitError:  # it has no class of the job
                if not data.loading.ignore_unfit:
                    raise
                self._labels[split].append(NONE)
        labels = torch.tensor([label for label in self._labels["training"] if label != NONE], dtype=torch.long)
        self._balance, self._counts = balance, torch.bincount(labels, minlength=len(classes))
        self._whose = {split: number_groups([bootstrap_unit(item) for item in data.splits[split]]) for split in SPLITS}
        self._by_patient, self._f1 = by_patient, f1
        if by_patient and not data.loading.ignore_unfit:
            for split in SPLITS[1:]:
                check_patients(data.splits[split], self._labels[split], self._whose[split])
        self._samples: SampleCache | TextSamples = texts or SampleCache(
            data,
            lambda item: self._read(item, image_size, settings, padding),
            lambda item: _check_item(item, self.classes, settings),
            reading_key("classification", settings, image_size, [self.classes, padding]),
        )

    def _read(self, item: Item, size: int, settings: PictureSettings, padding: Colour) -> Sample:
        """Return the decoded image of an item. Raises DataError if it cannot be read, UnfitError if it has no class."""
        found = {"image": read_picture(item, size, settings, padding)}
        class_index(item, self.classes)  # last: whether a file can be read must not depend on the job's settings
        return found

    def batch(self, indices: Sequence[int], seed: int) -> Batch:
        """Return "image" (N, 3, S, S), or "text" (N, T), and "label" (N,) of these training samples.

        Images are augmented with `seed`. Return {} if no sample can be read.
        """

        def augmented(index: int, raw: CachedSample) -> Sample:
            return augment(raw, seed, index) if self.augment else self._without_augmentation(index, raw)

        return self._collate("training", self._with_class("training", self._samples.map("training", indices, augmented)))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of a batch in float32, balanced by the job's `task.balance`."""
        device = next(model.parameters()).device
        logits = model(batch[self._key].to(device, non_blocking=True)).float()
        return balanced_loss(logits, batch["label"].to(device), self._counts.to(device), self._balance)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: str, batch_size: int, full: bool = False) -> dict[str, float]:
        """Return the metrics of a split, {} if it is empty. `full` (final evaluation) adds confusions and intervals.

        The model's mode is restored.
        """
        device, logits, kept = next(model.parameters()).device, [], []
        with evaluating(model):
            for part in self._samples.parts(split, batch_size):
                part = self._with_class(split, part)
                if batch := self._collate(split, part):
                    logits.append(model(batch[self._key].to(device, non_blocking=True)).float().cpu())
                    kept += [index for index, _ in part]
        if not kept:
            return {}
        found, labels = torch.cat(logits), torch.tensor(self._labels[split])[kept]
        # numbered anew, because a patient may have lost all samples
        _, first, whose = np.unique(self._whose[split][kept], return_index=True, return_inverse=True)
        if self._by_patient:
            kept = [kept[place] for place in first]
            found, labels, whose = merge_by_patient(found, whose), labels[first], np.arange(len(first))
        self.scored = self._unit_scores(split, kept, found, labels) if full else None
        closing = count_and_intervals(found, labels, whose, self._f1) if full else {}
        return score(found, labels, self.classes, full, self._f1) | closing

    def _unit_scores(self, split: str, kept: Sequence[int], logits: Tensor, labels: Tensor) -> UnitScores:
        """Return the predicted probability of each unit's true class, which ranks units more finely than accuracy."""
        names = tuple(self.data.splits[split][index].name for index in kept)
        values = logits.softmax(1)[torch.arange(len(labels)), labels].tolist()
        return UnitScores("probability of the true class", False, names, tuple(values), tuple(kept))

    def examples(self, model: nn.Module, split: str) -> Classified | None:
        """Return a few pictures, of as many classes as possible; None for an empty split or for texts."""
        if self._key == "text":
            return None
        found = self.show(model, split, pick_across_classes(self._labels[split], EXAMPLES))
        return found if isinstance(found, Classified) else None

    @torch.no_grad()
    def show(self, model: nn.Module, split: str, indices: Sequence[int]) -> Classified | Answered | None:
        """Return these pictures or texts with true and predicted classes; None if none can be read.

        The model runs on one sample at a time to save memory.
        """
        batch = self._collate(split, self._samples.map(split, indices, self._without_augmentation))
        if not batch:
            return None
        device = next(model.parameters()).device
        with evaluating(model):
            logits = torch.cat([model(one[None].to(device)).float().cpu() for one in batch[self._key]])
        if self._key == "text":
            texts = [self.data.splits[split][index] for index in indices]
            names = [tuple(self.classes[i] for i in some) for some in (batch["label"].tolist(), logits.argmax(1).tolist())]
            return Answered(tuple(map(text_or_blank, texts)), *names)
        return Classified(batch["image"].byte(), batch["label"], logits.softmax(1), tuple(self.classes))

    def _with_class(self, split: str, samples: Sequence[tuple[int, Sample]]) -> list[tuple[int, Sample]]:
        """Return the samples that have a class of the task. A text is read without its class, unlike an image."""
        return [(index, sample) for index, sample in samples if self._labels[split][index] != NONE]

    def _collate(self, split: str, samples: Sequence[tuple[int, Sample]]) -> Batch:
        if not samples:
            return {}
        labels = torch.tensor([self._labels[split][index] for index, _ in samples])
        rows = [sample[self._key] for _, sample in samples]
        pictures = self._key == "image"
        together = torch.stack(rows) if pictures else nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
        return {self._key: together, "label": labels}

    def _without_augmentation(self, index: int, raw: Any) -> Sample:
        """Return a sample without augmentation; an image as float32."""
        return to_float(index, raw) if self._key == "image" else raw

    @torch.no_grad()
    def predict(self, model: nn.Module, split: str, batch_size: int) -> list[dict[str, Any]]:
        """Return the predicted class of each text and the probabilities of all classes. Labels are not read."""
        device, found = next(model.parameters()).device, list[dict[str, Any]]()
        with evaluating(model):
            for part in self._samples.parts(split, batch_size):
                shares = model(self._collate(split, part)[self._key].to(device)).float().softmax(1).cpu()
                for row in shares:
                    named = dict(zip(self.classes, [round(one, 6) for one in row.tolist()], strict=True))
                    found.append({"class": self.classes[int(row.argmax())], "probabilities": named})
        return found


def balanced_loss(logits: Tensor, labels: Tensor, counts: Tensor, balance: str) -> Tensor:
    """Return the mean loss for logits (N, C) and labels (N,), at a site with `counts` (C,) training samples per class.

    `weights`: each sample's cross-entropy times n / (P n_y), where P is the number of classes at the site. So every class has
    the same total weight in an epoch. `prior`: the cross-entropy of logits + log(n_c / n). The plain logits then are those for
    classes with equal shares, and a class without samples gets no gradient.

    Source of `prior`: A. K. Menon, S. Jayasumana, A. S. Rawat, H. Jain, A. Veit, S. Kumar, "Long-Tail Learning via Logit
    Adjustment", ICLR 2021, Eq. 10 with tau = 1. Using a site's own shares as the prior, and leaving out a class without
    samples, is our reading for federations; X.-C. Li, D.-C. Zhan, "FedRS", KDD 2021, leaves such classes out too.
    """
    if balance == "prior":
        return F.cross_entropy(logits + (counts / counts.sum()).log(), labels)
    losses = F.cross_entropy(logits, labels, reduction="none")
    if balance == "weights":
        losses = losses * (counts.sum() / ((counts > 0).sum() * counts[labels]))
    return losses.mean()


def pick_across_classes(labels: Sequence[int], count: int) -> list[int]:
    """Return at most `count` sorted indices, chosen as the first of every class, then the second of every class, and so on."""
    seen: Counter[int] = Counter()
    turns = []
    for index, label in enumerate(labels):
        turns.append((seen[label], index))
        seen[label] += 1
    return sorted(index for _, index in sorted(turns)[:count])


def class_index(item: Item | Text, classes: Sequence[str]) -> int:
    """Return the index of a sample's class, given by name or number. Raises UnfitError if it has none of `classes`."""
    known = f"task.classes has {', '.join(classes)}"
    name, label = item.image or item.name, text_label(item.label, classes) if isinstance(item, Text) else item.label
    if label is None or isinstance(label, Path):
        raise UnfitError(f"{name}: has no class; every sample of a classification task needs a label ({known})")
    if isinstance(label, str):
        if label not in classes:
            raise UnfitError(f"{name}: label {label[:80]!r} is not a class of the task; {known}")
        return list(classes).index(label)
    if not 0 <= label < len(classes):
        raise UnfitError(f"{name}: label {label} is outside 0..{len(classes) - 1}; {known}")
    return label


def check_patients(items: Sequence[Item], labels: Sequence[int], whose: np.ndarray) -> None:
    """Raise DataError for a patient whose images differ in class, because a score per patient needs one class."""
    first: dict[int, int] = {}
    for item, label, patient in zip(items, labels, whose.tolist(), strict=True):
        if first.setdefault(patient, label) != label:
            where = item.image or item.name
            raise DataError(f"{where}: another sample of its patient is of another class; set task.scores.per: image")


def merge_by_patient(logits: Tensor, whose: np.ndarray) -> Tensor:
    """Return for P patients the log (P, C) of the mean probability over images; `whose` (N,): the images' patients, from 0."""
    count = sum_by_group(np.ones(len(whose)), whose)
    mean = torch.from_numpy(sum_by_group(logits.double().softmax(1).numpy(), whose) / count[:, None]).float()
    return mean.clamp_min(torch.finfo(torch.float32).tiny).log()


def count_and_intervals(logits: Tensor, labels: Tensor, whose: np.ndarray, f1: F1Classes = "all") -> dict[str, float]:
    """Return the number of scored units, and 95 % intervals of accuracy and macro F1 by a bootstrap over patients."""
    groups, true, guess = int(whose.max()) + 1, labels.numpy(), logits.argmax(1).numpy()
    hits, of_true, of_guess = (np.zeros((groups, logits.shape[1])) for _ in range(3))
    np.add.at(of_true, (whose, true), 1)
    np.add.at(of_guess, (whose, guess), 1)
    np.add.at(hits, (whose[true == guess], true[true == guess]), 1)

    def means(weights: np.ndarray) -> dict[str, np.ndarray]:
        hit, there, said = weights @ hits, weights @ of_true, weights @ of_guess
        counted = there + said > 0 if f1 == "all" else there > 0
        each = np.divide(2 * hit, there + said, out=np.zeros_like(hit), where=counted)
        return {"accuracy": hit.sum(1) / there.sum(1), "f1": each.sum(1) / counted.sum(1)}

    return {COUNT: float(len(labels))} | intervals(groups, means)


def score(
    logits: Tensor, labels: Tensor, classes: Sequence[str], confusion: bool = False, f1: F1Classes = "all"
) -> dict[str, float]:
    """Return metrics for logits (N, C) and labels (N,): "loss" (mean cross-entropy), "accuracy", macro "f1", "recall/<class>".

    `confusion` adds the counts "confusion/<true>/<predicted>". F1 of a class is 2 TP / (2 TP + FP + FN). Macro F1 is its mean
    over the classes with samples or predictions (`f1` "all": scikit-learn's average="macro"), or over those with samples
    ("present"). Classes without samples have neither a recall nor a row of counts.
    """
    size = len(classes)
    counts = torch.bincount(labels * size + logits.argmax(1), minlength=size**2).view(size, size).double()
    hits, of_true, of_guess = counts.diagonal(), counts.sum(1), counts.sum(0)
    seen = [i for i in range(size) if of_true[i] > 0]
    found = {"loss": float(F.cross_entropy(logits, labels)), "accuracy": float(hits.sum() / counts.sum())}
    counted = of_true + of_guess > 0 if f1 == "all" else of_true > 0
    found["f1"] = float((2 * hits / (of_true + of_guess))[counted].mean())
    found |= {f"recall/{classes[i]}": float(hits[i] / of_true[i]) for i in seen}
    if confusion:
        found |= {f"confusion/{classes[i]}/{classes[j]}": float(counts[i, j]) for i in seen for j in range(size)}
    return found


def _check_item(item: Item | Text, classes: Sequence[str], settings: PictureSettings) -> None:
    if isinstance(item, Item):
        image_shape(item, settings)
    class_index(item, classes)


def check_item(config: ClassificationConfig, item: Item | Text) -> None:
    """Raise DataError for a sample without a class of the task, or for a picture with a header that cannot be read."""
    _check_item(item, config.classes, config)


def build(config: ClassificationConfig, model: ModelConfig, data: DataList, tokenizer: Any) -> ClassificationTask:
    """See TaskKind."""
    require_kind(data, tokenizer is not None, model.name)
    texts = TextSamples(data, tokenizer, getattr(model, "max_length", 0)) if tokenizer is not None else None
    return ClassificationTask(
        data, config.classes, model.image_side, config.augment, config, config.scores.per == "patient", model.padding,
        config.balance, config.scores.f1, texts,
    )  # fmt: skip


def rehearse(config: ClassificationConfig, base: ModelConfig, model: nn.Module, count: int) -> Tensor:
    """See TaskKind."""
    side, length = base.image_side, getattr(base, "max_length", 0)
    given = torch.zeros(count, 3, side, side) if side else torch.zeros(count, length, dtype=torch.long)
    return F.cross_entropy(model(given).float(), torch.zeros(count, dtype=torch.long))
