"""Accountants against published numbers, each other and closed forms."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants.utils import get_noise_multiplier
from scipy.integrate import quad
from scipy.stats import norm

from consilium.errors import ConfigError
from consilium.privacy.accounting import Spend, epsilon_of, gaussian_delta, gaussian_epsilon, noise_multiplier

DELTA = 1 / 12


@pytest.mark.parametrize(
    ("epsilon", "accountant", "sigma"),
    [(3, "exact", 5.98), (3, "prv", 6.00), (3, "rdp", 7.07), (0.1, "exact", 32.35), (0.1, "prv", 33.36), (0.1, "rdp", 45.63)],
)
def test_noise_for_the_papers_hundred_releases(epsilon: float, accountant: str, sigma: float) -> None:
    found = noise_multiplier(epsilon, DELTA, 100, accountant=accountant)
    assert found == pytest.approx(sigma, abs=0.006)
    assert epsilon * 0.99 < epsilon_of([Spend(found, 1.0, 100)], DELTA, accountant) <= epsilon


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("epsilon", "accountant", "sigma"), [(3, "prv", 6.00), (3, "rdp", 7.08), (0.1, "prv", 33.8), (0.1, "rdp", 46.3)]
)
def test_opacus_own_search_stops_a_hundredth_of_epsilon_early(epsilon: float, accountant: str, sigma: float) -> None:
    """Its numbers, as papers print them, are a little larger than they need be; ours are never smaller than needed."""
    theirs = get_noise_multiplier(target_epsilon=epsilon, target_delta=DELTA, sample_rate=1.0, steps=100, accountant=accountant)
    assert theirs == pytest.approx(sigma, rel=2e-3)
    assert theirs >= 0.999 * noise_multiplier(epsilon, DELTA, 100, accountant=accountant)


def test_delta_is_the_hockey_stick_divergence_of_two_gaussians() -> None:
    mu, epsilon = 1.3, 0.8
    divergence, _ = quad(lambda x: max(norm.pdf(x, mu) - math.exp(epsilon) * norm.pdf(x), 0), -10, 12, limit=400)
    assert gaussian_delta(mu, epsilon) == pytest.approx(divergence, rel=1e-6)
    assert gaussian_epsilon(1.0, 1e-5) == pytest.approx(4.3772, abs=1e-4)


@given(st.floats(0.05, 20), st.floats(1e-8, 0.2), st.integers(1, 500))
@settings(max_examples=40, deadline=None)
def test_epsilon_and_noise_are_inverse(epsilon: float, delta: float, count: int) -> None:
    sigma = noise_multiplier(epsilon, delta, count)
    assert epsilon_of([Spend(sigma, 1.0, count)], delta) == pytest.approx(epsilon, rel=1e-6)


def test_composition_over_rounds_and_jobs_is_by_squares() -> None:
    one = epsilon_of([Spend(2.0, 1.0, 4), Spend(4.0, 1.0, 16)], 1e-5)
    assert one == pytest.approx(epsilon_of([Spend(math.sqrt(0.5), 1.0, 1)], 1e-5), rel=1e-9)


def test_prv_agrees_with_the_closed_form_at_full_participation_and_sampling_helps() -> None:
    exact, prv = (epsilon_of([Spend(8.0, 1.0, 60)], 1e-5, a) for a in ("exact", "prv"))
    assert prv == pytest.approx(exact, rel=0.02)
    assert prv >= exact
    assert epsilon_of([Spend(8.0, 0.1, 60)], 1e-5, "prv") < exact / 3
    assert epsilon_of([Spend(8.0, 0.1, 60)], 1e-5) == epsilon_of([Spend(8.0, 0.1, 60)], 1e-5, "prv")


def test_no_noise_is_infinite_and_nothing_costs_nothing() -> None:
    assert epsilon_of([Spend(0.0)], 1e-5) == math.inf
    assert epsilon_of([], 1e-5) == 0
    assert epsilon_of([Spend(0.0, 1.0, 0)], 1e-5) == 0
    assert gaussian_epsilon(math.inf, 1e-5) == math.inf
    assert gaussian_epsilon(1e-9, 1e-5) == 0


@pytest.mark.parametrize(
    ("epsilon", "delta", "field"), [(0, 1e-5, "epsilon"), (-1, 1e-5, "epsilon"), (1, 0, "delta"), (1, 1, "delta")]
)
def test_impossible_budgets_are_named(epsilon: float, delta: float, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"privacy\.{field}"):
        noise_multiplier(epsilon, delta, 10)


def test_a_budget_that_needs_absurd_noise_says_so() -> None:
    with pytest.raises(ConfigError, match="needs noise of"):
        noise_multiplier(1e-4, 1e-9, 100_000)
