"""Volumes and pictures whose prediction is known: the model answers where its picture is bright."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from consilium.data.datalist import read_datalist
from consilium.data.planes_and_tiles import expand
from consilium.tasks.base import Batch, Task
from consilium.tasks.segmentation import SegmentationConfig
from consilium.tasks.segmentation.task import SegmentationTask
from consilium.training import loop
from consilium.training.device import CPU


class Bright(nn.Module):
    """Says yes, for every class, where the picture is bright."""

    def __init__(self, classes: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(classes, 1, 1))

    def forward(self, images: Tensor, boxes: Tensor | None = None) -> Tensor:
        return (images[:, :1] - 127.5) * self.weight


def volume(folder: Path, name: str, guess: np.ndarray, reference: np.ndarray, affine: np.ndarray) -> dict[str, Any]:
    """Write masks (i, j, k) as a volume that Bright answers with `guess`, and return its entry."""
    for file, voxels in ((f"{name}.nii", guess.astype(np.uint8) * 255), (f"{name}-m.nii", reference.astype(np.uint8))):
        nibabel.save(nibabel.Nifti1Image(voxels, affine), folder / file)
    return {"image": f"{name}.nii", "label": f"{name}-m.nii"}


def picture(folder: Path, name: str, guess: np.ndarray, reference: np.ndarray) -> dict[str, Any]:
    """Write masks (rows, columns) as a picture that Bright answers with `guess`, and return its entry."""
    Image.fromarray(guess.astype(np.uint8) * 255).save(folder / f"{name}.png")
    Image.fromarray(reference.astype(np.uint8)).save(folder / f"{name}-m.png")
    return {"image": f"{name}.png", "label": f"{name}-m.png"}


def task_of(folder: Path, entries: list[dict[str, Any]], side: int = 8, **settings: Any) -> SegmentationTask:
    """Return the task of a job with these `task:` settings on a test split, as a site builds it."""
    (folder / "d.json").write_text(json.dumps({"training": [], "test": entries}))
    config = SegmentationConfig.model_validate({"classes": {"spot": [1]}, "augment": False} | settings)
    data = expand(read_datalist(folder / "d.json"), config)
    return SegmentationTask(data, config.classes, side, config.prompt, config.augment, config, config.scores)


def evaluated(task: SegmentationTask, batch_size: int = 3) -> dict[str, float]:
    """Return the closing metrics of Bright."""
    return task.evaluate(Bright(len(task.classes)), "test", batch_size, full=True)


def batches(task: Task, batch_size: int, seed: int) -> Iterator[Batch]:
    """Yield the batches of one epoch of the training split."""
    yield from (call() for call in loop._calls(task, batch_size, seed, CPU))
