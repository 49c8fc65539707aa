"""The segmentation task: hand-worked metrics, batches, boxes, empty cases."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from consilium.data.datalist import read_datalist
from consilium.data.settings import PictureSettings
from consilium.tasks.segmentation import SEGMENTATION, SegmentationConfig, SegmentationScoresConfig, task as task_module
from consilium.tasks.segmentation.prompts import boxes, points
from consilium.tasks.segmentation.task import DRAWN, SegmentationTask
from consilium.tasks.segmentation.unit_scores import overlap_counts, overlaps
from tests.tasks.scoring import batches


class Fixed(nn.Module):
    """Answers the same logits whatever it sees."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, images: Tensor, boxes: Tensor | None = None) -> Tensor:
        return self.logits.expand(len(images), -1, -1, -1)


def make_task(folder: Path, count: int = 3, **options: object) -> SegmentationTask:
    entries = []
    for index in range(count):
        image, mask = np.full((8, 8), 40 * index, np.uint8), np.zeros((8, 8), np.uint8)
        mask[:4] = 1
        mask[:2] = 2
        Image.fromarray(image).save(folder / f"{index}.png")
        Image.fromarray(mask).save(folder / f"m{index}.png")
        entries.append({"image": f"{index}.png", "label": f"m{index}.png"})
    (folder / "d.json").write_text(json.dumps({"training": entries, "test": entries}))
    return SegmentationTask(read_datalist(folder / "d.json"), {"disc": [1, 2], "cup": [2]}, 8, **options)


def test_metrics_of_a_known_prediction(tmp_path: Path) -> None:
    """Disc: 32 true pixels, 48 guessed, 32 shared: Dice 64/80, IoU 32/48. Cup: 16 true, none guessed: 0."""
    logits = torch.full((2, 8, 8), -5.0)
    logits[0, :6] = 5
    found = make_task(tmp_path).evaluate(Fixed(logits), "test", 2, full=True)
    assert found["dice/disc"] == pytest.approx(0.8)
    assert found["iou/disc"] == pytest.approx(2 / 3)
    assert found["dice/cup"] == 0
    assert found["dice"] == pytest.approx(0.4)
    assert found["hd95/disc"] == pytest.approx(2)
    assert found["hd95/cup"] == pytest.approx(8 * 2**0.5)
    assert found.keys() <= SEGMENTATION.metric_names(SegmentationConfig(classes=make_task(tmp_path).classes))


def test_loss_is_dice_plus_cross_entropy(tmp_path: Path) -> None:
    task = make_task(tmp_path, augment=False)
    batch = next(batches(task, 3, seed=0))
    probability = torch.full((2, 8, 8), 0.25)
    loss = task.loss(Fixed(probability.logit()), batch)
    disc, cup = (1 - (2 * n * 0.25 + 1e-5) / (n + 64 * 0.25 + 1e-5) for n in (32, 16))
    entropy = np.mean([-(n * np.log(0.25) + (64 - n) * np.log(0.75)) / 64 for n in (32, 16)])
    assert loss.item() == pytest.approx((disc + cup) / 2 + entropy, rel=1e-5)


def test_cross_entropy_alone_is_fedsca_s_equation_3(tmp_path: Path) -> None:
    task = make_task(tmp_path, augment=False, loss="bce")
    loss = task.loss(Fixed(torch.full((2, 8, 8), 0.25).logit()), next(batches(task, 3, seed=0)))
    entropy = np.mean([-(n * np.log(0.25) + (64 - n) * np.log(0.75)) / 64 for n in (32, 16)])
    assert loss.item() == pytest.approx(entropy, rel=1e-6)


def test_iou_of_foreground_and_background() -> None:
    """16 pixels, 4 true, 6 guessed, 3 shared: 3 / 7 inside, 9 / 13 outside. A picture full of the class has no outside.

    2 guessed, all of them among 4 true ones: 2 / 4 inside, 12 / 14 outside. 4 true ones, all of them among 8 guessed: 4 / 8
    and 8 / 12.
    """
    guess, label = torch.zeros(4, 16, dtype=torch.bool), torch.zeros(4, 16, dtype=torch.bool)
    guess[0, :6] = label[0, 3:7] = guess[1] = label[1] = True
    guess[2, :2] = label[2, :4] = guess[3, :8] = label[3, :4] = True
    found = overlaps(overlap_counts(guess, label), False, background=True)
    assert found["iou"].tolist() == pytest.approx([(3 / 7 + 9 / 13) / 2, 1.0, (1 / 2 + 6 / 7) / 2, (1 / 2 + 2 / 3) / 2])
    assert found["dice"].tolist() == pytest.approx([0.6, 1.0, 2 / 3, 2 / 3])
    nothing = torch.zeros(1, 16, dtype=torch.bool)
    assert overlaps(overlap_counts(guess[:1], nothing), False, background=True)["iou"].isnan().all()  # no reference, no score
    assert overlaps(overlap_counts(guess[:1], nothing), True, background=True)["iou"].item() == pytest.approx((0 + 10 / 16) / 2)


def test_an_absent_reference_counts_for_nothing() -> None:
    label, guess = torch.zeros(2, 1, 4, 4), torch.zeros(2, 1, 4, 4)
    label[0, 0, :2] = guess[0, 0, :2] = 1
    for empty, expected in ((False, float("nan")), (True, 1.0)):
        found = [overlaps(overlap_counts(guess[i].bool(), label[i].bool()), empty)["dice"].item() for i in (0, 1)]
        assert found == pytest.approx([1.0, expected], nan_ok=True)


def test_evaluation_of_an_empty_split_and_the_models_mode(tmp_path: Path) -> None:
    task, model = make_task(tmp_path), Fixed(torch.zeros(2, 8, 8)).train()
    assert task.evaluate(model, "validation", 2) == {}
    task.evaluate(model, "test", 2)
    assert model.training
    assert task.has("test")
    assert not task.has("validation")


def test_an_epoch_sees_every_sample_once_in_an_order_the_seed_fixes(tmp_path: Path) -> None:
    task = make_task(tmp_path, count=5, augment=False)
    orders = [[float(x) for b in batches(task, 2, seed) for x in b["image"][:, 0, 0, 0]] for seed in (1, 1, 2)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert sorted(orders[0]) == [0, 40, 80, 120, 160]
    assert [len(b["image"]) for b in batches(task, 2, 0)] == [2, 2, 1]


def test_boxes_around_masks_and_their_jitter() -> None:
    label = torch.zeros(2, 20, 20)
    label[0, 3:9, 5:16] = 1
    exact = boxes(label)
    assert exact[0].tolist() == [5, 3, 15, 8]
    assert exact[1].isnan().all()
    moved = boxes(label, seed=1)
    side = torch.tensor([10.0, 5.0, 10.0, 5.0])
    assert ((moved[0] - exact[0]).abs() <= 0.1 * side + 1e-5).all()
    assert not torch.equal(moved[0], exact[0])
    assert torch.equal(moved[0], boxes(label, seed=1)[0])
    parts = torch.stack([(boxes(label, seed)[0] - exact[0]) / side for seed in range(100)])
    assert -0.1 <= parts.min() < -0.09  # to both sides alike
    assert 0.09 < parts.max() <= 0.1
    edges = torch.stack([boxes(torch.ones(1, 20, 20), seed)[0] for seed in range(20)])
    assert (edges.min(), edges.max()) == (0, 19)  # within the picture


@pytest.mark.parametrize(("prompt", "numbers"), [("box", 4), ("point", 2)])
def test_prompts_travel_with_the_batch(prompt: str, numbers: int, tmp_path: Path) -> None:
    batch = make_task(tmp_path, prompt=prompt, augment=False).batch([0, 1], 0)
    assert batch["prompt"].shape == (2, 2, numbers)


def test_a_point_is_deepest_in_its_mask_or_any_of_it_as_the_seed_says() -> None:
    """A thin frame around a 5 x 5 square: its centre is deepest. At the picture's edge the edge counts; two columns tie."""
    label = torch.zeros(3, 20, 20)
    label[0, 2:17, 2] = label[0, 2, 2:17] = 1
    label[0, 8:13, 10:15] = 1
    label[1, :, 18:] = 1
    assert points(label)[:2].tolist() == [[12, 10], [18, 0]]
    assert points(label)[2].isnan().all()
    drawn = torch.stack([points(label, seed)[:2] for seed in range(40)]).long()
    assert all(label[c, y, x] for one in drawn.tolist() for c, (x, y) in enumerate(one))
    assert len(set(map(tuple, drawn[:, 1].tolist()))) > 15  # of 40 pixels; never one and the same
    assert torch.equal(points(label, 3)[:2], drawn[3].float())
    alone = points(label[1:], 3)[0]
    assert label[1, int(alone[1]), int(alone[0])]


def test_examples_are_the_first_three_with_what_the_model_says_and_its_dice(tmp_path: Path) -> None:
    """Disc: 32 true pixels, 48 guessed, 32 shared: Dice 64/80. Cup: 16 true, none guessed: 0. Their mean is 0.4."""
    task, model = make_task(tmp_path, 5), Fixed(torch.full((2, 8, 8), -5.0).index_fill_(0, torch.tensor(0), 5.0))
    with torch.no_grad():
        model.logits[0, 6:] = -5
    model.train()
    found = task.examples(model, "test")
    assert model.training
    assert found.images[:, 0, 0, 0].tolist() == [0, 40, 80]
    assert found.images.shape == (3, 3, 8, 8)
    assert [found.references[1, c].sum().item() for c in (0, 1)] == [32, 16]
    assert found.references[1, 0, :4].all()
    assert found.predictions[2, 0, :6].all()
    assert [found.predictions[2, c].sum().item() for c in (0, 1)] == [48, 0]
    assert found.dice.tolist() == pytest.approx([0.4] * 3)
    assert found.classes == ("disc", "cup")
    assert task.examples(model, "validation") is None
    unsure = Fixed(torch.zeros(2, 8, 8))  # a logit of 0 is no
    assert not task.examples(unsure, "test").predictions.any()
    assert task.evaluate(unsure, "test", 2)["dice"] == 0


@pytest.mark.parametrize("strip", [1, 40, 2**22])
def test_logits_are_enlarged_in_strips_as_all_at_once(strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_module, "STRIP", strip)
    logits = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    whole = nn.functional.interpolate(logits[None], (11, 9), mode="bilinear", align_corners=False)[0]
    assert torch.equal(task_module._enlarged_mask(logits, (11, 9)), whole > 0)
    assert not task_module._enlarged_mask(torch.zeros(1, 2, 2), (3, 3)).any()


def test_masks_stay_in_memory_as_long_as_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of 2 classes of 16 x 16 takes 64 bytes: of three pictures one or two are read again the second time."""
    read, asked = task_module.read_masks, []
    monkeypatch.setattr(task_module, "read_masks", lambda item, *how: asked.append(item) or read(item, *how))
    for index in range(3):
        for name in (f"{index}.png", f"m{index}.png"):
            Image.fromarray(np.full((16, 16), 1 + index % 2, np.uint8)).save(tmp_path / name)
    entries = [{"image": f"{index}.png", "label": f"m{index}.png"} for index in range(3)]
    (tmp_path / "d.json").write_text(json.dumps({"training": [], "test": entries}))
    found = []
    for room, times in ((63, 6), (64, 5), (128, 4), (192, 3)):
        monkeypatch.setattr(task_module, "MASK_BYTES", room)
        task = SegmentationTask(read_datalist(tmp_path / "d.json"), {"disc": [1, 2], "cup": [2]}, 8)
        asked.clear()
        found += [task.evaluate(Fixed(torch.full((2, 8, 8), 5.0)), "test", 2) for _ in range(2)]
        assert len(asked) == times
    assert all(one == found[0] for one in found)
    assert found[0]["dice/cup"] == 1


def test_structures_too_small_for_the_model_are_told_by_split(tmp_path: Path) -> None:
    mask = np.zeros((64, 64), np.uint8)
    mask[3, 3] = 1
    for index in range(2):
        Image.fromarray(mask * (index == 0)).save(tmp_path / f"m{index}.png")
        Image.fromarray(mask).save(tmp_path / f"{index}.png")
    entries = [{"image": f"{index}.png", "label": f"m{index}.png"} for index in range(2)]
    (tmp_path / "d.json").write_text(json.dumps({"training": [], "test": entries}))
    task = SegmentationTask(read_datalist(tmp_path / "d.json"), {"disc": [1]}, 8)
    task.evaluate(Fixed(torch.zeros(1, 8, 8)), "test", 1)
    (note,) = task.notes
    assert note.startswith("nothing of disc is left in 1 of 2 test pictures at the model's 8 pixels; ")


@pytest.mark.parametrize(
    ("shape", "options", "side"),
    [
        ((40, 80), {}, 80),
        ((40, 80), {"settings": PictureSettings(resize="pad")}, 80),
        ((300, 600), {}, DRAWN),
        ((4, 8), {}, 8),
        ((40, 80), {"scores": SegmentationScoresConfig(grid="resized")}, 8),
    ],
)
def test_examples_are_shown_as_sharp_as_their_scores(
    shape: tuple[int, int], options: dict[str, Any], side: int, tmp_path: Path
) -> None:
    """A column in two is white, which a picture of the model's 8 pixels shows as grey. The left half is the object."""
    image, mask = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
    image[:, ::2], mask[:, : shape[1] // 2] = 255, 1
    Image.fromarray(image).save(tmp_path / "i.png")
    Image.fromarray(mask).save(tmp_path / "m.png")
    (tmp_path / "d.json").write_text(json.dumps({"training": [], "test": [{"image": "i.png", "label": "m.png"}]}))
    task = SegmentationTask(read_datalist(tmp_path / "d.json"), {"disc": [1]}, 8, **options)
    logits = torch.full((1, 8, 8), -5.0)
    logits[..., :4] = 5
    found = task.examples(Fixed(logits), "test")
    assert found.images.shape == (1, 3, side, side)
    height = side // 2 if "settings" in options else side
    for masks in (found.references, found.predictions):
        assert masks.shape == (1, 1, side, side)
        assert masks[0, 0, :height, : side // 2].all()
        assert masks.sum() == height * side // 2
    assert found.dice.tolist() == [1]
    if side == 80:
        assert found.images[0, 0, :height].unique().tolist() == [0, 255]


def test_examples_of_a_grey_picture_of_odd_size_without_a_class(tmp_path: Path) -> None:
    Image.fromarray(np.full((7, 13), 90, np.uint8)).save(tmp_path / "i.png")
    Image.fromarray(np.zeros((7, 13), np.uint8)).save(tmp_path / "m.png")
    (tmp_path / "d.json").write_text(json.dumps({"training": [], "test": [{"image": "i.png", "label": "m.png"}]}))
    task = SegmentationTask(read_datalist(tmp_path / "d.json"), {"disc": [1]}, 8, prompt="box")
    found = task.examples(Fixed(torch.full((1, 8, 8), 5.0)), "test")
    assert (found.images == 90).all()
    assert not found.references.any()
    assert found.predictions.all()
    assert found.dice.isnan().all()
