"""Water-filling against cases worked by hand, and what must hold whatever the spectra, costs and budgets."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from consilium.strategies.fedhera import NOTHING, energies, fill_ranks, gate, random_ranks


@pytest.mark.parametrize(
    ("rows", "costs", "budget", "default", "literal"),
    [
        # order of E / c: .6 (0), .5 (1), .3 (0), .3 (1): the tie goes to layer 0
        ([[0.6, 0.3, 0.1], [0.5, 0.3, 0.2]], [1, 1], 3, [2, 1], [2, 1]),
        ([[0.6, 0.3, 0.1], [0.5, 0.3, 0.2]], [1, 1], 4, [2, 2], [2, 2]),
        ([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]], [1, 1, 1], 2, [2, 0, 0], [2, 0, 0]),  # all equal: layer 0 to its cap
        ([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]], [1, 1, 1], 3, [2, 1, 0], [2, 1, 0]),
        ([[0.6], [0.4]], [1, 1], 0, [0, 0], [0, 0]),
        ([[0.6], [0.4]], [2, 3], 1, [0, 0], [0, 0]),  # below one step
        ([[0.9, 0.1]], [2], 100, [2], [2]),  # the cap
        ([[0.9, 0.1]], [2], 4, [2], [2]),  # an exact fit
        ([[0.9], []], [1, 1], 5, [1, 0], [1, 0]),  # a layer without ranks
        # scores .9/4 = .225 (0), .2/1, .1/1: layer 0 is best but does not fit in 3; literal stops, the default fills layer 1
        ([[0.9, 0.1], [0.2, 0.1]], [4, 1], 3, [0, 2], [0, 0]),
        ([[0.9], [0.2, 0.1]], [4, 1], 4, [1, 0], [1, 0]),  # a larger budget may take ranks away where costs differ
        ([[0.9, 0.8], [0.2, 0.1]], [4, 1], 6, [1, 2], [1, 0]),
        # per cost, not raw: .5 / 1 goes before .9 / 2
        ([[0.9, 0.1], [0.5, 0.5]], [2, 1], 2, [0, 2], [0, 2]),
    ],
)
def test_fill_ranks_by_hand(rows: list, costs: list, budget: int, default: list, literal: list) -> None:
    assert fill_ranks(rows, costs, budget) == default
    assert fill_ranks(rows, costs, budget, literal=True) == literal


def test_energies_are_normalised_by_layer_and_uniform_for_nothing() -> None:
    values = torch.tensor([3.0, 1.0])
    assert energies(values, 10.0) == pytest.approx([0.9, 0.1])
    assert energies(100 * values, 1e5) == pytest.approx([0.9, 0.1])
    assert energies(1e-12 * values, 1e-23) == pytest.approx([0.9, 0.1])
    assert [e / NOTHING for e in energies(torch.zeros(4), 0.0)] == pytest.approx([1.0] * 4)
    assert fill_ranks([energies(torch.zeros(4), 0.0)] * 3, [2] * 3, 15) == [3, 2, 2]  # in turn, the lower index first


def test_ranks_without_energy_come_last_and_are_equal_in_layers_of_unequal_cost() -> None:
    costs = [4, 1, 2]
    assert fill_ranks([energies(torch.zeros(5), 0.0, cost / 4) for cost in costs], costs, 3 * 7) == [3, 3, 3]
    rows = [energies(torch.tensor([2.0, 1e-6, 0.0]), 4.0), energies(torch.tensor([1.0, 0.0, 0.0]), 1.0)]
    assert fill_ranks(rows, [1, 1], 3) == [2, 1]
    assert fill_ranks(rows, [1, 1], 5) == [3, 2]


ROW = st.lists(st.floats(0, 1), min_size=0, max_size=6).map(lambda row: sorted(row, reverse=True))
LAYERS = st.lists(st.tuples(ROW, st.integers(1, 9)), min_size=1, max_size=6)


def spent(ranks: list[int], costs: list[int]) -> int:
    return sum(rank * cost for rank, cost in zip(ranks, costs, strict=True))


@given(LAYERS, st.integers(0, 60), st.booleans())
@settings(max_examples=100, deadline=None)
def test_downloads_fit_and_nothing_more_would(layers: list, budget: int, literal: bool) -> None:
    rows, costs = [row for row, _ in layers], [cost for _, cost in layers]
    ranks = fill_ranks(rows, costs, budget, literal)
    assert all(0 <= rank <= len(row) for rank, row in zip(ranks, rows, strict=True))
    assert spent(ranks, costs) <= budget
    if not literal:
        left = budget - spent(ranks, costs)
        assert all(rank == len(row) or cost > left for rank, row, cost in zip(ranks, rows, costs, strict=True))


@given(LAYERS, st.integers(0, 60), st.integers(0, 60))
@settings(max_examples=100, deadline=None)
def test_a_larger_budget_never_takes_a_rank_away(layers: list, first: int, second: int) -> None:
    """Literal: for any costs, it is a prefix of one order. Default: for equal costs; and it never has less than literal."""
    rows, costs = [row for row, _ in layers], [cost for _, cost in layers]
    low, high = sorted((first, second))

    def nested(small: list[int], large: list[int]) -> bool:
        return all(a <= b for a, b in zip(small, large, strict=True))

    assert nested(fill_ranks(rows, costs, low, True), fill_ranks(rows, costs, high, True))
    assert nested(fill_ranks(rows, costs, low, True), fill_ranks(rows, costs, low))
    equal = [costs[0]] * len(rows)
    assert nested(fill_ranks(rows, equal, low), fill_ranks(rows, equal, high))


@pytest.mark.parametrize("schedule", ["paper", "neutral"])
def test_the_gate_by_hand(schedule: str) -> None:
    assert gate(0, None, 0, schedule) == 0.0
    assert gate(0, 1.0, 0, schedule) == 0.0
    assert gate(1, 1.0, 0, schedule) == pytest.approx(1 - math.exp(-1))
    assert gate(4, -1.0, 0, schedule) == pytest.approx(0.0, abs=1e-15)
    assert gate(3, None, 3, schedule) == pytest.approx(1 - math.exp(-1.5))
    assert gate(3, 1 + 1e-9, 0, schedule) == gate(3, 1.0, 0, schedule)
    assert gate(3, -1.5, 0, schedule) == gate(3, -1.0, 0, schedule)
    stale = {"paper": 1 - math.exp(-2 * 1.5 * 0.81), "neutral": 1 - math.exp(-2 * (1 + 0.5 * 0.81))}
    assert gate(4, 0.5, 2, schedule) == pytest.approx(stale[schedule])


def test_a_stale_site_loses_its_tail_or_returns_to_neutral() -> None:
    assert gate(100, 0.5, 99, "paper") < 0.01
    assert gate(4, 0.5, 200, "neutral") == pytest.approx(gate(4, None, 0, "neutral"))


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), min_size=1, max_size=6), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_random_ranks_fit_the_budget_and_nothing_more_would(layers: list, budget: int) -> None:
    caps, costs = (list(column) for column in zip(*layers, strict=True))
    ranks = random_ranks(caps, costs, budget, 3)
    assert all(0 <= rank <= cap for rank, cap in zip(ranks, caps, strict=True))
    left = budget - spent(ranks, costs)
    assert left >= 0
    assert all(rank == cap or cost > left for rank, cap, cost in zip(ranks, caps, costs, strict=True))


def test_random_ranks_are_drawn_evenly() -> None:
    """One rank for one of four layers: each gets a quarter of 4,000 draws, give or take 5 standard deviations (137)."""
    counts = [0] * 4
    for seed in range(4000):
        counts[random_ranks([2] * 4, [1] * 4, 1, seed).index(1)] += 1
    assert all(abs(count - 1000) < 137 for count in counts)
