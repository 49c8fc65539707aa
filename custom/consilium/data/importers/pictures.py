"""Pictures with a mask each, every set a site; and disc and cup of five fundus sets."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from consilium.core.errors import DataError
from consilium.data.importers.base import (
    NO_PATIENTS,
    PICTURE_ENDINGS,
    Found,
    Importer,
    Options,
    Reading,
    by_stem,
    check_sizes,
    child,
    files,
    folders,
    grey,
    mask_png,
    partner,
    usable,
    wrong_layout,
)

Reader = Callable[[Path, str], list[Found]]
"""Reads one set's folder as the site named."""

FUNDUS_LAYOUT = (
    "folders REFUGE (*.jpg, Disc_Cup_Masks/*.bmp), ORIGA and G1020 (Images/, Masks/), "
    "Drishti-GS1 (Images/, *_ODsegSoftmap.png, *_cupsegSoftmap.png), RIM-ONE_DL_images (partitioned_randomly/ or "
    "partitioned_by_hospital/ with training_set/ and test_set/) with RIM-ONE_DL_reference_segmentations "
    "(*-N-Disc-T.png, *-N-Cup-T.png), or some of them"
)
FEDDG_LAYOUT = "folders Domain1 to Domain4, or some of them, with train/ and test/, each with ROIs/image and ROIs/mask"
DISC_AND_CUP = {"disc": [1, 2], "cup": [2]}


def read_fundus(source: Path, options: Options) -> Reading:
    """Read the fundus sets there as label pictures of 1 (rim) and 2 (cup); see the function of each for its own encoding.

    The published splits of REFUGE, Drishti-GS1 and RIM-ONE DL stay. No set names its patients, so pictures are split elsewhere.
    """
    found = read_sets(source, FUNDUS, FUNDUS_LAYOUT)
    resplit = {"refuge", "drishti-gs1", "rim-one-dl"} if options.resplit else set()
    return Reading(found, DISC_AND_CUP, unnamed(found, {"origa", "g1020", *resplit}))


def unnamed(found: list[Found], sites: set[str]) -> list[str]:
    """Return a note for each of the sites that is there."""
    return [f"{site}: {NO_PATIENTS}" for site in sorted(sites & {one.site for one in found})]


def read_sets(source: Path, sets: dict[str, tuple[str, Reader]], expected: str) -> list[Found]:
    """Read every known set below the folder, or the folder itself if it is one."""
    named = {site: _named(source, start, site in SCATTERED) for site, (start, _) in sets.items()}
    found = [one for site, (_, read) in sets.items() for folder in named[site] for one in read(folder, site)]
    if not found:
        raise wrong_layout(source, expected)
    return found


def _named(source: Path, start: str, scattered: bool) -> list[Path]:
    """Return the one folder whose name starts so, spelled with or without hyphens; a list of none or one.

    A set that comes in several folders, `scattered`, is looked for in the source if they are there.
    """

    def fits(folder: Path) -> bool:
        return not folder.name.startswith(".") and re.sub(r"[^a-z0-9]", "", folder.name.lower()).startswith(start)

    found = [p for p in sorted(source.iterdir()) if p.is_dir() and fits(p)]
    if fits(source.resolve()):
        return [source]
    if len(found) > 1 and scattered:
        return [source]
    if len(found) > 1:
        names = ", ".join(p.name for p in found)
        raise DataError(f"{source}: expected one folder for {start}; found {names}; put them into one folder")
    return found


def folder_pair(folder: Path, pairs: list[tuple[str, str]]) -> tuple[Path, Path]:
    """Return the folders of images and masks, at any depth; those of PNG before others. Raises DataError."""
    found = [(child(one, a), child(one, b)) for one in folders(folder) for a, b in pairs]
    both = [(images, masks) for images, masks in found if images and masks]
    if not both:
        raise wrong_layout(folder, " or ".join(f"{a}/ beside {b}/" for a, b in pairs))
    return min(both, key=lambda pair: not files(pair[0], [".png"]))


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
    unknown = (values != 0) & (values != 128) & (values != 255)
    if unknown.any():
        raise DataError(f"{mask}: expected 0 (cup), 128 (rim) and 255 (background); found {values[unknown].min()}")
    return cup_from_dark(values)


def cup_from_dark(values: np.ndarray) -> np.ndarray:
    """Return labels (H, W) of grey values where the cup is dark and the background bright, cut at 50 and 200."""
    return (values <= 50).astype(np.uint8) + (values <= 200)


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


def _read_rim_one(folder: Path, site: str) -> list[Found]:
    """RIM-ONE DL: pictures in one of two published partitions, drawings of disc and cup apart from them.

    Both partitions hold the same pictures; the random one is taken where it is there, else that by hospital. Of several
    drawings of a picture (-1-, -2-) the first is taken.
    """
    parts = {one.name.lower(): one for one in folders(folder) if child(one, "training_set") and child(one, "test_set")}
    part = next((parts[name] for name in ("partitioned_randomly", "partitioned_by_hospital") if name in parts), None)
    if part is None:
        raise wrong_layout(folder, "partitioned_randomly/ or partitioned_by_hospital/ with training_set/ and test_set/")
    found = []
    drawings = _rim_one_drawings(folder)
    cups = by_stem(files(folder, ["-cup-t.png"]))
    for image in by_stem(files(part, [".png"])).values():
        disc = partner(image.stem, drawings, image, "drawing (*-1-Disc-T.png)")
        cup = partner(f"{disc.stem[: -len('Disc-T')]}Cup-T", cups, disc, "drawing")
        check_sizes(image, disc)
        check_sizes(image, cup)
        test = image.relative_to(part).parts[0].lower() == "test_set"
        label = mask_png(image.stem, _soft_mask, disc, cup)
        found.append(Found(site, image.stem, image, label, split="test" if test else None))
    return found


def _rim_one_drawings(folder: Path) -> dict[str, Path]:
    """Return the first drawing of the disc by its picture's name. Raises DataError if there are contours (*.txt) only."""
    discs = files(folder, ["-disc-t.png"])
    if not discs and files(folder, ["-disc-t.txt"]):
        raise DataError(f"{folder}: expected *-Disc-T.png; found contours (*.txt) only; draw them with the publisher's script")
    return {re.sub(r"-\d+-disc-t$", "", disc.stem, flags=re.IGNORECASE): disc for disc in reversed(discs)}


def _read_labelled(folder: Path, site: str) -> list[Found]:
    """ORIGA and G1020 in their Kaggle layout: Images/ with Masks/ (or both with _Square), pixels 1 rim and 2 cup.

    Such masks are used as they are. Pictures without a mask, and .mat annotations, are refused.
    """
    if files(folder, [".mat"]) and not any(child(one, m) for one in folders(folder) for m in ("Masks", "Masks_Square")):
        raise DataError(f"{folder}: expected Masks/*.png with pixels 1 and 2; found .mat annotations only, which are not read")
    images_folder, masks_folder = folder_pair(folder, [("Images", "Masks"), ("Images_Square", "Masks_Square")])
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


DOMAINS = {
    "domain1": "Drishti-GS",
    "domain2": "RIM-ONE r3",
    "domain3": "REFUGE's training set",
    "domain4": "REFUGE's validation set",
}


def read_feddg(source: Path, options: Options) -> Reading:
    """Read the fundus benchmark of DoFE and FedDG (Wang et al., Liu et al.): a site per domain, cut to the disc, in its split.

    Masks are dark in the cup and bright in the background, cut at 50 and 200 as the publishers' loader does, since their edges
    are smoothed. The two eyes of RIM-ONE's patients, named -L and -R, are kept together.
    Raises DataError for another layout, or a mask with a dark corner.
    """
    found = []
    for name in DOMAINS:
        domain = next((one for one in folders(source) if one.resolve().name.lower() == name), None)
        for split in ("train", "test"):
            found += _read_rois(domain, name, split) if domain else []
    if not found:
        raise wrong_layout(source, FEDDG_LAYOUT)
    there = sorted({one.site for one in found})
    notes = [f"{name}: {DOMAINS[name]}" for name in there]
    return Reading(found, DISC_AND_CUP, [", ".join(notes), f"{', '.join(there)}: {NO_PATIENTS}"])


def _read_rois(domain: Path, site: str, split: str) -> list[Found]:
    """Return the pictures of one split of a domain. Raises DataError."""
    part = child(domain, split)
    rois = child(part, "ROIs") if part else None
    if rois is None:
        raise wrong_layout(part or domain, "ROIs/image and ROIs/mask" if part else "train/ROIs and test/ROIs")
    images_folder, masks_folder = folder_pair(rois, [("image", "mask")])
    masks = by_stem(files(masks_folder, PICTURE_ENDINGS))
    found = []
    for image in files(images_folder, PICTURE_ENDINGS):
        mask = partner(image.stem, masks, image, "mask")
        check_sizes(image, mask)
        label = mask_png(f"{split}-{image.stem}", _feddg_mask, mask)
        group = re.sub(r"-[LR]$", "", image.stem)
        found.append(Found(site, group, image, label, split="test" if split == "test" else None))
    return found


def _feddg_mask(mask: Path) -> np.ndarray:
    values = grey(mask)
    if values[[0, 0, -1, -1], [0, -1, 0, -1]].min() <= 200:
        raise DataError(f"{mask}: expected 255 (background) in the corners, 128 (rim) and 0 (cup); found a dark corner")
    return cup_from_dark(values)


FUNDUS: dict[str, tuple[str, Reader]] = {
    "refuge": ("refuge", _read_refuge),
    "origa": ("origa", _read_labelled),
    "g1020": ("g1020", _read_labelled),
    "drishti-gs1": ("drishti", _read_drishti),
    "rim-one-dl": ("rimone", _read_rim_one),
}
"""Sites, how their folders' names start, and what reads them."""
SCATTERED = {"rim-one-dl"}
"""Sets that come as several folders side by side."""
SETS = {"fundus": Importer(FUNDUS_LAYOUT, read_fundus), "fundus-feddg": Importer(FEDDG_LAYOUT, read_feddg)}
