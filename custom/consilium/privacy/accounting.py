"""Budget to noise multiplier and back. A release is one Gaussian mechanism; its noise is noise_multiplier times sensitivity.

Three accountants. `exact`: composition of Gaussians in closed form (Balle and Wang 2018; Dong, Roth and Su 2022), for full
participation only: mu = sqrt(T) / sigma, delta(eps) = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu). `prv` (Gopi et al.
2021) and `rdp` (Mironov 2017) are Opacus' and also count Poisson-sampled releases; rdp is loose and here to reproduce papers.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from opacus.accountants import PRVAccountant, RDPAccountant
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

from consilium.errors import ConfigError

Accountant = Literal["exact", "prv", "rdp"]
LARGEST = 1e4
"""Noise multipliers and epsilons beyond this mean nothing to anybody."""

SMALLEST = 0.05
"""Searches for a sampled noise multiplier stop here; accountants' grids blow up below."""


@dataclass(frozen=True)
class Spend:
    """`count` equal releases with one noise multiplier, each on a Poisson sample with rate `sample_rate` (1: everyone)."""

    noise_multiplier: float
    sample_rate: float = 1.0
    count: int = 1


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return the exact delta of a Gaussian mechanism with sensitivity / deviation = mu."""
    if mu == 0:
        return 0.0
    tail = math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))
    return float(ndtr(mu / 2 - epsilon / mu) - tail)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the exact epsilon at `delta`; infinity where mu is."""
    if math.isinf(mu):
        return math.inf
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    top = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1  # the RDP bound lies above
    return float(brentq(lambda eps: gaussian_delta(mu, eps) - delta, 0.0, top, xtol=1e-10))


def epsilon_of(spends: Sequence[Spend], delta: float, accountant: Accountant = "exact") -> float:
    """Return the epsilon at `delta` of all `spends` together; infinity if one has no noise.

    With `exact`, spends on samples are counted by prv, because there is no closed form for them. Raises ConfigError for a
    delta outside (0, 1).
    """
    check_delta(delta)
    spends = [spend for spend in spends if spend.count]
    if any(spend.noise_multiplier <= 0 for spend in spends):
        return math.inf
    if accountant == "exact" and all(spend.sample_rate == 1 for spend in spends):
        return gaussian_epsilon(math.sqrt(sum(s.count / s.noise_multiplier**2 for s in spends)), delta)
    return _opacus_epsilon(spends, delta, accountant) if spends else 0.0


def _opacus_epsilon(spends: Sequence[Spend], delta: float, accountant: Accountant) -> float:
    counter = RDPAccountant() if accountant == "rdp" else PRVAccountant()
    counter.history = [(s.noise_multiplier, s.sample_rate, s.count) for s in spends]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rdp says when its best order is at the edge of its grid: its answer still holds
        try:
            return float(counter.get_epsilon(delta=delta))
        except (RuntimeError, ValueError, MemoryError):
            return math.inf  # a loss too large for the accountant's grid: say the worst


@lru_cache(maxsize=64)
def noise_multiplier(
    epsilon: float, delta: float, count: int, sample_rate: float = 1.0, accountant: Accountant = "exact"
) -> float:
    """Return the smallest noise multiplier that keeps (epsilon, delta) over `count` equal releases; never too small.

    Exact to 1e-10 in closed form, else to 1e-3 relative by bisection. Raises ConfigError for a budget nothing can keep.
    """
    check_delta(delta)
    if not 0 < epsilon < LARGEST:
        raise ConfigError(f"privacy.epsilon: {epsilon}: expected a number above 0; 1 is strong, 8 is weak")
    low = math.sqrt(count) / _gaussian_mu(epsilon, delta)
    if low > LARGEST:
        raise ConfigError(f"privacy.epsilon: {epsilon}: needs noise of {low:.0f} times the clip; ask for more, or fewer rounds")
    if accountant == "exact" and sample_rate == 1:
        return low * (1 + 1e-10)
    high = 2 * low  # rdp asks up to 1.5 times the exact answer
    while low > SMALLEST and epsilon_of([Spend(low, sample_rate, count)], delta, accountant) <= epsilon:
        low, high = low / 2, low  # sampling makes less noise do
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        enough = epsilon_of([Spend(middle, sample_rate, count)], delta, accountant) <= epsilon
        low, high = (low, middle) if enough else (middle, high)
    return high


def _gaussian_mu(epsilon: float, delta: float) -> float:
    return float(brentq(lambda mu: gaussian_delta(mu, epsilon) - delta, 1e-9, 1e4, xtol=1e-14, rtol=1e-12))


def check_delta(delta: float) -> None:
    """Raise ConfigError unless 0 < delta < 1."""
    if not 0 < delta < 1:
        raise ConfigError(f"privacy.delta: {delta}: expected a number between 0 and 1, such as 1e-5")
