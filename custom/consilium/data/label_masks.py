"""Labels of a picture or a volume, whatever their file holds: one value a voxel, or regions that may overlap."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from consilium.core.errors import DataError
from consilium.data.grid import Grid
from consilium.data.settings import Value


@dataclass(frozen=True, eq=False)
class Labels:
    """Either `values`, integers of the grid's shape, or `regions`: boolean masks of it by number or name. They may overlap.

    `grid`: where the regions of a file lie, if not on their image's voxels. `faults`: why regions cannot be read, by name: an
    error for those who ask for them only.
    """

    values: np.ndarray | None = None
    regions: dict[Value, np.ndarray] | None = None
    grid: Grid | None = None
    faults: Mapping[Value, DataError] = field(default_factory=dict)

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
        """Return a mask of the voxels that have one of the labels `wanted`. Raises DataError for a region with a fault."""
        if self.values is not None:
            return np.isin(self.values, [value for value in wanted if isinstance(value, int)])
        self.check(wanted)
        own = self.regions or {}
        chosen = [own[name] for name in matching_labels(wanted, own)]
        return np.logical_or.reduce(chosen) if chosen else np.zeros(self.shape, bool)

    def check(self, wanted: Iterable[Value]) -> None:
        """Raise DataError where a region of `wanted` has a fault."""
        for name in matching_labels(wanted, {**(self.regions or {}), **self.faults}):
            if name in self.faults:
                raise self.faults[name]

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> "Labels":
        """Return the labels with `change` done to every array: a plane cut, a picture made smaller."""
        if self.values is not None:
            return Labels(values=change(self.values))
        own = self.regions or {}
        changed = {id(mask): change(mask) for mask in {id(mask): mask for mask in own.values()}.values()}
        return Labels(regions={name: changed[id(mask)] for name, mask in own.items()}, faults=self.faults)


def matching_labels(wanted: Iterable[Value], there: Collection[Value]) -> list[Value]:
    """Return which of the labels `there` are meant: equal ones, of a name without any those that differ in case and blanks."""
    found: dict[Value, None] = {}
    for name in wanted:
        near = [one for one in there if isinstance(one, str) and _fold(one) == _fold(name)] if isinstance(name, str) else []
        found |= dict.fromkeys([name] if name in there else near)
    return list(found)


def _fold(name: str) -> str:
    return " ".join(name.split()).casefold()
