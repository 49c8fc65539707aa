"""Computes epsilon from noise multipliers, and the noise multiplier that keeps a budget.

A release is one Gaussian mechanism. The deviation of its noise is noise_multiplier times sensitivity.

There are three accountants. `exact` is the composition of Gaussians in closed form (Balle and Wang 2018; Dong, Roth and Su
2022), for full participation only: mu = sqrt(T) / sigma, delta(eps) = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu). `prv`
(Gopi et al. 2021) and `rdp` (Mironov 2017) come from Opacus and also count Poisson-sampled releases. rdp is loose; it is here
to reproduce papers.

Every answer is an upper bound and takes bounded time and memory. If prv's grid would become too large, rdp is used. If some
releases are sampled, the answer is at most the closed-form cost with everyone taking part.

Two computations of the same cost may differ in their last digits, because of the processor or the order of sums. `planned`
answers are raised by twice the accountant's numerical error. So a planned cost is never below what the ledger charges later.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal, Self, get_args

import numpy as np

from consilium.config.privacy import BudgetConfig, SiteLevelDpConfig, Unit
from consilium.core.errors import ConfigError
from consilium.core.schema import SMALLEST_NOISE

Accountant = Literal["exact", "prv", "rdp"]
LARGEST = 1e4
"""The largest noise multiplier and epsilon that are accepted; larger ones have no practical meaning."""

SLACK = 1e-12
"""Epsilon charged per release because its noise is discrete, not a continuous Gaussian; see discrete_gaussian.py."""
GRID = 2**18
"""The largest number of points of prv's grid: 30 MB, a quarter of a second per row. A larger problem gets a coarser grid."""
MOST_ROWS = 32
"""The largest number of different kinds of releases that prv composes; beyond it rdp is used."""
LARGEST_MU, LEAST_NOISE = 1e12, 1e-100
"""Beyond this mu the RDP bound is used: it is then at most 1e-10 too large, and the closed form has no digits left.

Under this noise multiplier epsilon is infinite. Only a file from a stranger has such numbers.
"""
ROOT_ERROR = 1e-10
"""Absolute error in epsilon when the closed form is solved (the solver's xtol)."""
RELATIVE_ERROR = 1e-12
"""Relative error of the closed form and of Opacus' series, which stop at terms under exp(-30) = 1e-13."""
WHOLE_ORDERS = (*range(2, 64), 80, 96, 128, 192, 256, 384, 512, 768, 1024)
FRACTIONS = 4.0
"""The largest noise multiplier for which fractional orders are used: there Opacus' series takes about 8 sigma terms."""


@dataclass(frozen=True)
class GaussianEvent:
    """`count` equal releases with one noise multiplier, each on a Poisson sample with rate `sample_rate` (1: everyone).

    `slack`: epsilon added per release because its noise is not a continuous Gaussian (discrete_gaussian.py).
    """

    noise_multiplier: float
    sample_rate: float = 1.0
    count: int = 1
    slack: float = 0.0


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return the exact delta at `epsilon` of a Gaussian mechanism with sensitivity / deviation = mu."""
    from scipy.special import erfcx, ndtr  # imported here: most commands compute no epsilon

    if mu == 0:
        return 0.0
    near, far = mu / 2 - epsilon / mu, mu / 2 + epsilon / mu  # e^eps Phi(-far) = e^(-near^2 / 2) erfcx(far / sqrt 2) / 2
    scale = math.exp(-near * near / 2) / 2
    first = float(ndtr(near)) if near > 0 else scale * float(erfcx(-near / math.sqrt(2)))
    return first - scale * float(erfcx(far / math.sqrt(2)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the exact epsilon of a Gaussian mechanism at `delta`, at most 2 ROOT_ERROR too large; infinity if mu is."""
    if math.isinf(mu):
        return math.inf
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    top = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1  # the RDP bound lies above
    if mu > LARGEST_MU:
        return top
    from scipy.optimize import brentq  # imported here because it takes a second and most processes never need it

    root = float(brentq(lambda eps: gaussian_delta(mu, eps) - delta, 0.0, top, xtol=ROOT_ERROR))
    return root * (1 + 1e-14) + ROOT_ERROR


def epsilon_of(spends: Sequence[GaussianEvent], delta: float, accountant: Accountant = "exact", planned: bool = False) -> float:
    """Return an epsilon at `delta` that holds for all `spends` together; infinity if one of them has no noise.

    With `exact`, sampled spends are counted by prv, because they have no closed form. A `planned` answer is never below the
    `exact` answer for the same spends, on any processor and in any order. Raises ConfigError for a delta outside (0, 1).
    """
    check_delta(delta)
    spends = [spend for spend in spends if spend.count and spend.sample_rate]
    if not spends:
        return 0.0
    if not all(spend.noise_multiplier >= LEAST_NOISE for spend in spends):
        return math.inf
    slack = math.fsum(spend.count * spend.slack for spend in spends)
    delta *= math.exp(-slack / 2)
    if delta == 0:  # over 1e15 releases
        return math.inf
    found = _continuous_epsilon(spends, delta, accountant, planned) + slack
    return max(found, _continuous_epsilon(spends, delta, "exact", planned) + slack) if planned else found  # ledgers use exact


def _continuous_epsilon(spends: Sequence[GaussianEvent], delta: float, accountant: Accountant, planned: bool) -> float:
    """Return the epsilon of `spends` as if their noise were continuous Gaussians, without slack."""
    everybody = _add_numerical_error(gaussian_epsilon(_joint_mu(spends), delta), planned)
    # Few rows for the same releases, because accountants are slow: one for all releases without sampling, one per kind of
    # sampled release. One with noise under SMALLEST_NOISE counts as not sampled: sampling hides nothing there.
    whole, sampled = list[GaussianEvent](), list[GaussianEvent]()
    for spend in spends:
        (whole if spend.sample_rate >= 1 or spend.noise_multiplier < SMALLEST_NOISE else sampled).append(spend)
    merged = merge([replace(spend, slack=0.0) for spend in sampled])
    rows = sorted(merged, key=lambda row: (row.noise_multiplier, row.sample_rate))
    rows += [GaussianEvent(1 / _joint_mu(whole))] if whole else []
    if accountant == "exact" and all(row.sample_rate == 1 for row in rows):
        return everybody
    rdp = accountant == "rdp"
    found = (
        _add_numerical_error(_rdp_epsilon(rows, delta, fractions=True), planned)
        if rdp
        else _prv_epsilon(tuple(rows), delta, planned)
    )
    return min(found, everybody) if any(spend.sample_rate < 1 for spend in spends) else found


def _add_numerical_error(epsilon: float, planned: bool) -> float:
    """Return `epsilon`, raised by twice the numerical error of the closed form and of rdp if `planned`."""
    return epsilon + 2 * ROOT_ERROR + 2 * RELATIVE_ERROR * epsilon if planned else epsilon


def _joint_mu(spends: Sequence[GaussianEvent]) -> float:
    return math.sqrt(math.fsum(spend.count / spend.noise_multiplier**2 for spend in spends))


def _rdp_epsilon(rows: Sequence[GaussianEvent], delta: float, fractions: bool = False) -> float:
    """Return RDP's upper bound. `fractions`: also use Opacus' fractional orders, which are slow for sampled releases."""
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis.rdp import get_privacy_spent

    orders = WHOLE_ORDERS
    if fractions and all(row.sample_rate == 1 or row.noise_multiplier <= FRACTIONS for row in rows):
        orders = tuple(sorted({*RDPAccountant.DEFAULT_ALPHAS, *WHOLE_ORDERS}))
    losses = sum(row.count * _renyi_divergences(row.noise_multiplier, row.sample_rate, orders) for row in rows)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # it warns if the best order is the last one; the bound still holds
        return _nan_to_infinity(float(get_privacy_spent(orders=orders, rdp=losses, delta=delta)[0]))


@lru_cache(maxsize=1024)
def _renyi_divergences(noise: float, rate: float, orders: tuple[float, ...]) -> np.ndarray:
    """Return the Renyi divergence of one release at each order; infinite if Opacus' series overflows."""
    from opacus.accountants.analysis.rdp import compute_rdp

    found = []
    for order in orders:
        try:
            found.append(_nan_to_infinity(float(compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=float(order)))))
        except (ValueError, OverflowError):
            found.append(math.inf)
    return np.array(found)


@lru_cache(maxsize=1024)  # asked for the ledger and the plan at every release, by every site of a process
def _prv_epsilon(rows: tuple[GaussianEvent, ...], delta: float, planned: bool) -> float:
    """Return prv's upper bound (Gopi et al., Algorithm 1, with Opacus' parts), or rdp's if the grid would be too large."""
    count, failure = sum(row.count for row in rows), delta / 1000
    alone = max(_rdp_epsilon([GaussianEvent(row.noise_multiplier, row.sample_rate)], failure / (8 * count)) for row in rows)
    reach = max(_rdp_epsilon(rows, failure / 4), alone)  # Remark 5.6: losses beyond it have less than `failure` probability
    points = 2 * (reach + 4) * math.sqrt(count * math.log(12 / failure) / 2)  # for an error of 1
    error = max(0.01, points / GRID)
    if error >= 0.5 or len(rows) > MOST_ROWS:
        return _add_numerical_error(_rdp_epsilon(rows, delta, fractions=True), planned)
    found = _add_numerical_error(_rdp_epsilon(rows, delta), planned)
    while error < 0.5:
        found = min(found, _prv_epsilon_on_grid(rows, delta, failure, reach, error, planned))
        if found > 5 * error or points / (error / 10) > GRID:
            break
        error /= 10  # for a small epsilon an error of 0.01 is too coarse
    return found


def _prv_epsilon_on_grid(
    rows: Sequence[GaussianEvent], delta: float, failure: float, reach: float, error: float, planned: bool
) -> float:
    """Return prv's upper bound with this discretization error; infinity if a privacy loss does not fit the grid.

    Floating-point rounding changes the grid's delta by at most (points + count) u, u = machine epsilon / 2. Twice that is
    subtracted from delta, so the answer is an upper bound. A `planned` answer subtracts four times that, so it is at least
    every other answer.
    """
    from opacus.accountants.analysis import prv

    count = sum(row.count for row in rows)
    mesh = error / math.sqrt(count * math.log(12 / failure) / 2)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # about overflow at a probability of 1, and slowly converging integrals
        try:
            half = 2 ** math.ceil(math.log2((max(reach, error) + 3) / mesh + 1))  # a power of 2 reuses one FFT plan
            grid = prv.Domain.create_aligned(-(half - 1.5) * mesh, (half - 1.5) * mesh, mesh)
            losses = [prv.PoissonSubsampledGaussianPRV(row.sample_rate, row.noise_multiplier) for row in rows]
            parts = [prv.discretize(prv.TruncatedPrivacyRandomVariable(loss, grid.t_min, grid.t_max), grid) for loss in losses]
            whole = prv.compose_heterogeneous(parts, [row.count for row in rows])
            rounding = (grid.size + count) * np.finfo(float).eps / 2  # sums over the grid, powers of a spectrum
            return _nan_to_infinity(float(whole.compute_epsilon(delta, failure + (4 if planned else 2) * rounding, error)[2]))
        except (RuntimeError, ValueError, IndexError, MemoryError, ZeroDivisionError):
            return math.inf  # a loss outside this grid


def _nan_to_infinity(value: float) -> float:
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

    `slack`: per release, see GaussianEvent. The relative error is 2e-9 in closed form, and 1e-3 by bisection otherwise. The
    result is rounded to ten digits, so that every processor finds the same. Raises ConfigError for a budget that no noise can
    keep.
    """
    from scipy.optimize import brentq

    check_delta(delta)
    if not 0 < epsilon <= LARGEST:
        raise ConfigError(f"privacy.epsilon: {epsilon}: expected over 0 and at most {LARGEST:.0f}; 1 is strong, 8 is weak")

    def keeps(sigma: float) -> bool:
        return epsilon_of([GaussianEvent(sigma, sample_rate, count, slack)], delta, accountant, planned=True) <= epsilon

    mu = float(brentq(lambda mu: gaussian_delta(mu, epsilon) - delta, 1e-30, 1e4, xtol=1e-14, rtol=1e-12, maxiter=1000))
    low = math.sqrt(count) / mu
    if accountant == "exact" and sample_rate == 1:
        return _first_that_keeps(keeps, low, 1e-10, epsilon)
    high = _first_that_keeps(keeps, low, 1.0, epsilon)
    low = _round_up(high / 2)
    while low > SMALLEST_NOISE and keeps(low):
        low, high = _round_up(low / 2), low  # with sampling, less noise is enough
    while high / low > 1.001:
        middle = _round_up(math.sqrt(low * high))
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return high


def _first_that_keeps(keeps: Callable[[float], bool], start: float, step: float, epsilon: float) -> float:
    """Return the first of start, start (1 + step), start (1 + 2 step), start (1 + 4 step) ... that keeps the budget.

    Each is rounded to ten digits before it is tried.
    """
    sigma = _round_up(start)
    while sigma <= LARGEST:
        if keeps(sigma):
            return sigma
        sigma, step = _round_up(start * (1 + step)), 2 * step
    raise ConfigError(
        f"privacy.epsilon: {epsilon}: needs noise of over {LARGEST:.0f} times the clip; ask for more, or fewer rounds"
    )


def _round_up(sigma: float) -> float:
    """Return a number rounded up to ten digits, at most 1.5e-9 larger."""
    return float(f"{sigma * (1 + 1e-9):.9e}")


def check_delta(delta: float) -> None:
    """Raise ConfigError unless 1e-300 <= delta < 1. Smaller numbers have too few digits to compute with."""
    if not 1e-300 <= delta < 1:
        raise ConfigError(f"privacy.delta: {delta}: expected a number under 1 and at least 1e-300, such as 1e-5")


# calibration -----------------------------------------------------------------------------------------------------------
# The noise of published tables.
#
# `calibration: paper` (site level) reproduces the noise of M. Zhu et al., "DEeR", IEEE TMI 2025. Their code asks Opacus' RDP
# accountant for the sigma of a number of *batches of images* at delta 1 / K. It then clips each of the L tensors of a release
# to C, and each of K sites adds noise of sigma C / sqrt(K) (Eq. 5). But what leaves a site is its update. So a release is one
# Gaussian mechanism with joint sensitivity C sqrt(L). Its noise multiplier is sigma / sqrt(K L) against everyone (trust local),
# and sigma / sqrt(L) if the server adds the whole noise (trust central). Plan, ledger and budget count that. One difference is
# ours: tensors with a peer are clipped as effective updates, as everywhere in this package. The paper clips the factors, for
# which this sensitivity does not hold.


@lru_cache(maxsize=64)
def paper_sigma(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Return Opacus' sigma for `steps` steps at this sample rate. Raises ConfigError if Opacus finds none.

    It is cached: the search takes seconds, and server, guard and site each make a plan.
    """
    from opacus.accountants.utils import get_noise_multiplier

    options = {"target_epsilon": epsilon, "target_delta": delta, "sample_rate": rate, "steps": steps, "accountant": "rdp"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its grid of orders
            return float(get_noise_multiplier(**options))
    except ValueError:
        raise ConfigError(
            f"privacy.epsilon: {epsilon}: Opacus has no noise for it (calibration paper); ask for more, or fewer rounds"
        ) from None


def printed_epsilon(privacy: SiteLevelDpConfig) -> str:
    """Return the epsilon that the paper would print."""
    assert privacy.epsilon is not None
    assert privacy.sites is not None
    return f"epsilon {privacy.epsilon:g} at delta {1 / privacy.sites:.3g}"


# composition -----------------------------------------------------------------------------------------------------------
# The joint cost of all releases on one data set, over all jobs and units, for one record, one patient and the whole site.

UNITS: tuple[Unit, ...] = get_args(Unit)
DISCRETE = "discrete gaussian"
"""The mechanism of a release: clipped integers plus exact discrete Gaussians from randomness.py (discrete_gaussian.py)."""
VOID = (
    "void: made by a version that drew the noise of DP-SGD from a seed of 32 bits (on a GPU 63). Whoever has such a release "
    "can find the seed and take the noise off"
)
"""The text that describes void rows, see `Entry.is_void`."""


_TYPES: dict[Any, tuple[type, ...]] = {int: (int,), float: (int, float), bool: (bool,)}
"""The types that a field of a row accepts; a field of any other type holds text."""


@dataclass(frozen=True)
class Entry:
    """One row of the ledger. `private` is False if the noise came from a seed, so that it could be subtracted again.

    `mechanism` is DISCRETE, or "" in rows of versions that did not name one. Those versions drew the noise of DP-SGD at the
    sites from a PyTorch generator, which on a CPU keeps 32 bits of its seed, see `is_void`.

    `digest` is the SHA-256 of the released tensors. With DP-SGD the training itself is the cost, so it is charged before the
    release exists. Such a release has two rows: one with its `count` and no digest, and later one with count 0 and the digest.
    """

    dataset: str
    unit: Unit
    adjacency: str
    trust: str
    job: str
    run: str
    round: int
    phase: int
    noise_multiplier: float
    sample_rate: float
    count: int
    clip: float
    private: bool = True
    digest: str = ""
    mechanism: str = ""

    @property
    def is_void(self) -> bool:
        """Whether this row promises nothing: its record- or patient-level noise can be subtracted by anyone with the release.

        With trust distributed, and at site level, the noise always came from the operating system's generator.
        """
        return self.unit != "site" and self.trust != "distributed" and not self.mechanism

    @property
    def terms(self) -> Self:
        """The row without its digest and its mechanism."""
        return replace(self, digest="", mechanism="")

    @classmethod
    def of(cls, raw: Any) -> Self:
        """Return the row that `asdict` converted to `raw`. Raises TypeError for other keys, or values of another type."""
        found = cls(**raw)
        for field in fields(cls):
            if type(getattr(found, field.name)) not in _TYPES.get(field.type, (str,)):
                raise TypeError(f"{field.name} is of another type")
        return found

    @property
    def key(self) -> tuple[str, str, str, int, int, bool]:
        """The identity of a row's release: two rows with the same key are the same release."""
        return self.dataset, self.unit, self.run, self.round, self.phase, self.count > 0

    def pays_for(self, release: Self) -> bool:
        """Tell whether this row's charge covers `release`: same terms, and no less noise than was charged.

        The noise may be up to a millionth larger, for example by another version's rounding. It then costs less than was
        charged.
        """
        same = replace(release.terms, noise_multiplier=self.noise_multiplier) == self.terms
        return same and self.noise_multiplier <= release.noise_multiplier <= self.noise_multiplier * (1 + 1e-6)

    @property
    def name(self) -> str:
        """The release in words."""
        return f"round {self.round} phase {self.phase} of job {self.job!r} (run {self.run})"


Budgets = Mapping[Unit, BudgetConfig]
"""The budgets of a site, by unit."""


def cost(entry: Entry, unit: str) -> GaussianEvent:
    """Return the cost of one row for one `unit` of its data set. This rule lets rows of different units compose.

    - The row's own unit: as planned.
    - A finer unit (a record or patient in a site-level row, a record in a patient-level row): two data sets that differ in the
      finer unit may have any two contributions within the clip C, up to 2 C apart. Noise sized for `replace` (2 C) covers that.
      Noise sized for `zero-out` (C) counts with half its multiplier. Sampling does not lower the cost of the finer unit.
    - A coarser unit (a site or patient in a record-level row): there is no bound, so the row counts as without noise.
    """
    if entry.unit == unit:
        return GaussianEvent(entry.noise_multiplier, entry.sample_rate, entry.count, SLACK)
    if UNITS.index(entry.unit) < UNITS.index(unit):
        return GaussianEvent(0.0, 1.0, entry.count)
    return GaussianEvent(noise_multiplier_for_part(entry.noise_multiplier, entry.adjacency), 1.0, entry.count, SLACK)


def noise_multiplier_for_part(noise_multiplier: float, adjacency: str) -> float:
    """Return the noise multiplier that holds for a part of the unit, such as a record of a site; see `cost`."""
    return noise_multiplier / 2 if adjacency == "zero-out" else noise_multiplier


def epsilon_for(unit: str, rows: Iterable[Entry], delta: float) -> float:
    """Return the epsilon of all `rows` together for one `unit` of their data set: the smallest bound that can be proved."""
    counted = [row for row in rows if row.count]
    whole = epsilon_of(merge([cost(row, unit) for row in counted]), delta)
    steps = [row for row in counted if row.unit == "patient"]
    if unit != "record" or not steps:
        return whole
    # A record's epsilon by group privacy in two steps: remove its patient, then add the patient without the record. The first
    # step costs what the patient-level rows cost a patient. The second costs that again, plus all other rows. Steps that cost
    # (e1, d1) and (e2, d2) cost (e1 + e2, d1 + exp(e1) d2) together.
    first = epsilon_of(merge([cost(row, row.unit) for row in steps]), delta / 2)
    if first > 500 or delta < 1e-80:  # the delta below would be too small to compute with
        return whole
    drawn = [cost(row, row.unit if row.unit == "patient" else "record") for row in counted]
    return min(whole, first + epsilon_of(merge(drawn), delta / 2 * math.exp(-first)))


def merge(spends: list[GaussianEvent]) -> list[GaussianEvent]:
    """Merge equal spends into one with a larger count. The time of an accountant grows with the number of different spends."""
    counts = Counter[GaussianEvent]()
    for one in spends:
        counts[replace(one, count=1)] += one.count
    return [replace(one, count=count) for one, count in counts.items()]


def weakest(adjacencies: Iterable[str]) -> str:
    """Return the adjacency that all rows together guarantee. `replace` implies `zero-out`, but not the reverse."""
    found = set(adjacencies)
    return "zero-out" if "zero-out" in found else found.pop()
