"""Intervals: worked by hand, seeded, over patients, and the same whatever else goes on in the process."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binom

from consilium.tasks import bootstrap
from consilium.tasks.bootstrap import intervals, intervals_of_means, number_groups, sum_by_group
from tests.tasks.scoring import Bright, evaluated, picture, task_of


def interval(values: list[float]) -> dict[str, float]:
    return intervals(len(values), lambda weights: {"x": weights @ np.array(values) / weights.sum(1)})


def test_two_values_and_one() -> None:
    """Resamples of 0 and 1 have the means 0, 1/2, 1 with the chances 1/4, 1/2, 1/4."""
    assert interval([0.0, 1.0]) == {"x_low": 0, "x_high": 1}
    assert interval([0.5]) == {}
    assert interval([0.25] * 7) == {"x_low": 0.25, "x_high": 0.25}


def test_a_share_s_interval_is_the_binomial_s() -> None:
    """Half of 100 values are 1. A quantile of 1,000 draws has a standard error of about 0.015 here, and steps of 0.01."""
    found = interval([0.0, 1.0] * 50)
    assert (found["x_low"], found["x_high"]) == pytest.approx(tuple(binom.ppf([0.025, 0.975], 100, 0.5) / 100), abs=0.03)


@pytest.mark.parametrize(("room", "parts"), [(2**22, [1000]), (7 * 300, [300, 300, 300, 100]), (3, [1] * 1000)])
def test_a_thousand_resamples_of_one_seed_come_in_parts(room: int, parts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "_AT_ONCE", room)
    values, sizes = np.array([0.0, 1, 1, 2, 3, 5, 8]), list[int]()

    def mean(weights: np.ndarray) -> dict[str, np.ndarray]:
        sizes.append(len(weights))
        return {"x": weights @ values / weights.sum(1)}

    found = intervals(7, mean)
    assert sizes == parts
    if len(parts) == 1:  # numpy's generator draws no other numbers for the same shape
        drawn = np.random.default_rng(0).integers(0, 7, (1000, 7))
        low, high = np.percentile(values[drawn].mean(1), [2.5, 97.5])
        assert found == pytest.approx({"x_low": low, "x_high": high})
    assert 0 < found["x_low"] < values.mean() < found["x_high"] < 8


def test_many_groups_come_in_parts_and_stay_within_memory() -> None:
    found = interval([0.0, 1.0] * 10_000)
    assert (found["x_low"], found["x_high"]) == pytest.approx((0.5 - 0.0069, 0.5 + 0.0069), abs=0.0013)


def test_groups_are_numbered_as_they_come_and_summed() -> None:
    numbers = number_groups(["b", "a", "b"])
    assert numbers.tolist() == [0, 1, 0]
    assert sum_by_group(np.array([[1.0, 2], [3, 4], [5, 6]]), numbers).tolist() == [[6, 8], [3, 4]]


def test_intervals_of_means_over_samples_of_which_a_group_has_several() -> None:
    """Groups a (0, 1) and b (1): resamples aa, ab and bb have the means 1/2, 2/3 and 1, with the chances 1/4, 1/2 and 1/4."""
    found = intervals_of_means({"x": [0.0, 1.0, 1.0], "y": [2.0, 0.0, 4.0]}, ["a", "a", "b"])
    assert found == {"x_low": 0.5, "x_high": 1, "y_low": 1, "y_high": 4}
    assert intervals_of_means({"x": [0.0, 1.0, 1.0]}, ["a", "b", "c"]) == {"x_low": 0, "x_high": 1}
    assert intervals_of_means({"x": [0.0, 1.0]}, ["a", "a"]) == {}


def entries(folder: Path, patients: list[str]) -> list[dict[str, str]]:
    """Write pictures whose Dice is 1, 0, 1, 0 ... of these patients."""
    some, other, found = np.zeros((8, 8), bool), np.zeros((8, 8), bool), []
    some[:2], other[4:] = True, True
    for index, patient in enumerate(patients):
        entry = picture(folder, f"p{index}", other if index % 2 else some, some)
        found.append(entry | ({"patient": patient} if patient else {}))
    return found


def test_whole_patients_are_drawn(tmp_path: Path) -> None:
    """Two patients of Dice 1 and 0 on average 1/2, or four pictures: then a mean of 1/4 is drawn, between patients never."""
    together = evaluated(task_of(tmp_path, entries(tmp_path, ["a", "a", "b", "b"])))
    assert (together["dice_low"], together["dice_high"]) == (0.5, 0.5)
    apart = evaluated(task_of(tmp_path, entries(tmp_path, [""] * 4)))
    assert (apart["dice_low"], apart["dice_high"]) == (0, 1)
    assert together["n"] == apart["n"] == 4


def test_nothing_else_moves_an_interval(tmp_path: Path) -> None:
    """Neither random numbers drawn before, nor another site evaluated before, nor another batch size."""
    (tmp_path / "other").mkdir()
    task, other = (
        task_of(tmp_path, entries(tmp_path, [""] * 5)),
        task_of(tmp_path / "other", entries(tmp_path / "other", ["c"] * 3)),
    )
    first = evaluated(task)
    evaluated(other)
    np.random.seed(3)
    torch.manual_seed(3)
    again = evaluated(task, batch_size=2)
    assert {**again, "loss": 0} == {**first, "loss": 0}
    names = {f"{name}{end}" for name in ("dice", "iou", "hd95", "assd") for end in ("_low", "_high")}
    assert names <= first.keys()
    assert not [name for name in task.evaluate(Bright(), "test", 2) if name.endswith(("_low", "_high"))]
