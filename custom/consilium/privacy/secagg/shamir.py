"""Shamir's secret sharing: any `threshold` of n shares give the secret back, fewer tell nothing of it.

A. Shamir, "How to Share a Secret", Communications of the ACM 22, 1979. Over the prime field of 2^521 - 1, which holds secrets
of up to 520 bits; coefficients are uniform from the system's generator; share i is the polynomial's value at i = 1..n.
"""

from collections.abc import Mapping

from consilium.privacy.randomness import secret_below

PRIME = 2**521 - 1
WIDTH = 66
"""Bytes of a share."""


def share(secret: int, threshold: int, parties: int, coefficients: list[int] | None = None) -> list[int]:
    """Return the shares of points 1..parties. `coefficients`: of powers 1..threshold - 1, drawn unless a test gives them."""
    drawn = [secret_below(PRIME) for _ in range(threshold - 1)] if coefficients is None else coefficients
    return [_value([secret, *drawn], point) for point in range(1, parties + 1)]


def _value(polynomial: list[int], point: int) -> int:
    total = 0
    for coefficient in reversed(polynomial):
        total = (total * point + coefficient) % PRIME
    return total


def reconstruct(shares: Mapping[int, int]) -> int:
    """Return the secret of shares by point: the value at 0 of the polynomial through them (Lagrange)."""
    secret = 0
    for point, value in shares.items():
        above, below = 1, 1
        for other in shares:
            if other != point:
                above, below = above * other % PRIME, below * (other - point) % PRIME
        secret = (secret + value * above * pow(below, -1, PRIME)) % PRIME
    return secret
