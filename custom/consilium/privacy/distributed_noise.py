"""Noise of every unit and trust: clipped integers plus exact discrete Gaussians, so that no rounding tells what noise hides.

All is in whole units of the grid on which sums are made. What is clipped is rounded to it: a site's update, or the gradient of
each unit of a DP-SGD step. Noise is an exact discrete Gaussian of variance s^2. It is one share (K = 1)
where one site or the server adds all of it. With `trust: distributed` every site adds a share, and only the sum carries the
whole. Of the sites in a sum, K are honest for certain: the fewest that a sum may have without the colluders. Their shares
together are not a discrete Gaussian, but close to one:

    eta(v) = 2 sum_{m >= 1} exp(-2 pi^2 v m^2)        lambda(v) = ln((1 + eta) / (1 - eta))
    tau = lambda(4) + sum_{k = 1}^{K - 1} lambda(s^2 k / (k + 1))      per number

and the sum is within tau (log ratio, either way) of what can be made of a continuous Gaussian of variance K s^2 - 4. So s is
the least whole number with K s^2 - 4 >= (sigma S)^2. The cost is that of the continuous Gaussian with sigma, and for T releases
of d numbers (epsilon + 2 T d tau, e^(T d tau) delta). From s^2 = 10 on tau is under 3e-34, so accounting.SLACK stands for it.

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
# Rejection from a discrete Laplace of scale s (Algorithms 1 to 3 of the source, with t = s). A candidate is y = u + s v with u
# uniform in 0 .. s - 1, kept with probability exp(-u / s), and v geometric. It is accepted with exp(-(y - s)^2 / (2 s^2)). With
# x = u / s that is, by v,
#
#     v = 0     exp(-(1 - x)^2 / 2)
#     v >= 1    exp(-x^2 / 2) exp(-x)^(v - 1) exp(-1 / 2)^((v - 1)^2)
#
# so every coin that is tossed has exp(-x), exp(-x^2 / 2), exp(-1) or exp(-1 / 2). Algorithm 1 makes those of coins 1 / k and x,
# and a coin x is one comparison of whole numbers below s. Only integers decide, all fit 64 bits, and all bits are those of
# randomness.py: what leaves has none of the traces that floating-point noise leaves in its last bits.
#
# Source: C. Canonne, G. Kamath, T. Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020.

LARGEST = 2**56
"""Standard deviations beyond this could leave 64 bits: 64 deviations are as likely as 2^-2950."""

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
Bits = Callable[[int], bytes]
"""Draws so many random bytes."""


def discrete_gaussian(count: int, deviation: int, bits: Bits = secret_bytes) -> Integers:
    """Return `count` independent samples, int64, of the discrete Gaussian with s = `deviation`, its variance just under s^2.

    `bits`: where randomness comes from. Raises ConfigError unless 1 <= deviation <= LARGEST.
    """
    if not 1 <= deviation <= LARGEST:
        raise ConfigError(f"discrete noise: deviation {deviation}: expected 1 to {LARGEST} units of the grid; change the clip")
    source, parts, missing = _Coins(bits), [np.zeros(0, np.int64)], count
    while missing > 0:
        found = _candidates(source, 64 + int(2.3 * missing), deviation)[:missing]
        parts.append(found)
        missing -= len(found)
    return np.concatenate(parts)


def _candidates(source: "_Coins", count: int, deviation: int) -> Integers:
    """Return those of `count` candidates that are accepted."""
    part = source.below(count, deviation)
    part = part[source.exponential(part, deviation)]
    whole = source.geometric(len(part))
    kept = _accepted(source, part, whole, deviation)
    size = part[kept] + deviation * whole[kept]
    negative = source.below(len(size), 2) == 1
    return np.where(negative, -size, size)[~(negative & (size == 0))]  # else 0 would come twice as often


def _accepted(source: "_Coins", part: Integers, whole: Integers, deviation: int) -> Flags:
    """Toss every candidate's coin exp(-(y - s)^2 / (2 s^2))."""
    kept = source.half_square(np.where(whole == 0, deviation - part, part), deviation)
    for times in range(1, int(whole.max(initial=0))):
        far = np.flatnonzero(kept & (whole > times))
        kept[far] = source.exponential(part[far], deviation)
        for _ in range(2 * times - 1):  # (v - 1)^2 is the sum of the first v - 1 odd numbers
            far = far[kept[far]]
            kept[far] = source.root(len(far))
    return kept


class _Coins:
    """Random whole numbers, and coins with probabilities that are exponentials, each tossed exactly."""

    def __init__(self, bits: Bits) -> None:
        self._bits = bits

    def below(self, count: int, limit: int) -> Integers:
        """Return uniform whole numbers below `limit`: as many bits as it has, again where they say too much."""
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

    def _alternating(self, count: int, toss: Callable[[NDArray[np.intp], int], Flags]) -> Flags:
        """Toss coins exp(-g), given coins g / k: how often in a row those fall is even (Algorithm 1)."""
        even, running, k = np.zeros(count, np.bool_), np.arange(count), 1
        while len(running):
            fallen = toss(running, k)
            if k % 2:
                even[running[~fallen]] = True
            running, k = running[fallen], k + 1
        return even

    def exponential(self, part: Integers, whole: int) -> Flags:
        """Toss coins exp(-part / whole), 0 <= part <= whole."""

        def toss(at: NDArray[np.intp], k: int) -> Flags:
            fallen = self._one_of(len(at), k)
            left = np.flatnonzero(fallen)
            fallen[left] = self._ratio(part[at[left]], whole)
            return fallen

        return self._alternating(len(part), toss)

    def half_square(self, part: Integers, whole: int) -> Flags:
        """Toss coins exp(-(part / whole)^2 / 2)."""

        def toss(at: NDArray[np.intp], k: int) -> Flags:
            fallen = self._one_of(len(at), 2 * k)
            for _ in range(2):
                left = np.flatnonzero(fallen)
                fallen[left] = self._ratio(part[at[left]], whole)
            return fallen

        return self._alternating(len(part), toss)

    def root(self, count: int) -> Flags:
        """Toss coins exp(-1 / 2)."""
        return self._alternating(count, lambda at, k: self._one_of(len(at), 2 * k))

    def geometric(self, count: int) -> Integers:
        """Return how many coins exp(-1) in a row fall before one does not."""
        found, running = np.zeros(count, np.int64), np.arange(count)
        while len(running):
            fallen = self._alternating(len(running), lambda at, k: self._one_of(len(at), k))
            running = running[fallen]
            found[running] += 1
        return found

    def _ratio(self, part: Integers, whole: int) -> Flags:
        return self.below(len(part), whole) < part

    def _one_of(self, count: int, k: int) -> Flags:
        return np.ones(count, np.bool_) if k == 1 else self.below(count, k) == 0


# distributed noise -----------------------------------------------------------------------------------------------------

LEAST_VARIANCE = 10
"""Shares under this variance, in units of the grid, are refused: their sum is too far from a Gaussian."""


def honest_shares(threshold: int, min_sites: int, colluders: int) -> int:
    """Return how many shares of noise a sum holds that nobody else knows: it is of max(t, min_sites) sites at least.

    `threshold`: the job's, 0 for none; a default one goes by how many are asked, which no plan knows.
    Raises ConfigError where fewer than two are left: then the server and the colluders would know all but one.
    """
    found = max(threshold, min_sites) - colluders
    if found < 2:
        sites = f"a sum of {max(threshold, min_sites)} sites"
        what = f"secure_aggregation.colluders: {colluders}: {sites} would hold {found} shares of noise that nobody else knows"
        raise ConfigError(f"{what}; raise threshold or federation.min_sites")
    return found


def share_deviation(noise_multiplier: float, sensitivity: float, shares: int, unit: float = UNIT) -> int:
    """Return s, in units of the grid, such that `shares` shares keep at least noise_multiplier * sensitivity between them.

    0 without noise. Raises ConfigError under LEAST_VARIANCE, and where 64 bits could not hold it.
    """
    if noise_multiplier == 0:
        return 0
    whole = (Fraction(noise_multiplier) * Fraction(sensitivity) / Fraction(unit)) ** 2 + 4
    found = math.isqrt(math.ceil(whole / shares) - 1) + 1
    if found**2 < LEAST_VARIANCE:
        what = f"noise of {noise_multiplier:g} times {sensitivity:g} is under the grid's {unit:g} in each of {shares} shares"
        raise ConfigError(f"privacy.clip: {what}; raise clip")
    if found > LARGEST:
        what = f"noise of {noise_multiplier:g} times {sensitivity:g} is over the {LARGEST * unit:g} that the grid has room for"
        raise ConfigError(f"privacy.clip: {what}; lower clip")
    return found


def slack(deviation: int, shares: int, numbers: int) -> float:
    """Return 2 d tau: what one release of so many numbers costs in epsilon beside the continuous Gaussian."""
    variance = deviation**2
    tau = _distance(4.0) + math.fsum(_distance(variance * k / (k + 1)) for k in range(1, shares))
    return 2 * numbers * tau


def _distance(variance: float) -> float:
    """Return lambda: how far a discrete Gaussian's weights may lie from the continuous one's, as a log ratio."""
    eta = 2 * math.fsum(math.exp(-2 * math.pi**2 * variance * m * m) for m in range(1, 20))
    return 2 * math.atanh(eta)


def on_grid(update: Mapping[str, Tensor], clip: float, unit: float = UNIT) -> Tensors:
    """Return an update clipped jointly to `clip` and rounded to whole units (int64), its norm at most clip / unit exactly.

    Rounding may lengthen it by sqrt(d) unit / 2, so it is clipped to that much less. Raises RefusedError for values that are
    not finite, and for a clip that the grid cannot hold.
    """
    numbers = sum(tensor.numel() for tensor in update.values())
    room = (clip - math.sqrt(numbers) * unit / 2) * (1 - margin(numbers))
    if room <= 0:
        raise RefusedError(
            f"privacy.clip: {clip:g} is under the grid's step for {numbers:,} numbers; nothing was sent; raise it"
        )
    norm = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in update.values()))
    if not math.isfinite(norm):
        raise RefusedError("update has NaN or Inf, which no clipping bounds; nothing was sent; lower training.lr")
    factor = min(1.0, room / norm) if norm else 1.0
    found = quantize({name: tensor.double() * factor for name, tensor in update.items()}, unit)
    if sum(value * value for t in found.values() for value in t.flatten().tolist()) > (Fraction(clip) / Fraction(unit)) ** 2:
        raise RefusedError("update is over the clip after rounding; nothing was sent; raise privacy.clip")
    return found


def margin(numbers: int) -> float:
    """Return the share of a clip that is kept free, because a norm of so many float64 numbers has an error.

    A sum of n positive numbers has a relative error of n * 2^-53 at most, in any order of additions (N. Higham, "Accuracy and
    Stability of Numerical Algorithms", 2002, chapter 4), and its root half of that. The rest is for products and divisions.
    """
    return max(1e-12, numbers * 2.0**-52)


def rounding(numbers: int, unit: float = UNIT) -> float:
    """Return more than `clipped_sum` can lengthen one unit's part by rounding: a step of the grid in each of its numbers."""
    return math.sqrt(numbers) * unit


def clipped_sum(gradients: Mapping[str, Tensor], clip: float, start: Tensor | None = None) -> Tensor:
    """Return the sum (d,) of all units' gradients, (N, *shape) by name, each clipped and rounded on its own; int64, on the CPU.

    Added to `start`, where given. One unit moves the sum by clip + `rounding` at most, whatever the others are, because each
    is rounded by itself and integers are added without error. A gradient that is not finite counts as zero: an error would
    tell of the unit, and noise would not hide it. A sum that 64 bits do not hold stops at their end: one that wraps would leap.
    """
    parts = [gradient.flatten(1) for gradient in gradients.values()]
    device, numbers = next((part.device for part in parts), None), sum(part.shape[1] for part in parts)
    total = torch.zeros(numbers, dtype=torch.int64, device=device) if start is None else start.to(device, copy=True)
    for one in zip(*parts, strict=True):
        whole = torch.cat(one).double()
        norm = torch.linalg.vector_norm(whole)
        factor = (clip / norm).clamp(max=1.0) * (1 - margin(numbers))  # 0 / 0 does not come: clip is over 0
        scaled = whole.mul_(torch.where(norm.isfinite(), factor, 0.0)).nan_to_num_(0.0, 0.0, 0.0)
        total.add_(quantize({"": scaled})[""]).clamp_(-ROOM, ROOM)
    return total.cpu()


def add_share(integers: Tensors, deviation: int, bits: Bits = secret_bytes) -> Tensors:
    """Return integers with an exact discrete Gaussian of this deviation on every one (0: none)."""
    if deviation == 0:
        return dict(integers)
    shapes = {name: tensor.shape for name, tensor in integers.items()}
    drawn = torch.from_numpy(discrete_gaussian(sum(shape.numel() for shape in shapes.values()), deviation, bits))
    parts = drawn.split([shape.numel() for shape in shapes.values()])
    return {name: integers[name] + part.reshape(shapes[name]) for name, part in zip(integers, parts, strict=True)}
