"""Noise of every unit and trust: clipped integers plus exact discrete Gaussians, so that no rounding tells what noise hides.

All is in whole units of the grid on which sums are made. What is clipped is rounded to it: a site's update, or the gradient of
each unit of a DP-SGD step. Noise is an exact discrete Gaussian of variance s^2 (discrete_gaussian.py). It is one share (K = 1)
where one site or the server adds all of it. With `trust: distributed` every site adds a share, and only the sum carries the
whole. Of the sites in a sum, K are honest for certain: the fewest that a sum may have without the colluders. Their shares
together are no discrete Gaussian, but close to one:

    eta(v) = 2 sum_{m >= 1} exp(-2 pi^2 v m^2)        lambda(v) = ln((1 + eta) / (1 - eta))
    tau = lambda(4) + sum_{k = 1}^{K - 1} lambda(s^2 k / (k + 1))      per number

and the sum is within tau (log ratio, either way) of what can be made of a continuous Gaussian of variance K s^2 - 4. So s is
the least whole number with K s^2 - 4 >= (sigma S)^2. The cost is that of the continuous Gaussian with sigma, and for T releases
of d numbers (epsilon + 2 T d tau, e^(T d tau) delta). From s^2 = 10 on tau is under 3e-34, so accounting.SLACK stands for it.

Source: P. Kairouz, Z. Liu, T. Steinke, "The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
Aggregation", ICML 2021 (sums of discrete Gaussians, with a bound of ours on their distance; sharper than its total variation).
"""

import math
from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import Tensor

from consilium.core.errors import ConfigError, RefusedError
from consilium.core.messages import Tensors
from consilium.privacy.discrete_gaussian import LARGEST, Bits, discrete_gaussian
from consilium.privacy.randomness import secret_bytes
from consilium.privacy.secagg.arithmetic import ROOM, UNIT, quantize

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
