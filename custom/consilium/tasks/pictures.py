"""What tasks on pictures share: how their lists are read, prepared and checked."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from consilium.data.datalist import DataList, read_datalist
from consilium.tasks.registry import Change

if TYPE_CHECKING:
    from consilium.data.check_report import Findings
    from consilium.data.datalist import Lost


def reader(classes: bool) -> Callable[[Path], DataList]:
    """Return what reads a list whose labels are `classes`, or else masks."""
    return lambda path: read_datalist(path, classes)


def usable(classes: bool) -> "Callable[[Path, list[Lost]], DataList]":
    """Return what reads the entries that can be used, and puts into a list why the others cannot."""
    return lambda path, lost: read_datalist(path, classes, lambda split, index, error: lost.append((split, error)))


def prepare(config: Any, data: DataList) -> DataList:
    """Return a list with volumes as their planes and large pictures as their tiles. Raises DataError."""
    from consilium.data.slices import expand

    return expand(data, config)


def check(
    path: Path, config: Any = None, tokenizer: Any = None, max_length: int = 0, change: Change | None = None
) -> "Findings":
    """Return what is found in a list and its files, for a job's task where one is given."""
    from consilium.data.check import check_datalist

    return check_datalist(path, config.classes, config, change) if config else check_datalist(path, change=change)
