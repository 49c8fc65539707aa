"""Integer arithmetic for exact sums. Numbers are 64-bit integers in units of 2^-36, so a sum does not depend on their order.

For every number of its update, a site sends weight * round(number / UNIT), and its weight as one additional number. A mask that
is uniform modulo 2^64 is added to each. A sum that wraps around cannot be detected. So there is a public bound, and every guard
limits numbers to it. Refusing a larger number would reveal something about one hospital's update: with the bounds of many jobs,
a server could search for the largest number.
"""

import logging
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from consilium.core.errors import RefusedError
from consilium.core.lazy import Tensor, torch
from consilium.core.messages import Tensors

UNIT = 2.0**-36
"""The grid: updates are rounded to multiples of this (1.5e-11) before they are summed."""
ROOM = 2**62
"""The bound on the absolute value of a sum of all sites' integers."""
Words = NDArray[np.uint64]
Layout = list[tuple[str, tuple[int, ...]]]
"""Names and shapes of the tensors, in the order of their numbers in a masked vector."""
_log = logging.getLogger(__name__)


def quantize(update: Mapping[str, Tensor], unit: float = UNIT) -> Tensors:
    """Return round(update / unit) as int64, of finite tensors. int64 tensors are on the grid already and stay unchanged."""
    return {
        name: tensor if tensor.dtype is torch.int64 else tensor.detach().double().div(unit).round_().to(torch.int64)
        for name, tensor in update.items()
    }


def largest_value(bound: float | None, parties: int, most_weight: int) -> int:
    """Return the largest absolute value, in units, that a number may have before it is multiplied by the weight.

    It is `bound` in units or, for None, the largest value for which the sum over `parties` sites with weights up to
    `most_weight` stays under ROOM. Raises RefusedError if that sum could exceed ROOM with this `bound`.
    """
    room = (ROOM - 1) // (parties * most_weight)
    if bound is None:
        return room
    if bound / UNIT > room:
        raise RefusedError(
            f"secure_aggregation.bound: {bound:g}: sums of {parties} sites of weights up to {most_weight} could wrap; "
            f"at most {room * UNIT:.4g}, or less weight"
        )
    return int(bound / UNIT)


def layout(shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """Return the layout of tensors with these shapes: sorted by name."""
    return sorted((name, tuple(shape)) for name, shape in shapes.items())


def flatten(integers: Mapping[str, Tensor], weight: int, largest: int) -> Words:
    """Return the vector (d + 1,) of all numbers in the order of tensor names, then the weight, as words.

    Each number is limited to `largest` units and multiplied by `weight`.
    """
    numbers = [integers[name].reshape(-1).numpy() for name in sorted(integers)]
    joined = np.concatenate([*numbers, np.ones(1, np.int64)])
    if joined.max() > largest or joined.min() < -largest:
        top = max(abs(int(joined.max())), abs(int(joined.min()))) * UNIT
        _log.warning(
            f"masked update: numbers up to {top:.3g} were cut off at {largest * UNIT:.3g}, which sums have room for; "
            "lower training.lr, or raise secure_aggregation.bound where there is room"
        )
    return (joined.clip(-largest, largest) * np.int64(weight)).view(np.uint64)


def unflatten(words: Words, order: Layout) -> tuple[Tensors, int]:
    """Split an unmasked vector (d + 1,) into the sums of the tensors (int64, units) and the sum of the weights."""
    integers, tensors, start = torch.from_numpy(words.view(np.int64).copy()), dict[str, Tensor](), 0
    for name, shape in order:
        size = int(np.prod(shape, dtype=np.int64))
        tensors[name] = integers[start : start + size].reshape(shape)
        start += size
    return tensors, int(integers[-1])


def vector_length(order: Layout) -> int:
    """Return the length of a vector of this layout: all numbers and the weight."""
    return sum(int(np.prod(shape, dtype=np.int64)) for _, shape in order) + 1
