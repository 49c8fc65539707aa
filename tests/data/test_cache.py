"""Decoded samples: opened once at the start, kept while there is room, equal either way."""

from pathlib import Path

import pytest
import torch

from consilium.core.errors import DataError
from consilium.data import cache
from consilium.data.cache import SampleCache
from consilium.data.datalist import DataList, Item
from consilium.data.images import Sample
from tests.conftest import Patch, refused


def make(count: int, asked: list[str]) -> SampleCache:
    def read(item: Item) -> Sample:
        asked.append(item.image.name)
        if item.image.name == "bad":
            raise DataError("bad")
        return {"image": torch.full((4,), float(item.image.name) + 0.2)}

    items = tuple(Item(Path(str(i) if i < 9 else "bad"), None) for i in range(count))
    return SampleCache(DataList(Path("d.json"), {"training": items, "validation": (), "test": ()}), read)


@pytest.mark.parametrize(("room", "reads"), [(1000, 3), (9, 4)])
def test_samples_are_read_again_only_where_there_was_no_room(room: int, reads: int, monkeypatch: Patch) -> None:
    monkeypatch.setattr(cache, "CACHE_BYTES", room)
    asked: list[str] = []
    samples = make(3, asked)
    assert asked == ["0", "1", "2"]
    assert [float(samples("training", i)["image"][0]) for i in range(3)] == [0, 1, 2]
    assert len(asked) == reads
    samples("training", 0)["image"].zero_().add_(7)
    assert samples("training", 1)["image"].dtype == torch.float32
    assert float(samples("training", 0)["image"][0]) == 0


def test_a_bad_sample_stops_at_the_start() -> None:
    refused("bad", make, 10, [])
