"""A task: one number per image, judged by the mean absolute error."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilium.core.errors import DataError
from consilium.data.cache import SampleCache
from consilium.data.datalist import SPLITS, DataList, Item
from consilium.data.images import read_picture
from consilium.data.safe_open import read_text
from consilium.models.registry import ModelConfig
from consilium.tasks.base import Batch, evaluating
from consilium.tasks.registry import Scores, TaskConfig, TaskKind


class RegressionConfig(TaskConfig):
    """One number per image; the data list has it as `label`."""

    @property
    def outputs(self) -> int:
        """See TaskConfig."""
        return 1


@dataclass(frozen=True)
class Measured(Item):
    """An image with its number."""

    value: float = 0.0


def read(path: Path) -> DataList:
    """Read {"training": [{"image": PATH, "label": NUMBER}], ...}. Raises DataError."""
    raw = json.loads(read_text(path, "give the path of a data list"))
    return DataList(path, {split: tuple(_measured(path, entry) for entry in raw.get(split, [])) for split in SPLITS})


def _measured(path: Path, entry: Any) -> Measured:
    if not isinstance(entry.get("label"), int | float):
        raise DataError(f'{path}: {entry.get("image")}: label {entry.get("label")!r} is not a number; write "label": 0.5')
    return Measured(path.parent / entry["image"], None, value=float(entry["label"]))


class RegressionTask:
    """One site's images with a number each. Metrics: "loss", the mean squared error, and "mae"."""

    def __init__(self, data: DataList, image_size: int) -> None:
        self.num_samples = len(data.splits["training"])
        self._labels = {split: torch.tensor([item.value for item in data.splits[split]]) for split in SPLITS}
        self._sample = SampleCache(data, lambda item: {"image": read_picture(item, image_size)})

    def has(self, split: str) -> bool:
        """See Task."""
        return len(self._labels[split]) > 0

    def batch(self, indices: Sequence[int], seed: int) -> Batch:
        """Return "image" (N, 3, S, S) and "label" (N,)."""
        images = torch.stack([self._sample("training", i)["image"] for i in indices])
        return {"image": images, "label": self._labels["training"][list(indices)]}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean squared error of a batch."""
        device = next(model.parameters()).device
        return F.mse_loss(model(batch["image"].to(device))[:, 0].float(), batch["label"].to(device))

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: str, batch_size: int, full: bool = False) -> dict[str, float]:
        """See Task; one image at a time."""
        if not self.has(split):
            return {}
        device, labels = next(model.parameters()).device, self._labels[split]
        with evaluating(model):
            found = [model(self._sample(split, i)["image"][None].to(device))[0, 0].float().cpu() for i in range(len(labels))]
        guesses = torch.stack(found)
        return {"loss": float(F.mse_loss(guesses, labels)), "mae": float((guesses - labels).abs().mean())}

    def examples(self, model: nn.Module, split: str) -> None:
        """Return None: there is no page of predictions for numbers."""
        return None


def build(config: RegressionConfig, model: ModelConfig, data: DataList, tokenizer: Any) -> RegressionTask:
    """Return the task on one site's data."""
    return RegressionTask(data, model.image_side)


SCORES = Scores(leading=("mae",), beside=("loss",), headings={"mae": "Mean abs. error", "loss": "Loss"})
REGRESSION = TaskKind(
    RegressionConfig, lambda config: SCORES, lambda config: frozenset({"loss", "mae"}), read, build, models=frozenset({"clip"})
)
