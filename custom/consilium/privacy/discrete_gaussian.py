"""Exact samples of the discrete Gaussian: integers y with probability proportional to exp(-y^2 / (2 s^2)), s a whole number.

Rejection from a discrete Laplace of scale s (Algorithms 1 to 3 of the source, with t = s). A candidate is y = u + s v with u
uniform in 0 .. s - 1, kept with probability exp(-u / s), and v geometric. It is accepted with exp(-(y - s)^2 / (2 s^2)). With
x = u / s that is, by v,

    v = 0     exp(-(1 - x)^2 / 2)
    v >= 1    exp(-x^2 / 2) exp(-x)^(v - 1) exp(-1 / 2)^((v - 1)^2)

so every coin that is tossed has exp(-x), exp(-x^2 / 2), exp(-1) or exp(-1 / 2). Algorithm 1 makes those of coins 1 / k and x,
and a coin x is one comparison of whole numbers below s. Only integers decide, all fit 64 bits, and all bits are those
of randomness.py: what leaves has none of the traces that floating-point noise leaves in its last bits.

Source: C. Canonne, G. Kamath, T. Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from consilium.core.errors import ConfigError
from consilium.privacy.randomness import secret_bytes

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
