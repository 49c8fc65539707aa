"""A look at samples before training: headers, grids and labels, so that it can begin while pictures are still being read."""

import logging
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from consilium.core.errors import DataError, UnfitError
from consilium.data import pictures, slides, volumes
from consilium.data.datalist import DataList, Item
from consilium.data.images import (
    Classes,
    check_annotated,
    check_pair,
    check_values,
    classes_of,
    level_of,
    plane_of,
    read_image,
    read_labels,
)
from consilium.data.loading import NOTHING_LEFT
from consilium.data.settings import DEFAULTS, PictureSettings

if TYPE_CHECKING:
    from consilium.data.store import Store

Check = Callable[[Item], None]
Place = tuple[str, int]
Lost = tuple[str, DataError]
"""A sample that cannot be read: its split, and why."""
NAMED = 10
"""Samples left out that the log names."""
_log = logging.getLogger(__name__)


def look_at_picture(item: Item, settings: PictureSettings = DEFAULTS) -> tuple[int, int]:
    """Return an image's (rows, columns) by its header. Raises DataError for one that is none, too large, or lacks the plane."""
    if volumes.is_volume(item.image):
        header = volumes.header(item.image)
        nothing = np.broadcast_to(np.zeros((), bool), header.grid.shape)
        rows, columns = header.grid.cut(nothing, item.axis, plane_of(item, item.image, header)).shape
        return rows, columns
    if item.tile is not None:
        slides.shape(item.image, level_of(settings))
        return item.tile[3], item.tile[2]
    if slides.is_slide(item.image):
        rows, columns = slides.whole(item.image).shape[:2]
        return rows, columns
    return pictures.size(item.image)


def seen_shape(item: Item, settings: PictureSettings = DEFAULTS) -> tuple[int, int]:
    """Return the (rows, columns) of what a job sees of an item: its crop, or all of it. Raises DataError."""
    shape = look_at_picture(item, settings)
    return shape if item.crop is None else item.crop.shape(*shape)


def look_at_sample(item: Item, classes: Classes, settings: PictureSettings = DEFAULTS) -> None:
    """Raise DataError for what images.read_sample would, but for voxels: the image is not decoded, its labels are."""
    check_annotated(item, classes)
    shape, labels = look_at_picture(item, settings), read_labels(item, settings)
    if labels.shape == shape[::-1] != shape:  # a PNG may say behind its pixels that it is turned
        shape = read_image(item, settings).shape[:2]
    check_pair(item, shape, labels)
    check_values(item, labels, classes_of(item, classes))


def faults(data: DataList, check: Check, settings: str, store: "Store | None") -> Iterator[tuple[Place, DataError]]:
    """Yield where a check fails and why, in the list's order but for volumes, whose planes come together.

    In a `quiet` list it is no failure that a sample does not fit the job. What has passed before, by the store's word, is not
    looked at again. Threads share the work, a volume is one thread's.
    """
    groups: dict[object, list[tuple[Place, Item]]] = {}
    for split, items in data.splits.items():
        for index, item in enumerate(items):
            groups.setdefault((split, index) if item.slice is None else item.image, []).append(((split, index), item))

    def look(group: list[tuple[Place, Item]]) -> list[tuple[Place, DataError]]:
        todo = [(place, item) for place, item in group if not (store and store.fingerprints.passed(item, settings))]
        if not todo or todo[0][1].slice is None:
            return _looked(todo, check, settings, store, data.loading.quiet)
        with volumes.held():
            return _looked(todo, check, settings, store, data.loading.quiet)

    if not data.loading.workers:
        for group in groups.values():
            yield from look(group)
        return
    with ThreadPoolExecutor(data.loading.workers, "consilium-look") as pool:
        for found in pool.map(look, groups.values()):  # what is not begun when the caller has seen enough is not done
            yield from found


def _looked(
    group: list[tuple[Place, Item]], check: Check, settings: str, store: "Store | None", quiet: bool
) -> list[tuple[Place, DataError]]:
    found = []
    for place, item in group:
        try:
            check(item)
        except DataError as error:
            if not (quiet and isinstance(error, UnfitError)):
                found.append((place, error))
        else:
            if store:
                store.fingerprints.note_passed(item, settings)
    return found


def left_of(data: DataList, lost: Collection[Lost]) -> DataList:
    """Return a list that the samples `lost` are out of already: they are counted, and the first named in the site's own log.

    Raises DataError where they were all that there was to train on: the share they lie on may be back at the next look.
    """
    for _, error in list(lost)[:NAMED]:
        _log.warning(f"left out: {error}")
    if len(lost) > NAMED:
        _log.warning(f"{data.path}: {len(lost):,} samples are left out; `consilium data check` names all")
    if not data.splits["training"] and any(split == "training" for split, _ in lost):
        raise DataError(NOTHING_LEFT)
    return replace(data, skipped=data.skipped + len(lost))


def without_faults(data: DataList, check: Check, settings: str, store: "Store | None") -> DataList:
    """Return the list without samples that fail the check, see `left_of`. Raises DataError."""
    bad = dict(faults(data, check, settings, store))
    kept = {split: tuple(i for n, i in enumerate(items) if (split, n) not in bad) for split, items in data.splits.items()}
    return left_of(replace(data, splits=kept), [(split, error) for (split, _), error in bad.items()])
