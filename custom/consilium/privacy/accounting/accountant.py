"""Budget to noise multiplier and back. A release is one Gaussian mechanism; its noise is noise_multiplier times sensitivity.

Three accountants. `exact`: composition of Gaussians in closed form (Balle and Wang 2018; Dong, Roth and Su 2022), for full
participation only: mu = sqrt(T) / sigma, delta(eps) = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu). `prv` (Gopi et al.
2021) and `rdp` (Mironov 2017) are Opacus' and also count Poisson-sampled releases; rdp is loose and here to reproduce papers.

Every answer is an upper bound, and comes in bounded time and memory. Where prv's grid would grow too large, rdp answers; and
where some releases are sampled, an answer is never over what they would cost had everybody taken part, in closed form.

Two computations of one cost differ in their last digits: other vector units, another order of sums. `planned` answers are
raised by twice each accountant's numerical error, so a plan is never under what its releases are charged later.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from consilium.config.privacy import SiteLevelDpConfig
from consilium.core.errors import ConfigError
from consilium.core.schema import SMALLEST_NOISE

Accountant = Literal["exact", "prv", "rdp"]
LARGEST = 1e4
"""Noise multipliers and epsilons beyond this mean nothing to anybody."""

SLACK = 1e-12
"""What a release's discrete noise is charged in epsilon for not being a continuous Gaussian, see distributed_noise.py."""
GRID = 2**18
"""Points of prv's grid at most: 30 MB, a quarter of a second a row. Its discretization error grows to keep it."""
MOST_ROWS = 32
"""Kinds of sampled releases that prv composes; rdp beyond."""
ROOT_ERROR = 1e-10
"""Absolute error in epsilon of the root of the closed form, the solver's xtol."""
RELATIVE_ERROR = 1e-12
"""Relative error of the closed form and of Opacus' series, which end at terms under exp(-30) = 1e-13."""
WHOLE_ORDERS = (*range(2, 64), 80, 96, 128, 192, 256, 384, 512, 768, 1024)
FRACTIONS = 4.0
"""Opacus' series at fractional orders takes about 8 sigma terms; from this noise on whole orders do."""


@dataclass(frozen=True)
class GaussianEvent:
    """`count` equal releases with one noise multiplier, each on a Poisson sample with rate `sample_rate` (1: everyone).

    `slack`: added epsilon of each release, because its noise is not a continuous Gaussian (distributed_noise.py); a log ratio.
    """

    noise_multiplier: float
    sample_rate: float = 1.0
    count: int = 1
    slack: float = 0.0


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return the exact delta of a Gaussian mechanism with sensitivity / deviation = mu."""
    from scipy.special import erfcx, ndtr  # here: most commands read what was accounted, and compute nothing

    if mu == 0:
        return 0.0
    near, far = mu / 2 - epsilon / mu, mu / 2 + epsilon / mu  # e^eps Phi(-far) = e^(-near^2 / 2) erfcx(far / sqrt 2) / 2
    scale = math.exp(-near * near / 2) / 2
    first = float(ndtr(near)) if near > 0 else scale * float(erfcx(-near / math.sqrt(2)))
    return first - scale * float(erfcx(far / math.sqrt(2)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the exact epsilon at `delta`, at most 2 ROOT_ERROR too large; infinity where mu is."""
    if math.isinf(mu):
        return math.inf
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    top = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1  # the RDP bound lies above
    from scipy.optimize import brentq  # here: it takes a second to import, which most processes never need

    root = float(brentq(lambda eps: gaussian_delta(mu, eps) - delta, 0.0, top, xtol=ROOT_ERROR))
    return root * (1 + 1e-14) + ROOT_ERROR


def epsilon_of(spends: Sequence[GaussianEvent], delta: float, accountant: Accountant = "exact", planned: bool = False) -> float:
    """Return an epsilon at `delta` that holds for all `spends` together; infinity if one has no noise.

    With `exact`, spends on samples are counted by prv, because there is no closed form for them. A `planned` answer is not
    under what `exact` says of the same spends, on another processor or in another order. Raises ConfigError for a delta outside
    (0, 1).
    """
    check_delta(delta)
    spends = [spend for spend in spends if spend.count and spend.sample_rate]
    if not spends:
        return 0.0
    if not all(spend.noise_multiplier > 0 for spend in spends):
        return math.inf
    slack = math.fsum(spend.count * spend.slack for spend in spends)
    delta *= math.exp(-slack / 2)
    found = _gaussian_cost(spends, delta, accountant, planned) + slack
    return max(found, _gaussian_cost(spends, delta, "exact", planned) + slack) if planned else found  # ledgers charge by exact


def _gaussian_cost(spends: Sequence[GaussianEvent], delta: float, accountant: Accountant, planned: bool) -> float:
    """Return the epsilon of continuous Gaussians."""
    everybody = _raised(gaussian_epsilon(_mu(spends), delta), planned)
    rows = _rows(spends)
    if accountant == "exact" and all(row.sample_rate == 1 for row in rows):
        return everybody
    rdp = accountant == "rdp"
    found = _raised(_rdp_epsilon(rows, delta, fractions=True), planned) if rdp else _prv_epsilon(tuple(rows), delta, planned)
    return min(found, everybody) if any(spend.sample_rate < 1 for spend in spends) else found


def _raised(epsilon: float, planned: bool) -> float:
    """Return a `planned` epsilon of the closed form or of rdp: two answers lie up to two errors apart."""
    return epsilon + 2 * ROOT_ERROR + 2 * RELATIVE_ERROR * epsilon if planned else epsilon


def _mu(spends: Sequence[GaussianEvent]) -> float:
    return math.sqrt(math.fsum(spend.count / spend.noise_multiplier**2 for spend in spends))


def _rows(spends: Sequence[GaussianEvent]) -> list[GaussianEvent]:
    """Return the same releases in few rows: all that everybody takes part in as one, equal sampled ones with their count.

    Sampling at a noise under SMALLEST_NOISE hides nothing and costs the accountants dear: it counts as everybody's.
    """
    counts: dict[tuple[float, float], int] = {}
    whole = []
    for spend in spends:
        if spend.sample_rate >= 1 or spend.noise_multiplier < SMALLEST_NOISE:
            whole.append(spend)
        else:
            key = (spend.noise_multiplier, spend.sample_rate)
            counts[key] = counts.get(key, 0) + spend.count
    sampled = [GaussianEvent(noise, rate, count) for (noise, rate), count in sorted(counts.items())]
    return sampled + ([GaussianEvent(1 / _mu(whole))] if whole else [])


def _rdp_epsilon(rows: Sequence[GaussianEvent], delta: float, fractions: bool = False) -> float:
    """Return RDP's upper bound; `fractions` adds Opacus' fractional orders, which take long where there are samples."""
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis.rdp import get_privacy_spent

    orders = WHOLE_ORDERS
    if fractions and all(row.sample_rate == 1 or row.noise_multiplier <= FRACTIONS for row in rows):
        orders = tuple(sorted({*RDPAccountant.DEFAULT_ALPHAS, *WHOLE_ORDERS}))
    losses = sum(row.count * _renyi(row.noise_multiplier, row.sample_rate, orders) for row in rows)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # it says when its best order is at the edge of its grid: its answer still holds
        return _not_nan(float(get_privacy_spent(orders=orders, rdp=losses, delta=delta)[0]))


@lru_cache(maxsize=1024)
def _renyi(noise: float, rate: float, orders: tuple[float, ...]) -> np.ndarray:
    """Return one release's Renyi divergence at each order, infinite where Opacus' series overflows."""
    return np.array([_renyi_at(noise, rate, order) for order in orders])


def _renyi_at(noise: float, rate: float, order: float) -> float:
    from opacus.accountants.analysis.rdp import compute_rdp

    try:
        return _not_nan(float(compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=float(order))))
    except (ValueError, OverflowError):
        return math.inf


@lru_cache(maxsize=1024)  # each release asks of the ledger and of its plan, and in one process every site does
def _prv_epsilon(rows: tuple[GaussianEvent, ...], delta: float, planned: bool) -> float:
    """Return prv's upper bound, by Gopi et al.'s Algorithm 1 with Opacus' parts; rdp's where it needs too large a grid."""
    count, failure = sum(row.count for row in rows), delta / 1000
    alone = max(_rdp_epsilon([GaussianEvent(row.noise_multiplier, row.sample_rate)], failure / (8 * count)) for row in rows)
    reach = max(_rdp_epsilon(rows, failure / 4), alone)  # Remark 5.6: outside of this lies less than the failure
    points = 2 * (reach + 4) * math.sqrt(count * math.log(12 / failure) / 2)  # at an error of 1
    error = max(0.01, points / GRID)
    if error >= 0.5 or len(rows) > MOST_ROWS:
        return _raised(_rdp_epsilon(rows, delta, fractions=True), planned)
    found = _raised(_rdp_epsilon(rows, delta), planned)
    while error < 0.5:
        found = min(found, _on_grid(rows, delta, failure, reach, error, planned))
        if found > 5 * error or points / (error / 10) > GRID:
            break
        error /= 10  # small epsilons: an error of 0.01 would drown them
    return found


def _on_grid(rows: Sequence[GaussianEvent], delta: float, failure: float, reach: float, error: float, planned: bool) -> float:
    """Return prv's upper bound with this discretization error, infinity where a loss does not fit the grid.

    Rounding moves the grid's delta by (points + count) u at most, u = eps / 2. Twice that is taken off delta, so the answer is
    an upper bound; four times for a `planned` answer, so that no other answer is over it.
    """
    from opacus.accountants.analysis import prv

    count = sum(row.count for row in rows)
    mesh = error / math.sqrt(count * math.log(12 / failure) / 2)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # overflows where a probability is 1, an integral that converges slowly
        try:
            half = 2 ** math.ceil(math.log2((max(reach, error) + 3) / mesh + 1))  # a power of 2: one plan of the FFT for all
            grid = prv.Domain.create_aligned(-(half - 1.5) * mesh, (half - 1.5) * mesh, mesh)
            losses = [prv.PoissonSubsampledGaussianPRV(row.sample_rate, row.noise_multiplier) for row in rows]
            parts = [prv.discretize(prv.TruncatedPrivacyRandomVariable(loss, grid.t_min, grid.t_max), grid) for loss in losses]
            whole = prv.compose_heterogeneous(parts, [row.count for row in rows])
            rounding = (grid.size + count) * np.finfo(float).eps / 2  # of sums over the grid, and of powers of a spectrum
            return _not_nan(float(whole.compute_epsilon(delta, failure + (4 if planned else 2) * rounding, error)[2]))
        except (RuntimeError, ValueError, IndexError, MemoryError, ZeroDivisionError):
            return math.inf  # a loss that this grid cannot hold


def _not_nan(value: float) -> float:
    return math.inf if math.isnan(value) else max(0.0, value)


@lru_cache(maxsize=64)
def noise_multiplier(
    epsilon: float,
    delta: float,
    count: int,
    sample_rate: float = 1.0,
    accountant: Accountant = "exact",
    slack: float = 0.0,
) -> float:
    """Return the smallest noise multiplier that keeps (epsilon, delta) over `count` equal releases; never too small.

    `slack`: of each release, see GaussianEvent. Exact to 2e-9 relative in closed form, else to 1e-3 by bisection. It has ten
    digits, so that other processors find the same. Raises ConfigError for a budget nothing can keep.
    """
    check_delta(delta)
    if not 0 < epsilon < LARGEST:
        raise ConfigError(f"privacy.epsilon: {epsilon}: expected a number above 0; 1 is strong, 8 is weak")

    def keeps(sigma: float) -> bool:
        return epsilon_of([GaussianEvent(sigma, sample_rate, count, slack)], delta, accountant, planned=True) <= epsilon

    low = math.sqrt(count) / _gaussian_mu(epsilon, delta)
    if accountant == "exact" and sample_rate == 1:
        return _first(keeps, low, 1e-10, epsilon)
    high = _first(keeps, low, 1.0, epsilon)
    low = _ten_digits(high / 2)
    while low > SMALLEST_NOISE and keeps(low):
        low, high = _ten_digits(low / 2), low  # sampling makes less noise do
    while high / low > 1.001:
        middle = _ten_digits(math.sqrt(low * high))
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return high


def _first(keeps: Callable[[float], bool], start: float, step: float, epsilon: float) -> float:
    """Return the first of start, start (1 + step), start (1 + 2 step), start (1 + 4 step) ... that keeps the budget.

    Each is tried with ten digits.
    """
    sigma = _ten_digits(start)
    while sigma <= LARGEST:
        if keeps(sigma):
            return sigma
        sigma, step = _ten_digits(start * (1 + step)), 2 * step
    raise ConfigError(
        f"privacy.epsilon: {epsilon}: needs noise of over {LARGEST:.0f} times the clip; ask for more, or fewer rounds"
    )


def _ten_digits(sigma: float) -> float:
    """Return a number rounded up to ten digits, at most 1.5e-9 larger."""
    return float(f"{sigma * (1 + 1e-9):.9e}")


def _gaussian_mu(epsilon: float, delta: float) -> float:
    from scipy.optimize import brentq

    return float(brentq(lambda mu: gaussian_delta(mu, epsilon) - delta, 1e-30, 1e4, xtol=1e-14, rtol=1e-12))


def check_delta(delta: float) -> None:
    """Raise ConfigError unless 0 < delta < 1."""
    if not 0 < delta < 1:
        raise ConfigError(f"privacy.delta: {delta}: expected a number between 0 and 1, such as 1e-5")


# calibration -----------------------------------------------------------------------------------------------------------
# The noise of published tables.
#
# `calibration: paper` (site level) reproduces the noise of M. Zhu et al., "DEeR", IEEE TMI 2025, whose code asks Opacus' RDP
# accountant for the sigma of so many *batches of images* at delta 1 / K, then clips each of a release's L tensors to C and lets
# each of K sites add sigma C / sqrt(K) (Eq. 5). What leaves are sites' updates, so that is one Gaussian mechanism a release of
# joint sensitivity C sqrt(L): of multiplier sigma / sqrt(K L) against everyone (trust local), sigma / sqrt(L) where the server
# adds the whole (central). That is what plan, ledger and budget count. Ours: tensors with a peer are clipped as effective
# updates, as everywhere here; the paper clips factors, for which there is no such bound.


def paper_sigma(privacy: SiteLevelDpConfig, batch: int, steps: int) -> float:
    """Return Opacus' sigma of so many `steps` at the sample rate batch / samples. Raises ConfigError where it has none."""
    assert privacy.epsilon is not None
    assert privacy.sites is not None
    assert privacy.samples is not None
    try:
        return _opacus_sigma(privacy.epsilon, 1 / privacy.sites, min(1.0, batch / privacy.samples), steps)
    except ValueError:
        what = f"{privacy.epsilon}: Opacus has no noise for it (calibration paper); ask for more, or fewer rounds"
        raise ConfigError(f"privacy.epsilon: {what}") from None


@lru_cache(maxsize=64)
def _opacus_sigma(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Return what Opacus finds, once a process: its search takes seconds, and server, guard and site each make a plan."""
    from opacus.accountants.utils import get_noise_multiplier

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its grid of orders
        found = get_noise_multiplier(
            target_epsilon=epsilon, target_delta=delta, sample_rate=rate, steps=steps, accountant="rdp"
        )
    return float(found)


def printed(privacy: SiteLevelDpConfig) -> str:
    """Return the epsilon that the paper would print."""
    assert privacy.epsilon is not None
    assert privacy.sites is not None
    return f"epsilon {privacy.epsilon:g} at delta {1 / privacy.sites:.3g}"
