"""The discrete Gaussian: probabilities from its definition, and from another library."""

import math

import numpy as np
import pytest
from opendp import prelude as opendp
from scipy.stats import chi2, chi2_contingency, kstest

from consilium.core.errors import ConfigError
from consilium.privacy.discrete_gaussian import LARGEST, discrete_gaussian


def probabilities(deviation: int, most: int) -> np.ndarray:
    """Return the probability of every integer from -most to most, by the definition."""
    weights = np.exp(-(np.arange(-most, most + 1) ** 2) / (2 * deviation**2))
    return weights / weights.sum()


def counted(samples: np.ndarray, most: int) -> np.ndarray:
    return np.bincount(np.clip(samples, -most, most) + most, minlength=2 * most + 1)


def samples_of(deviation: int, count: int, seed: int = 0) -> np.ndarray:
    return discrete_gaussian(count, deviation, np.random.default_rng(seed).bytes)


@pytest.mark.parametrize(("deviation", "most"), [(1, 3), (2, 6), (7, 20)])
def test_every_integer_comes_as_often_as_its_probability(deviation: int, most: int) -> None:
    count = 100_000
    expected = probabilities(deviation, 12 * most)[11 * most : 13 * most + 1] * count
    expected[[0, -1]] += (count - expected.sum()) / 2
    found = counted(samples_of(deviation, count), most)
    statistic = ((found - expected) ** 2 / expected).sum()
    assert chi2.sf(statistic, 2 * most) > 1e-3


def test_a_chi_square_of_so_many_samples_tells_a_rounded_gaussian() -> None:
    """The test above can fail: rounding a continuous Gaussian is another distribution, of variance 1/12 more."""
    rounded = np.rint(np.random.default_rng(0).normal(0, 1, 100_000)).astype(int)
    expected = probabilities(1, 36)[33:40] * 100_000
    expected[[0, -1]] += (100_000 - expected.sum()) / 2
    assert chi2.sf(((counted(rounded, 3) - expected) ** 2 / expected).sum(), 6) < 1e-6


def test_it_is_what_opendp_draws() -> None:
    opendp.enable_features("contrib")
    space = opendp.vector_domain(opendp.atom_domain(T=int)), opendp.l2_distance(T=float)
    theirs = np.array(opendp.m.make_gaussian(*space, scale=3.0)([0] * 20_000))
    table = np.array([counted(theirs, 8), counted(samples_of(3, 20_000), 8)])
    assert chi2_contingency(table).pvalue > 1e-6


def test_at_the_scale_of_the_grid_it_is_gaussian_to_the_last_bit() -> None:
    """2^36 units of the grid are 1: the shape is the normal one, and the low bits are uniform."""
    drawn = samples_of(2**36 + 12345, 20_000)
    assert kstest(drawn / (2**36 + 12345), "norm").pvalue > 1e-3
    low = np.bincount(drawn % 64, minlength=64)
    assert chi2.sf(((low - 312.5) ** 2 / 312.5).sum(), 63) > 1e-3


def test_the_largest_deviation_stays_in_64_bits() -> None:
    assert np.abs(samples_of(LARGEST, 5000) / LARGEST).max() < 6
    assert 60 * LARGEST < 2**62


@pytest.mark.parametrize("deviation", [0, LARGEST + 1])
def test_a_deviation_that_cannot_be_is_refused(deviation: int) -> None:
    with pytest.raises(ConfigError, match="expected 1 to"):
        discrete_gaussian(1, deviation)


def test_the_systems_generator_never_repeats() -> None:
    assert (discrete_gaussian(20, 2**30) != discrete_gaussian(20, 2**30)).all()
    assert len(discrete_gaussian(0, 5)) == 0
    assert math.isclose(discrete_gaussian(20_000, 100).std(), 100, rel_tol=0.04)
