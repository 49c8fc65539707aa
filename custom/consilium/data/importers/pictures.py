"""Pictures with a mask each: polyps of four endoscopy sets, disc and cup of four fundus sets. Every set is a site."""

import csv
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from consilium.data.importers.base import (
    NO_PATIENTS,
    PICTURE_ENDINGS,
    Found,
    Importer,
    Made,
    Options,
    Reading,
    by_stem,
    check_sizes,
    child,
    files,
    folders,
    grey,
    mask_png,
    numeric,
    partner,
    usable,
    wrong_layout,
)
from consilium.errors import DataError

Reader = Callable[[Path, str], list[Found]]
"""Reads one set's folder as the site named."""

POLYP_LAYOUT = (
    "folders Kvasir-SEG (images/, masks/), CVC-ClinicDB (Original/, Ground Truth/), CVC-ColonDB (images/, masks/), "
    "ETIS-LaribPolypDB (images/, masks/), or some of them"
)
FUNDUS_LAYOUT = (
    "folders REFUGE (*.jpg, Disc_Cup_Masks/*.bmp), ORIGA and G1020 (Images/, Masks/), "
    "Drishti-GS1 (Images/, *_ODsegSoftmap.png, *_cupsegSoftmap.png), or some of them"
)
RUNS = 10


def read_polyp(source: Path, options: Options) -> Reading:
    """Read the polyp sets there; masks of 0 and 255 stay, others (JPEG above all) are cut at 128.

    None of the sets has a published split. Kvasir-SEG names no patients: pictures are split. The others are frames of videos,
    neighbours in number: frames go by video where CVC-ClinicDB's metadata.csv (frame_id, sequence_id) is there, else by
    ten runs of consecutive frames, so that at most the ends of a run share a video with another split.
    """
    found = _read_sets(source, POLYPS, POLYP_LAYOUT)
    sites = sorted({one.site for one in found if one.group.startswith("run-")})
    notes = [f"{site}: names no videos, so runs of consecutive frames are kept together" for site in sites]
    return Reading(found, {"polyp": [255]}, notes + _unnamed(found, {"kvasir-seg"}))


def read_fundus(source: Path, options: Options) -> Reading:
    """Read the fundus sets there as label pictures of 1 (rim) and 2 (cup); see the function of each for its own encoding.

    REFUGE's and Drishti-GS1's published splits stay. No set names its patients, so pictures are split elsewhere.
    """
    found = _read_sets(source, FUNDUS, FUNDUS_LAYOUT)
    return Reading(found, {"disc": [1, 2], "cup": [2]}, _unnamed(found, {"origa", "g1020"}))


def _unnamed(found: list[Found], sites: set[str]) -> list[str]:
    """Return a note for each of the sites that is there."""
    return [f"{site}: {NO_PATIENTS}" for site in sorted(sites & {one.site for one in found})]


def _read_sets(source: Path, sets: dict[str, tuple[str, Reader]], expected: str) -> list[Found]:
    """Read every known set below the folder, or the folder itself if it is one."""
    named = {site: _named(source, start) for site, (start, _) in sets.items()}
    found = [one for site, (_, read) in sets.items() for folder in named[site] for one in read(folder, site)]
    if not found:
        raise wrong_layout(source, expected)
    return found


def _named(source: Path, start: str) -> list[Path]:
    """Return the one folder whose name starts so, spelled with or without hyphens; a list of none or one."""

    def fits(folder: Path) -> bool:
        return re.sub(r"[^a-z0-9]", "", folder.name.lower()).startswith(start)

    found = [p for p in sorted(source.iterdir()) if p.is_dir() and fits(p)]
    if fits(source.resolve()):
        return [source]
    if len(found) > 1:
        names = ", ".join(p.name for p in found)
        raise DataError(f"{source}: expected one folder for {start}; found {names}; put them into one folder")
    return found


def _pair(folder: Path, pairs: list[tuple[str, str]]) -> tuple[Path, Path]:
    """Return the folders of images and masks, at any depth; those of PNG before others. Raises DataError."""
    found = [(child(one, a), child(one, b)) for one in folders(folder) for a, b in pairs]
    both = [(images, masks) for images, masks in found if images and masks]
    if not both:
        raise wrong_layout(folder, " or ".join(f"{a}/ beside {b}/" for a, b in pairs))
    return min(both, key=lambda pair: not files(pair[0], [".png"]))


def _read_polyps(frames: bool, pairs: list[tuple[str, str]], folder: Path, site: str) -> list[Found]:
    images_folder, masks_folder = _pair(folder, pairs)
    images = sorted(files(images_folder, PICTURE_ENDINGS), key=numeric)
    if not images:
        raise wrong_layout(images_folder, "pictures")
    masks = by_stem(files(masks_folder, PICTURE_ENDINGS))
    sequences = _sequences(folder) if frames else {}
    found = []
    for index, image in enumerate(images):
        group = sequences.get(str(numeric(image)[0]), f"run-{index * RUNS // len(images)}") if frames else image.stem
        found.append(Found(site, group, image, _polyp_mask(image, partner(image.stem, masks, image, "mask"))))
    return found


def _sequences(folder: Path) -> dict[str, str]:
    """Return the video of every frame from a metadata.csv, empty without one."""
    for path in files(folder, ["metadata.csv"]):
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
        if rows and {"frame_id", "sequence_id"} <= rows[0].keys():
            return {row["frame_id"].strip(): f"sequence-{row['sequence_id'].strip()}" for row in rows}
    return {}


def _polyp_mask(image: Path, mask: Path) -> Path | Made:
    check_sizes(image, mask)
    return mask if usable(mask, (0, 255)) else mask_png(mask.stem, _threshold, mask)


def _threshold(mask: Path) -> np.ndarray:
    return np.where(grey(mask) >= 128, 255, 0)


def _read_refuge(folder: Path, site: str) -> list[Found]:
    """REFUGE: *.jpg with a *.bmp of the same name, 0 cup, 128 rim, 255 background.

    Pictures named g* and n* are the publisher's training set, V* its validation and T* its test set. Folders of drawings
    (Disc_Cup_Fovea_Illustration) are passed over.
    """
    masks = files(folder, [".bmp"])
    if not masks:
        raise wrong_layout(folder, "Disc_Cup_Masks/ with *.bmp")
    pictures = (p for p in files(folder, [".jpg", ".jpeg"]) if "illustration" not in str(p.relative_to(folder)).lower())
    images = by_stem(pictures)
    found = []
    for mask in by_stem(masks).values():
        image = partner(mask.stem, images, mask, "picture (*.jpg)")
        check_sizes(image, mask)
        split = {"V": "validation", "T": "test"}.get(mask.stem[0])
        found.append(Found(site, mask.stem, image, mask_png(mask.stem, _refuge_mask, mask), split=split))
    return found


def _refuge_mask(mask: Path) -> np.ndarray:
    values = grey(mask)
    if unknown := set(np.unique(values).tolist()) - {0, 128, 255}:
        raise DataError(f"{mask}: expected 0 (cup), 128 (rim) and 255 (background); found {min(unknown)}")
    return np.select([values == 0, values == 128], [2, 1], 0)


def _read_drishti(folder: Path, site: str) -> list[Found]:
    """Drishti-GS1: soft maps of disc and cup, 0 to 255 by how many of four experts agree; half of them is enough.

    Pictures lie in folders named Images; what lies below a folder named Test is the publisher's test set.
    """
    discs = files(folder, ["_odsegsoftmap.png"])
    if not discs:
        raise wrong_layout(folder, "*_ODsegSoftmap.png beside *_cupsegSoftmap.png")
    images = by_stem(p for p in files(folder, [".png"]) if "images" in [part.lower() for part in p.relative_to(folder).parts])
    found = []
    for disc in discs:
        stem = disc.name[: -len("_ODsegSoftmap.png")]
        image, cup = partner(stem, images, disc, "picture"), disc.with_name(f"{stem}_cupsegSoftmap.png")
        if not cup.is_file():
            raise DataError(f"{disc}: expected {cup.name} beside it; found none; complete the set")
        check_sizes(image, disc)
        check_sizes(image, cup)
        test = any(part.lower().startswith("test") for part in disc.relative_to(folder).parts)
        label = mask_png(stem, _soft_mask, disc, cup)
        found.append(Found(site, stem, image, label, split="test" if test else None))
    return found


def _soft_mask(disc: Path, cup: Path) -> np.ndarray:
    return np.select([grey(cup) >= 128, grey(disc) >= 128], [2, 1], 0)


def _read_labelled(folder: Path, site: str) -> list[Found]:
    """ORIGA and G1020 in their Kaggle layout: Images/ with Masks/ (or both with _Square), pixels 1 rim and 2 cup.

    Such masks are used as they are. Pictures without a mask, and .mat annotations, are refused.
    """
    if files(folder, [".mat"]) and not any(child(one, m) for one in folders(folder) for m in ("Masks", "Masks_Square")):
        raise DataError(f"{folder}: expected Masks/*.png with pixels 1 and 2; found .mat annotations only, which are not read")
    images_folder, masks_folder = _pair(folder, [("Images", "Masks"), ("Images_Square", "Masks_Square")])
    masks = by_stem(files(masks_folder, [".png", ".bmp", ".tif"]))
    found = []
    for image in files(images_folder, PICTURE_ENDINGS):
        mask = partner(image.stem, masks, image, "mask")
        check_sizes(image, mask)
        if not usable(mask, (0, 1, 2)):
            raise DataError(f"{mask}: expected one channel of 0, 1 (rim) and 2 (cup); found other values or colours")
        found.append(Found(site, image.stem, image, mask))
    if not found:
        raise wrong_layout(images_folder, "pictures")
    return found


PLAIN = [("images", "masks")]
POLYPS: dict[str, tuple[str, Reader]] = {
    "kvasir-seg": ("kvasirseg", partial(_read_polyps, False, PLAIN)),
    "cvc-clinicdb": ("cvcclinic", partial(_read_polyps, True, [("Original", "Ground Truth")])),
    "cvc-colondb": ("cvccolon", partial(_read_polyps, True, PLAIN)),
    "etis-laribpolypdb": ("etis", partial(_read_polyps, True, PLAIN)),
}
"""Sites, how their folders' names start, and what reads them."""
FUNDUS: dict[str, tuple[str, Reader]] = {
    "refuge": ("refuge", _read_refuge),
    "origa": ("origa", _read_labelled),
    "g1020": ("g1020", _read_labelled),
    "drishti-gs1": ("drishti", _read_drishti),
}
"""Like POLYPS."""
SETS = {"polyp": Importer(POLYP_LAYOUT, read_polyp), "fundus": Importer(FUNDUS_LAYOUT, read_fundus)}
