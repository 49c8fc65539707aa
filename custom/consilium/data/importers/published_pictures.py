"""Importers of published pictures with masks or classes: polyps, fundus, OCT and others.

Most sets are declarations (PictureSet) that shared code reads. They stand below their readers.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from consilium.core.errors import DataError
from consilium.data import pictures
from consilium.data.folders import list_class_pictures, select_sites, walk_folders
from consilium.data.importers.base import (
    NO_PATIENTS,
    PICTURE_ENDINGS,
    DerivedFile,
    Importer,
    ImportResult,
    Options,
    SourceSample,
    by_stem,
    csv_rows_if_complete,
    find_files,
    find_partner,
    find_subfolder,
    frame_order,
    grey_values,
    is_usable_mask,
    mask_png,
    wrong_layout,
)

RUNS = 10
"""If a set names no videos, its frames are cut into this number of runs, so only frames at the ends of a run share a video
with another split."""
POLYP, DISC_AND_CUP, NUCLEUS = {"polyp": [255]}, {"disc": [1, 2], "cup": [2]}, {"nucleus": [1]}
NAMES_NO_VIDEOS = "names no videos, so runs of consecutive frames are kept together"
Pairs = Sequence[tuple[str, str]]
"""(folder of pictures, folder of masks) names of folders that are beside each other."""


@dataclass(frozen=True)
class PictureSet:
    """A published set that becomes one site.

    `folder`: the start of its folder's name, in lower-case letters and digits. `layout`: the content of the folder, for
    messages. `read(folder)`: returns its samples; the drawings of a mask are their label and `more`. `values`: a drawing with
    these values only is used as it is. `make(*drawings)`: returns the mask's values otherwise; without it, such a drawing is
    refused. `has_split`: the publisher has a test split. `has_frames`: pictures are frames of videos.
    `is_scattered`: the set comes as several folders.
    """

    folder: str
    layout: str
    read: Callable[[Path], Iterable[SourceSample]]
    values: tuple[int, ...] = ()
    make: Callable[..., np.ndarray] | None = None
    has_split: bool = False
    has_frames: bool = False
    is_scattered: bool = False

    def has_set_name(self, folder: Path) -> bool:
        """Tell whether a folder has the set's name."""
        plain = re.sub(r"[^a-z0-9]", "", folder.name.lower())
        return not folder.name.startswith(".") and plain.startswith(self.folder)


def with_masks(
    site: str,
    found: Iterable[SourceSample],
    values: tuple[int, ...],
    make: Callable[..., np.ndarray] | None,
    prefix: str = "",
) -> Iterator[SourceSample]:
    """Yield a site's samples with their masks, see PictureSet. `prefix`: precedes the names of masks that will be written.

    Raises DataError if the size of a drawing differs from its picture's, and for a drawing that cannot be used.
    """
    for one in found:
        image = Path(str(one.image))
        for mask in one.masks:
            if (own := pictures.picture_shape(image)) != (other := pictures.picture_shape(mask)):
                expected, there = map(pictures.size_text, (own, other))
                raise DataError(f"{mask}: expected the {expected} pixels (width x height) of {image}; found {there}")
        label: Path | DerivedFile = one.masks[0]
        if not (values and is_usable_mask(one.masks[0], values)):
            if make is None:
                raise DataError(
                    f"{label}: expected one channel of {', '.join(map(str, values))}; found other values or colours"
                )
            label = mask_png(f"{prefix}{image.stem}", make, *one.masks)
        yield replace(one, site=site, label=label, more=())


def read_sets(sets: dict[str, PictureSet], classes: dict[str, list[int]], source: Path, options: Options) -> ImportResult:
    """Read every set of `sets` whose folder is in the source, or is the source. Raises DataError if there is none."""
    found, unnamed = list[SourceSample](), list[str]()
    asked = select_sites(sets, options.only, {})
    for site, one in ((site, one) for site, one in sets.items() if site in asked):
        below = [p for p in sorted(source.iterdir()) if p.is_dir() and one.has_set_name(p)]
        whole = one.has_set_name(source.resolve()) or (len(below) > 1 and one.is_scattered)
        if len(below) > 1 and not whole:
            names = ", ".join(p.name for p in below)
            raise DataError(f"{source}: expected one folder for {one.folder}; found {names}; put them into one folder")
        for folder in [source] if whole else below:
            own = list(one.read(folder))
            if not own:
                raise wrong_layout(folder, one.layout)
            own = grouped_by_video(own, folder) if one.has_frames else own
            if any(not sample.is_patient for sample in own) and (one.has_frames or options.resplit or not one.has_split):
                unnamed.append(f"{site}: {NAMES_NO_VIDEOS if one.has_frames else NO_PATIENTS}")
            found += with_masks(site, own, one.values, one.make)
    return ImportResult(found, classes, unnamed)


def sets_layout(sets: dict[str, PictureSet]) -> str:
    """Return the text that says which folders are expected."""
    return f"folders {', '.join(one.layout for one in sets.values())}, or some of them"


def folder_pair(folder: Path, pairs: Pairs) -> tuple[Path, Path]:
    """Return a folder of pictures and the folder of masks beside it, at any depth; a pair with PNG first. Raises DataError."""
    found = [(find_subfolder(one, a), find_subfolder(one, b)) for one in walk_folders(folder) for a, b in pairs]
    both = [(images, masks) for images, masks in found if images and masks]
    if not both:
        raise wrong_layout(folder, " or ".join(f"{a}/ beside {b}/" for a, b in pairs))
    return min(both, key=lambda pair: not find_files(pair[0], [".png"]))


def match_by_name(images: Path, masks: Path, split: str | None = None, prefix: str = "") -> list[SourceSample]:
    """Return a folder's pictures with the masks whose names are `prefix` and the picture's name. Raises DataError."""
    known = by_stem(find_files(masks, PICTURE_ENDINGS))
    return [
        SourceSample("", image.stem, image, find_partner(prefix + image.stem, known, image, "mask"), split=split)
        for image in find_files(images, PICTURE_ENDINGS)
    ]


def read_pairs(pairs: Pairs, folder: Path) -> list[SourceSample]:
    """Return the samples of a folder of pictures with the masks of equal names in the folder beside it. Raises DataError."""
    return match_by_name(*folder_pair(folder, pairs))


def find_folder(name: str, source: Path) -> Path | None:
    """Return the folder with this name in any case: the source, or a folder at any depth below it. None if there is none."""
    return next((one for one in walk_folders(source) if one.resolve().name.lower() == name.lower()), None)


def in_frame_order(frames: Iterable[SourceSample]) -> list[SourceSample]:
    """Return samples sorted by the last number in their picture's name, then by its name."""
    return sorted(frames, key=lambda one: frame_order(Path(str(one.image))))


def grouped_by_video(frames: Iterable[SourceSample], folder: Path | None) -> list[SourceSample]:
    """Return frames in the order of their numbers. The group of a frame is its video, else one of RUNS consecutive runs.

    Videos are read from the columns frame_id and sequence_id of a metadata.csv below `folder`, if there is one.
    """
    videos: dict[str, str] = {}
    for path in find_files(folder, ["metadata.csv"]) if folder else []:
        if rows := csv_rows_if_complete(path, "frame_id", "sequence_id"):
            videos = {row["frame_id"].strip(): f"sequence-{row['sequence_id'].strip()}" for row in rows}
            break
    ordered = in_frame_order(frames)
    groups = (
        videos.get(str(frame_order(Path(str(one.image)))[0]), f"run-{n * RUNS // len(ordered)}")
        for n, one in enumerate(ordered)
    )
    return [replace(one, group=g, is_patient=g.startswith("sequence-")) for one, g in zip(ordered, groups, strict=True)]


def _etis(folder: Path) -> list[SourceSample]:
    """Return the samples of ETIS-LaribPolypDB.

    N.tif has its mask in 'Ground Truth'/pN.tif, beside the pictures' folder or within it. Some copies have images/ and masks/.
    """
    masks = find_subfolder(folder.resolve().parent, "Ground Truth")
    if not masks or not any(p.suffix.lower() in PICTURE_ENDINGS for p in folder.iterdir()):
        folder, masks = folder_pair(folder, [("ETIS-LaribPolypDB", "Ground Truth"), *PLAIN])
    prefix = "p" if all(p.stem.lower().startswith("p") for p in find_files(masks, PICTURE_ENDINGS)) else ""
    return match_by_name(folder, masks, prefix=prefix)


def read_pranet(source: Path, options: Options) -> ImportResult:
    """Read the polyp benchmark of PraNet (Fan et al., MICCAI 2020): a site per set, in the published split.

    TrainDataset mixes two sets: pictures whose name is a number are from CVC-ClinicDB, all others from Kvasir-SEG. The other
    three sets have test pictures only, so their sites only test, unless --resplit is given. Frames of videos are grouped into
    ten runs. Raises DataError for another layout.
    """
    train, test = find_folder("TrainDataset", source), find_folder("TestDataset", source)
    parts: dict[str, list[SourceSample]] = {"cvc-clinicdb": [], "kvasir-seg": []}
    trained = set(parts)
    for one in match_by_name(*folder_pair(train, PRANET_PAIRS)) if train else []:
        parts["cvc-clinicdb" if one.group.isdigit() else "kvasir-seg"].append(one)
    for folder in sorted(test.iterdir()) if test else []:
        if folder.is_dir() and (site := PRANET_SITES.get(folder.name.lower())):
            parts.setdefault(site, []).extend(match_by_name(*folder_pair(folder, PRANET_PAIRS), "test"))
    found: list[SourceSample] = []
    for site, own in sorted(parts.items()):
        by_stem(Path(str(one.image)) for one in own)
        found += with_masks(
            site, in_frame_order(own) if site == "kvasir-seg" else grouped_by_video(own, None), (0, 255), _cut_at_half
        )
    if options.resplit:
        return ImportResult(found, POLYP, [f"kvasir-seg: {NO_PATIENTS}", f"the other sets {NAMES_NO_VIDEOS}"])
    notes = ["the published split is by picture: frames of one video may be in training and in test; --resplit cuts anew"]
    notes += [f"{s}: test pictures only, so it only tests; --resplit makes it train too" for s in sorted(set(parts) - trained)]
    return ImportResult(found, POLYP, notes)


def _cut_at_half(drawing: Path) -> np.ndarray:
    return np.where(grey_values(drawing) >= 128, 255, 0)


def _refuge(folder: Path) -> Iterator[SourceSample]:
    """Yield the samples of REFUGE: *.jpg and *.bmp of equal names. V* is validation, T* is test, g* and n* are training."""
    shown = (p for p in find_files(folder, [".jpg", ".jpeg"]) if "illustration" not in str(p.relative_to(folder)).lower())
    images = by_stem(shown)
    for mask in by_stem(find_files(folder, [".bmp"])).values():
        yield SourceSample(
            "",
            mask.stem,
            find_partner(mask.stem, images, mask, "picture (*.jpg)"),
            mask,
            split={"V": "validation", "T": "test"}.get(mask.stem[0]),
        )


def disc_cup_labels(exact: bool, mask: Path) -> np.ndarray:
    """Return labels (H, W) of a mask that is dark in the cup and bright in the background, by thresholds at 50 and 200.

    `exact`: whether every value must be 0, 128 or 255. If not, edges may be smoothed, and only a corner that is not background
    is refused. Raises DataError.
    """
    values = grey_values(mask)
    if exact and (unknown := values[~np.isin(values, (0, 128, 255))]).size:
        raise DataError(f"{mask}: expected 0 (cup), 128 (rim) and 255 (background); found {unknown.min()}")
    if not exact and values[[0, 0, -1, -1], [0, -1, 0, -1]].min() <= 200:
        raise DataError(f"{mask}: expected 255 (background) in the corners, 128 (rim) and 0 (cup); found a dark corner")
    return (values <= 50).astype(np.uint8) + (values <= 200)


def _drishti(folder: Path) -> Iterator[SourceSample]:
    """Yield the samples of Drishti-GS1: pictures in folders Images, soft maps of disc and cup. Folders Test* are for test."""
    images = by_stem(
        p for p in find_files(folder, [".png"]) if "images" in [part.lower() for part in p.relative_to(folder).parts]
    )
    for disc in find_files(folder, ["_odsegsoftmap.png"]):
        stem = disc.name[: -len("_ODsegSoftmap.png")]
        image, cup = find_partner(stem, images, disc, "picture"), disc.with_name(f"{stem}_cupsegSoftmap.png")
        if not cup.is_file():
            raise DataError(f"{disc}: expected {cup.name} beside it; found none; complete the set")
        test = any(part.lower().startswith("test") for part in disc.relative_to(folder).parts)
        yield SourceSample("", stem, image, disc, split="test" if test else None, more=(cup,))


def _rim_and_cup(disc: Path, cup: Path) -> np.ndarray:
    """Return labels (H, W): 2 where the cup's map is at least half of its range (two of four experts), else 1 by the disc's."""
    return np.select([grey_values(cup) >= 128, grey_values(disc) >= 128], [2, 1], 0)


def _rim_one(folder: Path) -> Iterator[SourceSample]:
    """Yield the samples of RIM-ONE DL: pictures in one of two published partitions, drawings of disc and cup elsewhere.

    Both partitions hold the same pictures. If both are there, the random one is read. If a picture has several drawings (-1-,
    -2-), the first is used.
    """
    parts = {
        one.name.lower(): one
        for one in walk_folders(folder)
        if find_subfolder(one, "training_set") and find_subfolder(one, "test_set")
    }
    part = next((parts[name] for name in ("partitioned_randomly", "partitioned_by_hospital") if name in parts), None)
    if part is None:
        raise wrong_layout(folder, "partitioned_randomly/ or partitioned_by_hospital/ with training_set/ and test_set/")
    discs, cups = find_files(folder, ["-disc-t.png"]), by_stem(find_files(folder, ["-cup-t.png"]))
    if not discs and find_files(folder, ["-disc-t.txt"]):
        raise DataError(f"{folder}: expected *-Disc-T.png; found contours (*.txt) only; draw them with the publisher's script")
    first = {re.sub(r"-\d+-disc-t$", "", disc.stem, flags=re.IGNORECASE): disc for disc in reversed(discs)}
    for image in by_stem(find_files(part, [".png"])).values():
        disc = find_partner(image.stem, first, image, "drawing (*-1-Disc-T.png)")
        cup = find_partner(f"{disc.stem[: -len('Disc-T')]}Cup-T", cups, disc, "drawing")
        yield SourceSample(
            "",
            image.stem,
            image,
            disc,
            split="test" if image.relative_to(part).parts[0].lower() == "test_set" else None,
            more=(cup,),
        )


def read_feddg(source: Path, options: Options) -> ImportResult:
    """Read the fundus benchmark of DoFE and FedDG (Wang et al. 2020, Liu et al. 2021): a site per domain, published splits.

    Masks are dark in the cup and bright in the background. Their edges are smoothed, so thresholds of 50 and 200 are applied,
    as in the publishers' loader. The two eyes of a RIM-ONE patient, named -L and -R, are one group. Raises DataError for
    another layout, or a mask whose corners are not bright as background is, such as an inverted one.
    """
    found: list[SourceSample] = []
    for site in DOMAINS:
        domain = find_folder(site, source)
        for split in ("train", "test") if domain else ():
            part = find_subfolder(domain, split) if domain else None
            rois = find_subfolder(part, "ROIs") if part else None
            if rois is None:
                raise wrong_layout(part or domain or source, "ROIs/image and ROIs/mask" if part else "train/ROIs and test/ROIs")
            own = match_by_name(*folder_pair(rois, [("image", "mask")]), "test" if split == "test" else None)
            found += with_masks(
                site,
                (replace(one, group=re.sub(r"-[LR]$", "", one.group)) for one in own),
                (),
                partial(disc_cup_labels, False),
                f"{split}-",
            )
    there = sorted({one.site for one in found})
    notes = [", ".join(f"{name}: {DOMAINS[name]}" for name in there), f"{', '.join(there)}: {NO_PATIENTS}"]
    return ImportResult(found, DISC_AND_CUP, notes)


def read_tnbc(source: Path, options: Options) -> ImportResult:
    """Read TNBC (Naylor et al. 2018): Slide_XX/*.png with GT_XX/*.png. Values above 0 are nuclei; a slide is a patient.

    Raises DataError for another layout.
    """
    found: list[SourceSample] = []
    for slide in [folder for folder in walk_folders(source) if re.fullmatch(r"slide_\d+", folder.name.lower())]:
        annotated = find_subfolder(slide.parent, truth := "GT_" + slide.name.split("_")[1])
        if annotated is None:
            raise wrong_layout(slide.parent, f"{truth} beside {slide.name}")
        own = (replace(one, group=slide.name, is_patient=True) for one in match_by_name(slide, annotated))
        found += with_masks("tnbc", own, (0, 1), lambda path: grey_values(path) > 0)
    return ImportResult(found, NUCLEUS)


PLAIN = [("images", "masks")]
POLYPS = {
    # Jha et al., Kvasir-SEG (2020): no patients are named
    "kvasir-seg": PictureSet(
        "kvasirseg", "Kvasir-SEG (images/, masks/)", lambda folder: in_frame_order(read_pairs(PLAIN, folder)), (0, 255),
        _cut_at_half,
    ),
    # Bernal et al., WM-DOVA maps (2015): a metadata.csv names the videos
    "cvc-clinicdb": PictureSet(
        "cvcclinic", "CVC-ClinicDB (Original/, Ground Truth/)", partial(read_pairs, [("Original", "Ground Truth")]),
        (0, 255), _cut_at_half, has_frames=True,
    ),
    # Bernal et al. (2012)
    "cvc-colondb": PictureSet(
        "cvccolon", "CVC-ColonDB (images/, masks/)", partial(read_pairs, PLAIN), (0, 255), _cut_at_half, has_frames=True
    ),
    # Silva et al. (2014)
    "etis-laribpolypdb": PictureSet(
        "etis", "ETIS-LaribPolypDB (ETIS-LaribPolypDB/N.tif, Ground Truth/pN.tif; or images/, masks/)", _etis, (0, 255),
        _cut_at_half, has_frames=True,
    ),
}  # fmt: skip
"""Labels are 0 and 255. A mask with other values, such as a JPEG, gets a threshold at 128."""
_KAGGLE = [("Images", "Masks"), ("Images_Square", "Masks_Square")]
FUNDUS = {
    # Orlando et al., REFUGE (2020)
    "refuge": PictureSet(
        "refuge", "REFUGE (*.jpg, Disc_Cup_Masks/*.bmp)", _refuge, make=partial(disc_cup_labels, True), has_split=True
    ),
    # Zhang et al., ORIGA-light (2010)
    "origa": PictureSet("origa", "ORIGA (Images/, Masks/)", partial(read_pairs, _KAGGLE), (0, 1, 2)),
    # Bajwa et al., G1020 (2020)
    "g1020": PictureSet("g1020", "G1020 (Images/, Masks/)", partial(read_pairs, _KAGGLE), (0, 1, 2)),
    # Sivaswamy et al., Drishti-GS (2014)
    "drishti-gs1": PictureSet(
        "drishti", "Drishti-GS1 (Images/, *_ODsegSoftmap.png, *_cupsegSoftmap.png)", _drishti, make=_rim_and_cup,
        has_split=True,
    ),
    # Fumero Batista et al., RIM-ONE DL (2020)
    "rim-one-dl": PictureSet(
        "rimone",
        "RIM-ONE_DL_images (partitioned_randomly/ or partitioned_by_hospital/ with training_set/ and test_set/) with "
        "RIM-ONE_DL_reference_segmentations (*-N-Disc-T.png, *-N-Cup-T.png)",
        _rim_one, make=_rim_and_cup, has_split=True, is_scattered=True,
    ),
}  # fmt: skip
DOMAINS = {
    "domain1": "Drishti-GS",
    "domain2": "RIM-ONE r3",
    "domain3": "REFUGE's training set",
    "domain4": "REFUGE's validation set",
}
PRANET_PAIRS = [("image", "mask"), *PLAIN]
PRANET_SITES = {"kvasir": "kvasir-seg"} | {
    name: name for name in ("cvc-300", "cvc-clinicdb", "cvc-colondb", "etis-laribpolypdb")
}
"""Sites by the names of the folders in TestDataset, in lower case."""


OCT_C8 = ("AMD", "CNV", "CSR", "DME", "DR", "DRUSEN", "MH", "NORMAL")
KVASIR_V2 = (
    "dyed-lifted-polyps", "dyed-resection-margins", "esophagitis", "normal-cecum", "normal-pylorus", "normal-z-line", "polyps",
    "ulcerative-colitis",
)  # fmt: skip


def read_classes(site: str, classes: Sequence[str], splits: Sequence[str], source: Path, options: Options) -> ImportResult:
    """Read the pictures of the first folder that has a folder for each class, in folders of `splits` if there are any."""
    wanted = [f"{split}/{name}" for split in splits or (".",) for name in classes]
    root = next((one for one in walk_folders(source) if all((one / name).is_dir() for name in wanted)), None)
    found = [
        SourceSample(site, f"{name}/{picture.name}", picture, name, split=split if splits else None)
        for split, picture, name in (list_class_pictures(root) if root else ())
        if name in classes
    ]
    notes = ["one list for all, no sites: share it out with `consilium data partition` of its datalist.json"]
    return ImportResult(found, list(classes), notes + ([] if splits else [f"{site}: {NO_PATIENTS}"]))


SETS = {
    "polyp": Importer(sets_layout(POLYPS), partial(read_sets, POLYPS, POLYP)),
    "polyp-pranet": Importer(
        "TrainDataset/{image,mask}/*.png and TestDataset/SET/{images,masks}/*.png, SET one of CVC-300, CVC-ClinicDB, "
        "CVC-ColonDB, ETIS-LaribPolypDB and Kvasir",
        read_pranet,
    ),
    "fundus": Importer(sets_layout(FUNDUS), partial(read_sets, FUNDUS, DISC_AND_CUP)),
    "fundus-feddg": Importer(
        "folders Domain1 to Domain4, or some of them, with train/ and test/, each with ROIs/image and ROIs/mask", read_feddg
    ),
    "tnbc": Importer("folders Slide_01, ... with *.png beside folders GT_01, ... with masks of the same names", read_tnbc),
    "oct-c8": Importer(  # Subramanian et al., OCT-C8 (2022)
        f"train/, val/ and test/ with a folder per class: {', '.join(OCT_C8)}",
        partial(read_classes, "oct-c8", OCT_C8, ("train", "val", "test")),
    ),
    "kvasir-v2": Importer(  # Pogorelov et al., Kvasir (2017)
        f"a folder per class: {', '.join(KVASIR_V2)}", partial(read_classes, "kvasir-v2", KVASIR_V2, ())
    ),
}
