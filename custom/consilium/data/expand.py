"""Volumes become their planes, and files tell whose they are: what a data list leaves to the files themselves."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from consilium.data import volumes
from consilium.data.datalist import DataList, Item, pseudonym
from consilium.data.settings import DEFAULTS, PictureSettings, SlicesConfig
from consilium.errors import DataError
from consilium.seeding import seed_for

_UNIT = 2**32


def expand(data: DataList, settings: PictureSettings = DEFAULTS) -> DataList:
    """Return the list with a volume of several planes replaced by its planes, and patients read from the files.

    Only headers are read, and the masks of training volumes if planes without labels are to be left out; which of these
    stay depends on nothing but their place. Raises DataError.
    """
    return DataList(data.path, {split: tuple(_expanded(items, split, settings)) for split, items in data.splits.items()})


def _expanded(items: Iterable[Item], split: str, settings: PictureSettings) -> Iterator[Item]:
    for index, item in enumerate(items):
        if not volumes.is_volume(item.image):
            yield item
            continue
        header = volumes.header(item.image)
        known = replace(
            item,
            patient=item.patient or pseudonym(header.patient),
            study=item.study or pseudonym(header.study or str(item.image)),
        )
        if item.slice is not None or header.grid.planes(settings.slices.axis) == 1:
            yield known
        else:
            yield from _planes(known, header, settings, split == "training", seed_for(index, "empty"))


def _planes(item: Item, header: volumes.Header, settings: PictureSettings, thin: bool, seed: int) -> Iterator[Item]:
    slices, axis = settings.slices, settings.slices.axis
    count = header.grid.planes(axis)
    labelled = _labelled(item, header, settings) if thin and slices.empty != "keep" else set(range(count))
    for number in range(0, count, slices.every if thin else 1):
        if number in labelled or _kept(slices, seed, number):
            yield replace(item, slice=number, axis=axis)


def _kept(slices: SlicesConfig, seed: int, number: int) -> bool:
    share = slices.empty if isinstance(slices.empty, float) else 0.0
    return seed_for(seed, "plane", number) % _UNIT < share * _UNIT


def _labelled(item: Item, header: volumes.Header, settings: PictureSettings) -> set[int]:
    """Return the planes that show any label."""
    if not isinstance(item.label, Path) or not volumes.is_volume(item.label):
        raise DataError(f"{item.image}: has no volume as its mask, so task.slices.empty cannot tell its planes; write keep")
    found = volumes.labels(item.label, header, settings.resample_masks)
    axis = settings.slices.axis
    background = {0, *(value for value, classes in item.label_map or () if not classes)}
    marked = found.where(found.present() - background)
    return {n for n in range(header.grid.planes(axis)) if header.grid.cut(marked, axis, n).any()}
