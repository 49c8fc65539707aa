"""Classes that a site did not annotate: neither in the loss nor in the scores, and nobody else notices."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilium.core.errors import DataError
from consilium.data.datalist import read_datalist
from consilium.tasks.segmentation.task import SegmentationTask
from tests.tasks.scoring import Bright, evaluated, picture, task_of

CLASSES = {"disc": [1, 2], "cup": [2]}


class Logits(nn.Module):
    """Answers with its parameters, an own set for every sample of the batch."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(count, 2, 8, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, images: Tensor, boxes: Tensor | None = None) -> Tensor:
        return self.values


def entries_of(folder: Path, *annotated: list[str] | None) -> list[dict[str, Any]]:
    """Write pictures of a disc of 16 pixels with a cup of 4 in it, predicted as 8 of these pixels."""
    found = []
    for index, names in enumerate(annotated):
        guess, reference = np.zeros((8, 8), bool), np.zeros((8, 8), np.uint8)
        reference[:4, :4], reference[:2, :2], guess[:2, :4] = 1, 2, True
        entry = picture(folder, f"p{index}", guess, reference)
        found.append(entry | ({} if names is None else {"annotated": names}))
    return found


def batch_of(folder: Path, *annotated: list[str] | None) -> tuple[Any, dict[str, Tensor]]:
    task = task_of(folder, entries_of(folder, *annotated), classes=CLASSES)
    samples = [task._with_annotated_classes("test", i, task._samples("test", i)) for i in range(len(annotated))]
    return task, task._collate(samples)


def dice_loss(logits: Tensor, label: Tensor) -> Tensor:
    said = logits.sigmoid()
    return 1 - (2 * (said * label).sum() + 1e-5) / (said.sum() + label.sum() + 1e-5)


def test_a_class_that_is_not_annotated_has_neither_dice_nor_cross_entropy(tmp_path: Path) -> None:
    task, batch = batch_of(tmp_path, ["disc"], None)
    model = Logits(2)
    loss = task.loss(model, batch)
    parts = [
        dice_loss(model.values[n, c], batch["label"][n, c])
        + F.binary_cross_entropy_with_logits(model.values[n, c], batch["label"][n, c])
        for n, c in ((0, 0), (1, 0), (1, 1))
    ]
    assert loss.item() == pytest.approx((parts[0] + (parts[1] + parts[2]) / 2).item() / 2, rel=1e-6)
    loss.backward()
    assert model.values.grad[0, 1].abs().max() == 0
    assert model.values.grad[0, 0].abs().max() > 0


def test_a_sample_s_gradient_depends_on_no_other_s_annotation(tmp_path: Path) -> None:
    gradients = []
    for other in (["disc"], ["disc", "cup"], []):
        (folder := tmp_path / str(len(other))).mkdir()
        task, batch = batch_of(folder, ["cup"], other)
        model = Logits(2)
        task.loss(model, batch).backward()
        gradients.append(model.values.grad[0])
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_a_sample_alone_is_computed_as_if_its_split_held_no_other(tmp_path: Path) -> None:
    """Under DP-SGD by the step gradients are rounded one by one: another formula for the same loss would move them all."""
    kept = []
    for others in ([], [["disc"]]):
        (folder := tmp_path / str(len(others))).mkdir()
        task = task_of(folder, entries_of(folder, None, *others), classes=CLASSES)
        alone = task._collate([task._with_annotated_classes("test", 0, task._samples("test", 0))])
        kept.append(alone.keys())
    assert kept[0] == kept[1]
    assert "annotated" not in kept[0]


def test_all_annotated_is_as_if_nothing_was_said(tmp_path: Path) -> None:
    found = []
    for names in (None, ["cup", "disc"]):
        task, batch = batch_of(tmp_path, names, names)
        model = Logits(2)
        loss = task.loss(model, batch)
        loss.backward()
        found.append((loss, model.values.grad, task.evaluate(Bright(2), "test", 2, True), batch.keys()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][2:] == found[1][2:]
    assert "annotated" not in batch


def test_scores_leave_it_out(tmp_path: Path) -> None:
    """Disc of 16, 8 of them found: 2 * 8 / 24. Cup of 4, all found among 8: 2 * 4 / 12; the site annotated it nowhere."""
    found = evaluated(task_of(tmp_path, entries_of(tmp_path, ["disc"], ["disc"]), classes=CLASSES))
    assert found["dice"] == found["dice/disc"] == pytest.approx(2 / 3)
    assert not [name for name in found if name.endswith("/cup")]
    found = evaluated(task_of(tmp_path, entries_of(tmp_path, ["disc"], None), classes=CLASSES))
    assert found["dice/cup"] == pytest.approx(2 / 3)
    found = evaluated(task_of(tmp_path, entries_of(tmp_path, [], None), classes=CLASSES))
    assert found["n"] == 1


def test_nothing_annotated_costs_nothing(tmp_path: Path) -> None:
    task, batch = batch_of(tmp_path, [], [])
    model = Logits(2)
    loss = task.loss(model, batch)
    loss.backward()
    assert loss == 0
    assert model.values.grad.abs().max() == 0


def test_training_batches_say_what_is_annotated_only_where_something_is_not(tmp_path: Path) -> None:
    entries = entries_of(tmp_path, ["cup"], None)
    (tmp_path / "d.json").write_text(json.dumps({"training": entries, "test": entries[1:]}))
    task = SegmentationTask(read_datalist(tmp_path / "d.json"), CLASSES, 8, prompt="box")
    assert task.batch([1, 0], 0)["annotated"].tolist() == [[1, 1], [0, 1]]
    assert "annotated" not in task._with_annotated_classes("test", 0, {})


def test_a_name_that_is_no_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"p0\.png: annotated class 'optic disc' is not a class of the task; task\.classes has disc"
    ):
        task_of(tmp_path, entries_of(tmp_path, ["optic disc"]), classes=CLASSES)
