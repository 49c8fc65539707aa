"""A hospital's own pictures, a folder per site. Labels are masks beside the pictures, a folder per class, or a table."""

import shlex
from collections.abc import Iterable
from pathlib import Path

from consilium.core.errors import DataError
from consilium.data.file_kinds import PICTURES
from consilium.data.folders import has_folders, lone_masks, read_folders, split_of
from consilium.data.importers.base import (
    Importer,
    ImportResult,
    Options,
    SourceSample,
    files,
    wrong_layout,
)
from consilium.data.importers.labels import labelled
from consilium.data.importers.table import Table, find_table
from consilium.data.pairs import Names, Pairs, Pattern, find_pairs, holds_pairs, kind_of, unpaired, words

LAYOUT = (
    "a folder per site: images/ and masks/, or other names such as a.png and a_mask.png, a mask of one channel with 0 outside; "
    "a folder per class; or a CSV file as `csv` reads"
)
PATIENTS = "; name them as `patient` in the lists and cut again by `data split`"
_SPLITS = {"tr": "training", "ts": "test"}
"""Words of nnU-Net's and the Decathlon's folders: imagesTr."""
Site = tuple[list[SourceSample], list[str]]
"""A site's samples, and notes."""


def read_own(source: Path, options: Options) -> ImportResult:
    """Read a folder of sites, or the folder of one site. Classes follow from the values in masks, or from names.

    Raises DataError for another layout, a picture without a mask, sizes that differ, and masks that are no label pictures.
    """
    below = sorted(one for one in source.iterdir() if one.is_dir() and not one.name.startswith("."))
    roles = {kind_of(one.name) for one in below} | {"image" for one in source.iterdir() if one.name.lower().endswith(PICTURES)}
    sites = {} if roles >= {"image", "mask"} else {one.name: site for one in below if (site := _site(one, options))}
    notes: list[str] = []
    if not sites or all(map(_named_split, sites)):
        whole = _site(source, options)
        if whole is None:
            raise wrong_layout(source, LAYOUT)
        sites = {source.resolve().name: whole}
    else:
        left = [one.name for one in below if one.name not in sites]
        why = "left out, it has neither masks nor classes nor a table that `consilium data import csv` reads"
        notes += [f"{name}: {why}" for name in left]
        if table := find_table(source):
            command = f"consilium data import csv {shlex.quote(str(table.path))} DEST --add"
            notes.append(f"{table.path.name}: not read; `{command}` adds it")
    samples = [one for found, _ in sites.values() for one in found]
    told = [f"{name}: {note}" for name, (_, own) in sites.items() for note in own]
    return labelled(source, samples, [*told, *notes], PATIENTS)


def _site(folder: Path, options: Options) -> Site | None:
    """Return what a site's folder holds: of a table with masks, by names, of a table with classes, a folder per class."""
    table, pictures = find_table(folder), files(folder, PICTURES)
    if table is not None and table.has_masks:
        return _of_table(table, folder)
    pairs, classes = find_pairs(folder, pictures, options.mask_patterns), has_folders(folder)
    whole = pairs is not None and not pairs.alone and not pairs.unused
    if pairs is not None and (whole or not classes or holds_pairs(folder, pictures)) and (pairs.found or table is None):
        return _of_pairs(folder, pairs, options.mask_patterns)
    if table is not None:
        return _of_table(table, folder)
    if what := lone_masks(folder):
        raise DataError(f"{folder}: holds {what}")
    return _of_classes(folder) if classes else None


def _of_table(table: Table, folder: Path) -> Site:
    """Return a site's pictures by its table; lines that name no site are of the folder's."""
    return table.samples(folder.resolve().name), [f"{table.path.name} was read", *table.notes]


def _of_classes(folder: Path) -> Site:
    found = list(read_folders(folder))
    split = {split for split, _, _ in found} != {"training"}
    name = folder.resolve().name
    return [
        SourceSample(name, str(picture.relative_to(folder)), picture, label, split=part if split else None)
        for part, picture, label in found
    ], []


def _of_pairs(folder: Path, pairs: Pairs, asked: Iterable[Pattern]) -> Site:
    """Return a site's pictures with their masks. Raises DataError where pictures lack one, and where there are two for each."""
    if pairs.others:
        both = " and ".join(f"'{one}'" for one in (pairs.pattern, *pairs.others))
        what = f"every picture has masks by {both}, and one is read"
        raise DataError(f"{folder}: {what}; choose by --mask-pattern '{pairs.pattern}'")
    with_masks = {image.path.parent for image, _ in pairs.found}
    left_out = pairs.pattern in asked or not any(one.path.parent in with_masks for one in pairs.alone)
    if not pairs.found or (pairs.alone and not left_out):
        raise DataError(unpaired(pairs, folder))
    if 2 * len(pairs.unused) >= len(pairs.found) and pairs.pattern not in asked:
        places = sorted({str(mask.parent.relative_to(folder)) for mask in (pairs.found[0][1], pairs.unused[0])})
        choice = " or ".join(f"--mask-pattern '{place}/{{}}'" for place in places)
        choice = choice if len(places) == 2 else f"--mask-pattern '{pairs.pattern}' leaves them out"
        other = pairs.unused[0].relative_to(folder)
        what = f"'{pairs.pattern}' finds {len(pairs.found)} masks, and not {len(pairs.unused)} others, the first {other}"
        raise DataError(f"{folder}: {what}; choose: {choice}")
    notes = []
    if pairs.pattern != Pattern():
        image, mask = pairs.found[0]
        notes.append(f"masks by --mask-pattern '{pairs.pattern}', as {mask.name} of {image.path.name}")
    for what, some in (
        ("pictures without a mask left out", [one.path for one in pairs.alone]),
        ("masks not used", pairs.unused),
    ):
        if some:
            notes.append(f"{len(some)} {what}, the first {some[0].relative_to(folder)}")
    splits = [_split(image) for image, _ in pairs.found]
    published = None not in splits and len(set(splits)) > 1
    return [
        SourceSample(folder.resolve().name, image.short, image.path, mask, split=split if published else None)
        for (image, mask), split in zip(pairs.found, splits, strict=True)
    ], notes


def _split(image: Names) -> str | None:
    """Return the split that a folder of the picture is called after."""
    parts = image.full.split("/")[:-1]
    return next((split for part in parts for word in (part, *words(part)) if (split := _named_split(word))), None)


def _named_split(name: str) -> str | None:
    return split_of(name) or _SPLITS.get(name.lower())


SETS = {"own": Importer(LAYOUT, read_own, has_patterns=True)}
