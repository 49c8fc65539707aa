"""Water-filling against cases worked by hand, and what must hold whatever the spectra, costs and budgets."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings, strategies as st

from consilium.core.errors import ConfigError
from consilium.strategies.heterogeneous_ranks.allocation import (
    NOTHING,
    Training,
    download_ranks,
    energies,
    gate,
    random_ranks,
    train_ranks,
)

INF = math.inf


@pytest.mark.parametrize(
    ("rows", "costs", "budget", "default", "literal"),
    [
        # order of E / c: .6 (0), .5 (1), .3 (0), .3 (1): the tie goes to layer 0
        ([[0.6, 0.3, 0.1], [0.5, 0.3, 0.2]], [1, 1], 3, [2, 1], [2, 1]),
        ([[0.6, 0.3, 0.1], [0.5, 0.3, 0.2]], [1, 1], 4, [2, 2], [2, 2]),
        ([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]], [1, 1, 1], 2, [2, 0, 0], [2, 0, 0]),  # all equal: layer 0 to its cap
        ([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]], [1, 1, 1], 3, [2, 1, 0], [2, 1, 0]),
        ([[0.6], [0.4]], [1, 1], 0, [0, 0], [0, 0]),
        ([[0.6], [0.4]], [2, 3], 1.5, [0, 0], [0, 0]),  # below one step
        ([[0.9, 0.1]], [2], 100, [2], [2]),  # the cap
        ([[0.9, 0.1]], [2], 4, [2], [2]),  # an exact fit
        ([[0.9], []], [1, 1], 5, [1, 0], [1, 0]),  # a layer without ranks
        # scores .9/4 = .225 (0), .2/1, .1/1: layer 0 is best but does not fit in 3; literal stops, the default fills layer 1
        ([[0.9, 0.1], [0.2, 0.1]], [4, 1], 3, [0, 2], [0, 0]),
        ([[0.9, 0.8], [0.2, 0.1]], [4, 1], 6, [1, 2], [1, 0]),
        # per cost, not raw: .5 / 1 goes before .9 / 2
        ([[0.9, 0.1], [0.5, 0.5]], [2, 1], 2, [0, 2], [0, 2]),
        ([[0.5, 0.5], [0.5, 0.5]], [0.1, 0.1], 0.2, [2, 0], [2, 0]),
    ],
)
def test_download_ranks_by_hand(rows: list, costs: list, budget: float, default: list, literal: list) -> None:
    assert download_ranks(rows, costs, budget) == default
    assert download_ranks(rows, costs, budget, literal=True) == literal


@pytest.mark.parametrize(
    ("rows", "caps", "site", "expected"),
    [
        ([[0.6, 0.3, 0.1], [0.5, 0.3, 0.2]], [3, 3], Training([1, 1], [1, 1], 3, INF), [2, 1]),
        ([[0.6, 0.3, 0.1], [0.5, 0.3, 0.2]], [1, 3], Training([1, 1], [1, 1], 3, INF), [1, 2]),  # r_train <= r_tot
        ([[0.6, 0.3, 0.1], [0.5, 0.3, 0.2]], [0, 0], Training([1, 1], [1, 1], 3, 3), [0, 0]),
        ([[0.6, 0.3], [0.5, 0.3]], [2, 2], Training([1, 1], [1, 1], 5, 0), [0, 0]),  # no memory at all
        ([[0.6, 0.3], [0.5, 0.3]], [2, 2], Training([1, 1], [2, 2], 5, 3), [1, 0]),  # memory binds, time does not
        ([[0.6, 0.3], [0.5, 0.3]], [2, 2], Training([3, 3], [1, 1], 7, 9), [1, 1]),  # time binds
        ([[0.6, 0.3], [0.5, 0.3]], [2, 2], Training([1, 1], [1, 1], INF, INF), [2, 2]),
        ([[0.6, 0.3], [0.5, 0.3]], [2, 2], Training([1, 1], [9, 1], 3, INF), [2, 1]),  # what is unlimited does not count
        # Layer 0 costs (4, 1), layer 1 (1, 4), budgets (8, 8). Shares are .5 and .125; alpha = beta: .3125 both, so .6 goes
        # first: left (4, 7), alpha = 2 / (2 + 8/7) = .6364: layer 0 costs .3636, layer 1 .2614. Scores .3/.3636 = .825 and
        # .5/.2614 = 1.913: layer 1, left (3, 3). Layer 0 needs 4 and layer 1 needs 4: neither fits.
        ([[0.6, 0.3], [0.5, 0.3]], [2, 2], Training([4, 1], [1, 4], 8, 8), [1, 1]),
        # Both bind, re-weighting decides: costs (2, 1) and (1, 2), budgets (4, 8). Shares (.5, .125) and (.25, .25); at first
        # .3125 and .25: scores 3.2 and 3.6: layer 1, left (3, 6), still alpha = beta: 3.2 and 1.6: layer 0, left (1, 5).
        # Layer 0 needs 2 units of time: layer 1, left (0, 3).
        ([[1.0, 0.9], [0.9, 0.4]], [2, 2], Training([2, 1], [1, 2], 4, 8), [1, 2]),
    ],
)
def test_train_ranks_by_hand(rows: list, caps: list, site: Training, expected: list) -> None:
    assert train_ranks(rows, caps, site) == expected


def test_the_weights_follow_what_is_left() -> None:
    """Time is nearly gone after the first step, so the layer that saves time goes before the one of more energy."""
    rows, caps, time, memory = [[0.9], [0.03], [0.02]], [1, 1, 1], [80, 15, 6], [1, 1, 9]
    # alpha = beta: 0.9 / .405 first, and layer 1 (.03 / .08) before layer 2 (.02 / .075). Left (20, 99): alpha = .832, layer 1
    # .03 / .1265 = .24 now after layer 2 .02 / .065 = .31. Left (14, 90): layer 1 needs 15.
    assert train_ranks(rows, caps, Training(time, memory, 100, 100)) == [1, 0, 1]
    assert train_ranks(rows, caps, Training(time, memory, 101, 100)) == [1, 1, 1]


def test_units_matter_only_when_literal() -> None:
    rows, caps = [[0.6, 0.4], [0.5, 0.4]], [2, 2]
    small, large = Training([3, 1], [2, 2], 4, 8), Training([3, 1], [2e9, 2e9], 4, 8e9)
    assert train_ranks(rows, caps, small) == train_ranks(rows, caps, large) == [0, 2]
    assert train_ranks(rows, caps, large, literal=True) == [1, 1]  # time drowned by bytes: energy alone decides
    # Unlimited memory counts as untouched, so alpha = beta = 1/2: .6 / 2 and .49 / 1.5 = .327.
    assert train_ranks([[0.6], [0.49]], [1, 1], Training([2, 2], [2, 1], 3, INF), literal=True) == [0, 1]


def test_energies_are_normalised_by_layer_and_uniform_for_nothing() -> None:
    values = torch.tensor([3.0, 1.0])
    assert energies(values, 10.0) == pytest.approx([0.9, 0.1])
    assert energies(100 * values, 1e5) == pytest.approx([0.9, 0.1])
    assert energies(1e-12 * values, 1e-23) == pytest.approx([0.9, 0.1])
    assert [e / NOTHING for e in energies(torch.zeros(4), 0.0)] == pytest.approx([1.0] * 4)
    assert download_ranks([energies(torch.zeros(4), 0.0)] * 3, [2] * 3, 15) == [3, 2, 2]  # in turn, the lower index first


def test_without_energy_layers_of_unequal_cost_get_the_same_rank() -> None:
    costs = [4, 1, 2]
    rows = [energies(torch.zeros(5), 0.0, cost / 4) for cost in costs]
    assert download_ranks(rows, costs, 3 * 7) == [3, 3, 3]
    assert train_ranks(rows, [5, 5, 5], Training(costs, costs, 14, math.inf)) == [2, 2, 2]


def test_ranks_without_energy_come_after_all_that_have_some() -> None:
    rows = [energies(torch.tensor([2.0, 1e-6, 0.0]), 4.0), energies(torch.tensor([1.0, 0.0, 0.0]), 1.0)]
    assert download_ranks(rows, [1, 1], 3) == [2, 1]
    assert download_ranks(rows, [1, 1], 5) == [3, 2]


@pytest.mark.parametrize(
    ("costs", "budget"), [([0, 1], 1), ([1, -1], 1), ([1, 1], -1), ([1], 1), ([1, INF], 1), ([1, 1], math.nan)]
)
def test_nonsense_is_refused(costs: list, budget: float) -> None:
    with pytest.raises(ConfigError):
        download_ranks([[1.0], [1.0]], costs, budget)
    for bad in (Training(costs, [1, 1], budget, 1), Training([1, 1], costs, 1, budget)):
        with pytest.raises(ConfigError):
            train_ranks([[1.0], [1.0]], [1, 1], bad)


ROW = st.lists(st.floats(0, 1), min_size=0, max_size=6).map(lambda row: sorted(row, reverse=True))
COST = st.one_of(st.integers(1, 9), st.floats(0.01, 9))
LAYERS = st.lists(st.tuples(ROW, COST, COST, st.integers(0, 8)), min_size=1, max_size=6)


def spent(ranks: list[int], costs: list[float]) -> Fraction:
    return sum((rank * Fraction(cost) for rank, cost in zip(ranks, costs, strict=True)), Fraction(0))


@given(LAYERS, st.floats(0, 60), st.booleans())
@settings(max_examples=100, deadline=None)
def test_downloads_fit_and_nothing_more_would(layers: list, budget: float, literal: bool) -> None:
    rows, costs = [row for row, *_ in layers], [cost for _, cost, *_ in layers]
    ranks = download_ranks(rows, costs, budget, literal)
    assert all(0 <= rank <= len(row) for rank, row in zip(ranks, rows, strict=True))
    assert spent(ranks, costs) <= Fraction(budget)
    if not literal:
        left = Fraction(budget) - spent(ranks, costs)
        assert all(rank == len(row) or Fraction(cost) > left for rank, row, cost in zip(ranks, rows, costs, strict=True))


@given(LAYERS, st.floats(0, 60), st.floats(0, 60))
@settings(max_examples=100, deadline=None)
def test_a_larger_budget_never_takes_a_rank_away(layers: list, first: float, second: float) -> None:
    """Literal: for any costs, it is a prefix of one order. Default: for equal costs; and it never has less than literal."""
    rows, costs = [row for row, *_ in layers], [cost for _, cost, *_ in layers]
    low, high = sorted((first, second))

    def nested(small: list[int], large: list[int]) -> bool:
        return all(a <= b for a, b in zip(small, large, strict=True))

    assert nested(download_ranks(rows, costs, low, True), download_ranks(rows, costs, high, True))
    assert nested(download_ranks(rows, costs, low, True), download_ranks(rows, costs, low))
    equal = [costs[0]] * len(rows)
    assert nested(download_ranks(rows, equal, low), download_ranks(rows, equal, high))
    caps = [len(row) for row in rows]
    assert nested(*(train_ranks(rows, caps, Training(equal, equal, budget, budget)) for budget in (low, high)))


def plain_train(rows: list, caps: list, site: Training) -> list[int]:
    """Algorithm 2 as a scan over all layers at each step, in the shares of the default."""
    ranks = [0] * len(rows)
    total = [Fraction(site.time_budget), Fraction(site.memory_budget)]
    left = list(total)
    while True:
        scarce = [1 / max(float(a / b) if b else 0.0, 1e-12) for a, b in zip(left, total, strict=True)]
        alpha, beta = scarce[0] / sum(scarce), scarce[1] / sum(scarce)
        best, chosen = -1.0, None
        for layer, row in enumerate(rows):
            costs = Fraction(site.time[layer]), Fraction(site.memory[layer])
            if ranks[layer] >= min(caps[layer], len(row)) or costs[0] > left[0] or costs[1] > left[1]:
                continue
            share = alpha * site.time[layer] * (1 / site.time_budget) + beta * site.memory[layer] * (1 / site.memory_budget)
            if row[ranks[layer]] / share > best:
                best, chosen = row[ranks[layer]] / share, layer
        if chosen is None:
            return ranks
        ranks[chosen] += 1
        left = [left[0] - Fraction(site.time[chosen]), left[1] - Fraction(site.memory[chosen])]


@given(LAYERS, st.floats(0, 60), st.floats(0, 60))
@settings(max_examples=100, deadline=None)
def test_training_fits_both_budgets_and_is_the_plain_scan(layers: list, seconds: float, memory: float) -> None:
    rows, times, bytes_each, caps = (list(column) for column in zip(*layers, strict=True))
    site = Training(times, bytes_each, seconds, memory)
    ranks = train_ranks(rows, caps, site)
    assert all(0 <= rank <= min(cap, len(row)) for rank, cap, row in zip(ranks, caps, rows, strict=True))
    assert spent(ranks, times) <= Fraction(seconds)
    assert spent(ranks, bytes_each) <= Fraction(memory)
    assert ranks == plain_train(rows, caps, site)


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


@given(st.lists(st.tuples(st.integers(0, 6), COST, COST), min_size=1, max_size=6), st.floats(0, 40), st.floats(0, 40))
@settings(max_examples=60, deadline=None)
def test_random_ranks_fit_all_budgets_and_nothing_more_would(layers: list, seconds: float, memory: float) -> None:
    caps, times, bytes_each = (list(column) for column in zip(*layers, strict=True))
    ranks = random_ranks(caps, [times, bytes_each], [seconds, memory], 3)
    assert all(0 <= rank <= cap for rank, cap in zip(ranks, caps, strict=True))
    left = [Fraction(seconds) - spent(ranks, times), Fraction(memory) - spent(ranks, bytes_each)]
    assert min(left) >= 0
    for rank, cap, time_cost, memory_cost in zip(ranks, caps, times, bytes_each, strict=True):
        assert rank == cap or Fraction(time_cost) > left[0] or Fraction(memory_cost) > left[1]


def test_random_ranks_are_drawn_evenly() -> None:
    """One rank for one of four layers: each gets a quarter of 4,000 draws, give or take 5 standard deviations (137)."""
    counts = [0] * 4
    for seed in range(4000):
        counts[random_ranks([2] * 4, [[1] * 4], [1], seed).index(1)] += 1
    assert all(abs(count - 1000) < 137 for count in counts)


def test_with_unequal_costs_the_default_is_not_nested() -> None:
    rows, costs = [[0.9], [0.2, 0.1]], [4, 1]
    assert download_ranks(rows, costs, 3) == [0, 2]
    assert download_ranks(rows, costs, 4) == [1, 0]
