"""Segmentation: batches of images and masks, Dice + cross-entropy, Dice / IoU / HD95 per class from MONAI.

Classes may nest (a cup lies in its disc), so every class is a binary problem of its own: sigmoid, not softmax.
"""

import warnings
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from monai.losses import DiceLoss
from monai.metrics import DiceMetric, HausdorffDistanceMetric, MeanIoU
from torch import Tensor, nn

from consilium.data.augment import augment
from consilium.data.cache import SampleCache, to_float
from consilium.data.datalist import DataList
from consilium.data.images import Sample, read_bytes
from consilium.data.inspect import look_at_sample
from consilium.data.settings import DEFAULTS, PictureSettings, read_as
from consilium.data.store import Raw
from consilium.seeding import seed_for
from consilium.tasks.base import Batch, Segmented, evaluating

EXAMPLES = 3
"""How many pictures of a split are shown: its first."""


class SegmentationTask:
    """One site's images. All samples are looked at once at the start, so that bad data stops before any training.

    Metrics are per image on the resized grid, averaged over the images where they are defined: an image whose reference lacks
    the class counts for neither Dice, IoU nor HD95. HD95 is in pixels of that grid; a prediction without the class counts
    with the grid's diagonal. "dice" and so on are means over the classes.
    """

    def __init__(
        self,
        data: DataList,
        classes: dict[str, list[int]],
        image_size: int,
        prompt: str = "none",
        augment: bool = True,
        settings: PictureSettings = DEFAULTS,
    ) -> None:
        self.data, self.classes, self.size = data, classes, image_size
        self.by_box, self.augment = prompt == "box", augment
        self.num_samples = len(data.splits["training"])
        self._dice, self.workers = DiceLoss(sigmoid=True), data.loading.workers
        self._samples = SampleCache(
            data,
            lambda item: read_bytes(item, classes, image_size, settings),
            lambda item: look_at_sample(item, classes, settings),
            read_as("segmentation", settings, image_size, classes),
        )

    @property
    def skipped(self) -> int:
        """How many samples were left out so far because they cannot be read."""
        return self._samples.skipped

    def has(self, split: str) -> bool:
        """Tell whether the split holds any sample."""
        return bool(self.data.splits[split])

    def batch(self, indices: Sequence[int], seed: int) -> Batch:
        """Return these samples of the training split, augmented as `seed` says; {} if none of them can be read."""
        found = self._samples.many("training", indices, lambda index, raw: self._training_sample(index, raw, seed))
        return self._collate([sample for _, sample in found])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean of Dice loss plus binary cross-entropy, in float32."""
        logits, label = self._forward(model, batch)
        return self._loss(logits, label)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: str, batch_size: int, distances: bool = False) -> dict[str, float]:
        """Return metrics of a split, {} if it is empty; `distances` adds HD95. The model's mode is restored."""
        scores: dict[str, list[Tensor]] = {}
        losses, count, was_training = 0.0, 0, model.training
        model.eval()
        for part in self._samples.parts(split, batch_size):
            if not (samples := [sample for _, sample in part]):
                continue
            count += len(samples)
            logits, label = self._forward(model, self._collate([self._with_boxes(s) for s in samples]))
            losses += float(self._loss(logits, label)) * len(samples)
            for name, values in score((logits > 0).float().cpu(), label.cpu(), distances).items():
                scores.setdefault(name, []).append(values)
        model.train(was_training)
        return {"loss": losses / count} | self._average({n: torch.cat(v) for n, v in scores.items()}) if count else {}

    @torch.no_grad()
    def examples(self, model: nn.Module, split: str) -> Segmented | None:
        """Return the split's first pictures with their masks; None if it is empty.

        The model sees one at a time, to save memory.
        """
        first = range(min(EXAMPLES, len(self.data.splits[split])))
        samples = [sample for _, sample in self._samples.many(split, first, to_float)]
        if not samples:
            return None
        with evaluating(model):
            logits = [self._forward(model, self._collate([self._with_boxes(sample)]))[0] for sample in samples]
        shown, guess = self._collate(samples), torch.cat(logits).cpu() > 0
        dice = score(guess.float(), shown["label"], False)["dice"].nanmean(1)
        return Segmented(shown["image"].byte(), shown["label"].bool(), guess, dice, tuple(self.classes))

    def _average(self, scores: dict[str, Tensor]) -> dict[str, float]:
        """Return the mean per class over images where it is defined, and their mean."""
        result: dict[str, float] = {}
        for metric, values in scores.items():
            by_class = {c: float(values[:, i].nanmean()) for i, c in enumerate(self.classes)}
            known = {c: v for c, v in by_class.items() if not np.isnan(v)}
            result |= {f"{metric}/{c}": v for c, v in known.items()}
            result |= {metric: sum(known.values()) / len(known)} if known else {}
        return result

    def _forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        device = next(model.parameters()).device
        moved = {key: tensor.to(device, non_blocking=True) for key, tensor in batch.items()}
        return model(moved["image"], moved.get("box")).float(), moved["label"]

    def _loss(self, logits: Tensor, label: Tensor) -> Tensor:
        return self._dice(logits, label) + F.binary_cross_entropy_with_logits(logits, label)

    def _training_sample(self, index: int, raw: Raw, seed: int) -> Sample:
        moved = augment(raw, seed, index) if self.augment else to_float(index, raw)
        return self._with_boxes(moved, seed_for(seed, "box", index))

    def _with_boxes(self, sample: Sample, seed: int | None = None) -> Sample:
        return sample | {"box": boxes(sample["label"], seed)} if self.by_box else sample

    @staticmethod
    def _collate(samples: list[Sample]) -> Batch:
        return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]} if samples else {}


def score(guess: Tensor, label: Tensor, distances: bool) -> dict[str, Tensor]:
    """Return metrics (N, C) for binary masks (N, C, S, S); NaN where the reference lacks the class."""
    empty = label.flatten(2).sum(-1) == 0
    found = {"dice": DiceMetric(ignore_empty=True)(guess, label), "iou": MeanIoU(ignore_empty=True)(guess, label)}
    if distances:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MONAI warns of empty predictions, which the next line scores
            far = HausdorffDistanceMetric(include_background=True, percentile=95)(guess, label)
        found["hd95"] = torch.where(far.isfinite(), far, torch.tensor(float(np.hypot(*label.shape[-2:]))))
    return {name: values.masked_fill(empty, float("nan")).double() for name, values in found.items()}


def boxes(label: Tensor, seed: int | None = None) -> Tensor:
    """Return the boxes (C, 4), xyxy in pixels, around masks (C, S, S); NaN where a class is absent.

    With a seed every side moves by up to 10 % of the box, as SAM-Med2D's training prompts do.
    """
    found = torch.full((len(label), 4), float("nan"))
    for index, mask in enumerate(label):
        rows, cols = torch.nonzero(mask, as_tuple=True)
        if len(rows):
            found[index] = torch.stack([cols.min(), rows.min(), cols.max(), rows.max()]).float()
    if seed is None:
        return found
    side = (found[:, 2:] - found[:, :2]).repeat(1, 2)
    draw = torch.rand(found.shape, generator=torch.Generator().manual_seed(seed)) * 0.2 - 0.1
    return (found + draw * side).clamp(0, label.shape[-1] - 1)
