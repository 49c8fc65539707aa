"""Polyps of four endoscopy sets, as their publishers name them, and as the benchmark of PraNet does."""

import csv
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
from consilium.data.importers.pictures import Reader, folder_pair, read_sets, unnamed

POLYP_LAYOUT = (
    "folders Kvasir-SEG (images/, masks/), CVC-ClinicDB (Original/, Ground Truth/), CVC-ColonDB (images/, masks/), "
    "ETIS-LaribPolypDB (ETIS-LaribPolypDB/N.tif, Ground Truth/pN.tif; or images/, masks/), or some of them"
)
PRANET_LAYOUT = (
    "TrainDataset/{image,mask}/*.png and TestDataset/SET/{images,masks}/*.png, SET one of CVC-300, CVC-ClinicDB, "
    "CVC-ColonDB, ETIS-LaribPolypDB and Kvasir"
)
RUNS = 10
Split = tuple[Path, Path, str | None]
"""A picture, its mask and its split."""


def read_polyp(source: Path, options: Options) -> Reading:
    """Read the polyp sets there; masks of 0 and 255 stay, others (JPEG above all) are cut at 128.

    None of the sets has a published split. Kvasir-SEG names no patients: pictures are split. The others are frames of videos,
    neighbours in number: frames go by video where CVC-ClinicDB's metadata.csv (frame_id, sequence_id) is there, else by
    ten runs of consecutive frames, so that at most the ends of a run share a video with another split.
    """
    found = read_sets(source, POLYPS, POLYP_LAYOUT)
    sites = sorted({one.site for one in found if one.group.startswith("run-")})
    notes = [f"{site}: names no videos, so runs of consecutive frames are kept together" for site in sites]
    return Reading(found, {"polyp": [255]}, notes + unnamed(found, {"kvasir-seg"}))


def read_pranet(source: Path, options: Options) -> Reading:
    """Read the polyp benchmark of PraNet (Fan et al.): a site per set, in its published split.

    TrainDataset mixes two sets: pictures named by a number alone are CVC-ClinicDB's frames, the others Kvasir-SEG's. The
    other three sets have test pictures only, so they become sites that only test; --resplit makes them train too. Frames are
    kept together in ten runs.
    Raises DataError for another layout.
    """
    train, test = _below(source, "TrainDataset"), _below(source, "TestDataset")
    if train is None and test is None:
        raise wrong_layout(source, PRANET_LAYOUT)
    parts: dict[str, list[Split]] = {site: [] for site in PRANET_TRAINED}
    for image, mask in _pairs(train) if train else []:
        parts["cvc-clinicdb" if image.stem.isdigit() else "kvasir-seg"].append((image, mask, None))
    for folder in sorted(test.iterdir()) if test else []:
        if folder.is_dir() and (site := PRANET.get(folder.name.lower())):
            parts.setdefault(site, []).extend((image, mask, "test") for image, mask in _pairs(folder))
    found = [one for site, pairs in sorted(parts.items()) for one in _pranet_site(site, pairs)]
    return Reading(found, {"polyp": [255]}, _pranet_notes(set(parts) - set(PRANET_TRAINED), options))


def _pranet_notes(test_only: set[str], options: Options) -> list[str]:
    """Return what the published split means for training."""
    if options.resplit:
        return [f"kvasir-seg: {NO_PATIENTS}", "the other sets name no videos, so runs of consecutive frames are kept together"]
    notes = ["the published split is by picture: frames of one video may be in training and in test; --resplit cuts anew"]
    return notes + [f"{site}: test pictures only, so it only tests; --resplit makes it train too" for site in sorted(test_only)]


def _pranet_site(site: str, pairs: list[Split]) -> list[Found]:
    """Return one site's pictures. Raises DataError if two have one name."""
    by_stem(image for image, _, _ in pairs)
    pairs = sorted(pairs, key=lambda one: numeric(one[0]))
    videos = {} if site == "kvasir-seg" else video_groups([image for image, _, _ in pairs], {})
    return [Found(site, videos.get(image, image.stem), image, polyp_mask(image, mask), split=s) for image, mask, s in pairs]


def _below(source: Path, name: str) -> Path | None:
    """Return the folder of that name: the source, or one at any depth below it."""
    return next((one for one in folders(source) if one.resolve().name.lower() == name.lower()), None)


def _pairs(folder: Path) -> list[tuple[Path, Path]]:
    """Return the pictures of images/ or image/ with their masks. Raises DataError."""
    images_folder, masks_folder = folder_pair(folder, [("image", "mask"), ("images", "masks")])
    masks = by_stem(files(masks_folder, PICTURE_ENDINGS))
    return [(image, partner(image.stem, masks, image, "mask")) for image in files(images_folder, PICTURE_ENDINGS)]


def _read_polyps(frames: bool, pairs: list[tuple[str, str]], folder: Path, site: str) -> list[Found]:
    return _read_pair(*folder_pair(folder, pairs), _sequences(folder) if frames else None, site)


def _read_etis(folder: Path, site: str) -> list[Found]:
    """ETIS-LaribPolypDB: N.tif with 'Ground Truth'/pN.tif beside their folder, or within it; elsewhere images/ and masks/."""
    drawn = child(folder.resolve().parent, "Ground Truth")
    if drawn and any(p.suffix.lower() in PICTURE_ENDINGS for p in folder.iterdir()):
        return _read_pair(folder, drawn, {}, site)
    return _read_polyps(True, [("ETIS-LaribPolypDB", "Ground Truth"), *PLAIN], folder, site)


def _read_pair(images_folder: Path, masks_folder: Path, sequences: dict[str, str] | None, site: str) -> list[Found]:
    """Return the pictures of a folder; frames, for which `sequences` is not None, are grouped by video. Raises DataError."""
    images = sorted(files(images_folder, PICTURE_ENDINGS), key=numeric)
    if not images:
        raise wrong_layout(images_folder, "pictures")
    masks = by_stem(files(masks_folder, PICTURE_ENDINGS))
    prefix = "p" if all(stem.lower().startswith("p") for stem in masks) else ""
    videos = {} if sequences is None else video_groups(images, sequences)
    found = []
    for image in images:
        label = polyp_mask(image, partner(prefix + image.stem, masks, image, "mask"))
        group = videos.get(image, image.stem)
        found.append(Found(site, group, image, label, is_patient=group.startswith("sequence-")))
    return found


def video_groups(images: list[Path], sequences: dict[str, str]) -> dict[Path, str]:
    """Return a group for every frame, in their order: its video where known, else one of ten runs of frames."""
    runs = {image: f"run-{index * RUNS // len(images)}" for index, image in enumerate(images)}
    return {image: sequences.get(str(numeric(image)[0]), run) for image, run in runs.items()}


def _sequences(folder: Path) -> dict[str, str]:
    """Return the video of every frame from a metadata.csv, empty without one."""
    for path in files(folder, ["metadata.csv"]):
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
        if rows and {"frame_id", "sequence_id"} <= rows[0].keys():
            return {row["frame_id"].strip(): f"sequence-{row['sequence_id'].strip()}" for row in rows}
    return {}


def polyp_mask(image: Path, mask: Path) -> Path | Made:
    """Return a mask as it is, or where it has other values than 0 and 255, cut at 128. Raises DataError."""
    check_sizes(image, mask)
    return mask if usable(mask, (0, 255)) else mask_png(mask.stem, _threshold, mask)


def _threshold(mask: Path) -> np.ndarray:
    return np.where(grey(mask) >= 128, 255, 0)


PLAIN = [("images", "masks")]
POLYPS: dict[str, tuple[str, Reader]] = {
    "kvasir-seg": ("kvasirseg", partial(_read_polyps, False, PLAIN)),
    "cvc-clinicdb": ("cvcclinic", partial(_read_polyps, True, [("Original", "Ground Truth")])),
    "cvc-colondb": ("cvccolon", partial(_read_polyps, True, PLAIN)),
    "etis-laribpolypdb": ("etis", _read_etis),
}
"""Sites, how their folders' names start, and what reads them."""
PRANET_TRAINED = ("cvc-clinicdb", "kvasir-seg")
PRANET = {
    "cvc-300": "cvc-300",
    "cvc-clinicdb": "cvc-clinicdb",
    "cvc-colondb": "cvc-colondb",
    "etis-laribpolypdb": "etis-laribpolypdb",
    "kvasir": "kvasir-seg",
}
"""Sites by the names of TestDataset's folders, in lower case."""
SETS = {"polyp": Importer(POLYP_LAYOUT, read_polyp), "polyp-pranet": Importer(PRANET_LAYOUT, read_pranet)}
