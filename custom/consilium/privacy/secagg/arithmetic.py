"""Numbers on the grid of the exact mean: 64-bit integers in units of 2^-36, whose sums no mask and no order changes.

A site sends weight * round(update / UNIT) of every number and, as one number more, its weight, each plus a mask that is uniform
modulo 2^64. Sums that wrap cannot be seen by anybody. So all know a bound, and every guard cuts numbers off at it. A refusal
instead would be about one hospital's update: by the bounds of many jobs a server could search for its largest number.
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
"""The bound of a sum of all sites' integers."""
Words = NDArray[np.uint64]
Layout = list[tuple[str, tuple[int, ...]]]
"""Names and shapes of the tensors, in the order in which their numbers stand in a masked vector."""
_log = logging.getLogger(__name__)


def quantize(update: Mapping[str, Tensor], unit: float = UNIT) -> Tensors:
    """Return round(update / unit), int64, of finite tensors. Those that are int64 already are on the grid and stay."""
    return {
        name: tensor if tensor.dtype is torch.int64 else tensor.detach().double().div(unit).round_().to(torch.int64)
        for name, tensor in update.items()
    }


def limit(bound: float | None, parties: int, most_weight: int) -> int:
    """Return the largest absolute value, in units, of a number before its weight: of `bound`, or as much as there is room for.

    Raises RefusedError where so many `parties` of up to `most_weight` could exceed the room together.
    """
    room = (ROOM - 1) // (parties * most_weight)
    if bound is None:
        return room
    if bound / UNIT > room:
        at = f"{parties} sites of weights up to {most_weight}"
        raise RefusedError(
            f"secure_aggregation.bound: {bound:g}: sums of {at} could wrap; at most {room * UNIT:.4g}, or less weight"
        )
    return int(bound / UNIT)


def layout(shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    """Return the one order of these tensors."""
    return sorted((name, tuple(shape)) for name, shape in shapes.items())


def flat(integers: Mapping[str, Tensor], weight: int, largest: int) -> Words:
    """Return (d + 1,) words: every number, cut off at `largest` units, times the weight, by names, then the weight."""
    numbers = [integers[name].reshape(-1).numpy() for name in sorted(integers)]
    joined = np.concatenate([*numbers, np.ones(1, np.int64)])
    if joined.max() > largest or joined.min() < -largest:
        top = max(abs(int(joined.max())), abs(int(joined.min()))) * UNIT
        what = f"numbers up to {top:.3g} were cut off at {largest * UNIT:.3g}, which sums have room for"
        _log.warning(f"masked update: {what}; lower training.lr, or raise secure_aggregation.bound where there is room")
    return (joined.clip(-largest, largest) * np.int64(weight)).view(np.uint64)


def unflat(words: Words, order: Layout) -> tuple[Tensors, int]:
    """Return the sums of tensors (int64, units) and of weights that a vector (d + 1,) without masks holds."""
    integers, tensors, start = torch.from_numpy(words.view(np.int64).copy()), dict[str, Tensor](), 0
    for name, shape in order:
        size = int(np.prod(shape, dtype=np.int64))
        tensors[name] = integers[start : start + size].reshape(shape)
        start += size
    return tensors, int(integers[-1])


def size_of(order: Layout) -> int:
    """Return the number of words of a vector of this layout."""
    return sum(int(np.prod(shape, dtype=np.int64)) for _, shape in order) + 1
