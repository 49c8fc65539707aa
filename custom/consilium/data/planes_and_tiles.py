"""Expansion of a data list: volumes into planes, large pictures into tiles, with patients from identifiers in the files."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from consilium.core.errors import DataError, UnfitError
from consilium.core.seeding import seed_for
from consilium.data import slides, volumes
from consilium.data.datalist import DataList, Item, Lost, with_lost_recorded
from consilium.data.images import read_labels
from consilium.data.patients import path_pseudonym, pseudonym
from consilium.data.settings import DEFAULTS, PictureSettings, SlicesConfig, TilesConfig

_UNIT = 2**32


def expand(data: DataList, settings: PictureSettings = DEFAULTS) -> DataList:
    """Return the list with volumes replaced by their planes and large pictures by their tiles, and patients read from files.

    Pictures are cut only if the settings have `tiles`. Only headers are read, and the masks of training samples if planes or
    tiles without labels are to be thinned out; which of these stay depends only on their positions. Raises DataError. With the
    list's `skip`, unreadable samples are left out and counted instead. With `ignore_unfit`, a sample that cannot be cut as the
    settings ask stays one sample.
    """
    lost: list[Lost] = []
    splits: dict[str, list[Item]] = {split: [] for split in data.splits}
    for split, found in splits.items():
        for index, item in enumerate(data.splits[split]):
            try:
                found += list(planes_or_tiles(item, settings, split, index))
            except DataError as error:
                if data.loading.ignore_unfit and isinstance(error, UnfitError):
                    found.append(item)
                elif data.loading.skip:
                    lost.append((split, error))
                else:
                    raise
    return with_lost_recorded(replace(data, splits={split: tuple(found) for split, found in splits.items()}), lost)


def planes_or_tiles(item: Item, settings: PictureSettings, split: str = "test", index: int = 0) -> Iterator[Item]:
    """Yield a picture, or its tiles, or a volume's planes. If the entry names one plane, yield only that. Raises DataError.

    In the training split, planes and tiles are thinned out as the settings say; `index` is then the seed.
    """
    wanted: SlicesConfig | TilesConfig | None = settings.tiles
    if volumes.is_volume(item.image):
        wanted, header = settings.slices, volumes.header(item.image, item.affine)
        item = replace(
            item,
            axis=item.plane_axis(settings.slices.axis),
            patient=item.patient or pseudonym(header.patient),
            study=item.study or pseudonym(header.study) or path_pseudonym(item.image),
        )
        count = header.grid.plane_count(item.axis)
        if item.slice is not None or count == 1:
            yield item
            return
        if isinstance(item.label, Path) and not volumes.is_volume(item.label):
            raise UnfitError(
                f"{item.label}: is one picture, and {item.image.name} has several planes; give a mask of equal grid",
                "mask of another size",
            )
        parts = {
            number: replace(item, slice=number)
            for number in range(0, count, settings.slices.every if split == "training" else 1)
        }
    elif settings.tiles is not None and item.tile is None and slides.is_cut_into_tiles(item.image, settings):
        item = replace(item, study=item.study or path_pseudonym(item.image))
        tiles = slides.tiles(slides.shape(item.image, settings.tiles.level), settings.tiles)
        parts = {number: replace(item, tile=tile) for number, tile in enumerate(tiles)}
    else:
        yield item
        return
    if split != "training" or wanted is None or wanted.empty == "keep":
        yield from parts.values()
        return
    if not isinstance(item.label, Path):
        what = "slices.empty cannot tell its planes" if wanted is settings.slices else "tiles.empty cannot tell its tiles"
        raise UnfitError(f"{item.image}: has no mask, so task.{what}; write keep")
    share = wanted.empty if isinstance(wanted.empty, float) else 0.0
    unmapped = {value for value, classes in item.label_map or () if not classes}
    background = {0} if wanted is settings.tiles else {0, *unmapped}  # a tile counts as labelled if any value is not 0
    for number, part in parts.items():
        if (seed_for(seed_for(index, "empty"), "plane", number) % _UNIT < share * _UNIT) or read_labels(
            part, settings
        ).present() - background:
            yield part
