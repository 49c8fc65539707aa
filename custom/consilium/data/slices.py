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
    thin, seed, wanted = split == "training", seed_for(index, "empty"), settings.tiles
    if not volumes.is_volume(item.image):
        if wanted is None or item.tile is not None or not slides.is_cut_into_tiles(item.image, settings):
            yield item
            return
        if thin and wanted.empty != "keep" and not isinstance(item.label, Path):
            raise UnfitError(f"{item.image}: has no mask, so task.tiles.empty cannot tell its tiles; write keep")
        for number, tile in enumerate(slides.tiles(slides.shape(item.image, wanted.level), wanted)):
            one = replace(item, study=item.study or path_pseudonym(item.image), tile=tile)
            if (
                not thin
                or wanted.empty == "keep"
                or _keeps_empty(wanted, seed, number)
                or read_labels(one, settings).present() - {0}
            ):
                yield one
        return
    header = volumes.header(item.image, item.affine)
    known = replace(
        item,
        axis=item.plane_axis(settings.slices.axis),
        patient=item.patient or pseudonym(header.patient),
        study=item.study or pseudonym(header.study) or path_pseudonym(item.image),
    )
    if item.slice is not None or header.grid.plane_count(known.axis) == 1:
        yield known
    else:
        yield from _expand_volume(known, header, settings, thin, seed)


def _expand_volume(
    item: Item, header: volumes.VolumeHeader, settings: PictureSettings, thin: bool, seed: int
) -> Iterator[Item]:
    if isinstance(item.label, Path) and not volumes.is_volume(item.label):
        raise UnfitError(
            f"{item.label}: is one picture, and {item.image.name} has several planes; give a mask of equal grid",
            "mask of another size",
        )
    slices, count = settings.slices, header.grid.plane_count(item.axis)
    labelled = set(range(count))
    if thin and slices.empty != "keep":  # planes that show any label
        if not isinstance(item.label, Path):
            raise UnfitError(
                f"{item.image}: has no volume as its mask, so task.slices.empty cannot tell its planes; write keep"
            )
        found = volumes.labels(item.label, header, settings.resample_masks)
        background = {0, *(value for value, classes in item.label_map or () if not classes)}
        marked = found.where(found.present() - background)
        labelled = {n for n in range(count) if header.grid.cut(marked, item.axis, n).any()}
    for number in range(0, count, slices.every if thin else 1):
        if number in labelled or _keeps_empty(slices, seed, number):
            yield replace(item, slice=number)


def _keeps_empty(parts: SlicesConfig | TilesConfig, seed: int, number: int) -> bool:
    share = parts.empty if isinstance(parts.empty, float) else 0.0
    return seed_for(seed, "plane", number) % _UNIT < share * _UNIT
