"""Decoded samples, kept in memory as bytes."""

from collections.abc import Callable

import torch

from consilium.data.datalist import DataList, Item
from consilium.data.images import Sample

CACHE_BYTES = 2 * 1024**3
"""Samples are kept up to here; beyond it they are read again."""


class SampleCache:
    """Call it with a split and an index. All samples are opened once at the start, so that bad data stops before any training.

    `read` must return values that are whole numbers of 0..255 up to rounding. Raises what `read` raises.
    """

    def __init__(self, data: DataList, read: Callable[[Item], Sample]) -> None:
        self._data, self._read, self._room = data, read, CACHE_BYTES
        self._kept: dict[tuple[str, int], Sample] = {}
        for split, items in data.splits.items():
            for index in range(len(items)):
                self(split, index)

    def __call__(self, split: str, index: int) -> Sample:
        """Return a decoded sample as float32."""
        if (found := self._kept.get((split, index))) is None:
            sample = self._read(self._data.splits[split][index])
            found = {key: tensor.round().to(torch.uint8) for key, tensor in sample.items()}
            self._room -= sum(tensor.numel() for tensor in found.values())
            if self._room > 0:
                self._kept[split, index] = found
        return {key: tensor.float() for key, tensor in found.items()}
