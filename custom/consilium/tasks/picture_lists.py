"""Functions with which tasks on pictures read, prepare and check data lists."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from consilium.core.lazy import lazy
from consilium.data.check_report import Findings
from consilium.data.datalist import DataList, Lost, read_datalist
from consilium.tasks.registry import Change

_check_datalist = lazy("consilium.data.check:check_datalist")
_expand = lazy("consilium.data.planes_and_tiles:expand")


def usable_reader(classes: bool) -> Callable[[Path, list[Lost]], DataList]:
    """Return a function that reads the usable entries of a data list and adds (split, error) of the others to `lost`."""
    return lambda path, lost: read_datalist(path, classes, lost)


def expand_to_slices_and_tiles(config: Any, data: DataList) -> DataList:
    """Return a data list with volumes expanded to planes and large pictures to tiles. Raises DataError."""
    found: DataList = _expand(data, config)
    return found


def check(
    path: Path, config: Any = None, tokenizer: Any = None, input_size: int = 0, prepare_list: Change | None = None
) -> Findings:
    """Return the findings of the check of a data list and its files, for a job's task if `config` is given. See Check."""
    found: Findings = _check_datalist(
        path, *((config.classes, config) if config else ()), prepare_list=prepare_list, size=input_size
    )
    return found
