"""A fixed part of every picture: the same in every round and in a resumed run."""

from dataclasses import dataclass
from typing import Any

from consilium.core.seeding import seed_for

_UNIT = 2**32


@dataclass(frozen=True)
class Crop:
    """A square of `side` pixels of a picture whose size is not known yet.

    `down`, `across`: where it lies, as shares (0 to 1, 1 left out) of the places that there are. A shorter side stays whole.
    """

    side: int
    down: float
    across: float

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the (rows, columns) that are left of a picture."""
        return min(rows, self.side), min(columns, self.side)

    def cut(self, array: Any) -> Any:
        """Return its part of a picture or a mask (H, W, ...), as a view."""
        rows, columns = self.shape(*array.shape[:2])
        top = int(self.down * (array.shape[0] - rows + 1))
        left = int(self.across * (array.shape[1] - columns + 1))
        return array[top : top + rows, left : left + columns]


def drawn(side: int, seed: int, name: str) -> Crop:
    """Return the crop that a seed and a picture's name fix."""
    down, across = (seed_for(seed, "crop", way, name) % _UNIT / _UNIT for way in ("down", "across"))
    return Crop(side, down, across)
