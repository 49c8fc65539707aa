"""Every file of a list once, a few at a time, however many samples come of each."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from consilium.data.datalist import Item

T = TypeVar("T")
AT_ONCE = 4
"""Files read side by side: each picture may take some hundred megabytes."""


def by_file(items: Sequence[Item], look: Callable[[list[Item]], list[T]]) -> list[T]:
    """Return what `look` says of each item; it is given all items of one image's file at once, in threads."""
    files: dict[Path, list[int]] = {}
    for index, item in enumerate(items):
        files.setdefault(item.image, []).append(index)
    found: dict[int, T] = {}
    with ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as pool:
        looks = pool.map(lambda indices: look([items[i] for i in indices]), files.values())
        for indices, ones in zip(files.values(), looks, strict=True):
            found |= zip(indices, ones, strict=True)
    return [found[index] for index in range(len(items))]
