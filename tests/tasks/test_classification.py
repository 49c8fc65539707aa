"""The classification task: hand-worked metrics, labels by name and number, seeded batches."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from consilium.core.errors import DataError
from consilium.data.datalist import Loading, read_datalist
from consilium.data.text import Text
from consilium.tasks.base import evaluating
from consilium.tasks.classification import ClassificationConfig, metric_names
from consilium.tasks.classification.task import (
    ClassificationTask,
    balanced_loss,
    class_index,
    count_and_intervals,
    pick_across_classes,
    score,
)
from consilium.tasks.registry import TASKS
from tests.conftest import small_cells
from tests.tasks.scoring import batches

CLASSES = ["round", "long", "spiky"]


class ByBrightness(nn.Module):
    """Calls a picture after its brightest corner pixel: 0 is round, 10 long, 20 spiky; sure of it by `sure`."""

    def __init__(self, sure: float = 5.0) -> None:
        super().__init__()
        self.sure = nn.Parameter(torch.tensor(sure))

    def forward(self, images: Tensor) -> Tensor:
        return self.sure * nn.functional.one_hot((images[:, 0, 0, 0] / 10).round().long(), 3).float()


def make_task(folder: Path, labels: list[object], values: list[int], **options: object) -> ClassificationTask:
    entries = []
    for index, (label, value) in enumerate(zip(labels, values, strict=True)):
        Image.fromarray(np.full((8, 8), value, np.uint8)).save(folder / f"{index}.png")
        entries.append({"image": f"{index}.png", "label": label})
    (folder / "d.json").write_text(json.dumps({"training": entries, "test": entries}))
    return ClassificationTask(read_datalist(folder / "d.json", labels_are_classes=True), CLASSES, 8, **options)


def test_metrics_of_known_answers(tmp_path: Path) -> None:
    """Two round called round and long, two long both called long: F1 of round 2/3, of long 4/5; nothing is spiky."""
    task = make_task(tmp_path, ["round", 0, "long", 1], [0, 10, 10, 10])
    found = task.evaluate(ByBrightness(5.0), "test", 3, full=True)
    right, wrong = (math.log(math.exp(5) + 2) - sure for sure in (5, 0))
    assert found["loss"] == pytest.approx((3 * right + wrong) / 4)
    assert found["accuracy"] == 0.75
    assert found["recall/round"] == 0.5
    assert found["recall/long"] == 1
    assert "recall/spiky" not in found
    assert found["f1"] == pytest.approx((2 / 3 + 4 / 5) / 2)
    counts = {name: value for name, value in found.items() if name.startswith("confusion/")}
    known = {"confusion/round/round": 1, "confusion/round/long": 1, "confusion/long/long": 2}
    assert {name: value for name, value in counts.items() if value} == known
    assert not any(name.startswith("confusion/spiky/") for name in counts)
    assert found.keys() <= metric_names(ClassificationConfig(name="classification", classes=task.classes))
    assert not any("confusion" in name for name in task.evaluate(ByBrightness(), "test", 3))


@pytest.mark.parametrize(("f1", "wanted"), [("all", (0 + 1 + 0) / 3), ("present", (0 + 1) / 2)])
def test_a_false_alarm_of_an_absent_class_is_a_class_of_macro_f1_as_in_scikit_learn(f1: Any, wanted: float) -> None:
    """Truth 0, 1 and answers 2, 1: scikit-learn 1.9's f1_score(average="macro") is 1/3."""
    logits, labels = torch.eye(3)[[2, 1]], torch.tensor([0, 1])
    found = score(logits, labels, CLASSES, f1=f1)
    assert found["f1"] == pytest.approx(wanted)
    assert found["accuracy"] == 0.5
    of_all = count_and_intervals(logits.repeat(2, 1), labels.repeat(2), np.array([0, 0, 1, 1]), f1)
    assert of_all["f1_low"] == of_all["f1_high"] == pytest.approx(wanted)


@pytest.mark.parametrize("seed", range(20))
def test_macro_f1_is_that_of_precision_and_recall(seed: int) -> None:
    """2 P R / (P + R) of each class that is there or answered, 0 where a class has no hit; others do not count."""
    generator = torch.Generator().manual_seed(seed)
    true, guess = (torch.randint(0, 5, (6,), generator=generator).tolist() for _ in range(2))
    each = []
    for one in set(true) | set(guess):
        hits = sum(t == g == one for t, g in zip(true, guess, strict=True))
        precision, recall = (hits / chosen.count(one) if hits else 0 for chosen in (guess, true))
        each.append(2 * precision * recall / (precision + recall) if hits else 0)
    found = score(torch.eye(5)[guess], torch.tensor(true), list("abcde"))
    assert found["f1"] == pytest.approx(sum(each) / len(each))


def test_a_picture_that_is_broken_later_is_found_by_reading_it_again(tmp_path: Path) -> None:
    task = make_task(tmp_path, [0, 1], [0, 20])
    task.batch([0, 1], 0)
    (tmp_path / "1.png").write_bytes(b"torn")
    task.read_again("training", 0)
    with pytest.raises(DataError, match=r"1\.png"):
        task.read_again("training", 1)


def test_loss_is_the_mean_cross_entropy_and_reaches_the_model(tmp_path: Path) -> None:
    task, model = make_task(tmp_path, [0, 1], [0, 20], augment=False), ByBrightness(2.0)
    loss = task.loss(model, task.batch([0, 1], 0))
    right, wrong = math.log(math.exp(2) + 2) - 2, math.log(math.exp(2) + 2)
    assert loss.item() == pytest.approx((right + wrong) / 2)
    loss.backward()
    assert model.sure.grad != 0


COUNTS = torch.tensor([6, 3, 0])
"""A site with six round, three long and no spiky cells."""


def test_weights_make_classes_equal_in_an_epoch() -> None:
    """n = 9, P = 2: a round cell weighs 9 / 12, a long one 9 / 6, so each class 4.5 of 9."""
    logits, labels = torch.randn(9, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0] * 6 + [1] * 3)
    each = [math.log(sum(math.exp(v) for v in row)) - row[label] for row, label in zip(logits.tolist(), labels, strict=True)]
    expected = (sum(each[:6]) * 9 / 12 + sum(each[6:]) * 9 / 6) / 9
    assert balanced_loss(logits, labels, COUNTS, "weights").item() == pytest.approx(expected, rel=1e-5)


def test_the_prior_takes_a_sites_mix_out_and_leaves_absent_classes_alone() -> None:
    """Equal logits mean equal shares: the loss is the entropy of the site's mix, and at its least for that mix."""
    logits, labels = torch.zeros(9, 3, requires_grad=True), torch.tensor([0] * 6 + [1] * 3)
    loss = balanced_loss(logits, labels, COUNTS, "prior")
    assert loss.item() == pytest.approx(-(6 * math.log(2 / 3) + 3 * math.log(1 / 3)) / 9, rel=1e-6)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.sum(0).tolist() == pytest.approx([0, 0, 0], abs=1e-7)
    assert not logits.grad[:, 2].any()
    assert logits.grad[:, :2].any()


def test_a_job_names_the_balance(tmp_path: Path) -> None:
    plain = make_task(tmp_path, [0, 0, 1], [0, 0, 10])
    batch, model = plain.batch([0, 1, 2], 0), ByBrightness()
    losses = {b: make_task(tmp_path, [0, 0, 1], [0, 0, 10], balance=b).loss(model, batch) for b in ("none", "weights", "prior")}
    assert len({round(loss.item(), 6) for loss in losses.values()}) == 2  # all are right: weights change nothing
    assert torch.equal(losses["none"], plain.loss(model, batch))
    with pytest.raises(ValueError, match=r"task\.balance: 'prior': counts a site's classes, so one record is in the gradients"):
        ClassificationConfig(name="classification", classes=CLASSES, balance="prior").check_per_sample_gradients()


def test_an_empty_split_and_the_models_mode(tmp_path: Path) -> None:
    task, model = make_task(tmp_path, [0, 1], [0, 10]), ByBrightness().train()
    assert task.evaluate(model, "validation", 2) == {}
    task.evaluate(model, "test", 2)
    assert model.training
    assert task.has("test")
    assert not task.has("validation")


def test_batches_are_seeded_per_sample_and_keep_labels(tmp_path: Path) -> None:
    task = make_task(tmp_path, [2, "long", 0], [20, 10, 0])
    noise = np.random.default_rng(0).integers(0, 255, (8, 8, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "0.png")
    task = ClassificationTask(task.data, CLASSES, 8)
    one, other = task.batch([0, 1, 2], 4), task.batch([2, 0], 4)
    assert one["label"].tolist() == [2, 1, 0]
    assert torch.equal(one["image"][0], other["image"][1])
    looks = {task.batch([0], seed)["image"].numpy().tobytes() for seed in range(8)}
    assert len(looks) > 4
    assert sorted(x for b in batches(task, 2, 0) for x in b["label"].tolist()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("square", r"0\.png: label 'square' is not a class of the task; task\.classes has round, long, spiky"),
        (3, r"0\.png: label 3 is outside 0\.\.2"),
        (-1, r"label -1 is outside"),
        (None, r"0\.png: has no class"),
        ("x" * 200, rf"label '{'x' * 80}' is not"),
    ],
)
def test_bad_labels_stop_before_training(label: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        make_task(tmp_path, [label], [0])


def test_a_text_s_class_is_its_name_or_else_its_number() -> None:
    def index(said: str, classes: list[str]) -> int:
        return class_index(Text("t:1", "q", "", (said,)), classes)

    assert [index(said, ["a", "b"]) for said in ("b", "1", "0")] == [1, 1, 0]
    assert [index(said, ["1", "0"]) for said in ("1", "0")] == [0, 1]  # these are names
    with pytest.raises(DataError, match=r"t:1: label 2 is outside 0\.\.1"):
        index("2", ["a", "b"])


def test_a_broken_picture_stops_before_training(tmp_path: Path) -> None:
    task = make_task(tmp_path, [0], [0])
    (tmp_path / "0.png").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"0\.png: image cannot be read"):
        ClassificationTask(task.data, CLASSES, 8)


def test_examples_are_of_as_many_classes_as_can_be(tmp_path: Path) -> None:
    """Each class's first, then each one's second: 0, 4, 7, then 1, 5, then 2. Logits are 5 for one of three classes."""
    assert pick_across_classes([0, 0, 0, 0, 1, 1, 1, 2], 6) == [0, 1, 2, 4, 5, 7]
    assert pick_across_classes([1, 1], 6) == [0, 1]
    task = make_task(tmp_path, ["round"] * 3 + ["long", "spiky"], [0, 10, 20, 10, 20])
    model = ByBrightness(5.0).train()
    found = task.examples(model, "test")
    assert model.training
    assert found.references.tolist() == [0, 0, 0, 1, 2]
    assert found.images[:, 2, 7, 7].tolist() == [0, 10, 20, 10, 20]
    assert found.predictions.argmax(1).tolist() == [0, 1, 2, 1, 2]
    assert found.predictions.max(1).values.tolist() == pytest.approx([math.exp(5) / (math.exp(5) + 2)] * 5)
    assert found.classes == tuple(CLASSES)
    assert task.examples(model, "validation") is None
    assert len(make_task(tmp_path, [0] * 4 + [1] * 4, [0] * 8).examples(model, "test").images) == 6


def by_patient(folder: Path, patients: list[str], labels: list[str], **scores: str) -> ClassificationTask:
    """Return a task on pictures that are ever brighter: 0, 40, 80 ..."""
    entries = []
    for index, (patient, label) in enumerate(zip(patients, labels, strict=True)):
        Image.fromarray(np.full((8, 8), 40 * index, np.uint8)).save(folder / f"{index}.png")
        entries.append({"image": f"{index}.png", "label": label, "patient": patient})
    mixed = [entries[0] | {"label": label} for label in ("dark", "light")]  # no score is of a training picture
    (folder / "p.json").write_text(json.dumps({"training": mixed, "test": entries}))
    return ClassificationTask(read_datalist(folder / "p.json", True), ["dark", "light"], 8, False, by_patient=True)


class Table(nn.Module):
    """Answers a picture of brightness 40 i with the i-th row."""

    def __init__(self, rows: list[list[float]]) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.tensor(rows))

    def forward(self, images: Tensor) -> Tensor:
        return self.rows[(images[:, 0, 0, 0] / 40).round().long()]


def test_a_patient_s_class_is_that_of_its_mean_probability(tmp_path: Path) -> None:
    """Patient a: light by .6, .6 and .05, on average .42: dark, where two images of three say light. Patient b: light, sure."""
    shares = [0.6, 0.9, 0.6, 0.05]
    task = by_patient(tmp_path, ["a", "b", "a", "a"], ["dark", "light", "dark", "dark"])
    found = task.evaluate(Table([[np.log(1 - p), np.log(p)] for p in shares]), "test", 3, full=True)
    assert (found["accuracy"], found["f1"], found["n"]) == (1, 1, 2)
    assert found["confusion/dark/dark"] == 1
    mean = (0.6 + 0.6 + 0.05) / 3
    assert found["loss"] == pytest.approx(-(np.log(1 - mean) + np.log(0.9)) / 2, rel=1e-5)
    assert (found["accuracy_low"], found["accuracy_high"]) == (1, 1)


def damaged_first(task: ClassificationTask, folder: Path, by_patient: bool) -> ClassificationTask:
    """Return the task on a list that skips bad samples, whose first picture is damaged."""
    data = replace(task.data, loading=Loading(skip=True))
    (folder / "0.png").write_bytes(b"no picture")
    return ClassificationTask(data, task.classes, 8, False, by_patient=by_patient)


def test_a_patient_without_a_readable_picture_is_not_scored(tmp_path: Path) -> None:
    """Patient a's one picture is damaged. Patient b is right, c wrong."""
    task = damaged_first(by_patient(tmp_path, ["a", "b", "c", "b"], ["dark", "dark", "light", "dark"]), tmp_path, True)
    found = task.evaluate(Table([[1.0, 0.0]] * 4), "test", 3, full=True)
    assert (found["accuracy"], found["n"], found["accuracy_low"], found["accuracy_high"]) == (0.5, 2, 0.0, 1.0)
    assert task.scored is not None
    assert task.scored.names == ("1.png", "2.png")


def test_the_pictures_of_one_patient_have_no_interval(tmp_path: Path) -> None:
    """Of two patients the first has no readable picture."""
    task = damaged_first(by_patient(tmp_path, ["a", "b", "b"], ["dark"] * 3), tmp_path, False)
    found = task.evaluate(Table([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), "test", 3, full=True)
    assert (found["accuracy"], found["n"]) == (0.5, 2)
    assert "accuracy_low" not in found


def test_probabilities_of_nothing_leave_a_finite_loss(tmp_path: Path) -> None:
    task = by_patient(tmp_path, ["a", "a"], ["dark", "dark"])
    assert np.isfinite(task.evaluate(Table([[-900.0, 900.0]] * 2), "test", 2)["loss"])


@pytest.mark.parametrize(("per", "accuracy"), [("image", 0.5), ("patient", 1.0)])
def test_the_job_says_whether_images_or_patients_are_scored(per: str, accuracy: float, tmp_path: Path) -> None:
    """As above: of four images those of shares .9 and .05 are right."""
    data = by_patient(tmp_path, ["a", "b", "a", "a"], ["dark", "light", "dark", "dark"]).data
    config = ClassificationConfig(name="classification", classes=["dark", "light"], scores={"per": per})
    model = small_cells().model.model_copy(update={"image_size": 8})
    task = TASKS["classification"].build(config, model, data, None)
    found = task.evaluate(Table([[np.log(1 - p), np.log(p)] for p in (0.6, 0.9, 0.6, 0.05)]), "test", 3)
    assert found["accuracy"] == accuracy


def test_the_probability_of_the_true_class_ranks_units_the_largest_first(tmp_path: Path) -> None:
    task = by_patient(tmp_path, ["a", "b"], ["dark", "light"])
    task.evaluate(Table([[np.log(1 - p), np.log(p)] for p in (0.2, 0.9)]), "test", 2, full=True)
    assert task.scored is not None
    assert (task.scored.score, task.scored.lower) == ("probability of the true class", False)
    assert task.scored.values == pytest.approx((0.8, 0.9))
    task = by_patient(tmp_path, ["a", "a", "b", "a"], ["dark", "dark", "light", "dark"])
    task.evaluate(Table([[np.log(1 - p), np.log(p)] for p in (0.2, 0.4, 0.9, 0.6)]), "test", 2, full=True)
    assert task.scored.values == pytest.approx((1 - (0.2 + 0.4 + 0.6) / 3, 0.9))  # of a patient its first picture stands for it
    assert (task.scored.samples, task.scored.names) == ((0, 2), ("0.png", "2.png"))


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_scored_without_dropout_and_gets_its_mode_back(training: bool) -> None:
    model = nn.Dropout(0.5).train(training)
    with evaluating(model):
        assert not model.training
    assert model.training is training


def test_a_patient_of_two_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"2\.png: another sample of its patient is of another class; set task\.scores\.per"):
        by_patient(tmp_path, ["a", "b", "a"], ["dark", "light", "light"])


def test_intervals_of_accuracy_and_f1_draw_patients(tmp_path: Path) -> None:
    """Patient a is all right, patient b all wrong: resamples are 1, 1/2, 0. F1 is then 1, of one class 2/3 and 0, or 0."""
    logits = torch.tensor([[2.0, 0], [2, 0], [2, 0], [2, 0]])
    found = count_and_intervals(logits, torch.tensor([0, 0, 1, 1]), np.array([0, 0, 1, 1]))
    assert found == {"n": 4, "accuracy_low": 0, "accuracy_high": 1, "f1_low": 0, "f1_high": 1}
