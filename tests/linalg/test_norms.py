"""Tensors taken together have the numbers, and the norms, that they have one by one."""

import math

import pytest
import torch

from consilium.core.errors import RefusedError
from consilium.core.norms import concat_small, non_finite_names, norm, norms
from consilium.server.aggregation import ExactMean

SMALL = 2**14
MIXED = {
    "a": torch.tensor([[3.0, 4.0]]),
    "large": torch.full((SMALL,), 0.5),
    "half": torch.tensor([5.0, 12.0], dtype=torch.bfloat16),
    "none": torch.zeros(0, 3),
    "b": torch.tensor(-2.0),
    "just": torch.zeros(SMALL - 1),
}


def test_small_ones_of_a_type_stand_in_a_row_and_large_ones_alone() -> None:
    rows = {tuple(names): numbers for names, numbers in concat_small(MIXED)}
    assert rows.keys() == {("a", "none", "b", "just"), ("large",), ("half",)}
    assert rows["a", "none", "b", "just"][:4].tolist() == [3.0, 4.0, -2.0, 0.0]
    assert rows["large",].data_ptr() == MIXED["large"].data_ptr()
    assert concat_small({}) == []


def test_norms_are_those_of_each_and_of_all() -> None:
    assert norms(MIXED) == {"a": 5.0, "large": math.sqrt(SMALL) / 2, "half": 13.0, "none": 0.0, "b": 2.0, "just": 0.0}
    assert list(norms(MIXED)) == list(MIXED)
    assert norm(MIXED) == pytest.approx(math.sqrt(25 + SMALL / 4 + 169 + 4), rel=1e-15)
    assert norm({}) == 0.0
    drawn = {str(n): torch.randn(3 + n, 70, generator=torch.Generator().manual_seed(n)) for n in range(9)}
    assert norms(drawn) == {name: float(one.double().square().sum().sqrt()) for name, one in drawn.items()}


def test_masked_integers_have_a_norm_too() -> None:
    assert norm({"a": torch.tensor([3]), "b": torch.tensor([0, -4])}) == 5.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_holds_no_finite_number_is_named_and_nothing_beside_it(bad: float) -> None:
    assert non_finite_names(MIXED) == []
    wrong = {name: MIXED[name].clone() for name in ("b", "large", "half")}
    for one in wrong.values():
        one.view(-1)[-1] = bad
        assert not math.isfinite(norm({"one": one}))
    assert sorted(non_finite_names(MIXED | wrong)) == ["b", "half", "large"]
    assert non_finite_names(MIXED | {"b": wrong["b"]}) == ["b"]


@pytest.mark.parametrize("place", [0, 1])
def test_a_mean_takes_no_nan_wherever_it_stands(place: int) -> None:
    mean = ExactMean()
    mean.add({"a": torch.tensor([1.0])}, 1)
    update = {"a": torch.tensor([1.0]), "b": torch.tensor([1.0], dtype=torch.float64)}
    update["ab"[place]][0] = math.nan
    with pytest.raises(RefusedError, match="value of nan"):
        mean.add(update, 1)
    assert mean.value()["a"].tolist() == [1.0]


def test_a_mean_of_sites_that_name_their_tensors_in_another_order_or_lack_one_is_the_same() -> None:
    mean = ExactMean()
    mean.add({"a": torch.tensor([1.0, 2.0]), "large": torch.ones(SMALL), "b": torch.tensor([[4.0]])}, 1)
    mean.add({"b": torch.tensor([[8.0]]), "a": torch.tensor([3.0, 6.0])}, 3)
    found = mean.value()
    assert list(found) == ["a", "large", "b"]
    assert found["a"].tolist() == [2.5, 5.0]
    assert found["b"].tolist() == [[7.0]]
    assert found["large"].eq(0.25).all()
