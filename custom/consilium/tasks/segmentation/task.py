"""The segmentation task on one site's data: batches of images and masks, the loss, and Dice, IoU, HD95 and ASSD per class.

Classes may overlap (a cup lies in its disc), so each class is a separate binary problem with a sigmoid, not a softmax.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilium.core.seeding import seed_for
from consilium.data.cache import SampleCache, to_float
from consilium.data.check_samples import check_and_find_vanished, cropped_shape
from consilium.data.datalist import SPLITS, DataList, Item
from consilium.data.disk_cache import CachedSample, DiskCache, salted_hash
from consilium.data.images import (
    BLACK,
    Colour,
    Sample,
    augment,
    check_annotated_classes,
    read_masks,
    read_picture,
    read_sample,
    resize_labels,
    unpadded_size,
)
from consilium.data.settings import DEFAULTS, PictureSettings, reading_key
from consilium.models.registry import ModelConfig
from consilium.tasks.base import Batch, SampledTask, Segmented, UnitScores, evaluating
from consilium.tasks.segmentation import GRIDS, TOO_SMALL, SegmentationConfig, SegmentationScoresConfig, prompt_kind_of
from consilium.tasks.segmentation.prompts import TAKEN
from consilium.tasks.segmentation.unit_scores import (
    Plane,
    Units,
    count_and_intervals,
    dice_loss,
    order,
    overlap_counts,
    overlaps,
)

MASK_BYTES = 2**27
"""The most bytes of masks at the files' size kept in memory, with 1 bit per pixel and class; each validation needs them."""
STRIP = 2**22
"""The numbers per strip when logits are enlarged."""
DRAWN = 512
"""The longest side, in pixels, at which pictures are shown that are scored at the file's size."""
EXAMPLES = 3
"""The number of pictures of a split that are shown: its first ones."""


class SegmentationTask(SampledTask):
    """One site's images. All samples are checked at the start, so bad data stops the job before training.

    Metrics are computed for each image, volume or patient (`scores.per`) and averaged over the units where they are defined.
    For a reference without the class HD95 and ASSD are undefined, and Dice and IoU too unless empty references count. A
    prediction without the class has the grid's diagonal as distance. Distances are in millimetres if the spacing is known
    ("hd95_mm"), else in pixels. Metrics without a class, such as "dice", are means over the classes. A class that was not
    annotated in an item is not scored there. In a list that ignores unfit samples an item that does not fit the job is not
    scored at all.
    """

    def __init__(
        self,
        data: DataList,
        classes: dict[str, list[int]],
        image_size: int,
        prompt: str = "none",
        augment: bool = True,
        settings: PictureSettings = DEFAULTS,
        scores: SegmentationScoresConfig = SegmentationScoresConfig(),  # noqa: B008
        padding: Colour = BLACK,
        loss: str = "dice+bce",
    ) -> None:
        self.data, self.classes, self.size, self._overlap = data, classes, image_size, loss == "dice+bce"
        self.augment, self.settings, self.scores = augment, settings, scores
        self._prompt = prompt
        for item in (item for split in SPLITS for item in data.splits[split]):
            check_annotated_classes(item, classes)
        self.num_samples = len(data.splits["training"])
        self.scored: UnitScores | None = None
        self.workers = data.loading.workers
        self._embeddings: EmbeddingCache | None = None
        self._padding, self._pictures = padding, dict[tuple[Item, int], Tensor]()
        self._kept, self._room = dict[Item, tuple[tuple[int, ...], np.ndarray]](), MASK_BYTES
        self._samples = SampleCache(
            data,
            lambda item: read_sample(item, classes, image_size, settings, padding),
            lambda item: check_and_find_vanished(item, classes, settings, image_size),
            reading_key("segmentation", settings, image_size, [classes, padding]),
        )

    @property
    def notes(self) -> list[str]:
        """Return a sentence for each split and class with structures too small for the model's size."""
        what = f"at the model's {self.size} pixels; single pixels are marked instead: raise model.image_size, or set task.tiles"
        return [
            f"nothing of {name} is left in {count} of {len(self.data.splits[split])} {split} pictures {what}"
            for (split, name), count in sorted(self._samples.vanished_classes.items())
        ]

    def enable_embedding_cache(self, encoder: str) -> None:
        """Cache the embeddings of pictures from now on, under the name of the frozen encoder. Augmented pictures differ."""
        self._embeddings = EmbeddingCache(self._samples.store, encoder)

    def batch(self, indices: Sequence[int], seed: int) -> Batch:
        """Return these samples of the training split, augmented with `seed`; {} if none of them can be read."""

        def augmented(index: int, raw: CachedSample) -> Sample:
            moved = augment(raw, seed, index) if self.augment else to_float(index, raw)
            return self._with_annotated_classes("training", index, self._add_prompt(moved, seed_for(seed, self._prompt, index)))

        found = self._samples.map("training", indices, augmented)
        return self._collate([sample for _, sample in found])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss in float32, averaged over the batch.

        It is Dice loss plus binary cross-entropy for `loss: dice+bce`, else binary cross-entropy alone.

        Padding counts as background, as in the fine-tuning of MedSAM, micro-sam and lightning-sam. It is never scored and costs
        little, and the model learns to predict nothing there.
        """
        logits, label, annotated = self._forward(model, batch, may_cache=not self.augment)
        return self._loss(logits, label, annotated)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: str, batch_size: int, full: bool = False) -> dict[str, float]:
        """Return the metrics of a split, {} if it is empty. `full` (final evaluation) adds HD95, ASSD and intervals.

        The model's mode is restored.
        """
        items = self.data.splits[split]
        units, losses, count = Units(items, self.scores, full), 0.0, 0
        with evaluating(model):
            for part in self._samples.parts(split, batch_size, order(items, self.scores)):
                samples = [self._with_annotated_classes(split, i, self._add_prompt(sample)) for i, sample in part]
                if not samples:
                    continue
                logits, label, annotated = self._forward(model, self._collate(samples))
                losses, count = losses + float(self._loss(logits, label, annotated)) * len(samples), count + len(samples)
                for plane in self._planes([items[i] for i, _ in part], logits, label):
                    units.add(plane)
        if not count:
            return {}
        found, table = units.scores()
        self.scored = self._unit_scores(items, found, units.shown, table["dice"]) if full else None
        result = {"loss": losses / count}
        for metric, values in table.items():  # the means per class over the units where it is defined, and the mean of these
            by_class = {c: float(values[:, i].nanmean()) for i, c in enumerate(self.classes)}
            known = {c: v for c, v in by_class.items() if not np.isnan(v)}
            result |= {f"{metric}/{c}": v for c, v in known.items()}
            result |= {metric: sum(known.values()) / len(known)} if known else {}
        if not full:
            return result
        # Too small structures of all splits are counted. A job whose list ignores unfit samples protects training pictures: its
        # counts are of `split` alone.
        told = {split} if self.data.loading.ignore_unfit else set(SPLITS)
        too_small = {
            f"{TOO_SMALL}/{where}/{name}": float(n)
            for (where, name), n in self._samples.vanished_classes.items()
            if where in told
        }
        return result | count_and_intervals(found, table) | too_small

    def _unit_scores(self, items: Sequence[Item], units: Sequence[Item], shown_by: Sequence[Item], dice: Tensor) -> UnitScores:
        """Return each unit's mean Dice over its classes.

        `shown_by`: for each unit the item that shows it. `dice`: (U, C).
        """
        places, whole = {item: index for index, item in enumerate(items)}, self.scores.per != "image"
        names = tuple(item.image.name if whole else item.name for item in units)
        return UnitScores("Dice", False, names, tuple(dice.nanmean(1).tolist()), tuple(places[item] for item in shown_by))

    def examples(self, model: nn.Module, split: str) -> Segmented | None:
        """Return the split's first pictures with true and predicted masks; None if the split is empty."""
        return self.show(model, split, range(min(EXAMPLES, len(self.data.splits[split]))))

    @torch.no_grad()
    def show(self, model: nn.Module, split: str, indices: Sequence[int]) -> Segmented | None:
        """Return these pictures with true and predicted masks; None if none can be read.

        They have the model's size, or up to DRAWN pixels of the files if scores are taken there and a file has more pixels. The
        model runs on one picture at a time to save memory.
        """
        found = self._samples.map(split, indices, to_float)
        if not found:
            return None
        items, samples = [self.data.splits[split][index] for index, _ in found], [sample for _, sample in found]
        with evaluating(model):
            logits = [self._forward(model, self._collate([self._add_prompt(sample)]))[0] for sample in samples]
        shown, guess = self._collate(samples), torch.cat(logits).cpu() > 0
        planes = self._planes(items, torch.cat(logits), shown["label"])
        each = [
            overlaps(overlap_counts(one.guess, one.reference), False)["dice"].masked_fill(~one.known, math.nan)
            for one in planes
        ]
        for item, mask in zip(items, guess, strict=True):
            rows, columns = self._size_without_padding(item)
            mask[:, rows:], mask[:, :, columns:] = False, False
        pictures, references, dice = shown["image"].byte(), shown["label"].bool(), torch.stack(each).nanmean(1)
        longest = max(max(cropped_shape(item, self.settings)) for item in items)
        if self.scores.grid == "original" and (side := min(DRAWN, longest)) > self.size:
            drawn = []
            for item, one in zip(items, logits, strict=True):  # the file's masks and the predicted ones, at this side
                if (item, side) not in self._pictures:
                    self._pictures[item, side] = read_picture(item, side, self.settings, self._padding)
                masks = np.stack([resize_labels(mask, side, self.settings) for mask in self._cached_masks(item).numpy()])
                rows, columns = self._size_without_padding(item)
                height, width = unpadded_size(cropped_shape(item, self.settings), side, self.settings)
                enlarged = torch.zeros(masks.shape, dtype=torch.bool)
                enlarged[:, :height, :width] = _enlarged_mask(one[0, :, :rows, :columns], (height, width))
                drawn.append((self._pictures[item, side], torch.from_numpy(masks), enlarged))
            pictures, references, guess = map(torch.stack, zip(*drawn, strict=True))
        return Segmented(pictures, references, guess, dice, tuple(self.classes), GRIDS[self.scores.grid])

    def _forward(self, model: nn.Module, batch: Batch, may_cache: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return logits, labels and the mask of annotated classes. `may_cache`: pictures repeat, so embeddings are cached."""
        device = next(model.parameters()).device
        made = {"embedding": self._embeddings(model, batch["image"])} if may_cache and self._embeddings else {}
        moved = {key: tensor.to(device, non_blocking=True) for key, tensor in batch.items()}
        return model(moved["image"], moved.get("prompt"), **made).float(), moved["label"], moved.get("annotated")

    def _loss(self, logits: Tensor, label: Tensor, annotated: Tensor | None) -> Tensor:
        """Return the loss; with `annotated` (N, C) each sample's loss is the mean over its annotated classes.

        Each sample then has weight 1 / N, so that its gradient does not depend on other samples' annotations (DP-SGD).
        """
        if annotated is None:
            entropy = F.binary_cross_entropy_with_logits(logits, label)
            return dice_loss(logits, label).mean() + entropy if self._overlap else entropy
        each = F.binary_cross_entropy_with_logits(logits, label, reduction="none").flatten(2).mean(2)
        if self._overlap:
            each = dice_loss(logits, label) + each
        each = each * annotated
        return (each.sum(1) / annotated.sum(1).clamp(min=1)).mean()

    def _planes(self, items: Sequence[Item], logits: Tensor, label: Tensor) -> Iterator[Plane]:
        """Yield predictions and references on the scored grid, without padding."""
        for item, one, mask in zip(items, logits, label, strict=True):
            rows, columns = self._size_without_padding(item)
            one, mask = one[:, :rows, :columns], mask[:, :rows, :columns].bool().cpu()
            if self.scores.grid == "resized" or cropped_shape(item, self.settings) == (rows, columns):  # the file's own size
                yield Plane(item, (one > 0).cpu(), mask, self._annotated_classes(item))
                continue
            mask = self._cached_masks(item)
            yield Plane(item, _enlarged_mask(one, tuple(mask.shape[1:])), mask, self._annotated_classes(item))

    def _cached_masks(self, item: Item) -> Tensor:
        """Return the masks (C, H, W) of a picture or its crop. Up to MASK_BYTES are cached as bits; others are read again."""
        if item not in self._kept:
            masks = read_masks(item, self.classes, self.settings)
            packed = masks.shape, np.packbits(masks)
            if packed[1].nbytes > self._room:
                return torch.from_numpy(masks)
            self._kept[item], self._room = packed, self._room - packed[1].nbytes
        shape, bits = self._kept[item]
        return torch.from_numpy(np.unpackbits(bits, count=math.prod(shape)).view(bool).reshape(shape))

    def _size_without_padding(self, item: Item) -> tuple[int, int]:
        if self.settings.resize == "stretch":
            return self.size, self.size
        return unpadded_size(cropped_shape(item, self.settings), self.size, self.settings)

    def _annotated_classes(self, item: Item) -> Tensor:
        return torch.tensor([item.annotated is None or name in item.annotated for name in self.classes])

    def _with_annotated_classes(self, split: str, index: int, sample: Sample) -> Sample:
        """Return the sample, with "annotated" (C,) added if its site did not annotate all classes in it."""
        item = self.data.splits[split][index]
        if item.annotated is None or (known := self._annotated_classes(item)).all():
            return sample
        return sample | {"annotated": known.float()}

    def _add_prompt(self, sample: Sample, seed: int | None = None) -> Sample:
        return sample | {"prompt": TAKEN[self._prompt](sample["label"], seed)} if self._prompt in TAKEN else sample

    @staticmethod
    def _collate(samples: list[Sample]) -> Batch:
        """Return a batch. It has "annotated" only if one of its samples has.

        Under DP-SGD a batch is one unit, so no sample outside a unit changes how its loss is computed, to the last bit.
        """
        known = next((sample["annotated"] for sample in samples if "annotated" in sample), None)
        if known is not None:
            samples = [{"annotated": torch.ones_like(known)} | sample for sample in samples]
        return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]} if samples else {}


def _enlarged_mask(logits: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the mask where logits (C, rows, columns), enlarged to `shape` by bilinear interpolation, are over 0.

    Rows are enlarged first, then columns in strips of at most STRIP values: a large picture at once would take gigabytes.
    """
    bilinear = partial(F.interpolate, mode="bilinear", align_corners=False)
    tall, step = bilinear(logits[None], (shape[0], logits.shape[2])), max(1, STRIP // (len(logits) * shape[1]))
    return torch.cat([(bilinear(part, (part.shape[2], shape[1])) > 0)[0] for part in tall.split(step, 2)], 1).cpu()


# embedding cache ---------------------------------------------------------------------------------------------------------
# If no part of the encoder trains, the embedding of a picture is the same in every step, round and stage. Each picture is
# encoded separately, cached or not, so that no result depends on the cache. The store is that of the decoded samples: names are
# salted, files belong to the user, and both share one size limit and are deleted together.


class EmbeddingCache:
    """Computes embeddings of pictures by one encoder, or takes them from `store`. None: nothing is cached.

    `identity` names the encoder's weights and settings.
    """

    def __init__(self, store: DiskCache | None, identity: str) -> None:
        self._store, self._identity = store, identity

    @torch.no_grad()
    def __call__(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return the embeddings (N, ...), on the model's device, of pictures (N, 3, S, S) with whole numbers in 0..255.

        The model needs a method `embed` for one picture (1, 3, S, S).
        """
        device, found = next(model.parameters()).device, list[Tensor]()
        for image in (picture[None] for picture in images):
            name = self._name(image, device) if self._store else ""
            if self._store and (stored := self._store.get(name)) is not None:
                ((dtype, array),) = stored.items()
                found.append(torch.from_numpy(np.array(array)).view(getattr(torch, dtype)).to(device, non_blocking=True))
                continue
            found.append(model.embed(image.to(device)))  # type: ignore[operator]
            if self._store:
                flat = found[-1].detach().cpu().contiguous()
                self._store.put(name, {str(flat.dtype).removeprefix("torch."): flat.view(torch.uint8).numpy()})
        return torch.cat(found)

    def _name(self, image: Tensor, device: torch.device) -> str:
        """Return a salted name made from the picture, the encoder, and the device and precision in use."""
        autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        content = salted_hash(self._salt(), "picture", image.to(torch.uint8).cpu().numpy().tobytes())
        return salted_hash(
            self._salt(), "embedding", self._identity, tuple(image.shape), content, device.type, autocast, torch.__version__
        )

    def _salt(self) -> bytes:
        assert self._store is not None
        return self._store.salt


def build(config: SegmentationConfig, model: ModelConfig, data: DataList, tokenizer: Any) -> SegmentationTask:
    """See TaskKind."""
    return SegmentationTask(
        data, config.classes, model.image_side, config.prompt, config.augment, config, config.scores, model.padding, config.loss
    )


def check_item(config: SegmentationConfig, item: Item) -> None:
    """Raise DataError for a sample whose headers or labels are bad."""
    check_and_find_vanished(item, config.classes, config)


def rehearse(config: SegmentationConfig, base: ModelConfig, model: nn.Module, count: int) -> Tensor:
    """See TaskKind."""
    side, classes = base.image_side, len(config.classes)
    label = torch.zeros(count, classes, side, side)
    kind = prompt_kind_of(config)
    prompts = torch.zeros(count, classes, len(kind.numbers)) if kind else None
    logits = model(torch.zeros(count, 3, side, side), prompts).float()
    return dice_loss(logits, label).mean() + F.binary_cross_entropy_with_logits(logits, label)
