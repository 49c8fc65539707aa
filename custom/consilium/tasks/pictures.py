"""How tasks on pictures read, prepare and check their lists."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from consilium.core.lazy import lazy
from consilium.data.check_report import Findings
from consilium.data.datalist import DataList, Lost, read_datalist
from consilium.tasks.registry import Change

_check_datalist = lazy("consilium.data.check:check_datalist")
_expand = lazy("consilium.data.slices:expand")


def reader(classes: bool) -> Callable[[Path], DataList]:
    """Return a function that reads a list whose labels are `classes`, or else masks."""
    return lambda path: read_datalist(path, classes)


def usable(classes: bool) -> Callable[[Path, list[Lost]], DataList]:
    """Return a function that reads the usable entries of a list, and adds to another list why the others cannot be used."""
    return lambda path, lost: read_datalist(path, classes, lambda split, index, error: lost.append((split, error)))


def prepare(config: Any, data: DataList) -> DataList:
    """Return a list with volumes as their planes and large pictures as their tiles. Raises DataError."""
    found: DataList = _expand(data, config)
    return found


def check(path: Path, config: Any = None, tokenizer: Any = None, max_length: int = 0, change: Change | None = None) -> Findings:
    """Return what the check finds in a list and its files, for a job's task where one is given, see Check."""
    found: Findings = _check_datalist(path, *((config.classes, config) if config else ()), change=change, size=max_length)
    return found
