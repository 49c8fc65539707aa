"""Labels of a picture or a volume, whatever their file holds: one value a voxel, or regions that may overlap."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from consilium.data.grid import Grid
from consilium.data.settings import Value


@dataclass(frozen=True, eq=False)
class Labels:
    """Either `values`, integers of the grid's shape, or `regions`: boolean masks of it by number or name. They may overlap.

    `grid`: where the regions of a file lie, if not on their image's voxels.
    """

    values: np.ndarray | None = None
    regions: dict[Value, np.ndarray] | None = None
    grid: Grid | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The grid's shape; () of no regions."""
        if self.values is not None:
            return self.values.shape
        return next((mask.shape for mask in (self.regions or {}).values()), ())

    def present(self) -> set[Value]:
        """Return the labels that some voxel has; 0 is background."""
        if self.values is not None:
            if self.values.dtype in (np.uint8, np.uint16):  # counting is ten times faster than sorting
                return set(np.flatnonzero(np.bincount(self.values.reshape(-1))).tolist())
            return set(np.unique(self.values).tolist())
        return {name for name, mask in (self.regions or {}).items() if mask.any()}

    def where(self, wanted: Collection[Value]) -> np.ndarray:
        """Return a mask of the voxels that have one of the labels `wanted`."""
        if self.values is not None:
            return np.isin(self.values, [value for value in wanted if isinstance(value, int)])
        chosen = [mask for name, mask in (self.regions or {}).items() if name in wanted]
        return np.logical_or.reduce(chosen) if chosen else np.zeros(self.shape, bool)

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> "Labels":
        """Return the labels with `change` done to every array: a plane cut, a picture made smaller."""
        if self.values is not None:
            return Labels(values=change(self.values))
        own = self.regions or {}
        changed = {id(mask): change(mask) for mask in {id(mask): mask for mask in own.values()}.values()}
        return Labels(regions={name: changed[id(mask)] for name, mask in own.items()})
