"""Shares of noise on a grid: their size, the clip after rounding, and that what is accounted bounds what is released."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.special import ndtr

from consilium.core.errors import ConfigError, RefusedError
from consilium.privacy.accounting import SLACK, gaussian_delta
from consilium.privacy.discrete_gaussian import add_share, clip_to_grid, honest_shares, share_deviation, slack
from consilium.privacy.secagg.arithmetic import UNIT

EPSILONS = np.array([0.0, 0.1, 0.5, 1.0, 2.0, 4.0])


def pmf(deviation: int, shares: int) -> np.ndarray:
    """Return the exact distribution of the sum of so many discrete Gaussians."""
    reach = 14 * deviation
    weights = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2.0 * deviation**2))
    one = found = weights / weights.sum()
    for _ in range(shares - 1):
        found = np.convolve(found, one)
    return found


def shifted(distribution: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a distribution and the same one moved by `step`, on one grid."""
    return np.pad(distribution, (0, step)), np.pad(distribution, (step, 0))


def divergences(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return sum max(0, p - e^eps q) at every epsilon, from the definition."""
    return np.array([np.maximum(p - math.exp(epsilon) * q, 0).sum() for epsilon in EPSILONS])


def sampled_deltas(mu: float, rate: float, epsilons: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return delta of (1 - q) N(0, 1) + q N(mu, 1) against N(0, 1), and the other way round, in closed form."""
    near, far = [], []
    for epsilon in epsilons:
        inside = (math.exp(epsilon) - 1 + rate) / rate
        cut = math.log(inside) / mu + mu / 2  # the ratio is over e^eps to the right of it
        near.append((1 - rate - math.exp(epsilon)) * ndtr(-cut) + rate * ndtr(mu - cut))
        left = (math.exp(-epsilon) - 1 + rate) / rate
        if left <= 0:
            far.append(0.0)
            continue
        cut = math.log(left) / mu + mu / 2  # the ratio is under e^-eps to the left of it
        far.append(ndtr(cut) - math.exp(epsilon) * ((1 - rate) * ndtr(cut) + rate * ndtr(cut - mu)))
    return np.array(near), np.array(far)


@pytest.mark.parametrize("deviation", range(2, 21))
def test_a_sum_of_shares_is_never_worse_than_the_gaussian_that_is_accounted(deviation: int) -> None:
    """By brute force, with one number, whole and on Poisson samples."""
    for shares in range(1 if deviation > 2 else 2, 6):
        check_against_the_bound(deviation, shares)


def check_against_the_bound(deviation: int, shares: int) -> None:
    spread, cost = math.sqrt(shares * deviation**2 - 4), slack(deviation, shares, 1)
    for step in {1, deviation, 3 * deviation}:
        still, moved = shifted(pmf(deviation, shares), step)
        bound = [math.exp(cost / 2) * gaussian_delta(step / spread, max(0.0, epsilon - cost)) for epsilon in EPSILONS]
        assert (divergences(moved, still) <= np.array(bound) + 1e-13).all()
        assert (divergences(still, moved) <= np.array(bound) + 1e-13).all()
        for rate in (0.1, 0.5):
            mixed = (1 - rate) * still + rate * moved
            near, far = sampled_deltas(step / spread, rate, np.maximum(EPSILONS - cost, 0))
            assert (divergences(mixed, still) <= math.exp(cost / 2) * near + 1e-13).all()
            assert (divergences(still, mixed) <= math.exp(cost / 2) * far + 1e-13).all()


@pytest.mark.parametrize(("deviation", "shares"), [(2, 2), (4, 3)])
def test_nor_with_two_numbers(deviation: int, shares: int) -> None:
    spread, cost = math.sqrt(shares * deviation**2 - 4), slack(deviation, shares, 2)
    for across, along in ((deviation, deviation), (1, 2 * deviation)):
        (a, moved_a), (b, moved_b) = (shifted(pmf(deviation, shares), step) for step in (across, along))
        still, moved = np.outer(a, b).ravel(), np.outer(moved_a, moved_b).ravel()
        mu = math.hypot(across, along) / spread
        bound = [math.exp(cost / 2) * gaussian_delta(mu, max(0.0, epsilon - cost)) for epsilon in EPSILONS]
        assert (divergences(moved, still) <= np.array(bound) + 1e-13).all()
        near, far = sampled_deltas(mu, 0.2, np.maximum(EPSILONS - cost, 0))
        mixed = 0.8 * still + 0.2 * moved
        assert (divergences(mixed, still) <= math.exp(cost / 2) * near + 1e-13).all()
        assert (divergences(still, mixed) <= math.exp(cost / 2) * far + 1e-13).all()


def test_the_bound_is_tight_and_one_of_too_little_variance_is_violated() -> None:
    """The tests above can fail: a tenth less noise accounted, and the release is worse than its bound."""
    still, moved = shifted(pmf(20, 2), 20)
    found, honest = divergences(moved, still), [gaussian_delta(20 / math.sqrt(800 - 4), e) for e in EPSILONS]
    assert (found[:4] / honest[:4] > 0.98).all()
    assert (found > [gaussian_delta(20 / math.sqrt(1.1 * 800), e) for e in EPSILONS]).all()


def test_the_least_distance_is_the_one_of_the_derivation() -> None:
    assert slack(4, 1, 1) / 2 == pytest.approx(4 * math.exp(-8 * math.pi**2), rel=1e-9)  # lambda(4), about 2e-34
    assert slack(4, 1000, 10**10) < SLACK


def test_shares_together_keep_the_whole_noise_and_none_is_larger_than_it_must_be() -> None:
    for noise, sensitivity, shares in ((1.0, 0.3, 7), (13.9, 2.0, 11), (0.5, 1e-3, 2)):
        found, wanted = share_deviation(noise, sensitivity, shares), (Fraction(noise) * Fraction(sensitivity) * 2**36) ** 2
        assert shares * found**2 - 4 >= wanted
        assert shares * (found - 1) ** 2 - 4 < wanted
    assert share_deviation(0.0, 1.0, 3) == 0


def test_noise_that_64_bits_could_not_hold_is_refused() -> None:
    """A deviation of 2^20 is 2^56 units, from which 64 deviations reach 2^62."""
    assert share_deviation(1.0, 2.0**20 - 1, 1) < 2**56
    with pytest.raises(ConfigError, match=r"privacy\.clip: noise of 1 times 2\.1e\+06 is over the 1\.04858e\+06"):
        share_deviation(1.0, 2.1e6, 1)


@pytest.mark.parametrize(("threshold", "least", "colluders", "shares"), [(9, 3, 1, 8), (3, 12, 1, 11), (3, 1, 1, 2)])
def test_the_shares_that_count_are_those_of_the_smallest_sum_without_the_colluders(
    threshold: int, least: int, colluders: int, shares: int
) -> None:
    assert honest_shares(threshold, least, colluders) == shares


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_what_is_rounded_stays_within_the_clip_exactly(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for clip in (1e-5, 0.3, 1000.0):
        update = {"a": scale * torch.randn(7, 5, generator=generator), "b": scale * torch.randn(100, generator=generator)}
        found = clip_to_grid(update, clip)
        square = sum(int(v) ** 2 for t in found.values() for v in t.flatten())
        assert square <= (Fraction(clip) / Fraction(UNIT)) ** 2
        norm = math.sqrt(sum(float(t.double().square().sum()) for t in update.values()))
        expected = min(1.0, clip / norm) * update["a"].double() / UNIT
        assert torch.allclose(found["a"].double(), expected, rtol=1e-4 if clip < 1e-3 else 1e-8, atol=0.51)


def test_rounding_alone_could_pass_the_clip() -> None:
    """Half a unit in each of 10,000 numbers is 50 units: what the clip leaves room for."""
    clip = 10_000 * UNIT
    found = clip_to_grid({"a": torch.full((10_000,), 100.5 * UNIT)}, clip)["a"]
    assert int((found**2).sum()) <= 10_000**2
    assert int((torch.full((10_000,), 101) ** 2).sum()) > 10_000**2


@pytest.mark.parametrize(
    ("update", "clip", "why"), [([math.nan], 1.0, "NaN or Inf"), ([1.0] * 16, UNIT, "under the grid's step")]
)
def test_what_cannot_be_put_on_the_grid_is_refused(update: list[float], clip: float, why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        clip_to_grid({"a": torch.tensor(update)}, clip)


def test_the_sum_of_all_shares_has_the_planned_noise() -> None:
    deviation, source = share_deviation(2.0, 0.5, 6), np.random.default_rng(1).bytes
    zero = {"a": torch.zeros(40, 25, dtype=torch.int64), "b": torch.zeros(2000, dtype=torch.int64)}
    shares = [add_share(zero, deviation, source) for _ in range(6)]
    whole = torch.cat([sum(share[name] for share in shares).flatten() for name in zero]).double() * UNIT
    assert float(whole.std()) == pytest.approx(1.0, rel=0.06)
    assert all(share["a"].dtype is torch.int64 and share["a"].shape == (40, 25) for share in shares)
    assert add_share(zero, 0)["a"].equal(zero["a"])


def test_noise_under_the_grid_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"privacy\.clip: .*1 times 1e-11"):
        share_deviation(1.0, 1e-11, 2)
