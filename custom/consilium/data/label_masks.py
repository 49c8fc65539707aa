"""Labels of a picture or a volume, independent of the file's format: one value per voxel, or regions that may overlap."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from consilium.core.errors import DataError
from consilium.data.grid import Grid
from consilium.data.settings import Value


@dataclass(frozen=True, eq=False)
class Labels:
    """Either `values`, integers of the image's shape, or `regions`, boolean masks by number or name, which may overlap.

    `grid`: the grid of the regions if it is not the image's. `faults`: by name, the errors of regions that cannot be read. An
    error is raised only when its region is used.
    """

    values: np.ndarray | None = None
    regions: dict[Value, np.ndarray] | None = None
    grid: Grid | None = None
    faults: Mapping[Value, DataError] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the arrays; () without regions."""
        if self.values is not None:
            return self.values.shape
        return next((mask.shape for mask in (self.regions or {}).values()), ())

    def present(self) -> set[Value]:
        """Return the labels that at least one voxel has; 0 is background."""
        if self.values is not None:
            if self.values.dtype in (np.uint8, np.uint16):  # bincount is ten times faster than unique
                return set(np.flatnonzero(np.bincount(self.values.reshape(-1))).tolist())
            return set(np.unique(self.values).tolist())
        return {name for name, mask in (self.regions or {}).items() if mask.any()}

    def where(self, wanted: Collection[Value]) -> np.ndarray:
        """Return a mask of the voxels with one of the `wanted` labels. Raises DataError for a region that cannot be read."""
        if self.values is not None:
            return np.isin(self.values, [value for value in wanted if isinstance(value, int)])
        self.check(wanted)
        own = self.regions or {}
        chosen = [own[name] for name in matching_labels(wanted, own)]
        return np.logical_or.reduce(chosen) if chosen else np.zeros(self.shape, bool)

    def check(self, wanted: Iterable[Value]) -> None:
        """Raise the DataError of the first `wanted` region that cannot be read. Return if all can be read."""
        for name in matching_labels(wanted, {**(self.regions or {}), **self.faults}):
            if name in self.faults:
                raise self.faults[name]

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> "Labels":
        """Return the labels with `change` applied to every array, such as cutting a plane or resizing."""
        if self.values is not None:
            return Labels(values=change(self.values))
        own = self.regions or {}
        changed = {id(mask): change(mask) for mask in {id(mask): mask for mask in own.values()}.values()}
        return Labels(regions={name: changed[id(mask)] for name, mask in own.items()}, faults=self.faults)


def matching_labels(wanted: Iterable[Value], there: Collection[Value]) -> list[Value]:
    """Return the labels of `there` that match a `wanted` label.

    An equal label matches; if a name has none, all names match that differ from it in case and blanks only.
    """
    found: dict[Value, None] = {}
    for name in wanted:
        near = [one for one in there if isinstance(one, str) and _fold(one) == _fold(name)] if isinstance(name, str) else []
        found |= dict.fromkeys([name] if name in there else near)
    return list(found)


def _fold(name: str) -> str:
    return " ".join(name.split()).casefold()
