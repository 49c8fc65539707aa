"""Clipping to an integer grid, and exact discrete Gaussian noise. Every privacy unit and every `trust` uses them.

Integers have no rounding errors, and the last bits of a floating-point sum would reveal what the noise hides. All numbers are
whole units of the grid on which sums are computed. A site's update, or the gradient of each unit in a DP-SGD step, is clipped
and rounded to the grid. The noise is an exact discrete Gaussian of variance s^2. Where one site or the server adds the whole
noise, there is one share (K = 1). With `trust: distributed` every site adds a share, and only the sum carries the whole noise.
K is the number of sites in a sum that are certainly honest: the fewest sites that a sum may have, minus the colluders. The sum
of their shares is not a discrete Gaussian, but it is close to one:

    eta(v) = 2 sum_{m >= 1} exp(-2 pi^2 v m^2)        lambda(v) = ln((1 + eta) / (1 - eta))
    tau = lambda(4) + sum_{k = 1}^{K - 1} lambda(s^2 k / (k + 1))      per number

The log ratio between the sum's distribution and a post-processing of a continuous Gaussian of variance K s^2 - 4 is at most tau
in both directions. So s is the smallest whole number with K s^2 - 4 >= (sigma S)^2. If T releases of the continuous Gaussian
with sigma cost (epsilon, delta), then T releases of d numbers cost (epsilon + 2 T d tau, e^(T d tau) delta). For s^2 >= 10, tau
is under 3e-34, so the accountant charges its constant SLACK instead.

Source: P. Kairouz, Z. Liu, T. Steinke, "The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
Aggregation", ICML 2021 (sums of discrete Gaussians, with a bound of ours on their distance; sharper than its total variation).
"""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from consilium.core.errors import ConfigError, RefusedError
from consilium.core.lazy import Tensor, torch
from consilium.core.messages import Tensors
from consilium.privacy.randomness import secret_bytes
from consilium.privacy.secagg.arithmetic import ROOM, UNIT, quantize

# discrete gaussian -----------------------------------------------------------------------------------------------------
# Exact samples of the discrete Gaussian: integers y with probability proportional to exp(-y^2 / (2 s^2)), s a whole number.
#
# The method is rejection sampling from a discrete Laplace of scale s (Algorithms 1 to 3 of the source, with t = s). A candidate
# is y = u + s v. Here u is uniform in 0 .. s - 1 and kept with probability exp(-u / s), and v is geometric. The candidate is
# accepted with probability exp(-(y - s)^2 / (2 s^2)). With x = u / s this probability is
#
#     v = 0     exp(-(1 - x)^2 / 2)
#     v >= 1    exp(-x^2 / 2) exp(-x)^(v - 1) exp(-1 / 2)^((v - 1)^2)
#
# so every coin that is tossed has probability exp(-x), exp(-x^2 / 2), exp(-1) or exp(-1 / 2). Algorithm 1 builds these coins
# from coins of probability 1 / k and x, and a coin of probability x is one comparison of whole numbers below s. All decisions
# use integers that fit 64 bits, and all random bits come from randomness.py. So released numbers lack the traces that
# floating-point noise leaves in the last bits.
#
# Source: C. Canonne, G. Kamath, T. Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020.

LARGEST = 2**56
"""The largest standard deviation. A sample then fits 64 bits: one beyond 64 deviations has probability 2^-2950."""

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
Bits = Callable[[int], bytes]
"""A function that returns the given number of random bytes."""


def discrete_gaussian(count: int, deviation: int, bits: Bits = secret_bytes) -> Integers:
    """Return `count` independent samples (int64) of the discrete Gaussian with s = `deviation`; its variance is just under s^2.

    `bits`: the source of randomness. Raises ConfigError unless 1 <= deviation <= LARGEST.
    """
    if not 1 <= deviation <= LARGEST:
        raise ConfigError(f"discrete noise: deviation {deviation}: expected 1 to {LARGEST} units of the grid; change the clip")
    source, parts, missing = _Coins(bits), [np.zeros(0, np.int64)], count
    while missing > 0:
        part = source.below(64 + int(2.3 * missing), deviation)
        part = part[source.toss_exponential(part, deviation)]
        whole = source.geometric(len(part))
        kept = _toss_acceptance(source, part, whole, deviation)
        size = part[kept] + deviation * whole[kept]
        negative = source.below(len(size), 2) == 1
        found = np.where(negative, -size, size)[~(negative & (size == 0))]  # without -0, or 0 would be twice as likely
        parts.append(found[:missing])
        missing -= len(parts[-1])
    return np.concatenate(parts)


def _toss_acceptance(source: "_Coins", part: Integers, whole: Integers, deviation: int) -> Flags:
    """Return which candidates are accepted: each with probability exp(-(y - s)^2 / (2 s^2))."""
    kept = source.toss_exponential(np.where(whole == 0, deviation - part, part), deviation, power=2)
    for times in range(1, int(whole.max(initial=0))):
        far = np.flatnonzero(kept & (whole > times))
        kept[far] = source.toss_exponential(part[far], deviation)
        for _ in range(2 * times - 1):  # (v - 1)^2 is the sum of the first v - 1 odd numbers
            far = far[kept[far]]
            kept[far] = source.toss_exp_half(len(far))
    return kept


class _Coins:
    """Draws random whole numbers, and tosses coins whose probabilities are exponentials. All are exact."""

    def __init__(self, bits: Bits) -> None:
        self._bits = bits

    def below(self, count: int, limit: int) -> Integers:
        """Return `count` uniform whole numbers below `limit`: draw as many bits as it has, and redraw numbers not below it."""
        width = (limit - 1).bit_length()
        size = next(n for n in (1, 2, 4, 8) if 8 * n >= width)
        mask, kept, missing = (1 << width) - 1, [np.zeros(0, np.int64)], count
        share = limit / (1 << width)
        while missing > 0:
            asked = int(missing / share * 1.02) + 16
            drawn = np.frombuffer(self._bits(size * asked), dtype=f"<u{size}") & np.array(mask, f"<u{size}")
            kept.append(drawn[drawn < limit][:missing].astype(np.int64))
            missing -= len(kept[-1])
        return np.concatenate(kept)

    def _toss_alternating(self, count: int, toss: Callable[[NDArray[np.intp], int], Flags]) -> Flags:
        """Toss coins of probability exp(-g), given coins of probability g / k (Algorithm 1).

        A coin is heads if the number of successive heads of the given coins (k = 1, 2, ...) is even.
        """
        even, running, k = np.zeros(count, np.bool_), np.arange(count), 1
        while len(running):
            fallen = toss(running, k)
            if k % 2:
                even[running[~fallen]] = True
            running, k = running[fallen], k + 1
        return even

    def toss_exponential(self, part: Integers, whole: int, power: int = 1) -> Flags:
        """Toss coins of probability exp(-x^power / power) for x = part / whole, 0 <= part <= whole; `power`: 1 or 2."""

        def toss(at: NDArray[np.intp], k: int) -> Flags:  # the k-th coin of the series for the entries at `at`
            fallen = self._toss_one_in(len(at), power * k)
            for _ in range(power):
                left = np.flatnonzero(fallen)
                fallen[left] = self.below(len(left), whole) < part[at[left]]
            return fallen

        return self._toss_alternating(len(part), toss)

    def toss_exp_half(self, count: int) -> Flags:
        """Toss coins of probability exp(-1 / 2)."""
        return self._toss_alternating(count, lambda at, k: self._toss_one_in(len(at), 2 * k))

    def geometric(self, count: int) -> Integers:
        """Return `count` geometric numbers: how many coins of probability exp(-1) are heads before the first tails."""
        found, running = np.zeros(count, np.int64), np.arange(count)
        while len(running):
            fallen = self._toss_alternating(len(running), lambda at, k: self._toss_one_in(len(at), k))
            running = running[fallen]
            found[running] += 1
        return found

    def _toss_one_in(self, count: int, k: int) -> Flags:
        return np.ones(count, np.bool_) if k == 1 else self.below(count, k) == 0


# distributed noise -----------------------------------------------------------------------------------------------------

LEAST_VARIANCE = 10
"""Shares under this variance, in units of the grid, are refused: their sum is too far from a Gaussian."""


def honest_shares(threshold: int, min_sites: int, colluders: int) -> int:
    """Return the least number of noise shares in a sum that neither server nor colluders know.

    It is max(threshold, min_sites) - colluders. `threshold`: of the job, 0 if it names none. A plan does not know the default
    threshold, because that depends on how many sites are asked. Raises ConfigError for fewer than two shares: the server and
    the colluders would then know all shares except one at most.
    """
    found = max(threshold, min_sites) - colluders
    if found < 2:
        raise ConfigError(
            f"secure_aggregation.colluders: {colluders}: a sum of {max(threshold, min_sites)} sites would hold {found} "
            "shares of noise that nobody else knows; raise threshold or federation.min_sites"
        )
    return found


def share_deviation(noise_multiplier: float, sensitivity: float, shares: int, unit: float = UNIT) -> int:
    """Return the deviation s of one share, in grid units: `shares` shares add up to at least noise_multiplier * sensitivity.

    Return 0 for a noise multiplier of 0. Raises ConfigError for s^2 under LEAST_VARIANCE, and for s over LARGEST.
    """
    if noise_multiplier == 0:
        return 0
    whole = (Fraction(noise_multiplier) * Fraction(sensitivity) / Fraction(unit)) ** 2 + 4
    found = math.isqrt(math.ceil(whole / shares) - 1) + 1
    if found**2 < LEAST_VARIANCE:
        raise ConfigError(
            f"privacy.clip: noise of {noise_multiplier:g} times {sensitivity:g} is under the grid's {unit:g} in each of "
            f"{shares} shares; raise clip"
        )
    if found > LARGEST:
        raise ConfigError(
            f"privacy.clip: noise of {noise_multiplier:g} times {sensitivity:g} is over the {LARGEST * unit:g} that the "
            "grid has room for; lower clip"
        )
    return found


def slack(deviation: int, shares: int, numbers: int) -> float:
    """Return 2 d tau, d = `numbers`: the epsilon that one release costs in addition to the continuous Gaussian."""
    variance = deviation**2
    tau = _largest_log_ratio(4.0) + math.fsum(_largest_log_ratio(variance * k / (k + 1)) for k in range(1, shares))
    return 2 * numbers * tau


def _largest_log_ratio(variance: float) -> float:
    """Return lambda(variance): the largest log ratio between the weights of the discrete and the continuous Gaussian."""
    eta = 2 * math.fsum(math.exp(-2 * math.pi**2 * variance * m * m) for m in range(1, 20))
    return 2 * math.atanh(eta)


def clip_to_grid(update: Mapping[str, Tensor], clip: float) -> Tensors:
    """Return an update clipped jointly to `clip` and rounded to whole units (int64). Its norm is at most clip / UNIT exactly.

    Rounding may lengthen the update by sqrt(d) UNIT / 2, so it is first clipped to that much less. Raises RefusedError for
    values that are not finite, and for a clip that is too small for the grid.
    """
    numbers = sum(tensor.numel() for tensor in update.values())
    room = (clip - math.sqrt(numbers) * UNIT / 2) * (1 - clip_safety_fraction(numbers))
    if room <= 0:
        raise RefusedError(
            f"privacy.clip: {clip:g} is under the grid's step for {numbers:,} numbers; nothing was sent; raise it"
        )
    norm = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in update.values()))
    if not math.isfinite(norm):
        raise RefusedError("update has NaN or Inf, which no clipping bounds; nothing was sent; lower training.lr")
    factor = min(1.0, room / norm) if norm else 1.0
    found = quantize({name: tensor.double() * factor for name, tensor in update.items()}, UNIT)
    if sum(value * value for t in found.values() for value in t.flatten().tolist()) > (Fraction(clip) / Fraction(UNIT)) ** 2:
        raise RefusedError("update is over the clip after rounding; nothing was sent; raise privacy.clip")
    return found


def clip_safety_fraction(numbers: int) -> float:
    """Return the fraction by which to reduce a clip, because the norm of `numbers` float64 numbers has a rounding error.

    A sum of n positive numbers has a relative error of at most n * 2^-53, in any order of additions (N. Higham, "Accuracy and
    Stability of Numerical Algorithms", 2002, chapter 4). Its square root has half of that. The rest covers products and
    divisions.
    """
    return max(1e-12, numbers * 2.0**-52)


def rounding(numbers: int, unit: float = UNIT) -> float:
    """Return a bound on how much rounding in `clipped_sum` lengthens one unit's gradient: one grid step in each number."""
    return math.sqrt(numbers) * unit


def clipped_sum(gradients: Mapping[str, Tensor], clip: float, start: Tensor | None = None) -> Tensor:
    """Return the sum (d,) of the gradients of N units, each clipped and rounded on its own; int64, on the CPU.

    `gradients` by name, (N, *shape). `start`: a sum to add to. Each unit is rounded separately, and integer addition is exact.
    So one unit moves the sum by at most clip + `rounding`, whatever the other units are. A gradient that is not finite counts
    as zero, because an error would reveal the unit without noise. A sum is limited to ROOM: a sum that wraps would jump.
    """
    parts = [gradient.flatten(1) for gradient in gradients.values()]
    device, numbers = next((part.device for part in parts), None), sum(part.shape[1] for part in parts)
    total = torch.zeros(numbers, dtype=torch.int64, device=device) if start is None else start.to(device, copy=True)
    for one in zip(*parts, strict=True):
        whole = torch.cat(one).double()
        norm = torch.linalg.vector_norm(whole)
        factor = (clip / norm).clamp(max=1.0) * (1 - clip_safety_fraction(numbers))  # never 0 / 0, because clip > 0
        scaled = whole.mul_(torch.where(norm.isfinite(), factor, 0.0)).nan_to_num_(0.0, 0.0, 0.0)
        total.add_(quantize({"": scaled})[""]).clamp_(-ROOM, ROOM)
    return total.cpu()


def add_share(integers: Tensors, deviation: int, bits: Bits = secret_bytes) -> Tensors:
    """Return `integers` with an exact discrete Gaussian of this deviation added to each number; unchanged for deviation 0."""
    if deviation == 0:
        return dict(integers)
    shapes = {name: tensor.shape for name, tensor in integers.items()}
    drawn = torch.from_numpy(discrete_gaussian(sum(shape.numel() for shape in shapes.values()), deviation, bits))
    parts = drawn.split([shape.numel() for shape in shapes.values()])
    return {name: integers[name] + part.reshape(shapes[name]) for name, part in zip(integers, parts, strict=True)}
